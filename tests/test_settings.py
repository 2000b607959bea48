"""Settings: typed, spelled out when wrong, and the same after a trip through JSON."""

import json
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from vitlab.settings import check_fields, from_dict, nearest, to_dict


@dataclass(frozen=True)
class Inner:
    rate: float = 0.1
    size: int | tuple[int, int] = 32
    classes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class Outer:
    inner: Inner = field(default_factory=Inner)
    mode: Literal["fast", "slow"] = "fast"
    verbose: bool = False
    name: str = "x"

    def __post_init__(self) -> None:
        check_fields(self)


@pytest.mark.parametrize(
    "values",
    [
        {"rate": 1},  # a whole number is a number
        {"size": (32, 48)},
        {"classes": ()},
        {"classes": (1, 2, 3)},
        {"classes": None},
    ],
)
def test_values_of_the_declared_type_are_taken(values: dict[str, Any]) -> None:
    Inner(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rate": "fast"}, "rate is 'fast'; allowed: float."),
        ({"rate": True}, "rate is True; allowed: float."),
        ({"rate": None}, "rate is None; allowed: float."),
        ({"rate": 10**400}, f"rate is 1{'0' * 400}; allowed: float."),
        ({"size": 32.0}, "size is 32.0; allowed: int or tuple[int, int]."),
        ({"size": True}, "size is True; allowed: int or tuple[int, int]."),
        ({"size": (32,)}, "size is (32,); allowed: int or tuple[int, int]."),
        ({"size": [32, 32]}, "size is [32, 32]; allowed: int or tuple[int, int]."),
        ({"classes": (1, "2")}, "classes is (1, '2'); allowed: tuple[int, ...] or None."),
    ],
)
def test_other_types_are_refused_with_what_is_allowed(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Inner(**values)
    assert str(caught.value) == message


def test_choices_are_listed() -> None:
    with pytest.raises(ValueError, match=r"mode is 'medium'; allowed: 'fast', 'slow'\."):
        Outer(mode="medium")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"verbose is 1; allowed: bool\."):
        Outer(verbose=1)  # pyright: ignore[reportArgumentType]


def test_json_and_back() -> None:
    config = Outer(inner=Inner(rate=1e-5, size=(32, 48), classes=(1, 2)), mode="slow", name="ü")
    assert from_dict(Outer, json.loads(json.dumps(to_dict(config)))) == config
    assert from_dict(Outer, {}) == Outer()


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"unknown setting 'verbos' for Outer; the nearest: verbose\."):
        from_dict(Outer, {"verbos": True})
    with pytest.raises(ValueError, match=r"unknown setting 'clases' for Inner; the nearest: classes, "):
        from_dict(Outer, {"inner": {"clases": [1]}})
    with pytest.raises(ValueError, match=r"unknown setting 'zzz' for Outer; allowed: inner, mode, verbose, name\."):
        from_dict(Outer, {"zzz": 1})


def test_a_part_that_is_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"inner is 3; allowed: Inner\."):
        from_dict(Outer, {"inner": 3})


def test_the_nearest_or_all() -> None:
    assert nearest("adem", ["adam", "sgd"]) == "the nearest: adam"
    assert nearest("zzz", ["adam", "sgd"]) == "allowed: adam, sgd"


@dataclass(frozen=True)
class First:
    kind: Literal["first"] = "first"


@dataclass(frozen=True)
class Second:
    kind: Literal["second"] = "second"


def test_the_kind_says_which_of_several_is_meant() -> None:
    assert from_dict(First | Second, {"kind": "second"}) == Second()
    for kind in ("third", ["second"], {}, 2):
        with pytest.raises(ValueError, match=r"kind is .*; allowed: 'first', 'second'"):
            from_dict(First | Second, {"kind": kind})
