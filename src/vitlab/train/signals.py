"""SIGTERM and Ctrl-C in a run: it saves itself and ends, and the same command continues it."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from vitlab.errors import RunError


class StoppedError(RunError):
    """SIGTERM or Ctrl-C has stopped the run; it is saved, and the same command continues it."""

    exit_code = 143


class _Interrupted(BaseException):
    """A signal. Not an Exception, which torch.compile would wrap in one of its own."""


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and the first Ctrl-C set, instead of ending the process."""
    event = threading.Event()

    def request_stop(number: int, _: Any) -> None:
        if event.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        event.set()

    with _signal_handler(request_stop):
        yield event


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the code inside at once, with StoppedError: for the compilation before a run's first step,
    which takes minutes and changes nothing."""

    def interrupt(number: int, frame: Any) -> None:
        if callable(handler := previous[number]):
            handler(number, frame)  # stops the run after the step where this exception gets lost, as in a destructor
        raise _Interrupted

    try:
        with _signal_handler(interrupt) as previous:
            yield
    except _Interrupted:
        raise StoppedError(
            "stopped while the model was compiled, before the first step; the same command continues from the last "
            "checkpoint."
        ) from None


@contextlib.contextmanager
def _signal_handler(handler: Any) -> Iterator[dict[int, Any]]:
    """Both signals go to `handler`, in the main thread, which alone receives them; gives the former handlers."""
    numbers = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in numbers}
    try:
        for number in numbers:
            signal.signal(number, handler)
        yield previous
    finally:
        for number, former in previous.items():
            signal.signal(number, former)
