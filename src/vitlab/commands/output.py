"""What commands share: argument types that several of them take, and output for people and for programs."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.errors import printable, quoted
from vitlab.models.config import Interpolation
from vitlab.settings import to_dict

CHECKPOINTS = "A Google .npz, a folder (saved model, run, timm, Hugging Face), hub:OWNER/NAME or timm:NAME.TAG."
Checkpoint = Annotated[Positional[str], tyro.conf.arg(metavar="CHECKPOINT", help=CHECKPOINTS)]
SIZE_HELP = (
    "Image side in pixels; default: as the checkpoint's preprocessing. Position embeddings are interpolated for it."
)
EvaluationSize = Annotated[int | None, tyro.conf.arg(help=SIZE_HELP)]
PositionInterpolation = Annotated[
    Interpolation | None,
    tyro.conf.arg(help="Interpolation of position embeddings; default: as the checkpoint's own library does."),
]
Device = Annotated[str, tyro.conf.arg(help="auto (the first GPU, else the CPU), cpu, cuda or cuda:1.")]
Json = Annotated[bool, tyro.conf.arg(help="Print the result as JSON.")]
# `--optim.lr`, not `--config.optim.lr`
RunConfig = Annotated[TrainConfig, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]
FinetuneRunConfig = Annotated[FinetuneConfig, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]


def is_rank_0() -> bool:
    """Whether this process prints: the only one, or rank 0 of torchrun's. Known before torch is imported."""
    return os.environ.get("RANK", "0") == "0"


def print_result(result: Any, as_json: bool, text: str, lines: bool = False) -> None:
    """Prints the result on the standard output of rank 0: as JSON (`lines`: on one line) or as `text`."""
    if is_rank_0():
        print(json.dumps(result, indent=None if lines else 1, default=str) if as_json else text, flush=True)


def print_start(doing: str) -> None:
    """Says what a command starts with, before it imports torch, which takes seconds."""
    print_note(f"{doing} ...")


def print_note(text: str) -> None:
    """Prints a line for people on the standard error of rank 0."""
    if is_rank_0():
        print(f"vitlab: {printable(text)}", file=sys.stderr, flush=True)


def settings_printer(workdir: Path) -> Callable[[TrainConfig], None]:
    """A function that prints the resolved settings on the standard error, so that `--json` stays readable."""

    def print_settings(config: TrainConfig) -> None:
        if is_rank_0():
            print(f"settings (saved in {workdir / 'config.json'}):", file=sys.stderr)
            for name, value in _flatten(to_dict(config)):
                print(f"  {name} = {quoted(str(value))}", file=sys.stderr)

    return print_settings


def _flatten(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    return [
        row
        for name, value in settings.items()
        for row in (_flatten(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)])
    ]
