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
from vitlab.weights.detect import HUB_NAME

LIBRARIES = {"timm": "timm", "huggingface": "transformers", "vitlab": "vitlab"}
"""Format -> name on the hub of the library that reads it."""
CLASSES = 20
"""Most class names on a card."""
ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
    autoescape=False,  # Markdown; `cell` escapes what comes from outside
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
ENVIRONMENT.filters["cell"] = lambda value: re.sub(r"([\\|`*_<>\[\]$])", r"\\\1", quoted(str(value)))


def model_card(
    library: Literal["timm", "huggingface", "vitlab"], folder: Path, config: ModelConfig, metadata: Mapping[str, Any]
) -> str:
    """The text for a model in `folder`, with the front matter that the Hub reads.

    Of the model's `metadata`: `classes`, `preprocessing`, `source`, and where it comes from a run of vitlab `dataset`,
    `start`, `alpha` (of `average_weights`) and the numbers of `Evaluation.metadata`, such as `test_accuracy`. Local
    paths are shortened to their last name. The license is unknown and omitted.
    """
    name, dataset = quoted(folder.resolve().name), metadata.get("dataset")
    if dataset is not None and not dataset.startswith("hub:"):
        dataset = quoted(Path(dataset.partition(":")[2] or dataset).name)
    for_dataset = f" for {dataset}" if dataset and config.num_classes else ""
    text = ENVIRONMENT.get_template("README.md.j2").render(
        front_matter=_front_matter(library, name, config, metadata, dataset),
        title=name_of(config) + for_dataset,
        library=LIBRARIES[library],
        config=config,
        metadata=metadata,
        dataset=dataset,
        facts=_facts(config, metadata, dataset),
    )
    return text.encode(errors="replace").decode()  # names of folders may not be valid text


def _front_matter(
    library: str, name: str, config: ModelConfig, metadata: Mapping[str, Any], dataset: str | None
) -> str:
    """YAML for the Hub: what the model is for, and the test of it."""
    from huggingface_hub import EvalResult, ModelCardData  # slow to import

    task = "image-classification" if config.num_classes else "image-feature-extraction"
    metric = "mean_average_precision" if "test_mean_average_precision" in metadata else "accuracy"
    result = EvalResult(
        task_type="image-classification",
        dataset_type=(dataset or "").removeprefix("hub:"),
        dataset_name=(dataset or "").removeprefix("hub:"),
        metric_type=metric,
        metric_value=metadata.get(f"test_{metric}"),
    )
    return ModelCardData(
        library_name=LIBRARIES[library],
        pipeline_tag=task,
        tags=[task, "vitlab", config.kind],
        base_model=_hub_id(metadata.get("source")),
        datasets=_hub_id(dataset),
        model_name=name,
        eval_results=[result] if dataset and f"test_{metric}" in metadata else None,
    ).to_yaml()


def _hub_id(spec: str | None) -> str | None:
    """OWNER/NAME of what is on the hub; None for anything else."""
    match = HUB_NAME.match(spec or "")
    return match and (match[1] or f"timm/{match[2]}")


def _facts(config: ModelConfig, metadata: Mapping[str, Any], dataset: str | None) -> dict[str, str | None]:
    """Rows of the table; empty ones are left out."""
    classes = [printable(str(name)) for name in metadata.get("classes") or ()]  # else one would quote them all
    sizes = differences = ""
    if isinstance(config, ViTConfig):
        differences = ", ".join(f"{name} {value}" for name, value in config.variant.differences.items())
        blocks = f"{config.depth} blocks, width {config.width}, {config.heads} heads"
        sizes = f": {blocks}, patches of {config.stride} pixels"
    test = _multi_label_test if "test_mean_average_precision" in metadata else _single_label_test
    alpha = metadata.get("alpha", 1.0)
    average = f"{alpha:.0%} fine-tuned, {1 - alpha:.0%} those of the initial model with a least-squares head (WiSE-FT)"
    return {
        "architecture": name_of(config) + sizes,
        "beside the paper's": differences,
        "parameters": f"{config.num_parameters:,}",
        "image size": "{} x {} pixels".format(*config.image_hw),
        "images": Preprocessing.read(metadata, "the card", config.image_size).describe(),
        "classes": _first(classes),
        "trained on": dataset,
        **test(metadata, dataset),
        "initial weights": metadata.get("start"),
        "weights": None if alpha == 1 else average,
        "converted from": metadata.get("source") if _hub_id(metadata.get("source")) else None,
    }


def _first(names: list[str]) -> str:
    return ", ".join(names[:CLASSES]) + (", ..." if len(names) > CLASSES else "")


def _single_label_test(metadata: Mapping[str, Any], dataset: str | None) -> dict[str, str | None]:
    """The test of a model of one label per image."""
    accuracy = None
    if dataset and "test_accuracy" in metadata:
        interval = metadata.get("test_accuracy_interval")
        accuracy = f"{metadata['test_accuracy']:.2%}"
        accuracy += " (95% confidence interval {:.2%} to {:.2%})".format(*interval) if interval else ""
        accuracy += _of_images(metadata)
    return {
        "test accuracy": accuracy,
        "balanced accuracy": _percent(metadata, "test_balanced_accuracy"),
        "expected calibration error": _percent(metadata, "test_expected_calibration_error"),
    }


def _multi_label_test(metadata: Mapping[str, Any], _: str | None) -> dict[str, str | None]:
    """The test of a model of several labels per image, and its thresholds."""
    named = zip(metadata.get("classes") or (), metadata.get("label_thresholds") or (), strict=False)
    thresholds = [f"{printable(str(name))} {threshold:.3f}" for name, threshold in named]
    return {
        "mean average precision": f"{metadata['test_mean_average_precision']:.2%}{_of_images(metadata)}",
        "mean F1": _percent(metadata, "test_f1"),
        "images with exactly their labels": _percent(metadata, "test_exact_match"),
        "thresholds of the labels": _first(thresholds) or "0.5",
    }


def _percent(metadata: Mapping[str, Any], name: str) -> str | None:
    return None if metadata.get(name) is None else f"{metadata[name]:.2%}"


def _of_images(metadata: Mapping[str, Any]) -> str:
    return f" of {metadata['test_images']:,} images" if metadata.get("test_images") else ""
