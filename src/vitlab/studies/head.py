"""Fig. 9, App. D.3: a class token or global average pooling (GAP), and the learning rate that each needs."""

from vitlab.config import TrainConfig
from vitlab.inspect.panels import Panel, Series
from vitlab.studies.point import Point, Scale
from vitlab.studies.presets import FEWSHOT, changed, comparison, jft, vit
from vitlab.studies.spec import Chart, Claim, Study, named, share
from vitlab.studies.statistics import Estimate, Results

KINDS = {"token": "class token", "gap": "GAP"}
RATES: dict[Scale, dict[str, tuple[float, ...]]] = {
    "tiny": dict.fromkeys(KINDS, (5e-4, 2e-3, 8e-3, 2e-2)),
    "gpu": dict.fromkeys(KINDS, (3e-4, 1e-3, 3e-3, 1e-2)),
    "paper": {"token": (8e-4,), "gap": (8e-4, 3e-4)},
}
"""Learning rates of each kind; at the small scales the highest is meant to be too high."""


def variants(scale: Scale) -> list[Point]:
    """Both kinds at every rate."""
    return [
        Point(f"{kind}.rate-{rate:g}", _config(scale, kind, rate), {"kind": kind, "rate": rate})
        for kind, rates in RATES[scale].items()
        for rate in rates
    ]


def _config(scale: Scale, pool: str, lr: float) -> TrainConfig:
    """The evaluations during training give the curves of Fig. 9."""
    match scale:
        case "tiny":  # 24 runs of 0.75 TFLOP: 9 minutes of one core at 36 GFLOP/s
            config, eval_every = comparison(scale, vit(28, 7, 64, 4, pool=pool), 800), 100
        case "gpu":  # 24 runs of 1.1 PFLOP: 5 minutes at 100 TFLOP/s
            config, eval_every = comparison(scale, vit(32, 4, 192, 6, heads=6, pool=pool), 3000), 300
        case "paper":  # every half epoch
            config, eval_every = jft("ViT-B/16", pool=pool), 37_000
    return changed(config, optim={"lr": lr}, eval_every=eval_every)


def _claims(results: Results) -> list[Claim]:
    gap, token = ({"kind": kind, "rate": results.best("rate", FEWSHOT, kind=kind)} for kind in ("gap", "token"))
    highest = max(set(results.where(kind="gap").values("rate")) & set(results.where(kind="token").values("rate")))
    claims = [
        Claim(
            f"Each at its own best rate, GAP ({gap['rate']:g}) and class token ({token['rate']:g}) transfer alike.",
            "3e-4 and 8e-4 end alike (Fig. 9; its values are not printed)",
            FEWSHOT,
            gap,
            token,
            expected="equal",
        )
    ]
    for metric, name in ((FEWSHOT, "5-shot accuracy"), ("accuracy", "accuracy")):
        best = {kind: {"kind": kind, "rate": results.best("rate", metric, kind=kind)} for kind in KINDS}
        high = {kind: {"kind": kind, "rate": highest} for kind in KINDS}
        text = (
            f"GAP needs a smaller rate: from its best one to {highest:g}, the highest of both, GAP loses more {name} "
            "than the class token does."
        )
        paper = "GAP at the class token's 8e-4 stays well below GAP at 3e-4 (Fig. 9; its values are not printed)"
        claims.append(Claim(text, paper, metric, (best["gap"], high["token"]), (high["gap"], best["token"])))
    return claims


def _charts(results: Results) -> list[Chart | Panel]:
    over_rates: list[Chart | Panel] = [
        Chart(
            f"Head: {title} at the end",
            title,
            metric,
            x="rate",
            lines="kind",
            names=KINDS,
            x_label="learning rate",
            log_x=True,
        )
        for title, metric in (("5-shot accuracy", FEWSHOT), ("test accuracy", "accuracy"))
    ]
    return [Panel("Head: while training", "step", "5-shot accuracy", list(map(curve, results.groups()))), *over_rates]


def curve(group: Results) -> Series:
    """Mean 5-shot accuracy over the steps at which all seeds were evaluated; error bars would hide the curves."""
    curves = [{record["step"]: record[FEWSHOT] for record in run.records if FEWSHOT in record} for run in group]
    steps = sorted(set.intersection(*map(set, curves)))
    means = [Estimate(tuple(values[step] for values in curves)).mean for step in steps]
    return Series(f"{KINDS[str(group.labels['kind'])]}, {group.labels['rate']:g}", steps, means)


def _mark(row: Results) -> str:
    best = row.study.best("rate", FEWSHOT, kind=row.labels["kind"])
    return "best" if row.labels["rate"] == best else ""


HEAD = Study(
    name="head",
    source="Fig. 9, App. D.3",
    question="Is a class token better than the mean over patches, or do they only need different learning rates?",
    variants=variants,
    summary="A ViT whose head sees the class token or the mean over patches, at several learning rates, all else "
    "equal. The best rate is that of the mean over seeds, by the metric that is compared; no images are held out for "
    "it.",
    rows=("kind", "rate"),
    columns={
        "head": named("kind", KINDS),
        "learning rate": "rate",
        "5-shot, %": share(FEWSHOT),
        "accuracy, %": share("accuracy"),
        "5-shot": _mark,
    },
    claims=_claims,
    charts=_charts,
)
