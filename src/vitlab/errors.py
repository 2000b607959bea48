"""The errors whose messages are printed without a traceback; and how names and warnings are written."""

import errno
import functools
import logging
import re
from collections.abc import Sequence

logger = logging.getLogger(__name__)

# What moves a terminal's cursor, changes its state, ends a line or turns the direction of text.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of a disk, a quota or a file that cannot grow."""


class UserError(ValueError):
    """Bad input: the message says what was given, what is allowed and what to do.

    The command line prints the message alone and exits with 2; every other ValueError keeps its traceback.
    """


class RunError(RuntimeError):
    """A command that failed in a known way: its message is printed without a traceback."""

    exit_code = 1
    on_every_rank = False
    """Whether each rank prints its own message; else rank 0 prints for all."""


class WriteError(RunError, OSError):
    """A file that cannot be written though the input is valid, as on a full disk; `errno` says why."""

    on_every_rank = True

    def __init__(self, message: str, number: int | None = None) -> None:
        super().__init__(message)
        self.errno = number


def quoted(name: str) -> str:
    """The name of a file or a class for a message: unchanged, or quoted with escapes if it has control characters."""
    return repr(name) if _CONTROL.search(name) else name


def first_ten(items: Sequence[str]) -> str:
    """The first ten items for a message, and how many there are if they are more."""
    return ", ".join(map(quoted, items[:10])) + (f", ... ({len(items)})" if len(items) > 10 else "")


def printable(text: str) -> str:
    """A message with its control characters, other than line breaks, escaped."""
    return re.sub(rf"(?!\n){_CONTROL.pattern}", lambda found: repr(found[0])[1:-1], text)


@functools.cache
def warn_once(text: str) -> None:
    """Logs a warning, unless it was logged before: what holds for a data set would be repeated for each split."""
    logger.warning(text)
