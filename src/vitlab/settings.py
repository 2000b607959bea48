"""Settings as frozen dataclasses: checked against their type hints, and converted to JSON data and back."""

import dataclasses
import difflib
import functools
import operator
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt

from vitlab.errors import UserError

PositiveInt = Annotated[int, Ge(1)]
NonNegativeInt = Annotated[int, Ge(0)]
Seed = Annotated[int, Ge(0), Lt(2**63)]
PositiveFloat = Annotated[float, Gt(0)]
NonNegativeFloat = Annotated[float, Ge(0)]
Fraction = Annotated[float, Gt(0), Le(1)]
FractionBelow1 = Annotated[float, Ge(0), Lt(1)]

SIGNS = {"gt": (">", operator.gt), "ge": (">=", operator.ge), "lt": ("<", operator.lt), "le": ("<=", operator.le)}
"""A limit's name in `annotated_types` -> its sign and its comparison."""
_LONE_SURROGATE = re.compile("[\ud800-\udc7f\udd00-\udfff]")
"""What no output can encode. Other surrogates are how Python decodes bytes of file names that are not text."""


def check_fields(config: Any) -> None:
    """Raises UserError if a field's value is not of its declared type, or outside the range of `annotated_types`."""
    hints = _type_hints(type(config))
    for item in dataclasses.fields(config):
        value, hint = getattr(config, item.name), hints[item.name]
        if not _fits(value, hint):
            raise UserError(f"{item.name} is {value!r}; allowed: {_spell(hint)}.")


@functools.cache  # it takes longer than all else when a config is made, and a plan makes hundreds
def _type_hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def read_fields(data: Any, fields: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A JSON object that another program, or a stranger, wrote, with its known fields checked against type hints.

    `fields` has the hint of each, or the `fields` of an object in it. null is as missing, unless the hint has None;
    unknown fields stay as they are. Raises UserError with `where`, the field, its value and what is allowed.
    """
    if not isinstance(data, dict):
        raise UserError(f"{where} is {str(data)[:100]!r}; allowed: a JSON object.")
    known = {}
    for name, hint in fields.items():
        value = data.get(name)
        if isinstance(hint, Mapping):
            if value is not None:
                known[name] = read_fields(value, hint, f"{where}: {name}")
        elif value is not None or (name in data and _fits(None, hint)):
            if not _fits(_as_tuples(value), hint):
                raise UserError(f"{where}: {name} is {repr(value)[:100]}; allowed: {_spell(hint)}.")
            known[name] = value
    return {name: value for name, value in data.items() if name not in fields} | known


def _as_tuples(value: Any) -> Any:
    """JSON's lists as the tuples of type hints."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


class Checked:
    """Base of the dataclasses that `check_fields` alone checks."""

    def __post_init__(self) -> None:
        check_fields(self)


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _fits(value, args[0]) and all(compare(value, bound) for _, compare, bound in _limits(args[1:]))
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, option) for option in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        hints = [args[0]] * len(value) if isinstance(value, tuple) and args[-1] is ... else args
        return isinstance(value, tuple) and len(value) == len(hints) and all(map(_fits, value, hints))
    if hint is float:  # finite; an int will do
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is str:
        return isinstance(value, str) and not _LONE_SURROGATE.search(value)
    return isinstance(value, hint)


def _limits(annotations: Iterable[Any]) -> list[tuple[str, Callable[[Any, Any], bool], Any]]:
    """Sign, comparison and bound of every range among the annotations of a type."""
    return [(*SIGNS[name], getattr(limit, name)) for limit in annotations for name in SIGNS if hasattr(limit, name)]


def _spell(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        limits = " and ".join(f"{sign} {bound:g}" for sign, _, bound in _limits(args[1:]))
        return f"{_spell(args[0])} {limits}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_spell(option) for option in args)
    if origin is Literal:
        return ", ".join(map(repr, args))
    if origin is tuple:
        return f"tuple of {', '.join('...' if item is ... else _spell(item) for item in args)}"
    return "None" if hint is type(None) else "finite float" if hint is float else getattr(hint, "__name__", str(hint))


to_dict = dataclasses.asdict
"""The settings as plain data for JSON."""


def from_dict(kind: Any, data: dict[str, Any]) -> Any:
    """The inverse of `to_dict`; raises UserError for an unknown key.

    `kind` is a dataclass, or a union of dataclasses, whose field `kind` selects one (default: the first).
    """
    kind = _select(kind, data)
    hints = typing.get_type_hints(kind)
    names = [item.name for item in dataclasses.fields(kind)]
    values = {}
    for key, value in data.items():
        if key not in names:
            raise UserError(f"unknown setting {key!r} for {kind.__name__}; {nearest(key, names)}.")
        if isinstance(value, dict) and _members(hints[key]):
            value = from_dict(hints[key], value)
        values[key] = tuple(value) if isinstance(value, list) else value
    return kind(**values)


def _members(hint: Any) -> list[type]:
    """The dataclasses in a type hint."""
    options = typing.get_args(hint) or [hint]
    return [option for option in options if dataclasses.is_dataclass(option) and isinstance(option, type)]


def _select(hint: Any, data: dict[str, Any]) -> type:
    """The dataclass of a union that `data["kind"]` names."""
    members = _members(hint)
    if len(members) == 1:
        return members[0]
    by_kind = {typing.get_args(typing.get_type_hints(member)["kind"])[0]: member for member in members}
    given = data.get("kind", next(iter(by_kind)))
    if not isinstance(given, str) or given not in by_kind:
        raise UserError(f"kind is {given!r}; allowed: {', '.join(map(repr, by_kind))}.")
    return by_kind[given]


def nearest(given: str, allowed: Iterable[str]) -> str:
    """`the nearest: a, b` for an error about a name that is not among `allowed`; case does not matter."""
    folded = {name.casefold(): name for name in allowed}
    near = [folded[name] for name in difflib.get_close_matches(given.casefold(), folded, n=3, cutoff=0.4)]
    return f"the nearest: {', '.join(near)}" if near else f"allowed: {', '.join(folded.values())}"
