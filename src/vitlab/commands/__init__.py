"""The commands: each is a dataclass of its arguments whose `run()` makes one library call and prints the result.

A command is imported when it is called; importing it does not import torch. Here is the list of commands, and what they
share: argument types that several of them take, and output for people and for programs.
"""

import importlib
import json
import os
import sys
from typing import Annotated, Any, TextIO

import tyro
from tyro.conf import Positional

from vitlab.display import fit
from vitlab.errors import printable
from vitlab.io import finite
from vitlab.models.variant import Interpolation
from vitlab.ranks import is_rank_0

PURPOSES = {
    "Train": {"demo": "train", "pretrain": "train", "finetune": "train", "study": "study"},
    "Evaluate": {
        "evaluate": "evaluate",
        "fewshot": "evaluate",
        "probe": "evaluate",
        "features": "evaluate",
        "vtab": "train",
        "predict": "evaluate",
    },
    "Inspect": {"inspect": "inspect", "paper": "inspect", "duplicates": "inspect"},
    "Convert and serve": {"convert": "convert", "export": "convert", "shard": "convert", "app": "inspect"},
    "Machine and lists": {"list": "info", "plan": "study", "bench": "study", "doctor": "info"},
}
"""The commands by purpose: name -> module in this folder; its class has the capitalized name."""
COMMANDS = {name: module for commands in PURPOSES.values() for name, module in commands.items()}

CHECKPOINTS = "A Google .npz, a folder (saved model, run, timm, Hugging Face), hub:OWNER/NAME or timm:NAME.TAG."
Checkpoint = Annotated[Positional[str], tyro.conf.arg(metavar="CHECKPOINT", help=CHECKPOINTS)]
IMAGES = "Files, folders, patterns (in quotes), addresses (https://...); - reads names from the standard input."
PositionInterpolation = Annotated[
    Interpolation | None,
    tyro.conf.arg(help="Interpolation of position embeddings. Default: as the checkpoint's own library does."),
]
Device = Annotated[str, tyro.conf.arg(help="auto (the first GPU, else the CPU), cpu, cuda or cuda:1.")]
Json = Annotated[bool, tyro.conf.arg(help="Print the result as JSON.")]


def command_type(name: str) -> Any:
    """The dataclass of a command."""
    return getattr(importlib.import_module(f"vitlab.commands.{COMMANDS[name]}"), name.capitalize())


def print_result(result: Any, as_json: bool, text: str, lines: bool = False) -> None:
    """Prints the result on the standard output of rank 0: as JSON (`lines`: on one line) or as `text`."""
    if is_rank_0():
        as_text = fit(printable(text), sys.stdout)
        print(json.dumps(finite(result), indent=None if lines else 1, default=str) if as_json else as_text, flush=True)


def discard(*streams: TextIO) -> None:
    """Sends to nowhere what is still printed, and what Python flushes at its end: the reader has ended."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        os.dup2(null, stream.fileno())


def read_names(sources: tuple[str, ...]) -> list[str]:
    """The sources, with `-` replaced by the names on the standard input: lines, or what is between NUL characters."""
    names = []
    for source in sources:
        if source == "-":
            data = sys.stdin.buffer.read()
            lines = data.split(b"\0") if b"\0" in data else data.replace(b"\r\n", b"\n").split(b"\n")
            names += [os.fsdecode(line) for line in lines if line]
        else:
            names.append(source)
    return names


def print_note(text: str) -> None:
    """Prints a line on the standard error of rank 0. Commands say what they begin before they import torch."""
    if is_rank_0():
        print(fit(f"vitlab: {printable(text)}", sys.stderr), file=sys.stderr, flush=True)
