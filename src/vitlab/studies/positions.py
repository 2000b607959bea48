"""Table 8, App. D.4: position embeddings, their kind and where they enter.

Fig. 10, the similarity of position embeddings, is drawn by `vitlab inspect` for any model, those of the study included.
"""

from typing import Any

import numpy as np

from vitlab.config import TrainConfig
from vitlab.studies.point import Point, Scale
from vitlab.studies.presets import FEWSHOT, comparison, jft, vit
from vitlab.studies.spec import Chart, Claim, Study, named, share
from vitlab.studies.statistics import Results

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

The table has one number for relative positions, in its first column: they act inside the attention of every block, each
with embeddings of its own.
"""
KINDS = {"none": "none", "1d": "1-D", "2d": "2-D", "relative": "relative"}
PLACES = {"stem": "stem", "every": "every block", "shared": "every block, shared"}
STEM = {"family": "absolute", "at": "stem"}


def variants(scale: Scale) -> list[Point]:
    """The cells of Table 8."""
    return [
        Point(f"{kind}-{at}", _config(scale, position=kind, position_at=at), _labels(kind, at)) for kind, at in TABLE8
    ]


def _config(scale: Scale, **positions: Any) -> TrainConfig:
    match scale:
        case "tiny":  # 24 runs of 1.1 TFLOP: 12 minutes of one core at 36 GFLOP/s
            return comparison(scale, vit(28, 4, 48, 3, **positions), 800)
        case "gpu":  # 24 runs of 1.1 PFLOP: 5 minutes at 100 TFLOP/s
            return comparison(scale, vit(32, 4, 192, 6, heads=6, **positions), 3000)
        case "paper":
            return jft("ViT-B/16", **positions)


def _labels(kind: str, at: str) -> dict[str, str | float]:
    family = kind if kind in ("none", "relative") else "absolute"
    return {"kind": kind, "at": at, "family": family, "any": "no" if kind == "none" else "yes"}


def _printed(**labels: str) -> float:
    """Mean of the cells of Table 8 that have these labels."""
    return float(np.mean([value for cell, value in TABLE8.items() if labels.items() <= _labels(*cell).items()]))


def _paper_cell(row: Results) -> str:
    return f"{100 * TABLE8[str(row.labels['kind']), str(row.labels['at'])]:.1f}"


def _equal(text: str, more: dict[str, str], less: dict[str, str]) -> Claim:
    paper = f"{_printed(**more):.5f} and {_printed(**less):.5f} (Table 8)"
    return Claim(text, paper, FEWSHOT, more, less, expected="equal")


POSITIONS = Study(
    name="positions",
    source="Table 8, App. D.4",
    question="Do position embeddings help, and does it matter which kind they are and where they enter?",
    variants=variants,
    summary="A ViT with the position embeddings of Table 8. All start at the standard deviation of 1-D ones.",
    rows=("kind", "at"),
    columns={
        "position embedding": named("kind", KINDS),
        "where": lambda row: "" if row.labels["kind"] == "none" else PLACES[str(row.labels["at"])],
        "5-shot, %": share(FEWSHOT),
        "paper: 5-shot on ImageNet, %": lambda row: (
            f"{100 * TABLE8[str(row.labels['kind']), str(row.labels['at'])]:.1f}"
        ),
        "accuracy, %": share("accuracy"),
    },
    claims=(
        Claim(
            "Without position embeddings 5-shot accuracy is lower than with any (mean of all kinds).",
            f"{_printed(any='no'):.5f} against {_printed(any='yes'):.5f} (Table 8)",
            FEWSHOT,
            {"any": "yes"},
            {"any": "no"},
        ),
        Claim(
            "Without position embeddings the accuracy of the pre-training task is lower, too.",
            "not given (Table 8 has few-shot accuracy only)",
            "accuracy",
            {"any": "yes"},
            {"any": "no"},
        ),
        _equal("1-D and 2-D embeddings are equal (mean over places).", {"kind": "1d"}, {"kind": "2d"}),
        _equal("1-D at the stem and relative ones are equal.", {"kind": "1d", "at": "stem"}, {"kind": "relative"}),
        _equal("At the stem and in every block are equal (mean of 1-D and 2-D).", STEM, STEM | {"at": "every"}),
        _equal("At the stem and shared by all blocks are equal (mean of 1-D and 2-D).", STEM, STEM | {"at": "shared"}),
    ),
    charts=tuple(
        Chart(
            f"Position embeddings: {title}",
            title,
            metric,
            x="kind",
            lines="at",
            x_label="kind",
            categories=True,
            names=KINDS | PLACES,
        )
        for title, metric in (("5-shot accuracy", FEWSHOT), ("test accuracy", "accuracy"))
    ),
)
