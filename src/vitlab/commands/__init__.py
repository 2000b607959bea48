"""The commands: each is a dataclass of its arguments whose `run()` makes one library call and prints the result.

Importing them does not import torch.
"""

import typing

from vitlab.commands.convert import Convert, Export, Shard
from vitlab.commands.evaluate import Evaluate, Fewshot, Predict, Probe
from vitlab.commands.info import Doctor, List
from vitlab.commands.inspect import App, Duplicates, Inspect
from vitlab.commands.study import Bench, Plan, Study
from vitlab.commands.train import Demo, Finetune, Pretrain, Vtab

Command = (
    Demo
    | List
    | Pretrain
    | Finetune
    | Vtab
    | Evaluate
    | Fewshot
    | Probe
    | Predict
    | Inspect
    | App
    | Study
    | Bench
    | Plan
    | Duplicates
    | Shard
    | Convert
    | Export
    | Doctor
)
COMMANDS: dict[str, type[Command]] = {kind.__name__.lower(): kind for kind in typing.get_args(Command)}

__all__ = ["COMMANDS", "Command"]
