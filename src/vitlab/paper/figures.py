"""Fig. 1 to 14: drawn from a model, from the numbers that the paper prints, or from what was recorded here.

A function takes a `Request` and returns figures by file name. Those that look into a model take the checkpoint of the
request; without one they train a small ViT on scanned digits for about half a minute, for Fig. 11 also a hybrid, and
for Fig. 10 three ViTs instead, for several minutes.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from vitlab.data.transforms import EvalTransform, to_pixels
from vitlab.errors import UserError
from vitlab.evaluation.sources import find_images, read_image
from vitlab.inspection import plots
from vitlab.inspection.capture import Capture, capture
from vitlab.inspection.embeddings import filters_of, positions_of
from vitlab.inspection.figures import Figure, distances, filters, pairs, positions
from vitlab.inspection.finished_run import Run
from vitlab.inspection.overview import draw_overview
from vitlab.models.registry import create_model
from vitlab.models.resnet_config import ResNetBody
from vitlab.models.vit import ViT
from vitlab.panels import Panel, Series
from vitlab.paper.recorded import STUDIES, read_panels
from vitlab.preprocessing import Preprocessing
from vitlab.recipes import tiny
from vitlab.runs.pretrain import pretrain
from vitlab.runs.vtab import MEANS
from vitlab.studies import vtab_table
from vitlab.studies.scaling import paper_panel
from vitlab.studies.spec import changed
from vitlab.studies.tables import TABLES
from vitlab.train.precision import choose_device
from vitlab.weights import Checkpoint, load_checkpoint, load_model

SHOWN, MORE, AVERAGED = 3, 16, 128
"""Images of Fig. 6, of Fig. 14, and for mean attention distances, at most."""
DIGITS_EPOCHS = 200 / 3
"""Epochs of the small ViT: about 20 seconds of two cores."""
TRAININGS = {
    "1/2 steps, 1/2 rate, 1/10 decay": (0.5, 0.5, 0.1),
    "1/2 steps": (0.5, 1.0, 1.0),
    "all steps": (1.0, 1.0, 1.0),
}
"""Fig. 10: factors of the steps, the learning rate and the weight decay, about as in the paper's three trainings."""
NARROW_POSITIONS = tiny.vit(16, 4, 96, 5, position_std=0.02)
"""The small ViT with Google's initial position embeddings, for Fig. 10: those of `tiny.digits` start so wide that they
hardly change."""
POSITION_EPOCHS = 200
"""Until the rows of patches show: about two minutes of two cores for all steps."""
HYBRID = tiny.vit(16, 1, 96, 5, stem=ResNetBody((2,), width=32, version="v2", min_group_size=16))
"""As many tokens and blocks as the small ViT, behind convolutions."""
PRETRAINING_SETS = {"ImageNet": "ImageNet", "I21k": "ImageNet-21k", "JFT": "JFT-300M"}
"""Name in Table 5 -> name."""
UNTRAINED = "ViT-Ti/16"
"""The model with random weights."""
Figures = dict[str, Figure]


@dataclass
class Request:
    """What `vitlab paper` was asked to show."""

    checkpoint: str | None = None
    images: Sequence[str] = ()
    out: Path = Path("paper")
    device: str = "auto"
    shown: int = SHOWN
    untrained: bool = False
    """Without a checkpoint, take a model with random weights."""
    log: Callable[[str], None] = field(default=lambda _: None)

    @functools.cached_property
    def vit(self) -> ViT:
        """The model of the checkpoint; without one a small ViT, trained now or by an earlier call."""
        model = self._loaded.model
        if not isinstance(model, ViT):
            raise UserError(f"{self.checkpoint} is a ResNet, which has no attention; give a Vision Transformer.")
        return model.to(choose_device(self.device))

    @functools.cached_property
    def _loaded(self) -> Checkpoint:
        if self.checkpoint is None and self.untrained:
            return Checkpoint(create_model(UNTRAINED), {}, Preprocessing())
        return load_checkpoint(self.checkpoint or self.train_digits())

    @property
    def learns_digits(self) -> bool:
        """Whether the models of the figures are trained now, on scanned digits."""
        return self.checkpoint is None and not self.untrained

    def train_digits(self, name: str = "digits", **changes: Any) -> Path:
        """The run of a small ViT on scanned digits, trained now or by an earlier call; `changes` of its recipe."""
        folder = self.out / name
        if not (folder / "result.json").is_file():
            self.log(f"no CHECKPOINT: a small ViT learns scanned digits in {folder}")
        pretrain(changed(tiny.digits(), **({"epochs": DIGITS_EPOCHS} | changes)), folder)
        return folder

    @functools.cached_property
    def pixels(self) -> list[UInt8[np.ndarray, "H W 3"]]:
        """The images as the model sees them: the request's, digits, or two photos that scikit-learn has."""
        if self.learns_digits and not self.images:
            return _digits(self.train_digits(), self.shown)
        transform = EvalTransform(self.vit.config.image_hw, self._loaded.preprocessing)
        sources = find_images(self.images) if self.images else find_images(sample_photos())
        inputs = [transform.apply([read_image(source, name)]) for name, source in list(sources)[: self.shown]]
        return [to_pixels(image)[0] for image in inputs]

    @functools.cached_property
    def batch(self) -> Float[Tensor, "B 3 H W"]:
        """The images in [-1, 1]."""
        return _to_batch(self.pixels)

    @functools.cached_property
    def captured(self) -> Capture:
        """Attention and tokens of the images."""
        return capture(self.vit, [self.batch], keep=len(self.pixels))


def sample_photos() -> list[UInt8[np.ndarray, "H W 3"]]:
    """A temple and a flower, CC BY 2.0: photos by danielbuechele and vultilion that come with scikit-learn."""
    from sklearn.datasets import load_sample_images

    return load_sample_images().images


def _digits(folder: Path, count: int) -> list[UInt8[np.ndarray, "H W 3"]]:
    """Test images of a run on digits, of all classes."""
    run = Run.read(folder)
    return list(run.preprocessed(run.one_per_class(count)).values())


def _to_batch(images: Sequence[UInt8[np.ndarray, "H W 3"]]) -> Float[Tensor, "B 3 H W"]:
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1


def fig1(request: Request) -> Figures:
    """The model at a glance, with an image cut into patches."""
    name, source = next(find_images(request.images or sample_photos()))
    return {"fig1": draw_overview(read_image(source, name))}


def fig2(request: Request) -> Figures:
    """VTAB by groups: Table 9's means."""
    series = vtab_table.printed_series(MEANS)
    return {"fig2": plots.panels([Panel("VTAB-1k (Table 9)", "", "mean accuracy", series, ticks=list(MEANS))])}


def fig3(request: Request) -> Figures:
    """ImageNet accuracy over the pre-training set: Table 5's column, and the study with small models here."""
    table = TABLES["table5"]
    column = table.columns.index("ImageNet")
    lines: dict[str, list[tuple[int, float]]] = {}
    for name, row in table.rows.items():
        model, data = name.split(", ")
        lines.setdefault(model, []).append((list(PRETRAINING_SETS).index(data), float(row[column]) / 100))
    series = [Series(model, *zip(*points, strict=True)) for model, points in lines.items()]
    ticks = list(PRETRAINING_SETS.values())
    printed = Panel("The paper (Table 5)", "pre-training set", "ImageNet accuracy", series, ticks=ticks)
    return {"fig3": plots.panels([printed, *read_panels("data-size")])}


def fig5(request: Request) -> Figures:
    """Accuracy over compute: Table 6, and the study with small models here."""
    return {"fig5": plots.panels([paper_panel(), paper_panel("ImageNet"), read_panels("scaling")[0]])}


def fig6(request: Request) -> Figures:
    """Images under the attention of the output token."""
    return {"fig6": pairs(request.captured, request.pixels)[0].figure}


def fig7(request: Request) -> Figures:
    """Filters of the patch embedding, similarity of position embeddings, attention distance by layer."""
    figures = {"fig7-left": filters(filters_of(request.vit)).figure}
    if (similarity := positions_of(request.vit)) is not None:
        figures["fig7-center"] = positions(similarity).figure
    return figures | {"fig7-right": _distances(request)}


def fig10(request: Request) -> Figures:
    """Similarity of position embeddings: of a checkpoint, or of three trainings that differ, as in the paper."""
    if not request.learns_digits:
        if (similarity := positions_of(request.vit)) is None:
            raise UserError(f"{request.checkpoint} has no absolute position embeddings; give a checkpoint that has.")
        return {"fig10": positions(similarity).figure}
    optim, figures = tiny.digits().optim, {}
    for side, (title, (steps, rate, decay)) in zip(("left", "center", "right"), TRAININGS.items(), strict=True):
        changes = {"lr": rate * optim.lr, "weight_decay": decay * optim.weight_decay}
        run = request.train_digits(
            f"digits-{side}", model=NARROW_POSITIONS, epochs=steps * POSITION_EPOCHS, optim=changes
        )
        similarity = positions_of(load_model(run))
        assert similarity is not None
        figures[f"fig10-{side}"] = positions(similarity, title).figure
    return figures


def fig11(request: Request) -> Figures:
    """Attention distance by layer: of a checkpoint, or of a ViT (left) and a hybrid (right)."""
    if not request.learns_digits:
        return {"fig11": _distances(request)}
    hybrid = request.train_digits("digits-hybrid", model=HYBRID)
    captured = capture(load_model(hybrid), [_to_batch(_digits(hybrid, AVERAGED))])
    right = distances(captured.distances, captured.layers, title="Attention distance, hybrid").figure
    return {"fig11-left": _distances(request), "fig11-right": right}


def _distances(request: Request) -> Figure:
    captured = dataclasses.replace(request, shown=AVERAGED).captured
    return distances(captured.distances, captured.layers).figure


def fig13(request: Request) -> Figures:
    """Axial attention: the study with small models here, and the speed recorded on a CPU."""
    return {"fig13": plots.panels([read_panels("axial")[0], *read_panels("fig13")])}


def fig14(request: Request) -> Figures:
    """Fig. 6 for more images."""
    more = dataclasses.replace(request, shown=MORE)
    return {"fig14": pairs(more.captured, more.pixels)[0].figure}


def _recorded(name: str, request: Request) -> Figures:
    """What was recorded here, with small models or on one core of a CPU; the paper prints no numbers."""
    return {name: plots.panels(read_panels(STUDIES.get(name, name)))}


PAPER_FIGURES: dict[str, Callable[[Request], Figures]] = {
    figure.__name__: figure for figure in (fig1, fig2, fig3, fig5, fig6, fig7, fig10, fig11, fig13, fig14)
}
PAPER_FIGURES |= {name: functools.partial(_recorded, name) for name in ("fig4", "fig8", "fig9", "fig12")}
