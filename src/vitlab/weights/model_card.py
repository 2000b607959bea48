"""README.md of a model's folder, as on the Hugging Face hub: what it is, what it was trained on, how to load it."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jinja2

from vitlab.errors import printable, quoted
from vitlab.models import ModelConfig, ViTConfig
from vitlab.models.registry import name_of
from vitlab.preprocessing import Preprocessing

LIBRARIES = {"timm": "timm", "huggingface": "transformers", "vitlab": "vitlab"}
"""Format -> name on the hub of the library that reads it."""
CLASSES = 20
"""Maximum number of class names on a card."""
ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=False,  # Markdown; `cell` escapes what comes from outside
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
ENVIRONMENT.filters["cell"] = lambda value: re.sub(r"([\\|`*_<>\[\]$])", r"\\\1", quoted(str(value)))


def model_card(
    library: Literal["timm", "huggingface", "vitlab"], folder: Path, config: ModelConfig, card: Mapping[str, Any]
) -> str:
    """The text for a model in `folder`, with the front matter that the Hub reads.

    Of the model's `card`: `classes`, `preprocessing`, `source`, and where it comes from a run of vitlab `dataset`,
    `start`, `alpha` (of `average_weights`) and the numbers of `Evaluation.metadata`, such as `test_accuracy`. Local
    paths are shortened to their last name. The license is unknown and omitted.
    """
    name, dataset = quoted(folder.resolve().name), card.get("dataset")
    dataset = (
        dataset
        if dataset is None or dataset.startswith("hub:")
        else quoted(Path(dataset.partition(":")[2] or dataset).name)
    )
    text = ENVIRONMENT.get_template("README.md.j2").render(
        metadata=_metadata(library, name, config, card, dataset),
        title=f"{name_of(config)}{f' for {dataset}' if dataset and config.num_classes else ''}",
        library=LIBRARIES[library],
        config=config,
        card=card,
        dataset=dataset,
        facts=_facts(config, card, dataset),
    )
    return text.encode(errors="replace").decode()  # names of folders may not be valid text


def _metadata(library: str, name: str, config: ModelConfig, card: Mapping[str, Any], dataset: str | None) -> str:
    """The front matter, YAML."""
    from huggingface_hub import EvalResult, ModelCardData  # slow to import

    task = "image-classification" if config.num_classes else "image-feature-extraction"
    multi_label = "test_mean_average_precision" in card
    metric = "mean_average_precision" if multi_label else "accuracy"
    result = EvalResult(
        task_type="image-classification",
        dataset_type=(dataset or "").removeprefix("hub:"),
        dataset_name=(dataset or "").removeprefix("hub:"),
        metric_type=metric,
        metric_value=card.get(f"test_{metric}"),
    )
    return ModelCardData(
        library_name=LIBRARIES[library],
        pipeline_tag=task,
        tags=[task, "vitlab", config.kind],
        base_model=_hub_id(card.get("source")),
        datasets=_hub_id(dataset),
        model_name=name,
        eval_results=[result] if dataset and f"test_{metric}" in card else None,
    ).to_yaml()


def _hub_id(spec: str | None) -> str | None:
    """OWNER/NAME of what is on the hub; None for anything else."""
    match = re.match(r"(?:hub:([\w.-]+/[\w.-]+)|timm:([\w.-]+))", spec or "")
    return match and (match[1] or f"timm/{match[2]}")


def _facts(config: ModelConfig, card: Mapping[str, Any], dataset: str | None) -> dict[str, str | None]:
    """Rows of the table; empty ones are left out."""
    classes = [printable(str(name)) for name in card.get("classes") or ()]  # else one would quote them all
    names = ", ".join(classes[:CLASSES]) + (", ..." if len(classes) > CLASSES else "")
    sizes = differences = ""
    if isinstance(config, ViTConfig):
        differences = ", ".join(f"{name} {value}" for name, value in config.variant.differences.items())
        sizes = (
            f": {config.depth} blocks, width {config.width}, {config.heads} heads, patches of {config.stride} pixels"
        )
    return {
        "architecture": name_of(config) + sizes,
        "beside the paper's": differences,
        "parameters": f"{config.num_parameters:,}",
        "image size": "{} x {} pixels".format(*config.image_hw),
        "images": Preprocessing.read(card, "the card", config.image_size).describe(),
        "classes": names,
        "trained on": dataset,
        **(_multi_label_test(card) if "test_mean_average_precision" in card else _one(card, dataset)),
        "initial weights": card.get("start"),
        "weights": _average(card),
        "converted from": card.get("source") if _hub_id(card.get("source")) else None,
    }


def _one(card: Mapping[str, Any], dataset: str | None) -> dict[str, str | None]:
    """The test of a model of one label per image."""
    return {
        "test accuracy": _accuracy(card) if dataset and "test_accuracy" in card else None,
        "balanced accuracy": _percent(card, "test_balanced_accuracy"),
        "expected calibration error": _percent(card, "test_expected_calibration_error"),
    }


def _multi_label_test(card: Mapping[str, Any]) -> dict[str, str | None]:
    """The test of a model of several labels per image, and its thresholds."""
    named = zip(card.get("classes") or (), card.get("label_thresholds") or (), strict=False)
    thresholds = [f"{printable(str(name))} {threshold:.3f}" for name, threshold in named]
    more = ", ..." if len(thresholds) > CLASSES else ""
    images = f" of {card['test_images']:,} images" if card.get("test_images") else ""
    return {
        "mean average precision": f"{card['test_mean_average_precision']:.2%}{images}",
        "mean F1": _percent(card, "test_f1"),
        "images with exactly their labels": _percent(card, "test_exact_match"),
        "thresholds of the labels": ", ".join(thresholds[:CLASSES]) + more or "0.5",
    }


def _average(card: Mapping[str, Any]) -> str | None:
    """What `average_weights` averaged; None where it did not."""
    if (alpha := card.get("alpha", 1.0)) == 1:
        return None
    return f"{alpha:.0%} fine-tuned, {1 - alpha:.0%} those of the initial model with a least-squares head (WiSE-FT)"


def _percent(card: Mapping[str, Any], name: str) -> str | None:
    return None if card.get(name) is None else f"{card[name]:.2%}"


def _accuracy(card: Mapping[str, Any]) -> str:
    """The test accuracy, with its interval and number of images where they are known."""
    interval, images = card.get("test_accuracy_interval"), card.get("test_images")
    text = f"{card['test_accuracy']:.2%}"
    text += " (95% confidence interval {:.2%} to {:.2%})".format(*interval) if interval else ""
    return text + (f" of {images:,} images" if images else "")
