"""Fig. 9, App. D.3: a class token or global average pooling (GAP), and the learning rate that each needs."""

import dataclasses
from collections.abc import Sequence

from vitlab.config import TrainConfig
from vitlab.inspect.panels import Panel
from vitlab.models.config import ViTConfig
from vitlab.studies.small import (
    FEWSHOT,
    best,
    gpu,
    gpu_vit,
    groups,
    jft,
    over_training,
    series,
    tiny,
    tiny_vit,
    told,
)
from vitlab.studies.statistics import difference, estimate, percent
from vitlab.studies.study import SEEDS, Claim, Done, Point, Report, Scale, Study

KINDS = {"token": "class token", "gap": "GAP"}
RATES: dict[Scale, dict[str, tuple[float, ...]]] = {
    "tiny": dict.fromkeys(KINDS, (5e-4, 2e-3, 8e-3, 2e-2)),
    "gpu": dict.fromkeys(KINDS, (3e-4, 1e-3, 3e-3, 1e-2)),
    "paper": {"token": (8e-4,), "gap": (8e-4, 3e-4)},
}
"""Learning rates of each kind: in small the same for both, wide enough that the highest is too high."""


def points(scale: Scale) -> list[Point]:
    """Both kinds at every rate, at three seeds; at the paper's scale its three runs, once."""
    seeds = SEEDS if scale != "paper" else SEEDS[:1]
    return [
        Point(f"{kind}.rate-{rate:g}.seed-{seed}", _config(scale, kind, rate, seed), {"kind": kind, "rate": rate})
        for seed in seeds
        for kind, rates in RATES[scale].items()
        for rate in rates
    ]


def _config(scale: Scale, kind: str, rate: float, seed: int) -> TrainConfig:
    """Evaluations while training, which are Fig. 9's curves; nothing but the kind and the rate differs."""
    changes = {"pool": kind}
    match scale:
        case "tiny":  # 24 runs of 0.75 TFLOP: 18 TFLOP, 9 minutes of one core at 36 GFLOP/s
            config = tiny(tiny_vit(width=64, mlp_dim=128, depth=4, **changes), seed, steps=800, lr=rate)
            every = 100
        case "gpu":  # 24 runs of 1.1 PFLOP: 27 PFLOP, 5 minutes at 100 TFLOP/s
            config = gpu(gpu_vit(**changes), seed, steps=3000, lr=rate)
            every = 300
        case "paper":  # every half epoch
            config = jft("ViT-B/16", **changes)
            config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=rate))
            every = 37_000
    return dataclasses.replace(config, eval_every=every)


def report(done: Sequence[Done]) -> Report:
    """A row for each kind and rate; few-shot accuracy while training, as Fig. 9, and at the end over the rate."""
    rows = []
    for kind, rate in groups(done, "kind", "rate"):
        own = {"kind": kind, "rate": rate}
        mark = "best" if rate == best(done, "rate", kind=kind) else ""
        rows.append((
            KINDS[str(kind)], f"{rate:g}", percent(estimate(done, FEWSHOT, **own)),
            percent(estimate(done, "accuracy", **own)), mark,
        ))  # fmt: skip
    model = done[0].point.config.model
    assert isinstance(model, ViTConfig)
    return Report(
        lead=f"A ViT of {model.depth} blocks and D = {model.width}, whose head sees the class token or the mean over "
        f"patches, at several learning rates, all else alike. The best rate is that of the mean over seeds, by the "
        f"figure that is then compared: no images are held out to choose it by. {told(done)}",
        columns=("head", "learning rate", "5-shot, %", "accuracy, %", "5-shot"),
        rows=rows,
        claims=_claims(done),
        panels=[_curves(done), _over_rates(done, FEWSHOT, "5-shot accuracy"),
                _over_rates(done, "accuracy", "test accuracy")],
    )  # fmt: skip


def _claims(done: Sequence[Done]) -> list[Claim]:
    gap, token = (best(done, "rate", kind=kind) for kind in ("gap", "token"))
    highest = max(set(_rates(done, "gap")) & set(_rates(done, "token")))
    drawn = "(Fig. 9; its values are not printed)"
    return [
        Claim(
            f"Each at its own best rate, GAP ({gap:g}) and class token ({token:g}) transfer alike.",
            f"3e-4 and 8e-4 end alike {drawn}",
            difference(done, FEWSHOT, {"kind": "gap", "rate": gap}, {"kind": "token", "rate": token}),
            expected="equal",
        ),
        *(
            Claim(
                f"GAP needs a smaller rate: from its best one to {highest:g}, the highest of both, GAP loses more "
                f"{name} than the class token does.",
                f"GAP at the class token's 8e-4 stays well below GAP at 3e-4 {drawn}",
                difference(lost(done, figure, highest), "lost", {"kind": "gap"}, {"kind": "token"}),
            )
            for figure, name in ((FEWSHOT, "5-shot accuracy"), ("accuracy", "accuracy"))
        ),
    ]


def _rates(done: Sequence[Done], kind: str) -> list[float]:
    return sorted({float(each.point.labels["rate"]) for each in done if each.point.labels["kind"] == kind})


def lost(done: Sequence[Done], figure: str, highest: float) -> list[Done]:
    """For each kind and seed the run at the rate `highest`, its figure `lost`: by how much that at the kind's best rate
    is higher. The best rate is that of the mean over seeds."""
    found = []
    for kind in KINDS:
        rate = best(done, "rate", figure, kind=kind)
        own = {(each.point.labels["rate"], each.seed): each for each in done if each.point.labels["kind"] == kind}
        for (at, seed), each in own.items():
            if at == highest and (rate, seed) in own:
                gone = own[rate, seed].figures[figure] - each.figures[figure]
                found.append(dataclasses.replace(each, figures={"lost": gone}))
    return found


def _curves(done: Sequence[Done]) -> Panel:
    """Means over seeds while training; without bars, which would hide the curves."""
    drawn = []
    for kind, rate in groups(done, "kind", "rate"):
        steps, figures = over_training(done, kind=kind, rate=rate)
        curve = series(f"{KINDS[str(kind)]}, {rate:g}", steps, figures)
        drawn.append(dataclasses.replace(curve, spread=()))
    return Panel("Head: while training", "step", "5-shot accuracy", drawn)


def _over_rates(done: Sequence[Done], figure: str, name: str) -> Panel:
    drawn = []
    for kind, title in KINDS.items():
        rates = _rates(done, kind)
        drawn.append(series(title, rates, [estimate(done, figure, kind=kind, rate=rate) for rate in rates]))
    return Panel(f"Head: {name} at the end", "learning rate", name, drawn, log_x=True)


HEAD = Study(
    name="head",
    source="Fig. 9, App. D.3",
    about="Is a class token better than the mean over patches, or do they only need different learning rates?",
    points=points,
    report=report,
)
