"""Fine-tuning on other classes at twice the resolution: its settings, the search and the runs."""

import dataclasses
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.config import DataConfig, FinetuneConfig, OptimConfig, TrainConfig
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.models.position import interpolate_positions
from vitlab.models.vit import Model, ViT
from vitlab.pipelines import finetune, pretrain, sweep
from vitlab.pipelines.finetune import (
    Finetuned,
    bit_hyperrule,
    default_image_size,
    saved_choices,
    sweep_and_finetune,
    with_preprocessing,
)
from vitlab.pipelines.pretrain import Outcome
from vitlab.pipelines.sweep import hold_out
from vitlab.preprocessing import Preprocessing
from vitlab.recipes.finetune import own
from vitlab.settings import to_dict
from vitlab.train.workdir import Workdir
from vitlab.weights import load_card, load_model, save_model
from vitlab.weights.google import write_google

S14 = ViTConfig(image_size=224, patch_size=14, width=384, depth=12, heads=6, mlp_dim=1536)


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


@pytest.fixture
def initial_models(monkeypatch: pytest.MonkeyPatch) -> list[ViT]:
    """The models that training starts from."""
    models: list[ViT] = []
    train: Callable[..., Model] = pretrain.train

    def recorded(config: Any, folder: Any, model: ViT, **options: Any) -> Model:
        models.append(ViT(model.config))
        models[-1].load_state_dict(model.state_dict())
        return train(config, folder, model, **options)

    monkeypatch.setattr(pretrain, "train", recorded)
    return models


def tune(checkpoint: Path, config: FinetuneConfig, folder: Path, **options: Any) -> Finetuned:
    return sweep_and_finetune(checkpoint, config, folder, device="cpu", tensorboard=False, **options)


def record_calls(monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[str, int]], list[str]]:
    """(label, images) of every training and the split of every evaluation, from here on."""
    trained: list[tuple[str, int]] = []
    evaluated: list[str] = []
    for module in (pretrain, sweep):

        def train(*args: Any, train: Any = module.train, **options: Any) -> Model:
            trained.append((options["label"], len(options["dataset"])))
            return train(*args, **options)

        def evaluate_split(*args: Any, evaluate_split: Any = module.evaluate_split) -> Any:
            evaluated.append(args[2].split)
            return evaluate_split(*args)

        monkeypatch.setattr(module, "train", train)
        monkeypatch.setattr(module, "evaluate_split", evaluate_split)
    return trained, evaluated


def settings_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that must not depend on how often the work was interrupted."""
    names = ("config.json", "metrics.jsonl", "result.json", "model.safetensors")
    paths = [path for name in names for path in sorted(folder.rglob(name))]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


# -------------------------------------------------------------------------------------------------- the initial model


@pytest.mark.parametrize("kind", ["folder", "google"])
def test_the_initial_model(
    kind: str, pretrained: Outcome, workdir: Path, single: FinetuneConfig, initial_models: list[ViT], tmp_path: Path
) -> None:
    """The checkpoint's, in both formats, with a new zero head and interpolated positions. Dropout is the recipe's."""
    checkpoint = workdir
    if kind == "google":
        checkpoint = tmp_path / "vit.npz"
        write_google(pretrained.model, checkpoint)
    done = tune(checkpoint, dataclasses.replace(single, steps=60), tmp_path / "run")
    (start,) = initial_models
    old, new = pretrained.model.state_dict(), start.state_dict()
    assert new["head.weight"].shape == (4, 16)
    assert not new["head.weight"].any()
    assert old.keys() - new.keys() == {"pre_logits.weight", "pre_logits.bias"}
    table = new["position.table"]
    assert torch.equal(table, interpolate_positions(old["position.table"], (2, 2), (4, 4), 1))
    assert torch.equal(table[0, [1, 4, 13, 16]], old["position.table"][0, 1:])  # corners aligned
    for name in new.keys() - {"head.weight", "head.bias", "position.table"}:
        assert torch.equal(new[name], old[name]), name
    model = pretrained.model.config
    assert isinstance(model, ViTConfig)
    assert done.config.model == start.config == load_model(tmp_path / "run").config
    assert start.config == dataclasses.replace(
        model, image_size=16, num_classes=4, representation_size=None, dropout=0.1, head_bias=0.0
    )
    assert done.result["test"]["accuracy"] > 0.4


@pytest.mark.parametrize("changes", [{"from_scratch": True}, {"fresh_positions": True}, {"head_std": 0.1}])
def test_initial_weights_drawn_by_seed(
    changes: dict[str, Any],
    pretrained: Outcome,
    workdir: Path,
    single: FinetuneConfig,
    initial_models: list[ViT],
    tmp_path: Path,
) -> None:
    """Only what `changes` names is drawn, by each run's seed; the folder's settings name it."""
    two = dataclasses.replace(single, runs=2)
    drawn = dataclasses.replace(two, **changes)
    tune(workdir, dataclasses.replace(two, runs=1), tmp_path / "usual")
    tune(workdir, drawn, tmp_path / "drawn")
    usual, first, second = (model.state_dict() for model in initial_models)
    different = {name for name in first if not torch.equal(first[name], second[name])}
    if "from_scratch" in changes:
        assert {"embedding.weight", "position.table", "blocks.0.mlp.fc1.weight"} <= different
    else:
        (name,) = different
        assert name == ("position.table" if "fresh_positions" in changes else "head.weight")
        assert all(torch.equal(usual[other], first[other]) for other in usual.keys() - {name})
        rows = first[name][:, 1:] if name == "position.table" else first[name]
        std = changes.get("head_std") or pretrained.config.model.position_std  # pyright: ignore[reportAttributeAccessIssue]
        assert 0.5 < rows.std() / std < 2
    if "fresh_positions" in changes:
        assert torch.equal(first["position.table"][:, :1], usual["position.table"][:, :1])  # the class token's
    starts = [settings_of(tmp_path / "drawn" / part)["start"] for part in (".", "run-0", "run-1")]
    assert len(set(starts)) == 1
    assert starts[0] != settings_of(tmp_path / "usual")["start"]
    with pytest.raises(ValueError, match=r"other settings:\n(.*\n)*  start: "):
        tune(workdir, dataclasses.replace(drawn, runs=1), tmp_path / "usual")


@pytest.mark.parametrize(
    "model",
    [
        ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, position="sincos2d"),
        ResNetConfig(image_size=8, body=ResNetBody((1,), width=32, version="v2")),
    ],
)
def test_fresh_positions_of_a_model_without_any(model: ModelConfig, single: FinetuneConfig, tmp_path: Path) -> None:
    save_model(build_model(model), tmp_path / "model")
    plain = dataclasses.replace(single.model, image_size=8, dropout=0.0)
    with pytest.raises(ValueError, match="the checkpoint has none"):
        tune(tmp_path / "model", dataclasses.replace(single, model=plain, fresh_positions=True), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_weights_are_another_run(
    workdir: Path, pretrained: Outcome, single: FinetuneConfig, tmp_path: Path
) -> None:
    """The folder names the weights that it started from, by content and not by path."""
    checkpoint, moved = tmp_path / "vit.npz", tmp_path / "elsewhere" / "vit.npz"
    write_google(pretrained.model, checkpoint)
    tune(checkpoint, single, tmp_path / "run")
    moved.parent.mkdir()
    checkpoint.rename(moved)
    tune(moved, single, tmp_path / "run")
    other = load_model(workdir)
    with torch.no_grad():
        other.get_parameter("norm.bias")[0] += 1e-3
    write_google(other, checkpoint)
    with pytest.raises(ValueError, match=r"holds a run with other settings:\n  start: vit.npz sha256:"):
        tune(checkpoint, single, tmp_path / "run")


@pytest.mark.parametrize("interpolation", [None, "corners"])
def test_positions_are_interpolated_as_by_the_checkpoint(
    interpolation: Any, pretrained: Outcome, single: FinetuneConfig, initial_models: list[ViT], tmp_path: Path
) -> None:
    config = pretrained.model.config
    assert isinstance(config, ViTConfig)
    source = ViT(dataclasses.replace(config, position_interpolation="bicubic"))
    source.load_state_dict(pretrained.model.state_dict())
    save_model(source, tmp_path / "checkpoint")
    done = tune(tmp_path / "checkpoint", single, tmp_path / "out", interpolation=interpolation)
    method = interpolation or "bicubic"
    expected = interpolate_positions(source.state_dict()["position.table"], (2, 2), (4, 4), 1, method)
    assert torch.equal(initial_models[0].state_dict()["position.table"], expected)
    assert isinstance(done.config.model, ViTConfig)
    assert done.config.model.position_interpolation == method


@pytest.mark.parametrize(("image_size", "expected"), [(None, (8, 8)), (12, (12, 12))])
def test_size_and_preprocessing_of_the_checkpoint(
    image_size: int | None, expected: Any, pretrained: Outcome, single: FinetuneConfig, tmp_path: Path
) -> None:
    prepared = Preprocessing(8, 10, interpolation="bicubic")
    save_model(pretrained.model, tmp_path / "checkpoint", extra={"preprocessing": prepared.to_card()})
    config = dataclasses.replace(single, automatic=("image_size", "preprocessing"))
    done = tune(tmp_path / "checkpoint", config, tmp_path / "out", image_size=image_size)
    assert done.config.model.image_hw == expected
    if image_size is None:
        assert Preprocessing.read(load_card(tmp_path / "out"), "card") == prepared


# ------------------------------------------------------------------------------------------------ the search and runs


@pytest.fixture(scope="module")
def searched(
    search: FinetuneConfig, pretrained: Outcome, workdir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """The whole protocol, what it has trained and evaluated, and its messages."""
    folder, log, settings = tmp_path_factory.mktemp("search"), [], []
    with pytest.MonkeyPatch.context() as patch:
        trained, evaluated = record_calls(patch)
        config = dataclasses.replace(search, steps=30)
        done = tune(workdir, config, folder, log=log.append, on_settings=settings.append)
    return {
        "folder": folder, "config": config, "done": done, "log": log, "settings": settings, "trained": trained,
        "evaluated": evaluated,
    }  # fmt: skip


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
    assert load_card(folder)["classes"] == ["3", "4", "5", "6"]
    assert searched["settings"] == [done.config]
    summary = done.summary(folder)
    assert "learning rate 0.1 " in summary
    assert "accuracy over 2 runs" in summary
    (estimate,) = [line for line in log if line.startswith("what this will take:")]
    assert "582 training and 145 test images, 4 classes" in estimate
    assert [line.split(":")[0] for line in log if line.startswith("learning rate")] == [
        "learning rate 1e-06", "learning rate 0.1",
    ]  # fmt: skip


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
    with pytest.raises(ValueError, match=r"(?s)other settings:\n  learning_rates: .*\n  runs: 2 -> 3"):
        tune(workdir, dataclasses.replace(config, learning_rates=(1e-6, 0.1, 0.2), runs=3), folder)


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

    save = ((Workdir, "log_metrics"), (Workdir, "write_result"), (sweep, "save_model"), (pretrain, "save_model"))
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
    evaluate_split, log = sweep.evaluate_split, []

    def diverged(config: TrainConfig, *args: Any) -> Any:
        evaluation = evaluate_split(config, *args)
        return (
            dataclasses.replace(evaluation, losses=evaluation.losses * np.nan) if config.optim.lr == 0.2 else evaluation
        )

    monkeypatch.setattr(sweep, "evaluate_split", diverged)
    config = dataclasses.replace(search, steps=3, runs=1, learning_rates=rates)
    done = tune(workdir, config, tmp_path / "out", log=log.append)
    assert done.result["sweep"][1] == {"learning_rate": rates[1], "accuracy": None}
    assert done.result["learning_rate"] == 0.1
    assert log[-1] == f"learning rate {rates[1]:g}: diverged"
    assert any("not finite at step" in line for line in log) == (cause == "training")
    (tmp_path / "out" / "result.json").unlink()
    trained, _ = record_calls(monkeypatch)
    assert tune(workdir, config, tmp_path / "out").result == done.result
    assert trained == []


@pytest.mark.usefixtures("pretrained")
def test_a_shortened_search(workdir: Path, search: FinetuneConfig, tmp_path: Path) -> None:
    """Warm-up and average span the same share of the steps; a length in epochs counts all of train."""
    optim, log = dataclasses.replace(search.optim, warmup_steps=10), []
    config = dataclasses.replace(search, runs=1, steps=None, epochs=0.55, sweep_steps=4, optim=optim, average_decay=0.9)
    tune(workdir, config, tmp_path, log=log.append)
    assert any(line.startswith("Deviation: the search takes 4 steps per rate") for line in log)
    for part, steps, warmup, decay in (("sweep/lr-0.1", 4, 2, 0.9**5), ("run-0", 20, 10, 0.9)):
        settings = settings_of(tmp_path / part)
        assert settings["optim"]["warmup_steps"] == warmup
        assert settings["average_decay"] == pytest.approx(decay)
        assert json.loads((tmp_path / part / "metrics.jsonl").read_text().splitlines()[-1])["step"] == steps


@pytest.mark.usefixtures("pretrained")
def test_continued_on_another_device(workdir: Path, search: FinetuneConfig, tmp_path: Path) -> None:
    """The micro-batch is no setting of a run: it may be another where memory is another."""
    config = dataclasses.replace(search, steps=4, runs=1)
    tune(workdir, dataclasses.replace(config, microbatch=4), tmp_path)
    (tmp_path / "result.json").unlink()
    assert tune(workdir, config, tmp_path).result["runs"]
    assert settings_of(tmp_path / "run-0")["microbatch"] == 4


# ------------------------------------------------------------------------------------------- images and invalid input


@pytest.fixture
def messy_folder(tmp_path: Path) -> Path:
    """Bright and dark images of many sizes, formats and modes, and six corrupt files."""
    formats = [("jpg", "RGB"), ("png", "RGBA"), ("webp", "RGB"), ("bmp", "L"), ("gif", "P"), ("jpeg", "CMYK")]
    rng = np.random.default_rng(0)
    for name, level in (("dark", 40), ("bright", 210)):
        (tmp_path / "mess" / name).mkdir(parents=True)
        for number in range(24):
            suffix, mode = formats[number % len(formats)]
            side = rng.integers(5, 90, 2)
            gray = np.clip(rng.normal(level, 15, (*side, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(gray).convert(mode).save(tmp_path / "mess" / name / f"{number:02}.{suffix}")
    dark, bright = tmp_path / "mess" / "dark", tmp_path / "mess" / "bright"
    (dark / "empty.png").touch()
    (dark / "text.jpg").write_text("no image at all")
    (dark / "cut.jpg").write_bytes((dark / "00.jpg").read_bytes()[:300])
    (dark / "lost.png").symlink_to("nowhere.png")
    (bright / "cut.webp").write_bytes((bright / "02.webp").read_bytes()[:40])
    (bright / "z.bmp").write_bytes((bright / "03.bmp").read_bytes()[:60])
    (bright / "notes.txt").write_text("not read")
    return tmp_path / "mess"


@pytest.mark.usefixtures("pretrained")
def test_a_folder_that_nobody_prepared(
    workdir: Path, messy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"folder:{messy_folder}"
    data = DataConfig(name=name, train_split="trainval", eval_split="test", crop="none", on_error="skip")
    config = FinetuneConfig(
        model=ViTConfig(image_size=8, patch_size=4),
        data=data,
        optim=OptimConfig(name="sgd", lr=0.1, clip_norm=1.0),
        steps=25,
        batch_size=12,
        precision="float32",
        learning_rates=(0.01, 0.1),
        held_out=0.2,
    )
    trained, _ = record_calls(monkeypatch)
    done = tune(workdir, config, tmp_path / "out")
    result = done.result
    reasons = {Path(file["path"]).relative_to(messy_folder).as_posix(): file["reason"] for file in result["unreadable"]}
    assert list(reasons) == [
        "bright/cut.webp", "bright/z.bmp", "dark/cut.jpg", "dark/empty.png", "dark/lost.png", "dark/text.jpg",
    ]  # fmt: skip
    assert "zero bytes" in reasons["dark/empty.png"]
    assert [row["class"] for row in result["test"]["per_class"]] == ["bright", "dark"]
    assert trained[-1][1] + result["test"]["images"] == 48  # every readable image, in one split or the other
    assert result["test"]["accuracy"] > 0.8
    assert f"{messy_folder / 'dark/cut.jpg'}: {reasons['dark/cut.jpg']}" in done.summary(tmp_path / "out")
    assert tune(workdir, config, tmp_path / "out").result == result
    strict = dataclasses.replace(config, data=dataclasses.replace(data, on_error="raise"))
    with pytest.raises(ValueError, match=r"cannot read the image .*mess/(dark|bright)/"):
        tune(workdir, strict, tmp_path / "strict")


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("wrong", ["checkpoint", "size", "far", "workdir", "rates", "device", "resize"])
def test_cheap_errors_come_before_the_data(
    wrong: str, workdir: Path, search: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finetune, "load_splits", lambda *_: pytest.fail("the data was read"))
    (tmp_path / "something").mkdir()
    (tmp_path / "something" / "else.txt").write_text("else")
    checkpoint, out, size, device = workdir, tmp_path / "out", None, "cpu"
    match wrong:
        case "checkpoint":
            checkpoint, expected = tmp_path / "nothing", "there is nothing at"
        case "size":
            size, expected = 18, r"18x18 cannot be cut into patches of 4x4.* 16, 20"
        case "far":
            search = dataclasses.replace(search, model=dataclasses.replace(search.model, image_size=64))
            expected = r"64 pixels are far from the 8 .* 64 times the patches; .*--image-size 16"
        case "workdir":
            out, expected = tmp_path / "something", "is not empty and holds no run"
        case "rates":
            search = dataclasses.replace(search, optim=dataclasses.replace(search.optim, lr=0.3))
            expected = r"optim.lr is 0.3 and learning_rates are 1e-06, 0.1"
        case "resize":
            search = dataclasses.replace(search, data=dataclasses.replace(search.data, eval_resize=4))
            expected = r"resize=4 must be at least image_size=16"
        case _:
            device, expected = "quantum", "device 'quantum' is unknown"
    with pytest.raises(UserError, match=expected):
        sweep_and_finetune(checkpoint, search, out, tensorboard=False, image_size=size, device=device)
    assert not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------------------- automatic settings


@pytest.mark.parametrize(
    ("examples", "steps", "warmup", "mixup", "batch"),
    [
        (40, 500, 100, 0.0, 32),
        (1_020, 500, 100, 0.0, 64),
        (19_999, 500, 100, 0.0, 512),
        (20_000, 10_000, 500, 0.1, 512),
        (499_999, 10_000, 500, 0.1, 512),
        (500_000, 20_000, 500, 0.1, 512),
    ],
)
def test_bit_hyperrule(examples: int, steps: int, warmup: int, mixup: float, batch: int) -> None:
    config = FinetuneConfig(steps=1, automatic=("steps", "warmup_steps", "mixup", "batch_size"))
    chosen = bit_hyperrule(config, examples)
    assert (chosen.steps, chosen.epochs, chosen.optim.warmup_steps) == (steps, None, warmup)
    assert (chosen.mixup, chosen.batch_size, chosen.automatic) == (mixup, batch, ())


def test_bit_hyperrule_changes_nothing_else() -> None:
    config = FinetuneConfig(steps=50, mixup=0.7, batch_size=24, automatic=("warmup_steps",))
    expected = dataclasses.replace(config, automatic=(), optim=dataclasses.replace(config.optim, warmup_steps=10))
    assert bit_hyperrule(config, 30_000) == expected
    large = dataclasses.replace(own(), model=S14, batch_size=64, automatic=("steps",))
    assert (bit_hyperrule(large, 2_934, "cpu").batch_size, bit_hyperrule(large, 2_934, "cpu").steps) == (64, 500)


@pytest.mark.parametrize(
    ("examples", "batch", "steps", "warmup", "sweep_steps"),
    [(160, 32, 100, 20, 20), (2_934, 32, 500, 100, 100), (50_000, 32, 500, 100, 100)],
)
def test_bit_hyperrule_on_a_cpu(examples: int, batch: int, steps: int, warmup: int, sweep_steps: int) -> None:
    """A ViT-S/14 at 224 pixels would take hours for BiT's own steps; a small model takes BiT's."""
    config = dataclasses.replace(own(), model=S14)
    chosen = bit_hyperrule(config, examples, "cpu")
    assert (chosen.batch_size, chosen.steps, chosen.epochs) == (batch, steps, None)
    assert (chosen.optim.warmup_steps, chosen.sweep_steps) == (warmup, sweep_steps)
    assert bit_hyperrule(config, examples, "cuda").batch_size == min(512, max(32, 2 ** int(math.log2(examples / 8))))
    tiny = dataclasses.replace(config, model=dataclasses.replace(S14, image_size=28, depth=2))
    assert (bit_hyperrule(tiny, examples, "cpu") == bit_hyperrule(tiny, examples, "cuda")) == (examples < 20_000)


@pytest.mark.parametrize(
    ("size", "patch", "device_type", "expected"),
    [(518, 14, "cpu", 224), (384, 16, "cpu", 224), (518, 14, "cuda", 518), (32, 4, "cpu", 32), (510, 30, "cpu", 210)],
)
def test_default_image_size(size: int, patch: int, device_type: str, expected: int) -> None:
    model = dataclasses.replace(S14, image_size=size, patch_size=patch)
    assert default_image_size(model, Preprocessing(size), device_type) == expected
    assert default_image_size(model, Preprocessing(112, 128), device_type) == 112  # at which it is evaluated


@pytest.mark.parametrize(
    ("checkpoint", "resize", "interpolation"),
    [
        (Preprocessing(224, 256, interpolation="bicubic"), 256, "bicubic"),
        (Preprocessing(224, interpolation="lanczos"), None, "lanczos"),
        (Preprocessing.google(224, 256), 256, None),
    ],
)
def test_test_images_are_prepared_as_by_the_checkpoint(
    checkpoint: Preprocessing, resize: int | None, interpolation: str | None
) -> None:
    data = with_preprocessing(own().data, checkpoint)
    assert (data.eval_resize, data.eval_interpolation) == (resize, interpolation)
    assert data.preprocessing(224).describe() == checkpoint.describe()


def test_choices_of_a_run_that_continues_elsewhere(tmp_path: Path) -> None:
    """What data and device have decided stays; what the user sets, and any other folder, decides nothing."""
    config = own()
    data = dataclasses.replace(config.data, eval_resize=256, eval_interpolation="bicubic")
    first = bit_hyperrule(dataclasses.replace(config, model=S14, data=data), 160, "cpu")
    (tmp_path / "config.json").write_text(json.dumps({"command": "finetune", **to_dict(first)}))
    resumed = saved_choices(tmp_path, config)
    assert (resumed.steps, resumed.batch_size, resumed.sweep_steps) == (100, 32, 20)
    assert (resumed.data.eval_resize, resumed.data.eval_interpolation) == (256, "bicubic")
    assert (resumed.optim.warmup_steps, resumed.model.image_size, resumed.automatic) == (20, 224, ())
    assert saved_choices(tmp_path, dataclasses.replace(config, steps=7, automatic=("batch_size",))).steps == 7
    assert saved_choices(tmp_path / "new", config) == config
    (tmp_path / "config.json").write_text("{")
    assert saved_choices(tmp_path, config) == config
