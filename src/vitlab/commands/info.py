"""The commands that list names and describe the machine: list, doctor."""

import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from vitlab.commands import Json, print_note, print_result
from vitlab.display import format_table
from vitlab.errors import UserError
from vitlab.models import MODELS, ModelConfig, ResNetConfig
from vitlab.models.resnet_config import AXIAL_HEADS
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.settings import nearest

Row = dict[str, Any]


@dataclass(frozen=True)
class List:
    """List models, checkpoints, data sets, recipes, studies, or the tasks of VTAB-1k and the sources of their data."""

    what: Annotated[Positional[str], tyro.conf.arg(metavar="{models,checkpoints,datasets,recipes,studies,vtab}")] = ""
    """What to list. Without it, what can be listed."""
    pattern: Annotated[Positional[str], tyro.conf.arg(metavar="PATTERN")] = "*"
    """Shell pattern for the names, such as `ViT-B*`."""
    root: Path | None = None
    """With `vtab`: a folder to search for the tasks' data."""
    json: Json = False

    def run(self) -> int:
        if self.root and self.what != "vtab":
            raise UserError(f"--root has no effect on a list of {self.what}; only `vitlab list vtab` reads a folder.")
        if not self.what:
            rows = [{"list": name, "": (function.__doc__ or "").partition(".")[0]} for name, function in LISTS.items()]
            print_result(rows, self.json, format_table(rows))
            return 0
        if self.what not in LISTS:
            raise UserError(f"there is no list of {self.what!r}; {nearest(self.what, LISTS)}.")
        rows = LISTS[self.what](self.pattern, **({"root": self.root} if self.root else {}))
        table = format_table(rows, optional=("stride", "kind")) or f"no {self.what} match {self.pattern!r}"
        print_result(rows, self.json, table)
        return 0


@dataclass(frozen=True)
class Doctor:
    """Report versions, devices, the attention in use, speeds and disk of this machine, and problems."""

    path: Path = Path()
    """Folder on the disk to measure."""
    json: Json = False

    def run(self) -> int:
        print_note("measuring this machine ...")
        from vitlab.cost.doctor import diagnose, format_diagnosis

        result = diagnose(self.path)
        print_result(result, self.json, format_diagnosis(result))
        return 0


def models(pattern: str = "*") -> list[Row]:
    """Every model at 224 pixels with 1,000 classes: sizes, parameters, multiply-accumulates; "-" for what it has not.

    `layers` of a ResNet are those that its name counts, `width` is the channels of its root, `tokens` the positions of
    its last feature map. `patch` is in pixels, of a hybrid in positions of its stem's feature map; `stride` in pixels.
    """
    return [_model(name, config) for name, config in _matching(MODELS, pattern)]


def _model(name: str, config: ModelConfig) -> Row:
    if isinstance(config, ResNetConfig):
        body = config.body
        kind, heads = ("axial", AXIAL_HEADS) if body.mixing == "axial" else ("ResNet", "-")
        row = {"kind": kind, "layers": 3 * sum(body.layers) + 2, "width": body.width, "mlp": "-", "heads": heads}
        row |= {"patch": "-", "stride": body.stride, "tokens": math.prod(config.grid)}
    else:
        kind = "axial" if config.encoder == "axial" else "hybrid" if config.stem else "ViT"
        row = {"kind": kind, "layers": config.depth, "width": config.width, "mlp": config.mlp_dim}
        row |= {"heads": config.heads, "patch": config.patch_size, "stride": config.stride, "tokens": config.num_tokens}
    gmacs = round(config.forward_macs / 1e9, 2)
    return {"model": name, **row, "parameters": config.num_parameters, "gmacs": gmacs}


def checkpoints(pattern: str = "*") -> list[Row]:
    """Public checkpoints to start from, of the many that can be loaded; one of them is the default advice.

    `parameters` are without the head, `image` is the side in pixels of its images.
    """
    from vitlab.weights.recommended import DEFAULT, RECOMMENDED

    return [
        {
            "checkpoint": each.spec,
            "default": each.spec == DEFAULT,
            "parameters": each.parameters,
            "image": each.image_size,
            "pre-training": each.pretraining,
            "license": each.license,
            "good for": each.use,
        }
        for _, each in _matching({each.spec: each for each in RECOMMENDED}, pattern)
    ]


def datasets(pattern: str = "*") -> list[Row]:
    """Every data set: classes, image size, splits with their sizes, license, source.

    `held out` are the fractions of train that stand in for the splits that the source lacks.
    """
    from vitlab.data.registry import DATASETS

    rows = []
    for name, info in _matching(DATASETS, pattern):
        unknown = "yours" if ":PATH" in name else "varied"
        rows.append(
            {
                "dataset": name,
                "classes": info.num_classes or unknown,
                "size": "x".join(map(str, info.image_size)) if info.image_size else unknown,
                "splits": ", ".join(f"{split} {count:,}" for split, count in info.splits.items()) or unknown,
                "held out": ", ".join(f"{split} {100 * fraction:g}%" for split, fraction in info.held_out.items())
                or "-",
                "license": info.license,
                "source": info.source,
            }
        )
    return rows


def recipes(pattern: str = "*") -> list[Row]:
    """Every recipe of `pretrain` and `finetune`, with the first line of its docstring."""
    rows = []
    for command, table in (("pretrain", PRETRAIN), ("finetune", FINETUNE)):
        for name, recipe in _matching(table, pattern):
            config = recipe()
            length = f"{config.steps:,} steps" if config.steps else f"{config.epochs:g} epochs"
            about = (recipe.__doc__ or f"Table 4, {config.data.name}.").splitlines()[0]
            rows.append({"command": command, "recipe": name, "length": length, "about": about})
    return rows


def studies(pattern: str = "*") -> list[Row]:
    """Every study: its source in the paper, and its question; then the tables of finished runs."""
    from vitlab.studies import STUDIES
    from vitlab.studies.tables import TABLES

    rows = {name: (study.source, study.question) for name, study in STUDIES.items()}
    about = "Of finished runs: how do my fine-tuned checkpoints compare with the paper's?"
    rows |= {name: (table.source.partition(":")[0], about) for name, table in TABLES.items()}
    return [{"study": name, "paper": source, "about": about} for name, (source, about) in _matching(rows, pattern)]


def vtab(pattern: str = "*", root: Path | None = None) -> list[Row]:
    """Every task of VTAB-1k and how to get its data; with a `root`, also what that folder has of it."""
    from vitlab.data.vtab.tasks import TASKS, available

    rows = []
    for name, task in _matching(TASKS, pattern):
        row = {"task": name, "called": task.title, "group": task.group, "classes": task.classes, "test": task.test_size}
        row |= {"data": task.origin.access} | ({"available": available(name, root)} if root else {})
        rows.append(row | {"license": task.origin.license, "source": task.origin.page})
    return rows


def _matching(table: Mapping[str, Any], pattern: str) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in table.items() if fnmatch.fnmatchcase(name, pattern)]


LISTS: dict[str, Callable[..., list[Row]]] = {
    "models": models,
    "checkpoints": checkpoints,
    "datasets": datasets,
    "recipes": recipes,
    "studies": studies,
    "vtab": vtab,
}
