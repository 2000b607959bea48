"""Settings are frozen dataclasses: checked against their own type hints, and carried through JSON and back.

An unknown or ill-typed setting is an error that names what is allowed, never a silence.
"""

import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Iterable
from typing import Any, Literal

from vitlab.errors import UserError


def check_fields(config: Any) -> None:
    """Raises ValueError if a field holds a value outside its declared type."""
    hints = typing.get_type_hints(type(config))
    for item in dataclasses.fields(config):
        given, hint = getattr(config, item.name), hints[item.name]
        if not _fits(given, hint):
            raise UserError(f"{item.name} is {given!r}; allowed: {_spell(hint)}.")


def _fits(value: Any, hint: Any) -> bool:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, each) for each in args)
    if origin is Literal:
        return value in args
    if origin is tuple:
        each = [args[0]] * len(value) if isinstance(value, tuple) and args[-1] is ... else args
        return isinstance(value, tuple) and len(value) == len(each) and all(map(_fits, value, each))
    if hint is float:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        return isinstance(value, float) or (is_int and abs(value) <= sys.float_info.max)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _spell(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_spell(each) for each in args)
    if origin is Literal:
        return ", ".join(map(repr, args))
    return "None" if hint is type(None) else getattr(hint, "__name__", str(hint)) if not args else str(hint)


def to_dict(config: Any) -> dict[str, Any]:
    """The settings as plain data for JSON."""
    return dataclasses.asdict(config)


def from_dict(kind: Any, data: dict[str, Any]) -> Any:
    """The inverse of `to_dict`; an unknown key is an error that names the nearest valid one.

    `kind` is a dataclass, or a union of dataclasses that say in a field `kind` which of them is meant (the first,
    where it is missing).
    """
    kind = _meant(kind, data)
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
    alone = [hint] if not typing.get_args(hint) else typing.get_args(hint)
    return [each for each in alone if dataclasses.is_dataclass(each) and isinstance(each, type)]


def _meant(hint: Any, data: dict[str, Any]) -> type:
    """The dataclass of a union that `data` says it is."""
    members = _members(hint)
    if len(members) == 1:
        return members[0]
    by_kind = {typing.get_args(typing.get_type_hints(each)["kind"])[0]: each for each in members}
    given = data.get("kind", next(iter(by_kind)))
    if not isinstance(given, str) or given not in by_kind:
        raise UserError(f"kind is {given!r}; allowed: {', '.join(map(repr, by_kind))}.")
    return by_kind[given]


def nearest(given: str, allowed: Iterable[str]) -> str:
    """`the nearest: a, b` for an error about a name that is not among `allowed`; case does not matter."""
    folded = {name.casefold(): name for name in allowed}
    near = [folded[name] for name in difflib.get_close_matches(given.casefold(), folded, n=3, cutoff=0.4)]
    return f"the nearest: {', '.join(near)}" if near else f"allowed: {', '.join(folded.values())}"
