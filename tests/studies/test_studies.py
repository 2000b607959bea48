"""Every study: its runs at each scale, its report of simulated results, its recorded results, and runs that run."""

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitlab.config import FinetuneConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.finetuning.protocol import sweep_and_finetune
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.registry import get_config
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.runs.pretrain import pretrain
from vitlab.studies import STUDIES, axial, data_size, optimizer, regularization, scaling, shape
from vitlab.studies.compute import model_of
from vitlab.studies.report import build_report
from vitlab.studies.scaling import (
    TABLE6,
    PaperRun,
    accuracy_lead,
    compute_ratio,
    lead_of_largest,
    paper_panel,
    select_front,
)
from vitlab.studies.spec import HELD_OUT, Result, Results, Scale, StudyRun, changed, exaflops

pytestmark = pytest.mark.usefixtures("unchecked")  # thousands of settings
RECORDED = Path(__file__).parents[2] / "src" / "vitlab" / "paper" / "recorded"
DESIGNED: tuple[Scale, ...] = ("small", "paper")
SCALES: tuple[Scale, ...] = ("tiny", *DESIGNED)
Accuracy = Callable[[StudyRun], float]


@functools.cache
def runs_and_models(name: str, scale: Scale, seeds: int | None = None) -> list[tuple[StudyRun, ModelConfig]]:
    """seeds: at `small`, by default the study's."""
    runs = STUDIES[name].runs(scale, seeds if scale == "small" else None)
    by_name = {run.name: run for run in runs}
    return [(run, model_of(run, by_name)) for run in runs]


def simulate(
    name: str,
    accuracy: Accuracy,
    held_out: Accuracy | None = None,
    scale: Scale = "small",
    examples: int = 30_000,
    seeds: int = 5,
) -> Results:
    """Every run, of so many seeds at `small`, with this accuracy, few-shot accuracy and (default: the same) held-out
    accuracy; it grows to them."""
    runs = []
    for run, model in runs_and_models(name, scale, seeds):
        value, val = accuracy(run), (held_out or accuracy)(run)
        records = [
            {"step": step, "fewshot_5shot": value * step / 20, "val_accuracy": val * step / 20} for step in (10, 20)
        ]
        figures = {"accuracy": value, "loss": 2.5, "constant_loss": 4.25, HELD_OUT: val}
        figures |= {f"fewshot_{shots}shot": value for shots in (5, 10, 500)}
        runs.append(Result(run, figures, records, round(examples * (run.config.data.subset_fraction or 1)), model))
    return Results(tuple(runs))


def noise(run: StudyRun, size: float = 1e-3) -> float:
    """A difference between the seeds that all runs of a seed share; of five, with a mean of 0 and this deviation."""
    return size * (run.config.seed - 2) / math.sqrt(2.5)


def report(name: str, accuracy: Accuracy, held_out: Accuracy | None = None, **settings: Any) -> dict[str, Any]:
    return build_report(STUDIES[name], settings.get("scale", "small"), simulate(name, accuracy, held_out, **settings))


def paper_points(name: str) -> dict[str, TrainConfig]:
    return {run.name: run.config for run in STUDIES[name].variants("paper")}


def verdicts(report: dict[str, Any]) -> list[str]:
    return [claim["verdict"] for claim in report["claims"]]


def measured(report: dict[str, Any]) -> list[float]:
    return [claim["measured"]["mean"] for claim in report["claims"]]


# Runs


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", STUDIES)
def test_points_and_report(name: str, scale: Scale) -> None:
    """Two seeds at `small`, else one, which decides nothing."""
    seen: dict[str, StudyRun] = {}
    seeds: dict[tuple, list[int]] = {}
    for run, _ in runs_and_models(name, scale, 2):
        assert re.fullmatch(r"[\w.+-]+", run.name), "not a valid folder name"
        assert run.name not in seen
        assert (run.init_from is not None) == isinstance(run.config, FinetuneConfig)
        assert run.init_from is None or seen[run.init_from].config.seed == run.config.seed
        seen[run.name] = run
        seeds.setdefault(tuple(run.labels.items()), []).append(run.config.seed)
        fewshot, learned = run.config.fewshot, run.config.data.classes
        if fewshot is not None and fewshot.classes is not None:
            assert not set(fewshot.classes) & set(learned or ()), "transfer is measured on classes that are learned"
    assert all(values == ([0, 1] if scale == "small" else [0]) for values in seeds.values())
    new = build_report(STUDIES[name], scale, simulate(name, lambda run: 0.5 + noise(run), scale=scale, seeds=2))
    columns = new["table"]["columns"]
    assert all(len(set(columns)) == len(columns) == len(row) for row in new["table"]["rows"])
    if scale != "small":
        assert set(verdicts(new)) == {"not tested" if scale == "tiny" else "inconclusive"}
    if scale == "tiny":  # no download
        assert {run.config.data.name for run in seen.values()} == {"digits"}
        assert not [run.name for run in seen.values() if run.config.fewshot and run.config.fewshot.dataset]
        assert not {"fashion_mnist", "cifar10"} & {label for run in seen.values() for label in run.labels.values()}


MODEL = {"model": ViTConfig()}
SETTINGS: dict[str, dict[str, Any]] = {
    "data-size": MODEL
    | {"data": {"subset_fraction": None, "name": "any"}, "steps": 1}
    | {"optim": {"lr": 1.0, "warmup_steps": 0, "weight_decay": 0.0}},
    "dropout-decay-smoothing": MODEL
    | {"label_smoothing": 0.0, "data": {"subset_fraction": None}, "optim": {"weight_decay": 0.0}},
    "scaling": MODEL | {"steps": 1},
    "resolution": MODEL | {"fresh_positions": False},
    "masking": {"from_scratch": False, "head_std": None, "masking": MaskingConfig()},
    "optimizer": MODEL | {"optim": OptimConfig()},
    "shape": MODEL,
    "head": {"model": {"pool": "gap"}, "optim": {"lr": 1.0}},
    "positions": {"model": {"position": "1d", "position_at": "stem"}},
    "axial": MODEL,
}
"""Study -> the settings by which its runs differ, each reset to one value."""


@pytest.mark.parametrize("name", STUDIES)
def test_points_differ_only_by_what_is_studied(name: str) -> None:
    configs: dict[bool, set[TrainConfig]] = {}
    for run in STUDIES[name].variants("small"):
        changes = {key: value for key, value in SETTINGS[name].items() if getattr(run.config, key, None) is not None}
        configs.setdefault(run.init_from is None, set()).add(changed(run.config, **changes))
    assert all(len(group) == 1 for group in configs.values())


SETTING_LABELS: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "data-size": lambda config: {"part": config.data.subset_fraction, "decay": config.optim.weight_decay},
    "resolution": lambda config: {"positions": "fresh" if config.fresh_positions else "interpolated"},
    "optimizer": lambda config: {"optimizer": config.optim.name, "rate": config.optim.lr},
    "head": lambda config: {"rate": config.optim.lr},
    "positions": lambda config: {"kind": config.model.position, "at": config.model.position_at},
}
"""Study -> labels of a run of these settings."""


@pytest.mark.parametrize("scale", DESIGNED)
@pytest.mark.parametrize("name", SETTING_LABELS)
def test_labels_are_the_settings(name: str, scale: Scale) -> None:
    for run in STUDIES[name].variants(scale):
        if (run.init_from is None) == (name != "resolution"):
            assert SETTING_LABELS[name](run.config).items() <= run.labels.items()


@pytest.mark.parametrize("scale", DESIGNED)
def test_kinds_of_heads(scale: Scale) -> None:
    """At the paper's scale both have the class token's hidden layer, except GAP in the paper's own pair."""
    for run in STUDIES["head"].variants(scale):
        kind, _, head = run.labels["kind"].partition("-")
        model: Any = run.config.model
        assert (model.pool, model.representation_size is None) == (kind, scale != "paper" or head == "linear")


@pytest.mark.parametrize("scale", DESIGNED)
def test_axial_forms_take_more_compute(scale: Scale) -> None:
    models = {run.labels["model"]: run.config.model for run in axial.variants(scale)}
    assert models.keys() == axial.FIG13.keys()
    for plain, form in axial.FORMS.items():
        model = models[form]
        axially = model.encoder if isinstance(model, ViTConfig) else model.body.mixing
        assert axially == "axial"
        assert model.forward_macs > models[plain].forward_macs


@pytest.mark.parametrize("scale", DESIGNED)
def test_shapes_change_one_dimension(scale: Scale) -> None:
    expected = {"depth": {"depth"}, "width": {"width", "heads"}, "mlp": {"mlp_dim"}, "patch": {"patch_size"}}
    base, *runs = shape.variants(scale)
    for run in runs:
        model, ours = vars(run.config.model), vars(base.config.model)
        different = {name for name in model if model[name] != ours[name]} - {"representation_size"}
        dimension = run.labels["dimension"]
        assert different == expected.get(dimension, set().union(*expected.values()))
        assert model["width"] / model["heads"] == ours["width"] / ours["heads"]
    results = simulate("shape", lambda run: 0.5, scale=scale)
    most = {
        name: max(map(shape.compute, results.where(dimension=name).groups())) for name in ("base", "depth", "width")
    }
    assert most["base"] == 1
    assert 1 <= most["width"] / most["depth"] < 1.5, "depth and width are compared at similar compute"


@pytest.mark.parametrize("table", [regularization.SMALL, regularization.PAPER])
def test_one_regularizer_at_a_time(table: dict[str, tuple[float, ...]]) -> None:
    counts = {name: sum(value > 0 for value in values) for name, values in table.items()}
    assert (counts.pop("none"), counts.pop("all three"), set(counts.values())) == (0, 3, {1})
    for run in regularization.variants("small" if table is regularization.SMALL else "paper"):
        config: Any = run.config
        values = (config.optim.weight_decay, config.model.dropout, config.label_smoothing)
        assert values == table[run.labels["setting"]]


# The paper's runs and numbers


@pytest.mark.parametrize(
    ("config", "run"),
    list(zip(paper_points("scaling").values(), TABLE6, strict=True)),
    ids=[f"{run.model}-{run.epochs}" for run in TABLE6],
)
def test_scaling_of_the_paper(config: TrainConfig, run: PaperRun) -> None:
    """Its recipes and its column of exaFLOPs, printed without decimals: within 2%; with convolutions, within 1%."""
    printed = run.exaflops
    if (run.model, run.epochs) == ("R50+ViT-L/16", 7):
        # 859 is not half of the 1668 that the same model takes for 14 epochs; ours fits that one.
        assert not math.isclose(printed, 1668 / 2, rel_tol=0.02)
        printed = 1668 / 2
    tolerance = 0.02 if run.family == "ViT" else 0.01
    assert abs(exaflops(config, 303_000_000) - printed) <= tolerance * printed + 0.5
    assert (config.epochs, config.batch_size, config.loss, config.model.head_bias) == (run.epochs, 4096, "sigmoid", -10)
    assert config.model.forward_macs == pytest.approx(get_config(run.model).forward_macs, rel=0.01)  # but for the head


def test_runs_of_the_paper() -> None:
    jft = PRETRAIN["jft"]
    runs = paper_points("masking")
    assert runs["mean-color-50"] == PRETRAIN["masked"]()
    assert (runs["scratch"], runs["supervised"]) == (PRETRAIN["imagenet"]("ViT-B/16"), jft("ViT-B/16"))
    # 14 epochs of ViT-B/16: a million steps of 4096, 17.6 GMACs an image
    assert exaflops(runs["mean-color-50"], 303_000_000) == pytest.approx(432, rel=0.01)
    before, *tuned = STUDIES["resolution"].variants("paper")
    assert before.config == jft("ViT-B/16")
    assert [run.config.model.image_hw[0] for run in tuned[:3]] == [224, 336, 448]
    for config in (tuned[0].config, runs["mean-color-50.finetuned"]):
        row = FINETUNE["imagenet"]()
        assert changed(config, model=row.model, average_decay=row.average_decay) == row
    rates = {name: config.optim.lr for name, config in paper_points("optimizer").items()}
    assert list(rates.values()) == pytest.approx([1e-3, 0.48, 6e-4, 0.48])  # 0.48 is 0.03 x 4096 / 256
    both = {(run.labels["data"], run.labels["setting"]): run.config for run in regularization.variants("paper")}
    assert both["ImageNet", "all three"] == PRETRAIN["imagenet"]("ViT-B/16")
    assert both["ImageNet-21k", "decay 0.03"].optim == PRETRAIN["imagenet21k"]("ViT-B/16").optim


def test_parts_of_jft() -> None:
    """9, 30, 90 and 300 million images; for all of them the steps of 7 epochs of the whole."""
    runs = [run for run in data_size.variants("paper") if run.init_from is None]
    assert [round(part * 303) for part in data_size.PAPER_PARTS] == [9, 30, 91, 303]
    assert {run.config.total_steps(1) for run in runs} == {517_822}
    whole = {run.labels["model"]: run.config for run in runs if run.labels["part"] == 1.0}
    for name in ("ViT-B/32", "ViT-L/16", "R50x1", "R152x2"):
        row = PRETRAIN["jft"](name)
        assert (whole[name].model, whole[name].optim, whole[name].loss) == (row.model, row.optim, row.loss)
    halved: Any = whole["ViT-b/32"].model
    assert (halved.width, halved.mlp_dim, halved.depth, halved.representation_size) == (384, 1536, 12, 384)


def test_tables_6_and_7_agree_and_have_the_printed_means() -> None:
    printed = {("R50x1", "adam"): 89.33, ("R50x1", "sgd"): 88.79, ("R152x2", "adam"): 94.01, ("R152x2", "sgd"): 93.72}
    assert {key: np.mean(cells) for key, cells in optimizer.TABLE7.items()} == pytest.approx(printed, abs=0.0051)
    averages = {run.model: run.average for run in TABLE6 if run.epochs == 7}
    assert averages["R50x1"] == pytest.approx(89.33, abs=0.005)
    assert averages["R152x2"] == pytest.approx(94.01, abs=0.01)
    assert max(TABLE6, key=lambda run: run.average).model == "ViT-H/14"


def test_decay_of_bit_in_the_long_run() -> None:
    """Coupled decay through momentum: what a constant parameter loses in a step, once the momentum has built up."""
    optim, velocity = optimizer.bit_sgd(256, 0), 0.0
    for _ in range(500):
        velocity = optim.momentum * velocity + 1e-4  # of a parameter that stays 1
    assert optim.lr * velocity == pytest.approx(optim.lr * optim.weight_decay)


# Scaling: comparing families


def test_claims_of_the_paper_hold_in_its_table() -> None:
    vits, hybrids, resnets = scaling.VIT, scaling.HYBRID, scaling.RESNET
    times = compute_ratio(vits, resnets)
    assert times is not None
    assert 2 < times < 4  # "2 - 4 times less compute"
    assert accuracy_lead(vits, resnets) > 0
    assert accuracy_lead(hybrids, vits, 0.0) > 0.005  # ahead at small budgets,
    assert abs(accuracy_lead(hybrids, vits, 1.0)) < 0.0015  # not at large ones
    assert lead_of_largest(vits, vits) > 0
    panel = paper_panel()
    assert [(line.name, len(line.x)) for line in panel.series] == [("ViT", 6), ("hybrid", 5), ("ResNet", 7)]
    assert [[note for note in line.notes if note] for line in panel.series] == [
        ["B/32", "H/14"],
        ["B/32", "L/16"],
        ["R50x1", "R200x3"],
    ]
    assert panel.series[0].y[0] == pytest.approx(0.925)


def test_families_are_compared_by_hand() -> None:
    """The gap at the common range, 10 to 1000, of which 100 is the middle; compute saved; growth beyond the half; runs
    chosen by their means: what costs more and gives less in the mean does not count, whatever it gives here."""
    ours, theirs = [(10.0, 0.5), (1000.0, 0.7)], [(1.0, 0.1), (10_000.0, 0.9)]
    assert [accuracy_lead(ours, theirs, at) for at in (0.5, 0.0, 1.0)] == pytest.approx(
        [0.6 - 0.5, 0.5 - 0.3, 0.7 - 0.7]
    )
    assert compute_ratio([(1.0, 0.4), (100.0, 0.8)], [(4.0, 0.4), (400.0, 0.8)]) == pytest.approx(4)
    assert compute_ratio([(1.0, 0.4)], [(1.0, 0.5)]) is None
    runs = [(1.0, 0.5), (2.0, 0.9), (4.0, 0.6)]
    assert lead_of_largest(runs, runs) == pytest.approx(-0.3)
    assert lead_of_largest(runs, [(1.0, 0.7), (2.0, 0.6), (4.0, 0.5)]) == pytest.approx(0.1)
    runs = [(1.0, 0.5), (3.0, 0.9), (4.0, 0.6)]
    assert lead_of_largest(runs, runs) == pytest.approx(0.1)  # 3 is more than half of 4
    means = [(1.0, 0.3), (10.0, 0.6), (100.0, 0.2)]
    assert select_front([(1.0, 0.4), (10.0, 0.3), (100.0, 0.9)], means) == [(1.0, 0.4), (10.0, 0.3)]


def test_a_power_law_is_fitted_to_the_front() -> None:
    """Errors of 0.4 at 1 and 0.2 at 100: the error halves with each hundredfold."""
    exponent, factor = scaling.fit_power_law([(1.0, 0.6), (10.0, 1 - 0.4 / 2**0.5), (100.0, 0.8), (50.0, 0.1)])
    assert (exponent, math.exp(factor)) == pytest.approx((-math.log10(2) / 2, 0.4))
    assert scaling.fit_power_law([(1.0, 0.6), (2.0, 0.5)]) == (0.0, pytest.approx(math.log(0.4)))
    panel = scaling.power_law_panel("T", "y", {"ViT": [(1.0, 0.6), (100.0, 0.8)]})
    assert (panel.series[0].y[0], panel.series[0].y[-1]) == pytest.approx((0.6, 0.8))


# Reports of simulated results

YES, NO, OUT = "supported", "contradicted", "not tested"


def of_positions(run: StudyRun) -> float:
    """As in the paper."""
    sign, kind = 1 if run.config.seed % 2 else -1, run.labels["kind"]
    return 0.7 - 0.1 * (kind == "none") + noise(run) + sign * {"1d": 1e-3, "2d": -1e-3}.get(kind, 0.0)


def of_data_size(slopes: dict[tuple[str, str], float]) -> Accuracy:
    """At the least data the ResNet is 5 points ahead; each tenfold brings a model its slope."""

    def accuracy(run: StudyRun) -> float:
        kind = run.labels["family"], run.labels["size"]
        tenfolds = math.log10(run.labels["part"] / 0.01)
        return 0.4 + 0.05 * (kind[0] == "ResNet") + slopes[kind] * tenfolds + noise(run, 0.01)

    return accuracy


def of_head(run: StudyRun) -> float:
    """As in the paper: equal at their best, and GAP falls further at the highest rate."""
    kind, rate = run.labels["kind"], run.labels["rate"]
    best = 0.8 + (1e-3 if kind == "gap" else -1e-3) * (1 if run.config.seed % 2 else -1)
    fall = {5e-4: 0.2, 2e-3: 0.2, 4e-3: 0.2, 8e-3: {"gap": 0.3, "token": 0.1}[kind]}
    fall[2e-3 if kind == "gap" else 4e-3] = 0.0
    return best - fall[rate] + noise(run)


def by_label(label: str, values: Mapping[str, float], size: float = 1e-3) -> Accuracy:
    """The accuracy of each value of a label; of runs without it, 0.9."""
    return lambda run: values.get(run.labels.get(label, ""), 0.9) + noise(run, size)


def of_resolution(run: StudyRun) -> float:
    table = {"interpolated": (0.80, 0.83, 0.84), "fresh": (0.78, 0.79, 0.79)}
    kind = run.labels.get("positions", "")
    return 0.9 if run.init_from is None else table[kind][round(2 * run.labels["factor"]) - 2] + noise(run, 0.01)


def of_scaling(run: StudyRun) -> float:
    """Accuracy rises by 2 points with each doubling of compute."""
    ahead = {"ViT": 0.04, "hybrid": 0.05, "ResNet": 0.0}[run.labels["family"]]
    return 0.2 + ahead + 0.02 * math.log2(exaflops(run.config, 30_000) / 1e-6) + noise(run)


BASE_MACS = shape.variants("small")[0].config.model.forward_macs


def of_shape(run: StudyRun) -> float:
    """Depth brings most."""
    slope = 0.05 if run.labels["dimension"] == "depth" else 0.01
    return 0.5 + slope * math.log(run.config.model.forward_macs / BASE_MACS) + noise(run)


MASKING = {"scratch": 0.30, "scratch-zero": 0.29, "mean-color-50": 0.34, "mean-color-50-zero": 0.32}
MASKING |= {"downsized-50": 0.33, "regression-50": 0.32, "mean-color-15": 0.35, "supervised": 0.38}
of_masking = by_label("variant", MASKING, 0.01)
AXIAL = {model: 0.7 + 0.02 * (model in axial.FORMS.values()) for model in axial.FIG13}
GROWING = of_data_size({("ViT", "small"): 0.1, ("ResNet", "small"): 0.07})


@pytest.mark.parametrize(
    ("name", "accuracy", "expected", "means"),
    [
        ("axial", by_label("model", AXIAL), [YES, YES, OUT] * 2, [0.02] * 6),
        ("positions", of_positions, [YES] * 6, None),
        ("shape", of_shape, [YES] * 8, None),
        ("data-size", GROWING, [YES, YES, OUT] * 2, [0.05, 0.03, -0.02] * 2),
        ("scaling", of_scaling, [OUT, YES, YES], None),
        ("resolution", of_resolution, [YES] * 4, [0.03, 0.04, 0.04, 0.05]),
        ("masking", of_masking, [YES] * 5 + [NO], [0.04, 0.03, 0.03, 0.02, 0.02, -0.01]),
        ("head", of_head, [YES] * 3, None),
    ],
)
def test_verdicts(name: str, accuracy: Accuracy, expected: list[str], means: list[float] | None) -> None:
    """Of results as in the paper, but for the last claim of masking."""
    written = report(name, accuracy, examples=27_000)
    assert verdicts(written) == expected
    assert means is None or measured(written) == pytest.approx(means)


def test_what_is_compared_at_the_papers_scale_alone() -> None:
    assert measured(report("masking", of_masking, scale="paper"))[-1] == pytest.approx(0.04)  # supervised
    table = {("token", 8e-4): 0.6, ("gap", 8e-4): 0.5, ("gap", 3e-4): 0.59}  # the token has one rate, and loses nothing
    table |= {("gap-linear", 8e-4): 0.4, ("gap-linear", 3e-4): 0.58}
    written = report("head", lambda p: table[p.labels["kind"], p.labels["rate"]], scale="paper")
    assert [measured(written)[i] for i in (1, 3)] == pytest.approx([0.09, 0.2])


def test_large_models_are_compared_at_the_papers_scale() -> None:
    slopes = {("ViT", "small"): 0.1, ("ResNet", "small"): 0.07, ("ViT", "large"): 0.12, ("ResNet", "large"): 0.13}
    slopes |= {("ViT", "half"): 0.1, ("ViT", "medium"): 0.1}
    written = report("data-size", of_data_size(slopes), scale="paper", examples=303_000_000)
    first, last = (math.log10(part / 0.01) for part in (data_size.PAPER_PARTS[0], data_size.PAPER_PARTS[-1]))
    small = [0.05 - 0.03 * first, 0.03, 0.03 * last - 0.05]
    large = [0.05 + 0.01 * first, -0.01, -0.01 * last - 0.05]
    assert measured(written) == pytest.approx([*small, *large, 0.02, 0.02], rel=1e-3)


def test_early_stopping_takes_the_best_evaluation() -> None:
    run = data_size.variants("paper")[0]
    records = [
        {"step": 100, "val_accuracy": 0.8, "fewshot_5shot": 0.3},
        {"step": 200, "loss": 0.1},
        {"step": 200, "val_accuracy": 0.7, "fewshot_5shot": 0.5},
    ]
    assert data_size.early_stopped(Result(run, {}, records, 100, run.config.model)) == 0.3


def test_decays_are_chosen_for_each_model_and_part_by_held_out_accuracy() -> None:
    """As if the ViT needed the large decay for 1% of the data, and the test preferred it everywhere."""

    def large(run: StudyRun) -> bool:
        return run.labels["decay"] > 1

    def validation(run: StudyRun) -> float:
        needed = run.labels["family"] == "ViT" and run.labels["part"] == 0.01
        return 0.5 + 0.1 * (large(run) == needed)

    written = report("data-size", lambda point: 0.5 + noise(point) + 0.2 * large(point), validation)
    assert measured(written)[0] == pytest.approx(-0.2)
    assert written["panels"][0]["series"][0]["y"] == pytest.approx([0.7, 0.5, 0.5])


def test_optimizers_are_compared_at_the_best_held_out_rate() -> None:
    """As if the middle rate were the best by held-out accuracy, and the largest one by the test."""
    middle = {"adam": optimizer.ADAM_RATES[1], "sgd": optimizer.bit_sgd(64, 0, optimizer.BIT_RATES[1]).lr}

    def accuracy(run: StudyRun) -> float:
        optim = run.config.optim
        return 0.5 + 0.02 * (optim.name == "adam") + noise(run) + 10 * optim.lr * (optim.lr > middle[optim.name])

    def validation(run: StudyRun) -> float:
        return 0.9 - abs(np.log(run.config.optim.lr / middle[run.config.optim.name])) / 10

    assert measured(report("optimizer", accuracy, validation)) == pytest.approx([0.02, 0.02])


@pytest.mark.parametrize(
    ("gains", "chosen", "differences"),
    [
        ((0.03, 0.04), ("smoothing 0.1", "smoothing 0.1"), [0.03, -0.01]),
        ((-0.03, -0.04), ("decay 0.3", "none"), [-0.01, -0.01]),
    ],
)
def test_regularizers_are_chosen_by_held_out_accuracy(
    gains: tuple[float, float], chosen: tuple[str, str], differences: list[float]
) -> None:
    """As if smoothing gained this much, and the others lost a little; decay 3 is best by the test alone. With little
    data one is chosen even where none gains."""
    by_amount: dict[str, float] = dict(zip(("2%", "50%"), gains, strict=True))

    def validation(run: StudyRun) -> float:
        setting, smoothing = run.labels["setting"], by_amount[run.labels["data"]]
        return 0.8 + noise(run, 0.002) + {"none": 0.0, "smoothing 0.1": smoothing}.get(setting, -0.01)

    def accuracy(run: StudyRun) -> float:
        return validation(run) + 0.1 * (run.labels["setting"] == "decay 3")

    written = report("dropout-decay-smoothing", accuracy, validation)
    assert measured(written) == pytest.approx(differences)
    assert all(name in claim["claim"] for name, claim in zip(chosen, written["claims"], strict=True))


# Recorded and real runs

RERUN = [name for name in STUDIES if json.loads((RECORDED / f"{name}.json").read_text())["scale"] == "small"]
"""Studies recorded at the scale `small`."""


def rounded(value: Any) -> Any:
    """As it is read from a file; numbers to nine digits."""
    return json.loads(json.dumps(value), parse_float=lambda text: f"{float(text):.9g}")


@pytest.mark.parametrize("name", RERUN)
def test_recorded_runs(name: str) -> None:
    """They are the study's, point for point: settings, sizes and lengths are as recorded; and give the same report."""
    study = json.loads((RECORDED / f"{name}.json").read_text())
    known = {run.name: (run, model) for run, model in runs_and_models(name, study["scale"])}
    assert {row["name"] for row in study["points"]} == known.keys()
    runs = []
    for row in study["points"]:
        run, model = known[row["name"]]
        runs.append(Result(run, row["figures"], [], row["examples"], model))
        assert (row["labels"], row["start"]) == (dict(run.labels), run.init_from)
        assert runs[-1].exaflops == pytest.approx(row["exaflops"], rel=1e-9)
    new = build_report(STUDIES[name], study["scale"], Results(tuple(runs)))
    parts = ["claims", "lead", "table"] + ["panels"] * (name != "head")  # whose curves are not recorded with points
    assert {part: rounded(new[part]) for part in parts} == {part: rounded(study[part]) for part in parts}


@pytest.mark.parametrize(
    ("name", "variant"), [("resolution", "pretrained.seed-0"), ("masking", "mean-color-50.seed-0")]
)
def test_points_run(name: str, variant: str, tmp_path: Path) -> None:
    """For two steps on the digits: they and the fine-tunings from them leave the metrics that their reports need."""
    runs = {run.name: run.config for run in STUDIES[name].runs("tiny")}
    tuned = next(run.config for run in STUDIES[name].runs("tiny") if run.init_from == variant)
    short: dict[str, Any] = {"steps": 2, "epochs": None, "batch_size": 8}
    options: dict[str, Any] = {"device": "cpu", "tensorboard": False}
    config = changed(runs[variant], **short)
    finished = pretrain(config, tmp_path / "run", **options)
    assert {"loss", "constant_loss" if config.masking else "accuracy"} <= finished.result["test"].keys()
    assert isinstance(tuned, FinetuneConfig)
    options["image_size"] = tuned.model.image_size
    run = sweep_and_finetune(tmp_path / "run" / "model", changed(tuned, **short), tmp_path / "tuned", **options)
    assert 0 <= run.result["test"]["accuracy"] <= 1
