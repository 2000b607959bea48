"""Fine-tuning in stages: the least-squares head, tested by itself; then from it, unless held-out images object."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from staged_job import tune

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import TrainTransform
from vitlab.evaluation.accuracy import evaluate_checkpoint
from vitlab.evaluation.features import Features
from vitlab.finetuning import head as head_module
from vitlab.finetuning import job as job_module
from vitlab.finetuning import protocol, stages
from vitlab.finetuning.head import LinearStage, check_head, hold_out_indices
from vitlab.finetuning.job import FinetuneJob
from vitlab.finetuning.plan import Plan, Task
from vitlab.finetuning.scores import format_score
from vitlab.finetuning.stages import ALPHAS, head_images
from vitlab.inspection import write_pages
from vitlab.io import write_bytes
from vitlab.recipes import OPEN
from vitlab.recipes.rules import adapt_config
from vitlab.runs import run as run_module
from vitlab.runs.cost import ImageCost
from vitlab.runs.run import RunContext, RunResult, evaluate_split
from vitlab.runs.splits import Splits, load_splits
from vitlab.train.microbatch import StepCost
from vitlab.train.run_files import PAGE
from vitlab.weights import load_metadata, load_model


@pytest.fixture(autouse=True)
def _cache_of_its_own_and_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report's figures take four times as long as these jobs, and have tests of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(write_pages, "inspect_checkpoint", lambda *arguments, **settings: {})


@pytest.mark.usefixtures("pretrained")
def test_both_stages(workdir: Path, staged: FinetuneConfig, tmp_path: Path) -> None:
    log: list[str] = []
    done = tune(workdir, staged, tmp_path / "out", log=log.append)
    result = done.result
    linear, chosen = result["linear"], result["chosen"]
    first = evaluate_checkpoint(tmp_path / "out" / "linear")
    assert first.accuracy == linear["accuracy"] > 0.5
    assert linear["leave_one_out"] == pytest.approx(linear["accuracy"], abs=0.1)
    assert linear["held_out"]["images"] == result["sweep"][0]["images"]
    assert [score["learning_rate"] for score in result["sweep"]] == list(staged.learning_rates)
    assert chosen == "run-0"
    assert result["test"]["accuracy"] == evaluate_checkpoint(tmp_path / "out").accuracy
    best = min(result["sweep"], key=lambda score: score["loss"])
    assert (result["learning_rate"], result["alpha"]) == (best["learning_rate"], best["alpha"])
    assert any("leave-one-out accuracy" in line for line in log)
    (marked,) = [line for line in done.summary().splitlines() if "<- chosen" in line]
    assert f"learning rate {result['learning_rate']:g} " in marked


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("rates", [(3.0, 10.0), (1e30,)], ids=["worse", "diverged"])
def test_where_fine_tuning_does_not_help_the_head_is_the_result(
    rates: tuple[float, ...], workdir: Path, staged: FinetuneConfig, tmp_path: Path
) -> None:
    useless = dataclasses.replace(staged, learning_rates=rates)
    useless = dataclasses.replace(useless, optim=dataclasses.replace(staged.optim, name="sgd", lr=rates[0]))
    done = tune(workdir, useless, tmp_path / "out")
    result, summary = done.result, done.summary()
    assert (result["chosen"], result["runs"], result["alpha"]) == ("linear", [], 0.0)
    assert result["test"]["accuracy"] == result["accuracy_mean"] == result["linear"]["accuracy"]
    assert not (tmp_path / "out" / "run-0").exists()
    assert [line.rpartition("  ")[2] for line in summary.splitlines() if "chosen" in line] == ["<- chosen"]
    assert "least-squares head" in next(line for line in summary.splitlines() if "chosen" in line)
    same = zip(load_model(tmp_path / "out").parameters(), load_model(tmp_path / "out/linear").parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


@pytest.mark.parametrize(("loss", "helps"), [(0.4, True), (0.6, False), (None, False)])
def test_the_held_out_loss_decides(
    workdir: Path, pretrained: RunResult, staged: FinetuneConfig, loss: float | None, helps: bool
) -> None:
    """Of the best rate; None is a training that diverged."""
    job = make_job(workdir, pretrained, staged)
    accuracy = None if loss is None else 0.7
    scores = [{"learning_rate": 1e-3, "accuracy": accuracy, "loss": loss, "alpha": 1.0, "images": 40}]
    scores.append({"learning_rate": 1e-4, "accuracy": None})
    if loss is not None:
        scores.append({"learning_rate": 1e-2, "accuracy": 0.9, "loss": 0.7, "alpha": 1.0, "images": 40})
    assert job._helps(scores, {"accuracy": 0.8, "loss": 0.5, "images": 40}) == helps


def test_the_weights_are_averaged_with_those_of_the_head(
    workdir: Path, pretrained: RunResult, staged: FinetuneConfig, tmp_path: Path
) -> None:
    """As the trial run chose; both runs train the same model, and what is tested is what is saved."""
    job = make_job(workdir, pretrained, staged)
    score = job.score_learning_rate(3e-3, tmp_path / "trial")
    assert score["alpha"] in (*ALPHAS, 1.0)
    assert f"{score['alpha']:.0%}" in format_score(score) or score["alpha"] == 1
    config = job.run_config(3e-3)
    results = [job.train_and_test(config, tmp_path / str(alpha), alpha=alpha) for alpha in (1.0, 0.25)]
    tuned, averaged = (load_model(tmp_path / name).state_dict() for name in ("1.0", "0.25"))
    head = job.linear.classifier().state_dict()
    for name, weights in averaged.items():
        torch.testing.assert_close(weights, 0.75 * head[name] + 0.25 * tuned[name])
    assert not torch.equal(averaged["head.weight"], tuned["head.weight"])
    assert results[1]["test"]["loss"] == evaluate_checkpoint(tmp_path / "0.25").record()["loss"]
    assert results[0]["test"]["loss"] != results[1]["test"]["loss"]
    (tmp_path / "0.25" / "result.json").unlink()  # killed before its last line: tested again
    assert job.train_and_test(config, tmp_path / "0.25", alpha=0.25) == results[1]


@pytest.mark.usefixtures("pretrained")
def test_without_a_trial_run_the_weights_are_averaged_by_a_quarter(
    workdir: Path, staged: FinetuneConfig, tmp_path: Path
) -> None:
    config = dataclasses.replace(staged, learning_rates=(), sweep_steps=None)
    results = [
        tune(workdir, dataclasses.replace(config, alpha=alpha), tmp_path / str(alpha)).result for alpha in (None, 1.0)
    ]
    assert [result["alpha"] for result in results] == [0.25, 1.0]
    assert load_metadata(tmp_path / "None")["alpha"] == 0.25
    card = (tmp_path / "None" / "model" / "README.md").read_text()
    assert "| weights | 25% fine-tuned, 75% those of the initial model" in card
    assert results[0]["test"] != results[1]["test"]
    averaged, tuned = (load_model(tmp_path / name).state_dict() for name in ("None", "1.0"))
    head = load_model(tmp_path / "1.0" / "linear").state_dict()
    for name, weights in averaged.items():
        torch.testing.assert_close(weights, 0.75 * head[name] + 0.25 * tuned[name])


@pytest.mark.parametrize(("losses", "alpha"), [((1.0, 0.5, 2.0, 3.0), 0.5), ((3.0, 2.0, 1.0, 0.5), 1.0)])
def test_the_average_of_least_held_out_loss(
    workdir: Path,
    pretrained: RunResult,
    staged: FinetuneConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    losses: tuple[float, ...],
    alpha: float,
) -> None:
    """`losses` of ALPHAS and of the fine-tuned model itself."""

    def evaluate_split(*args: Any) -> Any:
        evaluation = evaluate(*args)
        loss = averages.pop(0) if averages else losses[-1]
        return dataclasses.replace(evaluation, losses=np.full_like(evaluation.losses, loss))

    averages, evaluate = [losses[-1], *losses[:-1]], job_module.evaluate_split
    monkeypatch.setattr(job_module, "evaluate_split", evaluate_split)
    monkeypatch.setattr(run_module, "evaluate_split", evaluate_split)
    score = make_job(workdir, pretrained, staged).score_learning_rate(3e-3, tmp_path / "trial")
    assert (score["alpha"], score["loss"]) == (alpha, min(losses))


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_held_out_score_of_the_head_is_that_of_its_model(
    workdir: Path, pretrained: RunResult, staged: FinetuneConfig, loss: Any
) -> None:
    """Whatever training minimizes, or it could not be compared with the score of the fine-tuned model."""
    job = make_job(workdir, pretrained, dataclasses.replace(staged, loss=loss))
    rest, _ = hold_out_indices(job.splits.train, staged.held_out, staged.seed)
    evaluation = evaluate_split(job.config, job.linear.classifier(rest), job.sweep_splits.val)
    score = job.linear.score_held_out()
    assert score["accuracy"] == evaluation.accuracy
    assert score["loss"] == pytest.approx(evaluation.metrics()["loss"], rel=1e-4)


def test_representations_in_bfloat16(
    workdir: Path, pretrained: RunResult, staged: FinetuneConfig, tmp_path: Path
) -> None:
    """In the precision of training; the head is as good, and its model and test are in float32."""
    low, full = (
        make_job(workdir, pretrained, dataclasses.replace(staged, precision=precision)).linear
        for precision in ("bfloat16", "float32")
    )
    rounding = np.abs(low.plain.x - full.plain.x).max() / np.abs(full.plain.x).max()
    assert 0 < rounding < 0.03
    assert low.plain_head.accuracy == pytest.approx(full.plain_head.accuracy, abs=0.02)
    test = low.test(tmp_path / "linear")["test"]
    assert test["computed_in"] == "float32"
    assert test["accuracy"] == evaluate_checkpoint(tmp_path / "linear").accuracy


@pytest.mark.usefixtures("pretrained")
def test_without_a_refit_the_best_run_of_the_sweep_is_the_final_one(
    workdir: Path, staged: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its average of weights; killed at any place, the same."""
    config, out = dataclasses.replace(staged, refit=False), tmp_path / "out"
    done = tune(workdir, config, out)
    lr, alpha = done.result["learning_rate"], done.result["alpha"]
    best = next(score for score in done.result["sweep"] if score["learning_rate"] == lr)
    assert (done.result["chosen"], alpha) == ("run-0", best["alpha"])
    trained = load_model(out / f"sweep/lr-{lr}" / "model").state_dict()
    for folder in (out, out / "run-0"):
        assert all(torch.equal(weights, trained[name]) for name, weights in load_model(folder).state_dict().items())
    assert done.result["test"]["accuracy"] == evaluate_checkpoint(out).accuracy
    logs = [(out / f / "metrics.jsonl").read_text() for f in ("run-0", f"sweep/lr-{lr}")]
    assert logs[0] == logs[1] != ""
    monkeypatch.setattr(run_module, "train", lambda *_, **__: pytest.fail("trains again"))
    for killed in ("result.json", "run-0/result.json"):
        (out / killed).unlink()
        assert tune(workdir, config, out).result == done.result
    assert (out / "run-0/metrics.jsonl").read_text() == logs[1]


@pytest.mark.usefixtures("pretrained")
def test_without_a_refit_and_without_a_head(workdir: Path, staged: FinetuneConfig, tmp_path: Path) -> None:
    """The best of several rates from a head of zeros."""
    config = dataclasses.replace(staged, refit=False, head=None, sweep_steps=None)
    result = tune(workdir, config, tmp_path / "out").result
    trained = load_model(tmp_path / f"out/sweep/lr-{result['learning_rate']}" / "model").state_dict()
    assert all(torch.equal(weights, trained[n]) for n, weights in load_model(tmp_path / "out").state_dict().items())
    assert result["test"]["accuracy"] == evaluate_checkpoint(tmp_path / "out").accuracy
    assert len(result["runs"]) == 1


def test_without_a_refit_there_is_one_run_of_a_sweep(staged: FinetuneConfig) -> None:
    for changes in ({"runs": 3}, {"learning_rates": (), "sweep_steps": None}):
        with pytest.raises(ValueError, match="refit=False takes the best run of the sweep"):
            dataclasses.replace(staged, refit=False, **changes)


@pytest.mark.usefixtures("pretrained")
def test_all_runs_have_the_microbatch_of_the_first_start(
    workdir: Path, staged: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though less memory is free when the job resumes."""
    measured = [8, 4]

    def measure(config: TrainConfig, *_: Any) -> ImageCost:
        return ImageCost(StepCost(measured.pop(0), 1e-4, 1e-4, 1e-4, 0, None), config.model.forward_macs)

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(protocol, "measure_cost", measure)
    one = dataclasses.replace(staged, learning_rates=(3e-3,), sweep_steps=None)
    with monkeypatch.context() as patch:
        patch.setattr(FinetuneJob, "train_and_test", stopped)
        with pytest.raises(KeyboardInterrupt):
            tune(workdir, one, tmp_path / "out")
    tune(workdir, one, tmp_path / "out")
    sizes = {path.parent.name: json.loads(path.read_text())["microbatch"] for path in tmp_path.rglob("runtime.json")}
    assert sizes == dict.fromkeys(("out", "lr-0.003", "run-0"), 8)


@pytest.mark.usefixtures("pretrained")
def test_no_runs_end_with_the_head(workdir: Path, staged: FinetuneConfig, tmp_path: Path) -> None:
    alone = dataclasses.replace(staged, runs=0, learning_rates=(), sweep_steps=None)
    done = tune(workdir, alone, tmp_path / "out")
    assert (done.result["sweep"], done.result["chosen"]) == ([], "linear")
    assert "least-squares head" in done.summary()
    assert tune(workdir, alone, tmp_path / "out").result == done.result


def test_the_search_starts_from_a_head_without_the_held_out_images(
    workdir: Path, pretrained: RunResult, staged: FinetuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted: list[int | None] = []
    fit = LinearStage.fit_start

    def recorded(self: LinearStage, indices: Any = None) -> Any:
        fitted.append(None if indices is None else len(indices))
        return fit(self, indices)

    monkeypatch.setattr(LinearStage, "fit_start", recorded)
    job = make_job(workdir, pretrained, staged)
    job.score_learning_rate(1e-3, workdir.parent / "scored")
    assert fitted == [len(job.sweep_splits.train)]
    assert fitted[0] is not None
    assert fitted[0] < len(job.splits.train)


def make_job(workdir: Path, pretrained: RunResult, config: FinetuneConfig) -> FinetuneJob:
    train, test = (load_dataset("digits", split, classes=(3, 4, 5, 6)) for split in ("trainval", "test"))
    data = dataclasses.replace(config.data, name="digits")
    adapted = adapt_config(pretrained.config.model, dataclasses.replace(config, data=data), 4)
    return FinetuneJob(workdir, "", Splits(train, test, test), adapted, RunContext(torch.device("cpu"), False), print)


def test_the_head_of_a_new_model_predicts_as_the_least_squares(
    workdir: Path, pretrained: RunResult, staged: FinetuneConfig
) -> None:
    job = make_job(workdir, pretrained, staged)
    model, head = job.create_model(0).eval(), job.linear.fit_head()
    frozen = job.linear.plain
    with torch.inference_mode():
        logits = model.head(torch.from_numpy(frozen.x))  # pyright: ignore[reportOptionalCall]
    np.testing.assert_allclose(logits, head.logits(frozen.x), rtol=1e-4, atol=1e-4)


def test_the_loss_of_the_head_for_some_images(workdir: Path, pretrained: RunResult, staged: FinetuneConfig) -> None:
    job = make_job(workdir, pretrained, staged)
    whole, part = (job.head_loss(job.config, count) for count in (len(job.splits.train), 40))
    assert whole == job.linear.plain_head.loss < part


@pytest.mark.parametrize(("mirroring_harms", "crops_harm"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("views", [1, 2, 4])
def test_augmentation_that_harms_the_head_is_left_out(
    workdir: Path,
    pretrained: RunResult,
    staged: FinetuneConfig,
    monkeypatch: pytest.MonkeyPatch,
    views: int,
    mirroring_harms: bool,
    crops_harm: bool,
) -> None:
    """Representations are those of the image's class with noise, of mirrored ones with less; harm makes them those of
    the next class."""

    def made_up(self: LinearStage, _indices: Any, _description: str, **options: Any) -> Features:
        labels = self.splits.train.labels
        rng = np.random.default_rng(options.get("epoch", 0))
        transform: TrainTransform | None = options.get("augmentation")
        computed.append(transform)
        harmed = transform is not None and (crops_harm or (mirroring_harms and transform.flip))
        noise = 1.0 if transform is None else 0.3 if transform.flip else 1.0
        x = 2.0 * np.eye(4)[(labels + harmed) % 4] + noise * rng.normal(size=(len(labels), 4))
        return Features(x.astype(np.float32), labels, np.arange(len(labels)), 0)

    computed: list[TrainTransform | None] = []
    monkeypatch.setattr(LinearStage, "_features", made_up)
    data = dataclasses.replace(staged.data, crop="pad", pad=3, flip=True, randaugment_layers=2, randaugment_magnitude=5)
    job = make_job(workdir, pretrained, dataclasses.replace(staged, data=data, head_views=views))
    used, kept = job.linear.augmented
    flips = [transform.flip for transform in computed if transform]
    untested = views == 1
    if crops_harm or (mirroring_harms and untested):
        assert (used, kept) == (dataclasses.replace(staged.data, name="digits"), [])
        assert len(flips) == min(views, 2)
    else:
        assert used == dataclasses.replace(job.config.data, flip=not mirroring_harms)
        assert flips == [True] if untested else [False, True] + [not mirroring_harms] * (views - 2)
        assert len(kept) == views - mirroring_harms
    assert job.run_config(0.5).data == used
    assert job.sweep_config(0.5).data == dataclasses.replace(used, eval_split="held_out")
    assert job.linear.fit_head().accuracy > 0.7


def test_images_that_are_not_augmented_have_no_views(
    workdir: Path, pretrained: RunResult, staged: FinetuneConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LinearStage, "_view", lambda *_: pytest.fail("is computed"))
    job = make_job(workdir, pretrained, dataclasses.replace(staged, head_views=4))
    assert job.linear.augmented == (job.config.data, [])


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("blocks", [0, 1])
def test_only_the_last_blocks_are_trained(blocks: int, workdir: Path, staged: FinetuneConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(staged, trained_blocks=blocks, learning_rates=(), sweep_steps=None)
    tune(workdir, config, tmp_path / "out")
    before, after = load_model(workdir).state_dict(), load_model(tmp_path / "out" / "run-0").state_dict()
    kept = after.keys() - {"head.weight", "head.bias"}
    changed = {name for name in kept if not torch.equal(before[name], after[name])}
    depth = len({name.split(".")[1] for name in before if name.startswith("blocks.")})
    assert any(name.startswith("norm.") for name in changed) == (blocks > 0)
    assert all(name.startswith(("norm.", f"blocks.{depth - 1}.")) for name in changed)
    assert any(name.startswith("blocks.") for name in changed) == (blocks > 0)


@pytest.mark.usefixtures("pretrained")
def test_the_shortest_budget_yields_a_classifier(
    workdir: Path, staged: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head, without a report; the same command makes the report afterwards."""
    config, options, log = staged, {"budget": 1.0, "open_settings": OPEN["staged"]}, []

    def write_page(_folder: Path, _images: Any, out: Path, **_settings: Any) -> dict[str, Any]:
        write_bytes(out / "index.html", b"the page")
        return {}

    monkeypatch.setattr(write_pages, "inspect_checkpoint", write_page)
    done = tune(workdir, config, tmp_path / "out", **options, log=log.append)
    assert done.result["chosen"] == "linear"
    assert (tmp_path / "out" / "model" / "README.md").exists()
    assert not (tmp_path / "out" / PAGE).exists()
    left_out = [line for line in log if line.startswith("left out: ")]
    assert any("fine-tuning" in line and re.search(r"--budget \d+m includes it", line) for line in left_out)
    assert any("the report" in line and re.search(r"--budget \d+m includes it", line) for line in left_out)
    assert log.count("measuring the speed") == 1
    tune(workdir, config, tmp_path / "out", **options)
    assert (tmp_path / "out" / PAGE).exists()


@pytest.mark.usefixtures("pretrained")
def test_a_plan_is_kept_whatever_it_changes(
    workdir: Path, staged: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rates that were given, and a part of the images: the same command resumes."""
    full = len(load_dataset("digits", "trainval", classes=(3, 4, 5, 6)))

    def head_of_half(task: Task, measure: Any, *_: Any) -> Plan:
        planned.append(task.images.train)
        data = dataclasses.replace(task.config.data, subset_fraction=0.5)
        config = dataclasses.replace(task.config, runs=0, learning_rates=(), sweep_steps=None, data=data)
        return task.plan(config, measure(config, False))

    planned, log = [], []
    monkeypatch.setattr(protocol, "fit_budget", head_of_half)
    config, open_settings = staged, ("runs", "data.subset_fraction")
    done = tune(workdir, config, tmp_path / "out", budget=60.0, log=log.append, open_settings=open_settings)
    settings = json.loads((tmp_path / "out" / "config.json").read_text())
    assert settings["examples"] == pytest.approx(full / 2, abs=2)
    assert ["runs", 0, "the time budget"] in settings["reasons"]
    assert any(line.startswith(f"left out: 50% of the {full} training images") for line in log)
    (tmp_path / "out" / "result.json").unlink()
    log.clear()
    resumed = tune(workdir, config, tmp_path / "out", budget=90.0, log=log.append, open_settings=open_settings)
    assert resumed.result == done.result
    assert any("resuming the plan in " in line for line in log)
    assert planned == [full]
    one_rate: dict[str, Any] = {"learning_rates": (), "sweep_steps": None}
    other = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=1e-2), **one_rate)
    with pytest.raises(ValueError, match=r"other settings:\n  optim.lr: 0.003 -> 0.01"):
        tune(workdir, other, tmp_path / "out", budget=60.0, open_settings=open_settings)


@pytest.mark.usefixtures("pretrained")
def test_unreadable_images_may_leave_too_few(workdir: Path, staged: FinetuneConfig, tmp_path: Path) -> None:
    """Of two images of each class none can be held out where one is corrupt."""
    for split, number in (("train", 2), ("test", 1)):
        for name, level in (("bright", 200), ("dark", 40)):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(number):
                Image.new("RGB", (9 + i, 9), (level,) * 3).save(folder / f"{i}.png")
    data = dataclasses.replace(staged.data, name=f"folder:{tmp_path / 'photos'}", classes=None, on_error="skip")
    config = dataclasses.replace(staged, data=data, learning_rates=(3e-3,), sweep_steps=None)
    config = dataclasses.replace(config, batch_size=2, steps=2, held_out=0.5)
    options: dict[str, Any] = {"open_settings": ("runs", "learning_rates")}
    assert tune(workdir, config, tmp_path / "whole", **options).result["sweep"]
    for name in ("bright", "dark"):
        (tmp_path / "photos" / "train" / name / "1.png").write_bytes(b"")
    log: list[str] = []
    result = tune(workdir, config, tmp_path / "out", log=log.append, **options).result
    assert (result["chosen"], result["sweep"]) == ("linear", [])
    assert "2 images are too few to hold 50% of a class out: only the head is fitted" in log
    (tmp_path / "out" / "result.json").unlink()
    assert tune(workdir, config, tmp_path / "out", **options).result == result


def test_too_many_classes_for_the_head(staged: FinetuneConfig) -> None:
    check_head(staged)
    many = dataclasses.replace(staged, model=dataclasses.replace(staged.model, num_classes=20_000))
    with pytest.raises(ValueError, match=r"20,000 classes are too many .*, at most 10,000; give --recipe custom"):
        check_head(many)
    check_head(dataclasses.replace(many, head=None))


@pytest.mark.parametrize(("several", "views", "rows"), [(True, 1, 80), (False, 0, 40)])
def test_memory_limits_views_then_images(
    workdir: Path,
    pretrained: RunResult,
    staged: FinetuneConfig,
    monkeypatch: pytest.MonkeyPatch,
    several: bool,
    views: int,
    rows: int,
) -> None:
    """Of too many images as many of each class are taken."""
    labels = np.repeat(np.arange(4), (50, 10, 10, 10))

    def made_up(self: LinearStage, _indices: Any, _description: str, **_: Any) -> Features:
        x = 2.0 * np.eye(4)[labels] + np.random.default_rng(0).normal(size=(80, 4))
        return Features(x.astype(np.float32), labels, np.arange(80), 0)

    monkeypatch.setattr(LinearStage, "_features", made_up)
    monkeypatch.setattr(head_module, "MAX_ELEMENTS", 5 * (170 if several else 40))
    job = make_job(workdir, pretrained, dataclasses.replace(staged, head_views=4))
    train = Dataset("made", "train", tuple("abcd"), labels, np.zeros((80, 8, 8, 3), np.uint8))
    stage = dataclasses.replace(job.linear, splits=dataclasses.replace(job.splits, train=train))
    assert stage._num_views == views
    chosen = labels[stage._rows()]
    assert len(chosen) == rows
    assert several or np.bincount(chosen).tolist() == [10, 10, 10, 10]


@pytest.mark.parametrize(("limit", "shots"), [(40, 10), (8, 5)])
def test_where_fine_tuning_follows_the_head_takes_few_of_many_images(
    workdir: Path,
    pretrained: RunResult,
    staged: FinetuneConfig,
    monkeypatch: pytest.MonkeyPatch,
    limit: int,
    shots: int,
) -> None:
    """As many of each class, and those held out, which it is scored on; alone it takes all."""
    job = make_job(workdir, pretrained, staged)
    train, everything = job.splits.train, job.linear.plain
    for module in (head_module, stages):
        monkeypatch.setattr(module, "HEAD_IMAGES", limit)
        monkeypatch.setattr(module, "HEAD_SHOTS", 5)
    stage = make_job(workdir, pretrained, staged).linear
    _, held_out = hold_out_indices(train, staged.held_out, staged.seed)
    chosen = stage.plain.indices
    assert set(held_out) <= set(chosen)
    assert np.bincount(train.labels[np.setdiff1d(chosen, held_out)]).tolist() == [shots] * 4
    np.testing.assert_allclose(stage.plain.x, everything.x[chosen], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(stage.plain.labels, train.labels[chosen])
    assert len(chosen) == pytest.approx(head_images(staged, len(train), 4), abs=2)
    assert stage.score_held_out()["images"] == len(held_out)
    one_rate = dataclasses.replace(staged, learning_rates=(), sweep_steps=None)
    assert len(make_job(workdir, pretrained, one_rate).linear.plain.x) == 4 * shots
    alone = dataclasses.replace(one_rate, runs=0)
    assert len(make_job(workdir, pretrained, alone).linear.plain.x) == len(train)


def test_settings_that_contradict(staged: FinetuneConfig) -> None:
    with pytest.raises(ValueError, match=r"alpha=1 has no effect .*; leave it out, or give one rate"):
        dataclasses.replace(staged, alpha=1.0)
    with pytest.raises(ValueError, match=r"alpha=1 has no effect without head"):
        FinetuneConfig(steps=1, alpha=1.0)
    with pytest.raises(ValueError, match="runs=0 tests the least-squares head alone"):
        FinetuneConfig(steps=1, runs=0)
    contradictions: list[dict[str, Any]] = [{"from_scratch": True}, {"fresh_positions": True}, {"head_std": 0.1}]
    for changes in contradictions:
        with pytest.raises(ValueError, match=r"fitted to the checkpoint as it is; .* or give --recipe custom"):
            FinetuneConfig(steps=1, head="least_squares", **changes)


# ---------------------------------------------------------------------------------------- the user's val, and groups


def digits_in_folders(folder: Path, sizes: dict[str, int]) -> str:
    """Digits of two classes as files; "" is no split."""
    source = load_dataset("digits", "train", classes=(3, 4))
    for label in range(2):
        members, start = np.flatnonzero(source.labels == label), 0
        for split, count in sizes.items():
            (folder / split / "ab"[label]).mkdir(parents=True)
            for i in members[start : start + count]:
                Image.fromarray(source.image(int(i))).save(folder / split / "ab"[label] / f"{start // 4}_{i}.png")
                start += 1
    return f"folder:{folder}"


@pytest.fixture
def own(staged: FinetuneConfig, tmp_path: Path) -> FinetuneConfig:
    """One rate, on images of the user's own with train, val and test."""
    name = digits_in_folders(tmp_path / "data", {"train": 20, "val": 8, "test": 8})
    data = dataclasses.replace(staged.data, name=name, classes=None)
    settings: dict[str, Any] = {"steps": 4, "sweep_steps": None}
    return dataclasses.replace(staged, data=data, learning_rates=(3e-3,), **settings)


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("refit", [True, False])
def test_choices_are_made_on_the_val_of_the_user(
    workdir: Path, own: FinetuneConfig, refit: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep and the head that it is compared with see train alone; the final run takes val too, with `refit`."""
    monkeypatch.setattr(FinetuneJob, "_helps", lambda *_: True)
    scored: dict[int, set[str]] = {}
    log: list[str] = []

    def spy(*arguments: Any) -> Any:
        dataset = arguments[2]
        scored.setdefault(len(dataset), set()).update(entry.path for entry in dataset.entries)
        return evaluate_split(*arguments)

    monkeypatch.setattr(run_module, "evaluate_split", spy)
    monkeypatch.setattr(job_module, "evaluate_split", spy)
    done = tune(
        workdir, dataclasses.replace(own, refit=refit), tmp_path / "out", log=log.append, open_settings={"held_out"}
    )
    split = {len(dataset.entries): f"/{dataset.split}/" for dataset in (load_dataset(own.data.name, "val"),)}
    (rate,) = done.result["sweep"]
    assert rate["images"] == done.result["linear"]["held_out"]["images"] == 16
    assert all("/val/" in path or "/test/" in path for path in scored[16])
    assert split == {16: "/val/"}
    assert done.result["linear"]["chosen_on"] == "val"
    assert done.config.held_out == pytest.approx(16 / 56)
    settings = {
        name: json.loads((tmp_path / "out" / name / "config.json").read_bytes()) for name in ("linear", "run-0")
    }
    assert settings["run-0"]["examples"] == (56 if refit else 40)
    (swept,) = (tmp_path / "out" / "sweep").glob("*/config.json")
    assert json.loads(swept.read_bytes())["examples"] == 40
    assert any("choices are made on 16 of the 16 images of val" in line for line in log)
    assert any("least-squares head: val accuracy" in line for line in log)


def test_what_is_held_out_of_given_splits(own: FinetuneConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly val, or of a large one a part, of which the rest is not trained on either."""
    train = load_dataset(own.data.name, "trainval")
    rest, held = hold_out_indices(train, 16 / 56, 0)
    assert {Path(train.path(int(i))).parts[-3] for i in rest} == {"train"}
    assert {Path(train.path(int(i))).parts[-3] for i in held} == {"val"}
    assert (len(rest), len(held)) == (40, 16)
    rest, few = hold_out_indices(train, 6 / 56, 0)
    assert (len(rest), len(few)) == (40, 6)
    assert set(few) < set(held)
    random = load_dataset(own.data.name, "train")
    assert len(hold_out_indices(random, 0.25, 0)[1]) == 10
    monkeypatch.setattr(protocol, "MAX_HELD_OUT", 6)
    splits = load_splits(own.data)
    job = FinetuneJob("", "", splits, own, RunContext(torch.device("cpu")), print)
    job = protocol._with_held_out(job, {"held_out"})
    assert job.config.held_out == pytest.approx(6 / 56)
    assert job.reasons == (("held_out", job.config.held_out, "the user's val split"),)


@pytest.mark.usefixtures("pretrained")
def test_a_fraction_to_hold_out_beside_a_val_is_an_error(workdir: Path, own: FinetuneConfig, tmp_path: Path) -> None:
    given = dataclasses.replace(own, held_out=0.3)
    with pytest.raises(ValueError, match=r"held_out=0.3 has no effect .* own val .* --data.train-split train"):
        tune(workdir, given, tmp_path / "out")
    alone = dataclasses.replace(given, data=dataclasses.replace(given.data, train_split="train"))
    job = FinetuneJob("", "", load_splits(alone.data), alone, RunContext(torch.device("cpu")), print)
    assert protocol._with_held_out(job, set()).config.held_out == 0.3


@pytest.mark.usefixtures("pretrained")
def test_groups_are_whole_in_every_part_of_a_job(workdir: Path, own: FinetuneConfig, tmp_path: Path) -> None:
    """In the test, in the held-out part and in the head's own choices; a later evaluation has the same test."""
    name = digits_in_folders(tmp_path / "one", {"": 40})
    data = dataclasses.replace(own.data, name=name, group_by=r"[ab]/\d+")
    done = tune(workdir, dataclasses.replace(own, data=data, held_out=0.25), tmp_path / "out")
    splits = load_splits(data)
    assert splits.train.groups is not None
    assert splits.test.groups is not None
    assert not set(splits.train.groups) & set(splits.test.groups)
    rest, held = hold_out_indices(splits.train, 0.25, 0)
    assert len(held)
    assert not set(splits.train.groups[rest]) & set(splits.train.groups[held])
    assert done.result["linear"]["chosen_on"] == "leave-one-group-out"
    again = evaluate_checkpoint(tmp_path / "out")
    assert (len(again.labels), again.accuracy) == (len(splits.test), done.result["test"]["accuracy"])
    assert load_metadata(tmp_path / "out")["read"] == {"group_by": r"[ab]/\d+"}
