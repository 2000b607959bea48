"""Settings: typed, spelled out when wrong, and the same after a trip through JSON."""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Le

from vitlab.settings import check_fields, from_dict, to_dict

NAN = float("nan")


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
    ("kind", "name", "allowed", "values"),
    [
        (Inner, "rate", "finite float > 0 and <= 1", ("fast", True, None, 10**400, 0.0, 1.5, NAN, float("inf"))),
        (Inner, "size", "int >= 1 or tuple of int, int", (32.0, True, 0, (32,), [32, 32])),
        (Inner, "classes", "tuple of int >= 0, ... or None", ((1, "2"), (1, -1))),
        (Outer, "mode", "'fast', 'slow'", ("medium",)),
        (Outer, "verbose", "bool", (1,)),
    ],
)
def test_other_types_and_ranges_are_refused(kind: type, name: str, allowed: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError) as caught:
            kind(**{name: value})
        assert str(caught.value) == f"{name} is {value!r}; allowed: {allowed}."


def test_json_and_back() -> None:
    config = Outer(inner=Inner(rate=1, size=(32, 48), classes=(1, 2)), mode="slow", name="ü")  # 1 is a number too
    assert from_dict(Outer, json.loads(json.dumps(to_dict(config)))) == config
    assert from_dict(Outer, {"inner": {"classes": []}}) == Outer(Inner(classes=()))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"verbos": True}, "unknown setting 'verbos' .* the nearest: verbose"),
        ({"inner": {"clases": [1]}}, "unknown setting 'clases' .* the nearest: classes"),
        ({"zzz": 1}, "unknown setting 'zzz' .* allowed: inner, mode, verbose, name"),
        ({"inner": 3}, "inner is 3; allowed: Inner"),
    ],
)
def test_an_unknown_setting_names_the_nearest_or_all(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_dict(Outer, values)


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
