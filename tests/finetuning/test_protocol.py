"""Fine-tuning on other classes at twice the resolution: its settings, the search and the runs."""

import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from staged_job import tune

from vitlab.config import DataConfig, FinetuneConfig, OptimConfig, TrainConfig
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.finetuning import protocol, run_job, sweep
from vitlab.finetuning.held_out import hold_out
from vitlab.finetuning.job import FinetuneJob
from vitlab.finetuning.protocol import default_workdir
from vitlab.finetuning.sweep import RunStart
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig
from vitlab.models.vit import build_model
from vitlab.preprocessing import Preprocessing
from vitlab.recipes.rules import adapt_config
from vitlab.runs import run as run_module
from vitlab.runs.run import RunContext, RunResult
from vitlab.runs.splits import load_splits
from vitlab.train.run_files import PAGE
from vitlab.train.workdir import Workdir
from vitlab.weights import load_metadata, load_model, save_model
from vitlab.weights.google import write_google


@pytest.fixture(scope="module")
def search(config: TrainConfig) -> FinetuneConfig:
    """Two rates, one of which hardly moves, and two runs, on four other digits at 16 pixels."""
    return FinetuneConfig(
        model=dataclasses.replace(config.model, image_size=16, width=8, dropout=0.1),
        data=DataConfig(classes=(3, 4, 5, 6), crop="none", flip=False, train_split="trainval", eval_split="test"),
        optim=OptimConfig(name="sgd", lr=0.1, clip_norm=1.0),
        steps=12,
        batch_size=16,
        precision="float32",
        log_every=4,
        checkpoint_every=5,
        learning_rates=(1e-6, 0.1),
        held_out=0.25,
        runs=2,
    )


@pytest.fixture(scope="module")
def single(search: FinetuneConfig) -> FinetuneConfig:
    """One run of one step, without a search."""
    return dataclasses.replace(search, learning_rates=(), runs=1, steps=1)


def record_calls(monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[str, int]], list[str]]:
    """(label, images) of every training and the split of every evaluation, from here on."""
    trained: list[tuple[str, int]] = []
    evaluated: list[str] = []
    train = run_module.train

    def recorded_train(config: Any, folder: Any, model: Any, dataset: Any, *args: Any, **options: Any) -> Any:
        trained.append((options["description"], len(dataset)))
        return train(config, folder, model, dataset, *args, **options)

    monkeypatch.setattr(run_module, "train", recorded_train)
    for module in (run_module, sweep, run_job):

        def evaluate_split(*args: Any, evaluate_split: Any = module.evaluate_split) -> Any:
            evaluated.append(args[2].split)
            return evaluate_split(*args)

        monkeypatch.setattr(module, "evaluate_split", evaluate_split)
    return trained, evaluated


def settings_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that must not depend on how often the work was interrupted."""
    names = ("config.json", "metrics.jsonl", "result.json", "model.safetensors")
    paths = [path for name in names for path in sorted(folder.rglob(name))]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize("changes", [{"from_scratch": True}, {"fresh_positions": True}, {"head_std": 0.1}])
def test_initial_weights_drawn_by_seed(
    changes: dict[str, Any], workdir: Path, pretrained: RunResult, search: Any
) -> None:
    """Only what `changes` names is drawn, by each run's seed."""
    config, splits = adapt_config(pretrained.config.model, search, 4), load_splits(pretrained.config.data)

    def create(seed: int, **changes: Any) -> dict[str, torch.Tensor]:
        changed = dataclasses.replace(config, **changes)
        job = FinetuneJob(workdir, "", splits, changed, RunContext(torch.device("cpu")), print)
        return RunStart(job, None).create_model(seed).state_dict()

    usual, first, second = create(0), create(0, **changes), create(1, **changes)
    different = {name for name in first if not torch.equal(first[name], second[name])}
    if "from_scratch" in changes:
        assert {"embedding.weight", "position.table", "blocks.0.mlp.fc1.weight"} <= different
        return
    (name,) = different
    assert name == ("position.table" if "fresh_positions" in changes else "head.weight")
    assert all(torch.equal(usual[other], first[other]) for other in usual.keys() - {name})
    rows = first[name][:, 1:] if name == "position.table" else first[name]
    source: Any = pretrained.config.model
    assert 0.5 < rows.std() / changes.get("head_std", source.position_std) < 2
    if "fresh_positions" in changes:
        assert torch.equal(first["position.table"][:, :1], usual["position.table"][:, :1])  # the class token's


RESNET = ResNetConfig(image_size=8, body=ResNetBody((1,), width=32, version="v2"))


@pytest.mark.parametrize(
    ("model", "changes", "options", "word"),
    [
        (
            ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, position="sincos2d"),
            {"fresh_positions": True},
            {},
            "has none",
        ),
        (RESNET, {"fresh_positions": True}, {}, "has none"),
        (RESNET, {}, {"interpolation": "corners"}, "interpolation='corners'"),
    ],
)
def test_a_model_without_positions(
    model: ModelConfig, changes: Any, options: Any, word: str, single: FinetuneConfig, tmp_path: Path
) -> None:
    save_model(build_model(model), tmp_path / "model")
    plain = dataclasses.replace(single, model=dataclasses.replace(single.model, image_size=8, dropout=0.0), **changes)
    with pytest.raises(UserError, match=word):
        tune(tmp_path / "model", plain, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("pretrained")
def test_other_weights_are_another_run(workdir: Path, single: FinetuneConfig, tmp_path: Path) -> None:
    """The folder names the initial weights, by content and not by path, and what is drawn."""
    checkpoint, moved = tmp_path / "vit.npz", tmp_path / "elsewhere" / "vit.npz"
    write_google(load_model(workdir), checkpoint)
    tune(checkpoint, single, tmp_path / "run")
    moved.parent.mkdir()
    checkpoint.rename(moved)
    tune(moved, single, tmp_path / "run")
    for changes in ({"from_scratch": True}, {"fresh_positions": True}, {"head_std": 0.1}):
        with pytest.raises(ValueError, match=r"other settings:\n(.*\n)*  start: "):
            tune(moved, dataclasses.replace(single, **changes), tmp_path / "run")
    other = load_model(workdir)
    with torch.no_grad():
        other.get_parameter("norm.bias")[0] += 1e-3
    write_google(other, checkpoint)
    with pytest.raises(ValueError, match=r"other settings:\n  start: vit.npz sha256:"):
        tune(checkpoint, single, tmp_path / "run")


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize(("image_size", "expected"), [(None, (8, 8)), (12, (12, 12))])
def test_size_and_preprocessing_of_the_checkpoint(
    image_size: int | None, expected: Any, workdir: Path, single: FinetuneConfig, tmp_path: Path
) -> None:
    prepared = Preprocessing(8, 10, interpolation="bicubic")
    save_model(load_model(workdir), tmp_path / "checkpoint", extra={"preprocessing": prepared.to_metadata()})
    open_settings = ("model.image_size", "data.eval_resize", "data.eval_interpolation")
    options: dict[str, Any] = {"image_size": image_size, "open_settings": open_settings}
    done = tune(tmp_path / "checkpoint", single, tmp_path / "out", **options)
    assert done.config.model.image_hw == expected
    if image_size is None:
        assert Preprocessing.read(load_metadata(tmp_path / "out"), "card") == prepared


@pytest.fixture(scope="module")
def searched(
    search: FinetuneConfig, pretrained: RunResult, workdir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The whole protocol, what it has trained and evaluated, and its messages."""
    folder, log = tmp_path_factory.mktemp("search"), []
    with pytest.MonkeyPatch.context() as patch:
        trained, evaluated = record_calls(patch)
        config = dataclasses.replace(search, steps=30)
        done = tune(workdir, config, folder, log=log.append)
    return {"folder": folder, "config": config, "done": done, "log": log, "trained": trained, "evaluated": evaluated}


def test_search_then_runs_on_all_of_train(searched: dict[str, Any]) -> None:
    train = load_dataset("digits", "trainval", classes=(3, 4, 5, 6))
    rest, held_out = hold_out(train, 0.25, 0)
    sizes = [len(rest), len(rest), len(train), len(train)]
    assert searched["trained"] == list(zip(["rate 1e-06", "rate 0.1", "run 0", "run 1"], sizes, strict=True))
    assert searched["evaluated"] == ["held_out"] * 2 + ["test"] * 2
    result = searched["done"].result
    slow, fast = result["sweep"]
    assert (slow["learning_rate"], fast["learning_rate"], result["learning_rate"]) == (1e-6, 0.1, 0.1)
    assert slow["accuracy"] < fast["accuracy"]
    assert slow["images"] == len(held_out)
    accuracies = [run["accuracy"] for run in result["runs"]]
    assert [run["seed"] for run in result["runs"]] == [0, 1]
    assert result["accuracy_mean"] == pytest.approx(statistics.fmean(accuracies))
    assert result["accuracy_sd"] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2**0.5)
    assert result["runs"][0]["loss"] != result["runs"][1]["loss"]


def test_files_and_messages(searched: dict[str, Any]) -> None:
    folder, done, log = searched["folder"], searched["done"], searched["log"]
    parts = [folder / part for part in ("sweep/lr-1e-06", "sweep/lr-0.1", "run-0", "run-1")]
    for part in parts:
        names = {path.name for path in part.iterdir()}
        assert names >= {"config.json", "metrics.jsonl", "result.json"}
        assert ("checkpoints" in names) == ("model" in names) == part.name.startswith("run-")
    assert [settings_of(part)["optim"]["lr"] for part in parts] == [1e-6, 0.1, 0.1, 0.1]
    assert [settings_of(part)["seed"] for part in parts] == [0, 0, 0, 1]
    assert settings_of(folder)["learning_rates"] == [1e-6, 0.1]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = (*done.result["sweep"], *done.result["runs"])
    assert [line["accuracy"] for line in lines] == [row["accuracy"] for row in rows]
    model, first = load_model(folder), load_model(folder / "run-0")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), first.parameters(), strict=True))
    assert load_metadata(folder)["classes"] == ["3", "4", "5", "6"]
    assert not (folder / PAGE).exists()  # the paper's protocol writes none
    (plan,) = [line for line in log if line.startswith("plan:")]
    assert "582 training and 145 test images, 4 classes" in plan
    rates = [line.split(":")[0] for line in log if line.startswith("learning rate")]
    assert rates == ["learning rate 1e-06", "learning rate 0.1"]


def test_a_finished_search_is_only_read(
    searched: dict[str, Any], workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, config, before = searched["folder"], searched["config"], contents(searched["folder"])
    trained, evaluated = record_calls(monkeypatch)
    log: list[str] = []
    assert tune(workdir, config, folder, log=log.append).result == searched["done"].result
    assert (trained, evaluated) == ([], [])
    assert contents(folder) == before
    assert not any("what this will take" in line for line in log)
    assert log.count(settings := f"settings: {folder / 'config.json'}") == 1
    with pytest.raises(ValueError, match=r"(?s)other settings:\n  learning_rates: .*\n  runs: 2 -> 3"):
        tune(workdir, dataclasses.replace(config, learning_rates=(1e-6, 0.1, 0.2), runs=3), folder, log=log.append)
    assert log.count(settings) == 1  # a refused run has none


@pytest.mark.usefixtures("pretrained")
def test_interrupted_anywhere(
    workdir: Path, search: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crashes before records, models and results; what is finished is not trained again."""

    class CrashError(Exception):
        pass

    short = dataclasses.replace(search, steps=6, runs=1, checkpoint_every=2)
    straight = tune(workdir, short, tmp_path / "straight")
    folder, left, crashes = tmp_path / "killed", 0, 0

    def fail_late(function: Any) -> Any:
        def failing(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise CrashError
            return function(*args, **options)

        return failing

    writers = (sweep, run_job, run_module)
    save = ((Workdir, "log"), (Workdir, "write_result"), *((module, "save_model") for module in writers))
    for module, name in save:
        monkeypatch.setattr(module, name, fail_late(getattr(module, name)))
    trained, _ = record_calls(monkeypatch)
    lives = np.random.default_rng(0)
    while True:
        finished = {path.parent.name for path in folder.rglob("result.json")}
        trained.clear()
        left = int(lives.integers(10))  # events of this life
        try:
            done = tune(workdir, short, folder)
            break
        except CrashError:
            crashes += 1
            repeated = {label.replace("rate ", "lr-").replace("run ", "run-") for label, _ in trained}
            assert not repeated & finished
            assert crashes < 60
    assert crashes > 5
    assert done.result == straight.result
    assert contents(folder) == contents(tmp_path / "straight")


@pytest.mark.usefixtures("pretrained")
def test_one_run_without_a_search(workdir: Path, single: FinetuneConfig, tmp_path: Path) -> None:
    """One rate is no search; the run has the folder itself. Several runs have theirs."""
    one = tune(workdir, dataclasses.replace(single, learning_rates=(0.05,)), tmp_path / "one")
    assert one.config.optim.lr == 0.05
    assert one.result.keys() == {"test"}
    assert not list((tmp_path / "one").glob("run-*"))
    two = tune(workdir, dataclasses.replace(single, runs=2), tmp_path / "two").result
    assert (two["sweep"], two["learning_rate"], len(two["runs"])) == ([], single.optim.lr, 2)
    assert not (tmp_path / "two" / "sweep").exists()


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("cause", ["training", "last update"])
def test_a_rate_that_diverges_is_not_chosen(
    cause: str, workdir: Path, search: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = (0.1, 1e30) if cause == "training" else (0.1, 0.2)
    evaluate_split, log = run_module.evaluate_split, []

    def diverged(config: TrainConfig, *args: Any) -> Any:
        evaluation = evaluate_split(config, *args)
        losses = evaluation.losses * (np.nan if config.optim.lr == 0.2 else 1)
        return dataclasses.replace(evaluation, losses=losses)

    monkeypatch.setattr(run_module, "evaluate_split", diverged)
    config = dataclasses.replace(search, steps=3, runs=1, learning_rates=rates)
    done = tune(workdir, config, tmp_path / "out", log=log.append)
    assert done.result["sweep"][1] == {"learning_rate": rates[1], "accuracy": None}
    assert done.result["learning_rate"] == 0.1
    assert f"learning rate {rates[1]:g}: diverged" in log
    assert any("not finite at step" in line for line in log) == (cause == "training")
    (tmp_path / "out" / "result.json").unlink()
    trained, _ = record_calls(monkeypatch)
    assert tune(workdir, config, tmp_path / "out").result == done.result
    assert trained == []


def test_a_shortened_search(workdir: Path, pretrained: RunResult, search: FinetuneConfig) -> None:
    """Warm-up and average span the same share of the steps; a length in epochs counts all of train."""
    splits, optim = load_splits(pretrained.config.data), dataclasses.replace(search.optim, warmup_steps=10)
    steps = round(0.55 * len(splits.train) / 16)
    config = dataclasses.replace(search, steps=None, epochs=0.55, sweep_steps=4, optim=optim, average_decay=0.9)
    job = FinetuneJob(workdir, "", splits, config, RunContext(torch.device("cpu")), print)
    short = RunStart(job, None).sweep_config(0.1)
    assert (short.steps, short.optim.lr, short.optim.warmup_steps) == (4, 0.1, 10 * 4 // steps)
    assert short.average_decay == pytest.approx(0.9 ** (steps / 4))


@pytest.mark.usefixtures("pretrained")
def test_a_folder_with_unreadable_images(workdir: Path, single: FinetuneConfig, tmp_path: Path) -> None:
    for name, level in (("bright", 210), ("dark", 40)):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (20 + number, 90), (level,) * 3).save(tmp_path / "photos" / name / f"{number}.png")
        (tmp_path / "photos" / name / "text.jpg").write_text("no image at all")
    data = dataclasses.replace(single.data, name=f"folder:{tmp_path / 'photos'}", classes=None, on_error="skip")
    config = dataclasses.replace(single, data=data, batch_size=4)
    said: list[str] = []
    done = tune(workdir, config, tmp_path / "out", log=said.append)
    assert any(line.startswith("2 images cannot be read and are skipped, the first ") for line in said)
    paths = [str(tmp_path / "photos" / name / "text.jpg") for name in ("bright", "dark")]
    assert [file["path"] for file in done.result["unreadable"]] == paths
    assert all(f"{path}: " in done.summary() for path in paths)
    assert [row["class"] for row in done.result["test"]["per_class"]] == ["bright", "dark"]
    assert settings_of(tmp_path / "out")["examples"] + done.result["test"]["images"] == 20


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize(
    ("size", "lr", "folder", "message"),
    [
        (18, 0.1, "out", "18x18 .* 16, 20"),
        (None, 0.1, "out", "--image-size 16"),
        (16, 0.1, "full", "holds no run"),
        (16, 0.3, "out", r"optim.lr is 0\.3"),
    ],
)
def test_errors_before_the_data_is_read(
    size: int | None, lr: float, folder: str, message: str, workdir: Path, search: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(protocol, "load_splits", lambda *_: pytest.fail("the data was read"))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "else.txt").write_text("else")
    optim = dataclasses.replace(search.optim, lr=lr)
    config = dataclasses.replace(search, model=dataclasses.replace(search.model, image_size=64), optim=optim)
    with pytest.raises(UserError, match=message):
        tune(workdir, config, tmp_path / folder, image_size=size)
    assert not (tmp_path / "out").exists()


def test_the_folder_of_a_job_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "flowers").mkdir()
    monkeypatch.chdir(tmp_path / "flowers")
    for dataset in ("folder:.", "folder:../flowers", "csv:flowers.csv", "flowers"):
        assert default_workdir(dataset) == Path("runs/finetune-flowers")
