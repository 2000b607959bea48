"""Inspecting a checkpoint or a run: a page, every figure of the paper as a file, the arrays behind them.

`vitlab inspect` calls `inspect_checkpoint`. A run that ends calls `report`: its page, RUN/report, and its model card.
"""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from vitlab.data.decode import ImageError
from vitlab.data.transforms import EvalTransform, to_pixels
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError, quoted
from vitlab.evaluation.multi_label import predicted_label_names
from vitlab.evaluation.predict import top_classes
from vitlab.evaluation.sources import ImageSource, find_images, read_image
from vitlab.inspection.capture import capture
from vitlab.inspection.figures import write_drawings
from vitlab.inspection.finished_run import Run, run_folders
from vitlab.inspection.report import Inspection, checkpoint_page, make_embedding_figures, make_figures
from vitlab.inspection.run_section import Report, data_section, run_section
from vitlab.inspection.summary import summarize
from vitlab.io import resolved, write_bytes
from vitlab.models.config import ImageSize, ModelConfig, ViTConfig, check_rgb
from vitlab.models.registry import name_of
from vitlab.models.variant import Interpolation
from vitlab.models.vit import ViT
from vitlab.settings import from_dict
from vitlab.train.precision import choose_device, prepare_for_inference
from vitlab.train.workdir import write_json
from vitlab.weights import class_names, load_checkpoint, load_metadata
from vitlab.weights.folder import README
from vitlab.weights.model_card import model_card

DISTANCE_IMAGES = {"whole": 128, "short": 32}
"""Test images of a run over which attention distances are averaged: as in App. D.7, or in a short page."""
NOTED_ERRORS = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, MemoryError),
    *(OSError, RuntimeError, TypeError, ValueError),
)
"""Exceptions that `report` notes and does not raise."""
NamedImage = tuple[str, ImageSource | UserError]
"""Name and source of an image, from `find_images`."""


def inspect_checkpoint(
    checkpoint: str | Path,
    sources: Sequence[str],
    out: str | Path,
    *,
    shown: int = 16,
    top: int = 5,
    batch_size: int = 16,
    image_size: ImageSize | None = None,
    interpolation: Interpolation | None = None,
    device: str = "auto",
    short: bool = False,
    log: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Writes a page, figures and arrays about a checkpoint to `out`, and returns the content of its result.json.

    sources: image files, and folders, which are searched recursively. Unreadable images are skipped and named. Without
    sources, a finished run shows its test images; any other checkpoint only sizes, filters and position embeddings.
    shown: how many of the images are on the page, each with its `top` predictions. All images count for the attention
    distances.
    short: leaves out near-duplicates and the files of the figures, and uses fewer images of a run.
    log: receives how images are preprocessed.

    The page of a run begins with its training, its test and its images; a ResNet's page has only these. `out` receives
    index.html, result.json and figures/NAME.png, .svg and .npz. Raises UserError for invalid numbers, for a ResNet with
    images or without a run, for a missing path, and if no image can be read.
    """
    for name, value in {"shown": shown, "top": top, "batch_size": batch_size}.items():
        if value < 1:
            raise UserError(f"{name} is {value}; give at least 1.")
    _check_out(out := Path(out))
    torch_device = choose_device(device)
    loaded = load_checkpoint(checkpoint, image_size=image_size, interpolation=interpolation)
    model, preprocessing = loaded.model, loaded.preprocessing
    check_rgb(model.config)
    runs = [Run.read(folder) for folder in run_folders(checkpoint)]
    inspection = Inspection(str(checkpoint), model.config, loaded.metadata)
    if isinstance(model, ViT):
        inspection = replace(inspection, embeddings=make_embedding_figures(model))
        count = max(shown, DISTANCE_IMAGES["short" if short else "whole"])
        images = list(find_images(sources)) if sources else _test_images(runs, count, shown)
        if images:
            log(f"images: {preprocessing.describe()}")
            reader = _Reader(images, EvalTransform(model.config.image_hw, preprocessing), shown)
            prepare_for_inference(model, torch_device, torch.float32)
            inspection = _capture(inspection, model, reader, batch_size, top)
    elif sources or not runs:
        raise UserError(
            f"{checkpoint} is a ResNet, which has no attention; give a Vision Transformer or a hybrid, or the folder "
            "of a ResNet's run without images, to see its training."
        )
    return _write_page(inspection, runs, out, torch_device, short)


def _write_page(
    inspection: Inspection, runs: Sequence[Run], out: Path, device: torch.device, short: bool
) -> dict[str, Any]:
    """Writes the page, the figures unless it is `short`, and result.json, whose content is returned."""
    drawings = make_figures(inspection)
    names = [f"{run.folder.name}: {run.title}" if len(runs) > 1 else None for run in runs]
    sections = [run_section(run, name, device=device) for run, name in zip(runs, names, strict=True)]
    if not short:
        write_drawings(drawings, out / "figures")
    images_section = data_section(runs[0], search=not short) if runs else None
    summary = summarize(runs[0], inspection.checkpoint) if runs else None
    text = checkpoint_page(inspection, drawings, sections, images_section, summary)
    write_bytes(page := out / "index.html", text.encode())
    figures = [] if short else [f"figures/{drawing.name}" for drawing in drawings]
    result = _result(inspection) | {"figures": figures, "page": str(page.resolve())}
    write_json(out / "result.json", result)
    return result


def _check_out(out: Path) -> None:
    """Raises UserError for a file, and for a folder where something would be overwritten."""
    if resolved(out).is_file():
        raise UserError(f"{out} is a file; give the name of a folder.")
    if (out / "config.json").exists():  # its result.json would be overwritten
        raise UserError(f"{out} holds a run or a model; give another folder, for example {out / 'look'}.")


def _test_images(runs: Sequence[Run], count: int, shown: int) -> list[NamedImage]:
    """Up to `count` test images of the first run, named with their class: one of each class first, up to `shown`.

    Empty without a run, or where its data set is missing, which its section of the page says.
    """
    if not runs:
        return []
    run = runs[0]
    first = run.one_per_class(shown)
    rest = np.setdiff1d(np.arange(len(run.test.labels)), first)
    try:
        images = run.images(np.concatenate([first, rest])[:count])
    except ValueError:
        return []
    return [(f"{run.names[row]}, {run.label(row)}", image) for row, image in images.items()]


class _Reader:
    """Reads images in batches; records the first `shown`, as the model sees them, and those that cannot be read."""

    def __init__(self, sources: Sequence[NamedImage], transform: EvalTransform, shown: int) -> None:
        self.sources = sources
        self.transform = transform
        self.shown = shown
        self.names: list[str] = []  # of the shown images
        self.images: list[UInt8[np.ndarray, "H W 3"]] = []  # the shown images, as the model sees them
        self.unreadable: list[tuple[str, str]] = []  # name, reason

    def batches(self, batch_size: int) -> Iterator[Float[Tensor, "B 3 H W"]]:
        """All images that can be read. Raises UserError where none can."""
        batch: list[Tensor] = []
        with ProgressDisplay("inspect", len(self.sources)) as progress:
            for number, (name, source) in enumerate(self.sources, start=1):
                try:
                    batch.append(self._read(name, source))
                except ImageError as error:
                    self.unreadable.append((name, error.reason))
                if len(batch) == batch_size:
                    yield torch.cat(batch)
                    batch.clear()
                progress.update(number)
        if batch:
            yield torch.cat(batch)
        if not self.names:
            name, reason = self.unreadable[0]
            raise UserError(f"none of the {len(self.sources)} images can be read; the first, {quoted(name)}: {reason}.")

    def _read(self, name: str, source: ImageSource | UserError) -> Float[Tensor, "1 3 H W"]:
        levels = self.transform.preprocessing.range
        pixels = source if isinstance(source, np.ndarray) else read_image(source, name, levels)
        image = self.transform.apply([pixels])
        if len(self.names) < self.shown:
            self.names.append(name)
            self.images.append(to_pixels(image)[0])
        return image


def _capture(inspection: Inspection, model: ViT, reader: _Reader, batch_size: int, top: int) -> Inspection:
    """The inspection with the capture of all images, the first of them with predictions, and the unreadable ones."""
    captured = capture(model, reader.batches(batch_size), keep=reader.shown)
    classes = class_names(inspection.metadata, model.config.num_classes)
    return replace(
        inspection,
        capture=captured,
        names=reader.names,
        images=reader.images,
        predictions=top_classes(torch.from_numpy(captured.logits), inspection.metadata, top),
        labels=predicted_label_names(captured.logits, classes, inspection.metadata),
        unreadable=reader.unreadable,
    )


def _result(inspection: Inspection) -> dict[str, Any]:
    """The content of result.json, but for the names of files."""
    config, captured = inspection.config, inspection.capture
    result: dict[str, Any] = {
        "checkpoint": inspection.checkpoint,
        "model": name_of(config),
        "image_size": list(config.image_hw),
        "parameters": config.num_parameters,
        "gmacs": config.forward_macs / 1e9,
        "images": captured.count if captured else 0,
        "unreadable": [{"path": name, "reason": reason} for name, reason in inspection.unreadable],
    }
    if isinstance(config, ViTConfig):
        result["grid"] = list(config.grid)
    if captured:
        result["distances"] = dict(zip(captured.layers, captured.distances.tolist(), strict=True))
        result["shown"] = [
            {"path": name, "predictions": [{"class": c, "probability": p} for c, p in predictions]}
            for name, predictions in zip(inspection.names, inspection.predictions, strict=True)
        ]
        for shown, labels in zip(result["shown"], inspection.labels or (), strict=False):
            shown["labels"] = list(labels)
    return result


def default_out(checkpoint: str | Path) -> Path:
    """The folder `inspect` of a run, or of the current folder for other checkpoints."""
    return Path(checkpoint if run_folders(checkpoint) else "") / "inspect"


def as_text(result: dict[str, Any]) -> str:
    """A result in a few lines."""
    lines = [f"{result['model']}: {result['parameters']:,} parameters, {result['gmacs']:.3g} GMACs an image"]
    if distances := result.get("distances"):
        means = [f"{np.mean(heads):.1f} pixels in layer {name}" for name, heads in distances.items()]
        images = "1 image" if result["images"] == 1 else f"{result['images']:,} images"
        lines.append(f"mean attention distance over {images}: {', '.join(dict.fromkeys((means[0], means[-1])))}")
    for image in result["unreadable"]:
        lines.append(f"{quoted(image['path'])}: cannot be read: {image['reason']}")
    return "\n".join([*lines, result["page"]])


def report(
    run_folder: str | Path, out: str | Path | None = None, *, device: str = "auto", kind: Report = "whole"
) -> dict[str, Any]:
    """The page of a finished run in `out` (default: RUN/report), and its model card, RUN/model/README.md.

    run_folder: of one run, or of several with run-0, run-1, ..., whose card has the test of run-0. A card that was
    edited stays. With the `kind` "none" only the card is written. Returns the result of `inspect_checkpoint` and the
    path of the `card`. Raises nothing, because the run has succeeded: an error becomes the `note` of the result.
    """
    folder = Path(run_folder)
    out = folder / "report" if out is None else out
    result = {}
    try:
        if kind != "none":
            result |= inspect_checkpoint(folder, [], out, device=device, short=kind == "short")
        result["card"] = str(_write_card(folder).resolve())
    except NOTED_ERRORS as error:
        result["note"] = (
            f"the run is complete, its report in {folder} is not ({type(error).__name__}: {error}); "
            f"`{shlex.join(['vitlab', 'inspect', str(folder), '--out', str(out)])}` tries again"
        )
    return result


def _write_card(folder: Path) -> Path:
    """Writes the model card unless somebody has edited it; returns its path."""
    path = folder / "model" / README
    run = Run.read(run_folders(folder)[0])
    metadata = load_metadata(folder) | run.test.metadata()
    text = model_card("vitlab", folder, from_dict(ModelConfig, run.settings["model"]), metadata).encode()
    if not path.exists() or _is_corrupt(path.read_bytes(), text):
        write_bytes(path, text)
    return path


def _is_corrupt(card: bytes, text: bytes) -> bool:
    """Whether a card is only the beginning of `text`, or is no text; any other difference is somebody's edit."""
    try:
        return "\0" in card.decode() or (text.startswith(card) and card != text)
    except UnicodeDecodeError:
        return True
