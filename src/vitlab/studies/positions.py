"""Table 8, App. D.4: what position embeddings are worth, of which kind, and where they enter.

Fig. 10 is not measured here: `vitlab inspect` draws the similarity of position embeddings for any model, those of the
points' folders too.
"""

from collections.abc import Sequence

import numpy as np

from vitlab.config import TrainConfig
from vitlab.inspect.panels import Panel
from vitlab.models.config import ViTConfig
from vitlab.studies.small import FEWSHOT, gpu, gpu_vit, jft, series, tiny, tiny_vit, told
from vitlab.studies.statistics import difference, estimate, percent
from vitlab.studies.study import SEEDS, Claim, Done, Point, Report, Scale, Study

TABLE8 = {
    ("none", "stem"): 0.61382,
    ("1d", "stem"): 0.64206,
    ("1d", "every"): 0.63964,
    ("1d", "shared"): 0.64292,
    ("2d", "stem"): 0.64001,
    ("2d", "every"): 0.64046,
    ("2d", "shared"): 0.64022,
    ("relative", "every"): 0.64032,
}
"""(kind, where it enters) -> 5-shot accuracy on ImageNet, ViT-B/16 after 7 epochs of JFT-300M.

The table has one figure for relative positions, in its first column: they act inside the attention of every block, by
embeddings of its own, as an attention layer's other weights are.
"""

KINDS = {"none": "none", "1d": "1-D", "2d": "2-D", "relative": "relative"}
PLACES = {"stem": "stem", "every": "every block", "shared": "every block, shared"}
FAMILY = {"none": "none", "1d": "absolute", "2d": "absolute", "relative": "relative"}


def points(scale: Scale) -> list[Point]:
    """The cells of Table 8, at three seeds; at the paper's scale at one."""
    seeds = SEEDS if scale != "paper" else SEEDS[:1]
    return [_point(scale, kind, at, seed) for seed in seeds for kind, at in TABLE8]


def _point(scale: Scale, kind: str, at: str, seed: int) -> Point:
    changes = {"position": kind, "position_at": at}
    return Point(f"{kind}-{at}.seed-{seed}", _config(scale, changes, seed), _labels(kind, at))


def _config(scale: Scale, changes: dict[str, str], seed: int) -> TrainConfig:
    match scale:
        case "tiny":  # 24 runs of 1.1 TFLOP: 27 TFLOP, 12 minutes of one core at 36 GFLOP/s
            return tiny(tiny_vit(patch_size=4, **changes), seed, steps=800)
        case "gpu":  # 24 runs of 1.1 PFLOP: 27 PFLOP, 5 minutes at 100 TFLOP/s
            return gpu(gpu_vit(**changes), seed, steps=3000)
        case "paper":
            return jft("ViT-B/16", **changes)


def report(done: Sequence[Done]) -> Report:
    """Table 8, ours and the paper's, and its columns as a figure."""
    rows = []
    for kind, at in TABLE8:
        shots, accuracy = estimate(done, FEWSHOT, kind=kind, at=at), estimate(done, "accuracy", kind=kind, at=at)
        place = "" if kind == "none" else PLACES[at]
        rows.append((KINDS[kind], place, percent(shots), f"{100 * TABLE8[kind, at]:.1f}", percent(accuracy)))
    model = done[0].point.config.model
    assert isinstance(model, ViTConfig)
    return Report(
        lead=f"A ViT of {model.depth} blocks, D = {model.width}, {model.num_patches} patches of {model.patch_size} "
        f"pixels ({model.pool}), with the position embeddings of Table 8. All of them start at sd "
        f"{model.position_std:g}, which was chosen for 1-D ones. {told(done)}",
        columns=("position embedding", "where", "5-shot, %", "paper: 5-shot on ImageNet, %", "accuracy, %"),
        rows=rows,
        claims=_claims(done),
        panels=[_panel(done, FEWSHOT, "5-shot accuracy"), _panel(done, "accuracy", "test accuracy")],
    )


def _claims(done: Sequence[Done]) -> list[Claim]:
    def better(figure: str, text: str, paper: str) -> Claim:
        return Claim(text, paper, difference(done, figure, {"any": "yes"}, {"any": "no"}))

    def equal(more: dict[str, str], less: dict[str, str], text: str) -> Claim:
        paper = f"{_printed(**more):.5f} and {_printed(**less):.5f} (Table 8)"
        return Claim(text, paper, difference(done, FEWSHOT, more, less), expected="equal")

    stem = {"family": "absolute", "at": "stem"}
    return [
        better(FEWSHOT, "Without position embeddings 5-shot accuracy is lower than with any (mean of all kinds).",
               f"{_printed(any='no'):.5f} against {_printed(any='yes'):.5f} (Table 8)"),
        better("accuracy", "Without position embeddings the accuracy of pre-training's own task is lower, too.",
               "not told (Table 8 has few-shot accuracy alone)"),
        equal({"kind": "1d"}, {"kind": "2d"}, "1-D and 2-D embeddings are equal (mean over places)."),
        equal({"kind": "1d", "at": "stem"}, {"kind": "relative"}, "1-D at the stem and relative ones are equal."),
        equal(stem, stem | {"at": "every"}, "At the stem and in every block are equal (mean of 1-D and 2-D)."),
        equal(stem, stem | {"at": "shared"}, "At the stem and shared by all blocks are equal (mean of 1-D and 2-D)."),
    ]  # fmt: skip


def _printed(**labels: str) -> float:
    """Mean of the cells of Table 8 that have these labels."""
    return float(np.mean([value for cell, value in TABLE8.items() if labels.items() <= _labels(*cell).items()]))


def _labels(kind: str, at: str) -> dict[str, str | float]:
    return {"kind": kind, "at": at, "family": FAMILY[kind], "any": "no" if kind == "none" else "yes"}


def _panel(done: Sequence[Done], figure: str, name: str) -> Panel:
    drawn = []
    for at, place in PLACES.items():
        kinds = [kind for kind, where in TABLE8 if where == at]
        places = [list(KINDS).index(kind) for kind in kinds]
        drawn.append(series(place, places, [estimate(done, figure, kind=kind, at=at) for kind in kinds]))
    return Panel(f"Position embeddings: {name}", "kind", name, drawn, ticks=tuple(KINDS.values()))


POSITIONS = Study(
    name="positions",
    source="Table 8, App. D.4",
    about="Do position embeddings help, and does it matter of which kind they are and where they enter?",
    points=points,
    report=report,
)
