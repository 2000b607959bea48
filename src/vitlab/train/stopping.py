"""How a run ends before its last step: by a signal, or by a loss that is not finite."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from vitlab.errors import RunError


class NonFiniteError(RunError):
    """The loss or the gradient is infinite or NaN."""


class StoppedError(RunError):
    """SIGTERM or Ctrl-C has stopped the run; it is saved, and the same command resumes it."""

    exit_code = 143


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and the first Ctrl-C set, instead of ending the process."""
    event = threading.Event()

    def request_stop(number: int, _: Any) -> None:
        if event.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        event.set()

    is_main = threading.current_thread() is threading.main_thread()  # no other thread receives signals
    previous = {number: signal.signal(number, request_stop) for number in (signal.SIGTERM, signal.SIGINT) if is_main}
    try:
        yield event
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
