"""The commands: each is arguments -> one library call -> print. Nothing here needs torch until it runs."""

import typing

from vitlab.commands.convert import Convert, Export, Shard
from vitlab.commands.evaluate import Evaluate, Fewshot, Predict, Probe
from vitlab.commands.info import Doctor, List
from vitlab.commands.inspect import App, Duplicates, Inspect
from vitlab.commands.output import FinetuneRunConfig, RunConfig
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

__all__ = ["COMMANDS", "Command", "Finetune", "FinetuneRunConfig", "Pretrain", "RunConfig", "Vtab"]
