"""Looking inside one checkpoint: a page, every figure of the paper as a file, and the numbers behind them."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitlab.data.decode import ImageError, decode_image
from vitlab.data.transforms import EvalTransform, pair, to_pixels, to_range
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError, quoted
from vitlab.evaluate.load import choose_device
from vitlab.evaluate.predict import find_images
from vitlab.inspect.capture import capture
from vitlab.inspect.drawings import write_drawings
from vitlab.inspect.embeddings import filters_of, positions_of
from vitlab.inspect.page import write_page
from vitlab.inspect.report import Inspection, checkpoint_page, draw
from vitlab.inspect.summary import name_of
from vitlab.models.config import ImageSize, Interpolation, ViTConfig
from vitlab.models.vit import ViT
from vitlab.pipelines.finished_run import Run, run_folders
from vitlab.train.workdir import write_json
from vitlab.weights import load_checkpoint

MOST = 128
"""Images that a run's attention distances are over, as in App. D.7."""


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
    say: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Looks into a Vision Transformer or a hybrid while it sees images; writes a page, figures and numbers to `out`.

    `sources` are files, folders (searched through) or `-` for the standard input; all of their images count for the
    attention distances, the first `shown` stand on the page, each with its `top` answers. Images that cannot be read
    are left out and named. Without sources, a finished run shows test images of its own, and the page of any other
    checkpoint what needs none: its card, filters and position embeddings. A run's page also tells how the run went.
    `image_size` and `interpolation` are as in `load_checkpoint`; `say` hears how images are prepared.

    In `out`: index.html, which needs no network; figures/NAME.png, .svg and .npz; result.json, which is returned.
    A ResNet has no attention to look at, so of its run the page only tells how it went. Raises ValueError for any other
    ResNet, for a path that is not there, and where no image can be read.
    """
    out = Path(out)
    for name, value in (("shown", shown), ("top", top), ("batch_size", batch_size)):
        if value < 1:
            raise UserError(f"{name} is {value}; give at least 1.")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give the name of a folder.")
    if (out / "config.json").exists():  # its result.json is another
        raise UserError(f"{out} holds a run or a model; give another folder, say {out / 'look'}.")
    place = choose_device(device)
    loaded = load_checkpoint(checkpoint, image_size=image_size, interpolation=interpolation)
    model, preprocessing = loaded.model, loaded.preprocessing
    card = loaded.card | {"preprocessing": preprocessing.to_card()}
    runs = [Run.read(folder) for folder in run_folders(checkpoint)]
    phases = [run.phase(f"{run.folder.name}: {run.title}" if len(runs) > 1 else None) for run in runs]
    shown_as = {"checkpoint": str(checkpoint), "config": model.config, "card": card}
    names: list[str] = []
    if isinstance(model, ViT):
        found = list(find_images(sources)) if sources else _own_images(runs, shown)  # a missing one is told at once
        stream = _Stream(found, EvalTransform(model.config.image_hw, preprocessing), shown, batch_size)
        if found and say:
            say(f"images: {preprocessing.describe()}")
        seen = capture(model.to(place), stream.batches(), keep=shown) if found else None
        names = stream.names
        inspection = Inspection(
            **shown_as, filters=filters_of(model), positions=positions_of(model), capture=seen,
            names=[_short(name) for name in names], images=stream.images, unreadable=stream.unreadable,
        )  # fmt: skip
    elif runs and not sources:
        inspection = Inspection(**shown_as)
    else:
        raise UserError(
            f"{checkpoint} is a ResNet, which has no attention to look at; give a Vision Transformer or a hybrid, or "
            f"the folder of a ResNet's run and no images, to see how the run went."
        )
    drawn = draw(inspection)
    write_drawings(drawn, out / "figures")
    write_page(out / "index.html", checkpoint_page(inspection, drawn, top=top, phases=phases))
    result = _result(inspection, names, top) | {
        "figures": [f"figures/{drawing.name}" for drawing in drawn],
        "page": str((out / "index.html").resolve()),
    }
    write_json(out / "result.json", result)
    return result


def as_text(result: dict[str, Any]) -> str:
    """A result in a few lines, for people."""
    lines = [f"{result['model']}: {result['parameters']:,} parameters, {result['gmacs']:.3g} GMACs a image"]
    if distances := result.get("distances"):
        means = [f"{np.mean(far):.1f} pixels in layer {name}" for name, far in distances.items()]
        said = ", ".join(dict.fromkeys((means[0], means[-1])))
        images = "1 image" if result["images"] == 1 else f"{result['images']:,} images"
        lines.append(f"mean attention distance over {images}: {said}")
    for each in result["unreadable"]:
        lines.append(f"{quoted(each['path'])}: cannot be read: {each['reason']}")
    return "\n".join([*lines, result["page"]])


def _own_images(runs: Sequence[Run], shown: int) -> list[tuple[str, np.ndarray]]:
    """Up to MOST test images of the first run, by name and class, as its model sees them: one of each class, then the
    others in order. None where there is no run, or where its images are not to be had, as its part of the page tells.
    """
    for run in runs[:1]:
        first = run.one_of_each(shown)
        rows = np.concatenate([first, np.setdiff1d(np.arange(len(run.test.labels)), first)])[: max(shown, MOST)]
        with contextlib.suppress(ValueError):
            images = run.images(rows)
            truths = [run.test.classes[label] for label in run.test.labels]
            return [(f"{run.names[row]}, {truths[row]}", images[row]) for row in map(int, rows) if row in images]
    return []


@dataclass
class _Stream:
    """Images on their way into a model. What is known of them when they are through is kept here."""

    found: Sequence[tuple[str, Path | bytes | np.ndarray]]
    """Name, and where it is, or itself as the model sees it."""
    transform: EvalTransform
    shown: int
    batch_size: int
    names: list[str] = field(default_factory=list)
    """Of the first `shown` images, and they themselves, as the model sees them."""
    images: list[np.ndarray] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)

    def batches(self) -> Iterator[Float[Tensor, "B 3 H W"]]:
        """Raises ValueError where none of the images can be read."""
        pending: list[Tensor] = []
        with ProgressDisplay("inspect", len(self.found)) as progress:
            for number, (path, data) in enumerate(self.found, start=1):
                try:
                    image = self._image(path, data)
                except ImageError as error:
                    self.unreadable.append((path, error.reason))
                    continue
                if len(self.names) < self.shown:
                    self.names.append(path)
                    self.images.append(to_pixels(image)[0])
                pending.append(image)
                if len(pending) == self.batch_size:
                    yield torch.cat(pending)
                    pending = []
                    progress.update(number)
            if pending:
                yield torch.cat(pending)
        if not self.names:
            path, reason = self.unreadable[0]
            raise UserError(f"none of the {len(self.found)} images can be read; the first, {quoted(path)}: {reason}.")

    def _image(self, path: str, data: Path | bytes | np.ndarray) -> Float[Tensor, "1 3 H W"]:
        if not isinstance(data, np.ndarray):
            return self.transform.apply([decode_image(data, path=path)])
        if data.shape[:2] != pair(self.transform.image_size):
            return self.transform.apply([data])  # the model is looked at in another size than its own
        return to_range(torch.from_numpy(data).permute(2, 0, 1)[None].float())


def _short(path: str) -> str:
    """A image's file and folder."""
    return "/".join(Path(path).parts[-2:])


def _result(inspection: Inspection, paths: Sequence[str], top: int) -> dict[str, Any]:
    config, seen = inspection.config, inspection.capture
    found: dict[str, Any] = {
        "checkpoint": inspection.checkpoint,
        "model": name_of(config),
        "image_size": list(config.image_hw),
        "parameters": config.num_parameters,
        "gmacs": config.forward_macs / 1e9,
        "images": seen.count if seen else 0,
        "unreadable": [{"path": path, "reason": reason} for path, reason in inspection.unreadable],
    }
    if isinstance(config, ViTConfig):
        found["grid"] = list(config.grid)
    if seen:
        found["distances"] = dict(zip(seen.layers, seen.distances.tolist(), strict=True))
        found["shown"] = [
            {
                "path": path,
                "answers": [{"class": name, "probability": share} for name, share in inspection.predictions(i, top)],
            }
            for i, path in enumerate(paths)
        ]
    return found
