"""beartype, applied to a function when it is first called, for one process calls few of all functions."""

from collections.abc import Callable
from typing import Any

from beartype import beartype


def when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    checked: Callable[..., Any] | None = None

    def check(*args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        if checked is None:
            checked = beartype(function)
        return checked(*args, **kwargs)

    return check
