"""Table 8, App. D.4: position embeddings, their kind and where they enter.

Fig. 10, the similarity of position embeddings, is drawn by `vitlab inspect` for any model, also the study's.
"""

import numpy as np

from vitlab.studies.presets import MEASURED, Models, comparison, transfer, transfer_and_accuracy, vit
from vitlab.studies.spec import Claim, Scale, Study, StudyRun, difference, named

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

The table has relative positions in its first column only: they act in the attention of every block, each with its own.
"""
EQUAL = 0.01
"""Kinds of embeddings are equal within this: in Table 8 they differ by at most 0.65 points, and by 2.3 from none."""
KINDS = {"none": "none", "1d": "1-D", "2d": "2-D", "relative": "relative"}
ENTRIES = {"stem": "stem", "every": "every block", "shared": "every block, shared"}
MODELS: Models = {"small": (vit(28, 4, 48, 3), 3000), "paper": "ViT-B/16"}


def variants(scale: Scale) -> list[StudyRun]:
    """The cells of Table 8."""
    return [
        StudyRun(f"{kind}-{at}", comparison(scale, MODELS, position=kind, position_at=at), _labels(kind, at))
        for kind, at in TABLE8
    ]


def _labels(kind: str, at: str) -> dict[str, str]:
    family = kind if kind in ("none", "relative") else "absolute"
    return {"kind": kind, "at": at, "family": family, "any": "no" if kind == "none" else "yes"}


def _printed(**labels: str) -> float:
    """Mean of the cells of Table 8 that have these labels."""
    return float(np.mean([value for cell, value in TABLE8.items() if labels.items() <= _labels(*cell).items()]))


def _equal(text: str, one: dict[str, str], other: dict[str, str]) -> Claim:
    paper = f"5-shot {_printed(**one):.5f} and {_printed(**other):.5f} (Table 8)"
    return Claim(f"In transfer, {text}", paper, difference(transfer, one, other), expected="equal", relevant=EQUAL)


WITH, WITHOUT, ABSOLUTE = {"any": "yes"}, {"any": "no"}, {"family": "absolute"}
STEM = ABSOLUTE | {"at": "stem"}
POSITIONS = Study(
    name="positions",
    source="Table 8, App. D.4",
    question="Do position embeddings help, and does it matter which kind they are and where they enter?",
    variants=variants,
    seeds=8,
    summary="A ViT with the position embeddings of Table 8. All start at the standard deviation of 1-D ones.",
    rows=("kind", "at"),
    columns={
        "position embedding": named("kind", KINDS),
        "where": lambda row: "" if row.labels["kind"] == "none" else ENTRIES[row.labels["at"]],
        "paper: 5-shot on ImageNet, %": lambda row: f"{100 * _printed(**row.labels):.1f}",
        **MEASURED,
    },
    claims=(
        Claim(
            "Without position embeddings transfer accuracy is lower than with any (mean of all kinds).",
            f"{_printed(**WITHOUT):.5f} against {_printed(**WITH):.5f} (Table 8)",
            difference(transfer, WITH, WITHOUT),
        ),
        Claim(
            "Without position embeddings the accuracy of the pre-training task is lower, too.",
            "not given (Table 8 has few-shot accuracy only)",
            difference("accuracy", WITH, WITHOUT),
        ),
        _equal("1-D and 2-D embeddings are equal (mean over where they enter).", {"kind": "1d"}, {"kind": "2d"}),
        _equal("absolute (mean of all) and relative ones are equal.", ABSOLUTE, {"kind": "relative"}),
        _equal("at the stem and in every block are equal (mean of 1-D and 2-D).", STEM, STEM | {"at": "every"}),
        _equal("at the stem and shared by all blocks are equal (mean of 1-D and 2-D).", STEM, STEM | {"at": "shared"}),
    ),
    charts=transfer_and_accuracy("Position embeddings", x="kind", lines="at", x_label="kind", names=KINDS | ENTRIES),
)
