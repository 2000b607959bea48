"""Models, data sets, recipes, studies and VTAB tasks by name, as rows for `vitlab list`."""

import fnmatch
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab.models import MODELS, ModelConfig, ResNetConfig
from vitlab.models.resnet_config import AXIAL_HEADS
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.studies import STUDIES

if TYPE_CHECKING:
    from vitlab.data.registry import DatasetInfo

Row = dict[str, Any]


def models(pattern: str = "*") -> list[Row]:
    """Every model at 224 pixels with 1,000 classes: sizes, parameters, multiply-accumulates; "-" for what it has not.

    `layers` of a ResNet are those that its name counts, `width` is the channels of its root, `tokens` the positions of
    its last feature map. `patch` is in pixels, of a hybrid in positions of its stem's feature map; `stride` in pixels.
    """
    return [_model(name, config) for name, config in MODELS.items() if fnmatch.fnmatchcase(name, pattern)]


def _model(name: str, config: ModelConfig) -> Row:
    if isinstance(config, ResNetConfig):
        body = config.body
        axial, stride, tokens = body.mixing == "axial", body.stride, math.prod(config.grid)
        layers, width, mlp, patch = 3 * sum(body.layers) + 2, body.width, "-", "-"
        kind, heads = ("axial", AXIAL_HEADS) if axial else ("ResNet", "-")
    else:
        stride, tokens = config.stride, config.num_tokens
        layers, width, mlp, heads, patch = config.depth, config.width, config.mlp_dim, config.heads, config.patch_size
        kind = "axial" if config.encoder == "axial" else "hybrid" if config.stem else "ViT"
    return {
        "model": name,
        "kind": kind,
        "layers": layers,
        "width": width,
        "mlp": mlp,
        "heads": heads,
        "patch": patch,
        "stride": stride,
        "tokens": tokens,
        "parameters": config.num_parameters,
        "gmacs": round(config.forward_macs / 1e9, 2),
    }


def datasets(pattern: str = "*") -> list[Row]:
    """Every data set: classes, splits with their sizes, image size, how the paper fine-tunes on it, license, source.

    `held out` are the shares of train that stand in for the splits that the source lacks.
    """
    from vitlab.data.registry import DATASETS

    return [_dataset(name, info) for name, info in DATASETS.items() if fnmatch.fnmatchcase(name, pattern)]


def _dataset(name: str, info: "DatasetInfo") -> Row:
    unknown = "yours" if ":PATH" in name else "varied"
    return {
        "dataset": name,
        "classes": info.num_classes or unknown,
        "size": "x".join(map(str, info.image_size)) if info.image_size else unknown,
        "splits": ", ".join(f"{split} {count:,}" for split, count in info.splits.items()) or unknown,
        "held out": ", ".join(f"{split} {_percent(share)}" for split, share in info.held_out.items()) or "-",
        "fine-tuning": _protocol(name),
        "license": info.license,
        "source": info.source,
    }


def _protocol(name: str) -> str:
    """The row of Table 4 for a data set: its own, or else VTAB's where it is one of the 19 tasks; "-" without one."""
    from vitlab.data.vtab.tasks import TASKS

    configs = [recipe() for recipe in FINETUNE.values()]
    rows = {config.data.name: config for config in configs if config.learning_rates}
    row = rows.get(name) or (rows["vtab:TASK"] if name in TASKS else None)
    if row is None:
        return "-"
    lowest, highest = min(row.learning_rates), max(row.learning_rates)
    rates = f"rate {lowest:g}" if lowest == highest else f"rates {lowest:g}-{highest:g}"
    return (
        f"Table 4{'' if name in rows else ' (VTAB)'}: {row.steps:,} steps, batch {row.batch_size}, "
        f"{row.model.image_hw[0]} px, {rates}, {_percent(row.held_out)} held out"
    )


def _percent(share: float) -> str:
    return f"{100 * share:g} %"


def vtab(pattern: str = "*", root: Path | None = None) -> list[Row]:
    """Every task of VTAB-1k, and how to get its data; with a `root`, also what of it is there (without a download)."""
    from vitlab.data.vtab.tasks import TASKS, available

    return [
        {
            "task": name,
            "called": task.csv,
            "group": task.group,
            "classes": task.classes,
            "test": task.test_size,
            "data": task.origin.access,
            **({"found": available(name, root)} if root else {}),
            "license": task.origin.license,
            "source": task.origin.page,
        }
        for name, task in TASKS.items()
        if fnmatch.fnmatchcase(name, pattern)
    ]


def recipes(pattern: str = "*") -> list[Row]:
    """Every recipe of `pretrain` and `finetune`, with the first line of what it says of itself."""
    rows = []
    for command, table in (("pretrain", PRETRAIN), ("finetune", FINETUNE)):
        for name, recipe in table.items():
            if fnmatch.fnmatchcase(name, pattern):
                config = recipe()
                length = f"{config.steps:,} steps" if config.steps else f"{config.epochs:g} epochs"
                about = (recipe.__doc__ or f"Table 4, {config.data.name}.").splitlines()[0]
                rows.append({"command": command, "recipe": name, "length": length, "about": about})
    return rows


def studies(pattern: str = "*") -> list[Row]:
    """Every study: where it stands in the paper, and what it asks."""
    matching = [study for name, study in STUDIES.items() if fnmatch.fnmatchcase(name, pattern)]
    return [{"study": study.name, "paper": study.source, "about": study.question} for study in matching]
