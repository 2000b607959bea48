"""Settings: typed, spelled out when wrong, and the same after a trip through JSON."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le

from vitlab.settings import check_fields, from_dict, nearest, to_dict


@dataclass(frozen=True)
class Inner:
    rate: Annotated[float, Gt(0), Le(1)] = 0.1
    size: Annotated[int, Ge(1)] | tuple[int, int] = 32
    classes: tuple[Annotated[int, Ge(0)], ...] | None = None

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
    ("name", "allowed", "values"),
    [
        ("rate", "finite float > 0 and <= 1", ("fast", True, None, 10**400, 0.0, 1.5, float("nan"), float("inf"))),
        ("size", "int >= 1 or tuple of int, int", (32.0, True, 0, (32,), [32, 32])),
        ("classes", "tuple of int >= 0, ... or None", ((1, "2"), (1, -1))),
    ],
)
def test_other_types_and_ranges_are_refused(name: str, allowed: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError) as caught:
            Inner(**{name: value})
        assert str(caught.value) == f"{name} is {value!r}; allowed: {allowed}."


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
