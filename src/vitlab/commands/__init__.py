"""The commands: each is a dataclass of its arguments whose `run()` makes one library call and prints the result.

A command is imported when it is called; importing it does not import torch.
"""

import importlib
from typing import Any

PURPOSES = {
    "Train": {"demo": "train", "pretrain": "train", "finetune": "train", "study": "study"},
    "Evaluate": {
        "evaluate": "evaluate",
        "fewshot": "evaluate",
        "probe": "evaluate",
        "vtab": "train",
        "predict": "evaluate",
    },
    "Inspect": {"inspect": "inspect", "duplicates": "inspect"},
    "Convert and serve": {"convert": "convert", "export": "convert", "shard": "convert", "app": "inspect"},
    "Machine and lists": {"list": "info", "plan": "study", "bench": "study", "doctor": "info"},
}
"""The commands by purpose: name -> module in this folder, in which the class has the capitalized name."""
COMMANDS = {name: module for commands in PURPOSES.values() for name, module in commands.items()}


def command_type(name: str) -> Any:
    """The dataclass of a command."""
    return getattr(importlib.import_module(f"vitlab.commands.{COMMANDS[name]}"), name.capitalize())
