"""What there is by name, as rows for people and programs: models, data sets, recipes."""

import fnmatch
from typing import Any

from vitlab.models import MODELS, forward_macs
from vitlab.recipes import FINETUNE, PRETRAIN

Row = dict[str, Any]


def models(pattern: str = "*") -> list[Row]:
    """Every model at 224 pixels with 1,000 classes: sizes, parameters, multiply-accumulates."""
    return [
        {
            "model": name,
            "layers": config.depth,
            "width": config.width,
            "mlp": config.mlp_dim,
            "heads": config.heads,
            "patch": config.patch_size,
            "tokens": config.num_tokens,
            "parameters": config.num_parameters,
            "gmacs": round(forward_macs(config) / 1e9, 2),
        }
        for name, config in MODELS.items()
        if fnmatch.fnmatchcase(name, pattern)
    ]


def datasets(pattern: str = "*") -> list[Row]:
    """Every data set: classes, splits with their sizes, picture size, source, licence."""
    from vitlab.data.datasets import DATASETS

    return [
        {
            "dataset": name,
            "classes": len(info.classes) or "yours",
            "size": "x".join(map(str, info.image_size)) if info.image_size else "yours",
            "splits": ", ".join(f"{split} {count:,}" for split, count in info.splits.items()) or "yours",
            "held out": ", ".join(f"{split} {share:.0%}" for split, share in info.held_out.items()) or "-",
            "licence": info.licence,
            "source": info.source,
        }
        for name, info in DATASETS.items()
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


def as_table(rows: list[Row]) -> str:
    """Columns under their names; numbers to the right."""
    if not rows:
        return "nothing has such a name"
    cells = [list(rows[0])] + [[f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    right = [isinstance(value, (int, float)) for value in rows[0].values()]
    return "\n".join(
        "  ".join(
            f"{cell:>{w}}" if r else f"{cell:{w}}" for cell, w, r in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    )
