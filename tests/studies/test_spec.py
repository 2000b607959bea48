"""Runs, digests, compute; means and differences over seeds, against values worked out by hand."""

import dataclasses

import pytest

from vitlab.config import FewShotConfig, FinetuneConfig, TrainConfig
from vitlab.models.config import ViTConfig
from vitlab.recipes import tiny
from vitlab.studies import STUDIES
from vitlab.studies.spec import Result, Results, StudyRun, changed, difference, digest, exaflops
from vitlab.studies.statistics import std

pytestmark = pytest.mark.usefixtures("unchecked")
BASE = tiny.digits()


def test_digests_are_the_same_on_every_machine() -> None:
    """Or every finished run would run again."""
    runs = {"a": StudyRun("a", BASE, {}), "b": StudyRun("b", tiny.finetune_digits(), {}, "a")}
    assert [digest(run, runs) for run in runs.values()] == ["813960be", "cacb7ca1"]


def test_a_digest_changes_with_every_setting_and_with_nothing_else() -> None:
    for changes in (
        {"seed": 1},
        {"optim": {"lr": 1e-3}},
        {"model": {"pool": "token"}},
        {"data": {"subset_fraction": 0.1}},
        {"fewshot": FewShotConfig()},
    ):
        assert digest(StudyRun("p", changed(BASE, **changes), {}), {}) != digest(StudyRun("p", BASE, {}), {}), changes
    assert digest(StudyRun("other", tiny.digits(), {"kind": "1d"}), {}) == digest(StudyRun("p", BASE, {}), {})


def test_a_point_changes_with_the_one_that_it_starts_from() -> None:
    tune = tiny.finetune_digits()

    def chain(lr: float) -> dict[str, str]:
        first = StudyRun("a", changed(BASE, optim={"lr": lr}), {})
        runs = [first, StudyRun("b", tune, {}, "a"), StudyRun("c", tune, {}, "b"), StudyRun("d", BASE, {})]
        by_name = {run.name: run for run in runs}
        return {name: digest(run, by_name) for name, run in by_name.items()}

    one, other = chain(1e-3), chain(3e-3)
    assert {name for name in one if one[name] != other[name]} == {"a", "b", "c"}
    assert len(set(one.values())) == 4  # b and c have the same settings and different starts


def test_the_seed_draws_the_images_of_a_part_too() -> None:
    for part, expected in ((0.1, 3), (None, None)):
        config = StudyRun("a", changed(BASE, data={"subset_fraction": part}), {}).with_seed(3).config
        assert (config.seed, config.data.subset_seed) == (3, expected)


def test_compute_of_a_fine_tuning() -> None:
    """Its search and all its runs, of the model that was run."""
    model = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8)
    one = FinetuneConfig(model=model, steps=100, batch_size=10)
    assert exaflops(one, 50) == pytest.approx(6 * model.forward_macs * 1000 / 1e18)
    for changes, steps in (
        ({"learning_rates": (0.1,)}, 100),
        ({"learning_rates": (0.1, 0.2, 0.3), "runs": 3}, 600),
        ({"learning_rates": (0.1, 0.2), "sweep_steps": 25}, 150),
        ({"learning_rates": (0.1, 0.2), "head": "least_squares", "runs": 0}, 0),
    ):
        assert exaflops(changed(one, **changes), 50) == pytest.approx(steps / 100 * exaflops(one, 50))
    start = dataclasses.replace(model, width=16, mlp_dim=32)
    assert Result(StudyRun("b", one, {}, "a"), {}, [], 50, start).exaflops == pytest.approx(
        6 * start.forward_macs * 1000 / 1e18
    )


CONFIG = TrainConfig(model=ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=1, mlp_dim=8), steps=1)


def run(seed: int, value: float, **labels: str | float) -> Result:
    name = "-".join(map(str, [*labels.values(), seed]))
    return Result(StudyRun(name, changed(CONFIG, seed=seed), labels), {"accuracy": value}, [], 100, CONFIG.model)


RUNS = Results(
    (
        run(2, 0.60, kind="1d", at="stem"),
        run(0, 0.64, kind="1d", at="stem"),
        run(1, 0.62, kind="1d", at="stem"),
        run(0, 0.60, kind="1d", at="every"),
        run(0, 0.50, kind="none"),
        run(1, 0.51, kind="none"),
        run(2, 0.52, kind="none"),
    )
)


def test_a_metric_is_of_the_points_with_its_labels_by_seed() -> None:
    values = RUNS.measure("accuracy", kind="1d", at="stem")
    assert values.tolist() == [0.64, 0.62, 0.60]
    assert std(values) == pytest.approx(0.02)  # n - 1: sqrt((0.02^2 + 0.02^2) / 2)
    assert RUNS.measure("accuracy", kind="1d").tolist() == [0.64, 0.60, 0.62, 0.60]
    assert RUNS.measure(lambda result: 2 * result.metrics["accuracy"], kind="1d", at="every").tolist() == [1.2]
    with pytest.raises(ValueError, match="2d"):
        RUNS.measure("accuracy", kind="2d")
    assert RUNS.values("kind") == ["1d", "none"]
    groups = [{"kind": "1d", "at": "stem"}, {"kind": "1d", "at": "every"}, {"kind": "none"}]
    assert [dict(group.labels) for group in RUNS.groups()] == groups
    assert [len(group.runs) for group in RUNS.groups("kind")] == [4, 3]
    assert [len(group.runs) for group in RUNS.groups("kind", "at")] == [3, 1]


def test_the_best_is_that_of_the_mean() -> None:
    """`a` is best at 0.2 although one seed is better at 0.1; of equal ones the first."""
    table = {("a", 0.1): (0.6, 0.2), ("a", 0.2): (0.5, 0.5), ("b", 0.1): (0.3, 0.3), ("b", 0.2): (0.3, 0.3)}
    runs = [run(s, v[s], kind=kind, rate=rate) for (kind, rate), v in table.items() for s in (0, 1)]
    assert Results(tuple(runs)).best("rate", "accuracy", kind="a") == 0.2
    assert Results(tuple(runs)).best("rate", "accuracy", kind="b") == 0.1


@pytest.mark.parametrize("name", STUDIES)
def test_tiny_is_small_in_short(name: str) -> None:
    """One seed on digits, a twentieth of the steps, and nothing else."""
    tiny_runs = STUDIES[name].runs("tiny")
    small = STUDIES[name].runs("small", seeds=1)[: len(tiny_runs)]  # data-size has a second data set
    assert [run.name for run in tiny_runs] == [run.name.replace(run.config.data.name, "digits") for run in small]
    for one, other in zip(tiny_runs, small, strict=True):
        lengths = [config.total_steps(10_000) for config in (one.config, other.config)]
        assert lengths[0] == pytest.approx(lengths[1] / 20, abs=1)
        same = {"steps": 1, "epochs": None, "eval_every": None, "optim": {"warmup_steps": 0}, "data": {"name": "any"}}
        assert changed(one.config, **same) == changed(other.config, **same)


def test_a_difference_is_paired_by_seed() -> None:
    """And a difference of differences: `a` rises by 0.2, `b` by 0.13 and by 0.10 with one seed."""
    measured = RUNS.over_seeds(difference("accuracy", {"kind": "1d"}, {"kind": "none"}))
    # seed 0: (0.64 + 0.60) / 2 - 0.50; seed 1: 0.62 - 0.51; seed 2: 0.60 - 0.52
    assert (measured.mean, measured.pairs) == (pytest.approx(0.31 / 3), 3)
    values = {("a", 0.0): (0.3, 0.3, 0.3), ("a", 1.0): (0.5, 0.5, 0.5)}
    values |= {("b", 0.0): (0.35, 0.35, 0.35), ("b", 1.0): (0.48, 0.48, 0.45)}
    runs = [run(seed, v[seed], kind=kind, part=part) for (kind, part), v in values.items() for seed in range(3)]
    groups = {(kind, part): {"kind": kind, "part": part} for kind, part in values}
    growth = difference("accuracy", (groups["a", 1.0], groups["b", 0.0]), (groups["a", 0.0], groups["b", 1.0]))
    measured = Results(tuple(runs)).over_seeds(growth)
    assert (measured.mean, measured.pairs) == (pytest.approx(0.08), 3)
