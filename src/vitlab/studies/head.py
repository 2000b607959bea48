"""Fig. 9, App. D.3: a class token or global average pooling (GAP), and the learning rate that each needs."""

import numpy as np

from vitlab.panels import Panel, Series
from vitlab.studies.presets import FEWSHOT, MEASURED, Models, comparison, transfer, transfer_and_accuracy, vit
from vitlab.studies.spec import Claim, Labels, Metric, Results, Scale, Study, StudyRun, changed, difference, named

KINDS = {"token": "class token", "gap": "GAP", "gap-linear": "GAP, linear head"}
RATES: dict[Scale, dict[str, tuple[float, ...]]] = {
    "small": dict.fromkeys(("token", "gap"), (5e-4, 2e-3, 4e-3, 8e-3)),
    "paper": {"token": (8e-4,), "gap": (8e-4, 3e-4), "gap-linear": (8e-4, 3e-4)},
}
"""Learning rates of each kind; at `small` the highest is meant to be too high.

Deviation: token and GAP have the same classifier, linear at `small`, at the paper's with a hidden layer of
tanh. The paper's pair is a class token with that layer and GAP with a linear classifier, which its scale has too.
"""
MODELS: Models = {"small": (vit(28, 7, 64, 4), 3000), "paper": "ViT-B/16"}
EQUAL = 0.01
"""Both kinds are equal within this on the pre-training task, whose accuracy has less spread over seeds than 5-shot."""
EVAL_EVERY: dict[Scale, int] = {"small": 500, "paper": 37_000}
"""The evaluations during training give the curves of Fig. 9; the paper's are half an epoch apart."""


def variants(scale: Scale) -> list[StudyRun]:
    """Each kind at every rate."""
    linear = {"gap-linear": {"representation_size": None}}
    return [
        StudyRun(
            f"{kind}.rate-{rate:g}",
            changed(
                comparison(scale, MODELS, pool=kind.removesuffix("-linear"), **linear.get(kind, {})),
                optim={"lr": rate},
                eval_every=EVAL_EVERY[scale],
            ),
            {"kind": kind, "rate": rate},
        )
        for kind, rates in RATES[scale].items()
        for rate in rates
    ]


def _best(results: Results, metric: Metric, kind: str) -> Labels:
    """Labels of the kind at its best rate."""
    return {"kind": kind, "rate": results.study.best("rate", metric, kind=kind)}


def _claims(results: Results) -> list[Claim]:
    best_gap, best_token = (_best(results, "accuracy", kind) for kind in ("gap", "token"))
    rates = f"GAP ({best_gap['rate']:g}) and class token ({best_token['rate']:g})"
    text = f"Each at the rate with its best accuracy on the pre-training task, {rates} are equally accurate."
    paper = "3e-4 and 8e-4 end alike, 5-shot (Fig. 9; its values are not printed)"
    claims = [Claim(text, paper, difference("accuracy", best_gap, best_token), expected="equal", relevant=EQUAL)]
    highest = max(set(results.where(kind="gap").values("rate")) & set(results.where(kind="token").values("rate")))
    for metric, name in ((transfer, "transfer accuracy"), ("accuracy", "accuracy")):
        best_gap, best_token = (_best(results, metric, kind) for kind in ("gap", "token"))
        high_gap, high_token = ({"kind": kind, "rate": highest} for kind in ("gap", "token"))
        text = (
            f"GAP needs a smaller rate: from its best one to {highest:g}, the highest of both, GAP loses more {name} "
            "than the class token does."
        )
        paper = "GAP at the class token's 8e-4 stays well below GAP at 3e-4 (Fig. 9; its values are not printed)"
        claims.append(Claim(text, paper, difference(metric, (best_gap, high_token), (high_gap, best_token))))
    if "gap-linear" in results.values("kind"):
        text = f"At {highest:g}, GAP with a linear head is behind the class token with its hidden layer."
        pair = {"kind": "token", "rate": highest}, {"kind": "gap-linear", "rate": highest}
        claims.append(Claim(text, "Fig. 9's pair at 8e-4 (its values are not printed)", difference(transfer, *pair)))
    return claims


def _curve(group: Results) -> Series:
    """Mean 5-shot accuracy over the steps at which all seeds were evaluated; error bars would hide the curves."""
    curves = [{record["step"]: record[FEWSHOT] for record in run.records if FEWSHOT in record} for run in group]
    steps = sorted(set.intersection(*map(set, curves)))
    means = [float(np.mean([values[step] for values in curves])) for step in steps]
    return Series(f"{KINDS[group.labels['kind']]}, {group.labels['rate']:g}", steps, means)


HEAD = Study(
    name="head",
    source="Fig. 9, App. D.3",
    question="Is a class token better than the mean over patches, or do they only need different learning rates?",
    variants=variants,
    seeds=8,
    summary="A ViT whose head sees the class token or the mean over patches (GAP), at several learning rates. The best "
    "rate has the highest mean over seeds of the compared metric; no images are held out for it.",
    rows=("kind", "rate"),
    columns={
        "head": named("kind", KINDS),
        "learning rate": "rate",
        **MEASURED,
        "best in transfer": lambda row: "yes" if row.labels == _best(row, transfer, row.labels["kind"]) else "",
    },
    claims=_claims,
    charts=lambda results: [
        Panel("Head: while training", "step", "5-shot accuracy", list(map(_curve, results.groups()))),
        *transfer_and_accuracy(
            "Head at the end", x="rate", lines="kind", names=KINDS, x_label="learning rate", log_x=True
        ),
    ],
)
