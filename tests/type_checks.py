"""Types and shapes are checked by beartype: each function's first calls in each test.

Checks of a training's every step would take a third of the time of all tests.
"""

import sys
from collections import Counter
from collections.abc import Callable
from types import FunctionType
from typing import Any, no_type_check

from beartype import beartype

CHECKED_CALLS = 10
"""How many calls of a function are checked in each test."""
_calls: Counter[tuple[str, str]] = Counter()
_unchecked: list[Callable[..., Any]] = []


def when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """The checker of `function`'s arguments or result, made at its first call: a process calls few of all functions."""
    checked: Callable[..., Any] | None = None
    name = (function.__module__, function.__qualname__)

    def check(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        if checked is None:
            if (result := function.__annotations__.get("return", Any)) is not Any:
                # The checker of a result, which would check the arguments again. Their shapes are known from the first.
                function.__annotations__ = {"return": result}
            checked = beartype(function)
        _calls[name] += 1
        if _calls[name] == 2 * CHECKED_CALLS:  # arguments and result
            _stop_checking(*name)
        return checked(*args, **kwargs)

    return check


def check_again() -> None:
    """At the start of a test."""
    _calls.clear()
    while _unchecked:
        delattr(_unchecked.pop(), "__no_type_check__")


def _stop_checking(module: str, qualified_name: str) -> None:
    """For a function or method of this module; one that is defined in a function is always checked."""
    if "<locals>" in qualified_name:
        return
    found: Any = sys.modules[module]
    for part in qualified_name.split("."):
        found = getattr(found, part, None)
    found = getattr(found, "fget", getattr(found, "__func__", found))
    if isinstance(found, FunctionType):
        no_type_check(found)  # jaxtyping asks for it at each call
        _unchecked.append(found)
