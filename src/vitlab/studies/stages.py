"""What a long measurement is doing: one live line on a terminal, elsewhere lines now and then."""

import time
from collections.abc import Callable

from rich.console import Console
from rich.text import Text

SECONDS = 10.0
"""Between two lines where there is no terminal."""


class Stages:
    """A context manager. `begin` and `show` say what is being done, `done` leaves a line behind.

    Where there is no terminal, what begins is printed at once, and what is shown where nothing was for SECONDS.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True, highlight=False, soft_wrap=True)
        self._status = self._console.status("")
        self._clock = clock
        self._next = 0.0

    def __enter__(self) -> "Stages":
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def begin(self, text: str) -> None:
        self._next = 0.0
        self.show(text)

    def show(self, text: str) -> None:
        if self._console.is_terminal:
            self._status.update(Text(text))
        elif self._clock() >= self._next:
            self._console.print(text, markup=False)
            self._next = self._clock() + SECONDS

    def done(self, text: str) -> None:
        self._console.print(text, markup=False)
