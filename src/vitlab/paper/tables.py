"""Table 1 to 9: what the paper prints, next to what the code here counts, trains by, or has measured."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vitlab.config import TrainConfig
from vitlab.cost.plan import TABLE2, core_days
from vitlab.data.vtab.tasks import TASKS
from vitlab.models.config import ViTConfig
from vitlab.models.registry import get_config
from vitlab.recipes import pretrain
from vitlab.recipes.finetune import TABLE4
from vitlab.runs.vtab import MEANS
from vitlab.studies import vtab_table
from vitlab.studies.compute import PAPER_IMAGES
from vitlab.studies.optimizer import TABLE7
from vitlab.studies.positions import ENTRIES, KINDS, TABLE8
from vitlab.studies.scaling import SCALING, TABLE6, TESTS
from vitlab.studies.spec import exaflops
from vitlab.studies.tables import CORE_DAYS, TABLES

Rows = Sequence[Mapping[str, Any]]
SIZES = {"ViT-Base": ("B", "86M"), "ViT-Large": ("L", "307M"), "ViT-Huge": ("H", "632M")}
"""Name in Table 1 -> letter in the names of this package, and the parameters that the paper prints."""
PATCHES = {"B": (16, 32), "L": (16, 32), "H": (14,)}
PRINTED_EPOCHS = {
    ("JFT-300M", "ViT-L/16"): "7/14",
    ("JFT-300M", "R50+ViT-L/16"): "7/14",
    ("ImageNet-21k", "ViT-L/16"): "30/90",
    ("ImageNet-21k", "ViT-L/32"): "30/90",
}
"""Rows with two numbers in Table 3; the recipe has the larger one."""
TABLE4_TITLES = {
    "imagenet": "ImageNet",
    "cifar100": "CIFAR-100",
    "cifar10": "CIFAR-10",
    "pets": "Oxford-IIIT Pets",
    "flowers102": "Flowers-102",
    "vtab:TASK": "VTAB (19 tasks)",
}
HERE = "here: "
"""In front of the heading of a column whose numbers are ours."""


def table1() -> Rows:
    """Sizes, and the parameters of each patch size with 1,000 classes."""
    rows = []
    for name, (size, printed) in SIZES.items():
        configs = {patch: get_config(f"ViT-{size}/{patch}") for patch in PATCHES[size]}
        config = next(iter(configs.values()))
        assert isinstance(config, ViTConfig)
        counts = ", ".join(f"/{patch}: {config.num_parameters / 1e6:.1f}M" for patch, config in configs.items())
        sizes = {"layers": config.depth, "D": config.width, "MLP": config.mlp_dim, "heads": config.heads}
        rows.append({"model": name, **sizes, "parameters": printed, f"{HERE}parameters": counts})
    return rows


def table2() -> Rows:
    """Accuracy in percent as printed, and core-days by the exaFLOPs of the run and the mean rate of a core."""
    days = {}
    for recipe, model, _ in TABLE2:
        config = recipe(model)
        count = core_days(exaflops(config, PAPER_IMAGES[config.data.name]))["days"]
        days[f"{model}, {'JFT' if recipe is pretrain.jft else 'I21k'}"] = f"{count / 1000:.2g}k"
    return [row | {f"{HERE}{CORE_DAYS}": days.get(row["model"], "")} for row in _printed_rows("table2")]


def _printed_rows(name: str) -> list[dict[str, str]]:
    table = TABLES[name]
    return [{"model": model, **dict(zip(table.columns, row, strict=True))} for model, row in table.rows.items()]


def table3() -> Rows:
    """The rows of the recipes in `recipes/pretrain.py`, with the epochs as printed and as in the recipe."""
    configs = [("JFT-300M", model, pretrain.jft(model)) for model in pretrain.JFT]
    configs += [("ImageNet-21k", model, pretrain.imagenet21k(model)) for model in pretrain.IMAGENET21K]
    configs += [("ImageNet", "ViT-*", pretrain.imagenet())]
    return [
        {"model": model, "data": data}
        | {"epochs": PRINTED_EPOCHS.get((data, model), f"{config.epochs:g}"), f"{HERE}epochs": f"{config.epochs:g}"}
        | _settings(config)
        for data, model, config in configs
    ]


def _settings(config: TrainConfig) -> dict[str, Any]:
    model, optim = config.model, config.optim
    return {
        "base rate": f"{optim.lr:g}",
        "decay": optim.schedule,
        "weight decay": f"{optim.weight_decay:g}",
        "dropout": f"{model.dropout:g}" if isinstance(model, ViTConfig) else "0",
        "batch": config.batch_size,
        "warm-up": optim.warmup_steps,
    }


def table4() -> Rows:
    """The rows of the recipes in `recipes/finetune.py`; the held-out share is App. B.1.1's, warm-up Google's code's."""
    return [
        {
            "data": TABLE4_TITLES[name],
            "steps": steps,
            "base rates": ", ".join(f"{rate:g}" for rate in rates),
            "held out (B.1.1)": f"{held_out:.0%}",
            f"{HERE}warm-up": warmup,
        }
        for name, (rates, held_out, steps, warmup) in TABLE4.items()
        if name
    ]


def table5() -> Rows:
    """Accuracy in percent as printed, by pre-training set."""
    return _printed_rows("table5")


def table6() -> Rows:
    """Accuracy in percent and exaFLOPs as printed, and the exaFLOPs that the code here counts."""
    return [
        {"model": printed.model, "epochs": printed.epochs}
        | {name: f"{value:.2f}" for name, value in zip(TESTS, printed.accuracies, strict=True)}
        | {"exaFLOPs": printed.exaflops}
        | {f"{HERE}exaFLOPs": round(exaflops(run.config, PAPER_IMAGES["shards:jft300m"]))}
        for printed, run in zip(TABLE6, SCALING.variants("paper"), strict=True)
    ]


def table7() -> Rows:
    """Accuracy in percent as printed."""
    data = ("ImageNet", "CIFAR-10", "CIFAR-100", "Pets", "Flowers")
    return [
        {"model": model, "optimizer": optimizer}
        | {name: f"{value:.2f}" for name, value in zip(data, values, strict=True)}
        | {"average": f"{sum(values) / len(values):.2f}"}
        for (model, optimizer), values in TABLE7.items()
    ]


def table8() -> Rows:
    """5-shot accuracy on ImageNet as printed."""
    return [
        {"positions": KINDS[kind], "where": "" if kind == "none" else ENTRIES[at], "5-shot": f"{value:.5f}"}
        for (kind, at), value in TABLE8.items()
    ]


def table9() -> Rows:
    """Accuracy in percent as printed, and the means of the groups by the numbers of the table."""
    rows = [
        {"task": TASKS[name].title, "group": TASKS[name].group} | _printed(values)
        for name, values in vtab_table.TABLE9.items()
    ]
    for group in MEANS:
        means = [vtab_table.printed_mean(model, group) for model in range(len(vtab_table.PAPER))]
        rows.append({"task": f"mean of {group}", "group": ""} | _printed(means))
    return rows


def _printed(values: Sequence[float]) -> dict[str, str]:
    return {model: f"{value:.1f}" for model, value in zip(vtab_table.PAPER, values, strict=True)}


PAPER_TABLES: dict[str, Callable[[], Rows]] = {
    table.__name__: table for table in (table1, table2, table3, table4, table5, table6, table7, table8, table9)
}
