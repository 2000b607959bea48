"""What commands have in common: arguments that many take, and how they speak to people and to programs."""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.errors import UserError, printable, quoted
from vitlab.models.config import Interpolation
from vitlab.settings import to_dict

CHECKPOINTS = "A Google .npz, a folder (saved model, run, timm, Hugging Face), hub:OWNER/NAME or timm:NAME.TAG."
Checkpoint = Annotated[Positional[str], tyro.conf.arg(metavar="CHECKPOINT", help=CHECKPOINTS)]
EvaluationSize = Annotated[
    int | None,
    tyro.conf.arg(help="Image side in pixels; as the checkpoint's preprocessing says unless given. Position embeddings "
                  "are interpolated for it."),
]  # fmt: skip
PositionInterpolation = Annotated[
    Interpolation | None,
    tyro.conf.arg(help="How position embeddings are interpolated; as the checkpoint's own library does unless given."),
]
# `--optim.lr`, not `--config.optim.lr`
RunConfig = Annotated[TrainConfig, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]
FinetuneRunConfig = Annotated[FinetuneConfig, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]


def answer(data: Any, as_json: bool, text: str, lines: bool = False) -> None:
    print(json.dumps(data, indent=None if lines else 1, default=str) if as_json else text, flush=True)


def show_settings(workdir: Path) -> Callable[[TrainConfig], None]:
    """Shows the resolved settings, on the standard error so that `--json` stays readable by a program."""

    def show(config: TrainConfig) -> None:
        print(f"settings (kept in {workdir / 'config.json'}):", file=sys.stderr)
        for name, value in _flat(to_dict(config)):
            print(f"  {name} = {quoted(str(value))}", file=sys.stderr)

    return show


def _flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    return [
        row
        for name, value in settings.items()
        for row in (_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)])
    ]


def say(text: str) -> None:
    print(f"vitlab: {printable(text)}", file=sys.stderr)


def begin(doing: str) -> None:
    """Says what a command starts with, before torch is imported, which takes seconds; of several processes the first.

    Every command that may work for longer than two seconds calls this first of all."""
    if os.environ.get("RANK", "0") == "0":
        print(f"vitlab: {doing} ...", file=sys.stderr, flush=True)


def say_score(task: str, record: dict[str, Any]) -> None:
    print(f"{task}: {record['accuracy']:.2%} of {record['images']:,}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A function that hears how much is done, and of how much: a bar on a terminal, elsewhere a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console, told = Console(stderr=True), time.monotonic()
    columns = (TextColumn(label), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label)

        def report(done: int, of: int) -> None:
            nonlocal told
            bar.update(task, completed=done, total=of)
            if not console.is_terminal and time.monotonic() - told > 30:
                told = time.monotonic()
                print(f"{label}: {done:,} of {of:,}", file=sys.stderr, flush=True)

        yield report


def whole_numbers(name: str, given: str) -> tuple[int, ...]:
    """`64,128` as numbers."""
    try:
        return tuple(int(each) for each in given.split(","))
    except ValueError as error:
        raise UserError(f"--{name} is {given!r}; give whole numbers, with commas between several.") from error


def whole_number(name: str, given: str) -> int:
    """`64` as a number; several are refused."""
    try:
        return int(given)
    except ValueError as error:
        raise UserError(f"--{name} is {given!r}; give one whole number, or auto.") from error
