"""The environment variables that torchrun sets for each process of a job, read without torch."""

import os

from vitlab.errors import UserError

MAX_PORT = 65535
MAX_RANKS = 2**20


def world_size() -> int:
    """The number of processes in the job."""
    return rank_number("WORLD_SIZE", 1, MAX_RANKS, default=1)


def is_rank_0() -> bool:
    """Whether this process prints: the only one, or rank 0."""
    return os.environ.get("WORLD_SIZE") in (None, "", "1") or os.environ.get("RANK", "0") == "0"


def rank_number(name: str, least: int, most: int, default: int | None = None) -> int:
    """The value of a variable; `default` where it is not set. Raises UserError for anything but a number in range."""
    text = os.environ.get(name) or str(default)
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if least <= number <= most:
        return number
    raise UserError(
        f"the environment variable {name} is {text!r}; allowed: {least} to {most}, as `torchrun --nproc-per-node N -m "
        f"vitlab ...` sets it. Unset WORLD_SIZE, RANK and LOCAL_RANK for a single process."
    )
