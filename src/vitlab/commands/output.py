"""What commands share: argument types that several of them take, and output for people and for programs."""

import json
import os
import sys
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from vitlab.errors import printable
from vitlab.models.config import Interpolation

CHECKPOINTS = "A Google .npz, a folder (saved model, run, timm, Hugging Face), hub:OWNER/NAME or timm:NAME.TAG."
Checkpoint = Annotated[Positional[str], tyro.conf.arg(metavar="CHECKPOINT", help=CHECKPOINTS)]
EvaluationSize = Annotated[
    int | None,
    tyro.conf.arg(help="Image side in pixels; default: as the checkpoint's preprocessing."),
]
PositionInterpolation = Annotated[
    Interpolation | None,
    tyro.conf.arg(help="Interpolation of position embeddings; default: as the checkpoint's own library does."),
]
Device = Annotated[str, tyro.conf.arg(help="auto (the first GPU, else the CPU), cpu, cuda or cuda:1.")]
Json = Annotated[bool, tyro.conf.arg(help="Print the result as JSON.")]


def is_rank_0() -> bool:
    """Whether this process prints: the only one, or rank 0 of torchrun's. Known before torch is imported."""
    return os.environ.get("RANK", "0") == "0"


def print_result(result: Any, as_json: bool, text: str, lines: bool = False) -> None:
    """Prints the result on the standard output of rank 0: as JSON (`lines`: on one line) or as `text`."""
    if is_rank_0():
        print(json.dumps(result, indent=None if lines else 1, default=str) if as_json else text, flush=True)


def print_note(text: str) -> None:
    """Prints a line on the standard error of rank 0. Commands say what they begin before they import torch."""
    if is_rank_0():
        print(f"vitlab: {printable(text)}", file=sys.stderr, flush=True)
