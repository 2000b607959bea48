"""A checkpoint carried to other classes at twice the resolution, from both formats; the search and the runs."""

import dataclasses
import itertools
import json
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
from vitlab.pipelines import finetune as room
from vitlab.pipelines import pretrain as run
from vitlab.pipelines.finetune import Finetuned, finetune, sweep_and_finetune
from vitlab.pipelines.pretrain import Outcome
from vitlab.pipelines.sweep import best_rate, hold_out
from vitlab.preprocessing import Preprocessing
from vitlab.recipes.finetune import own
from vitlab.train.workdir import Workdir
from vitlab.weights import load_card, load_model, save_model
from vitlab.weights.google import write_google


@pytest.fixture
def task(config: TrainConfig) -> TrainConfig:
    """Four other digits at 16 pixels; its model is a stand-in."""
    return TrainConfig(
        model=dataclasses.replace(config.model, image_size=16, width=8, dropout=0.1),
        data=DataConfig(classes=(3, 4, 5, 6), crop="none", flip=False),
        optim=OptimConfig(name="sgd", lr=0.1, clip_norm=1.0),
        steps=60,
        batch_size=16,
        precision="float32",
    )


@pytest.fixture(params=["folder", "google"])
def checkpoint(request: pytest.FixtureRequest, pretrained: Outcome, workdir: Path, tmp_path: Path) -> Path:
    """The same model in our format and in Google's."""
    if request.param == "folder":
        return workdir
    write_google(pretrained.model, tmp_path / "vit.npz")
    return tmp_path / "vit.npz"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Model]:
    """The models that training started from."""
    seen: list[Model] = []
    train: Callable[..., Model] = run.train

    def watched(config: Any, folder: Any, model: ViT, **options: Any) -> Model:
        seen.append(ViT(model.config))
        seen[-1].load_state_dict(model.state_dict())
        return train(config, folder, model, **options)

    monkeypatch.setattr(run, "train", watched)
    return seen


def carry(checkpoint: Path, config: TrainConfig, folder: Path, image_size: int | None = None) -> Outcome:
    return finetune(checkpoint, config, folder, image_size=image_size, device="cpu", tensorboard=False)


def test_carried_to_other_classes_at_twice_the_size(
    checkpoint: Path, task: TrainConfig, pretrained: Outcome, begun: list[ViT], tmp_path: Path
) -> None:
    outcome = carry(checkpoint, task, tmp_path / "run")
    (start,) = begun
    old, new = pretrained.model.state_dict(), start.state_dict()
    assert new["head.weight"].shape == (4, 16)
    assert not new["head.weight"].any()
    assert not new["head.bias"].any()
    assert old.keys() - new.keys() == {"pre_logits.weight", "pre_logits.bias"}
    assert old["position.table"].shape == (1, 5, 16)
    expected = interpolate_positions(old["position.table"], (2, 2), (4, 4), 1)
    assert torch.equal(new["position.table"], expected)
    assert torch.equal(new["position.table"][0, [1, 4, 13, 16]], old["position.table"][0, 1:])  # corners aligned
    for name in new.keys() - {"head.weight", "head.bias", "position.table"}:
        assert torch.equal(new[name], old[name]), name
    assert outcome.test.classes == ("3", "4", "5", "6")
    assert outcome.test.accuracy > 0.4
    assert load_model(tmp_path / "run").config == outcome.model.config == outcome.config.model


def test_the_model_is_the_checkpoints(checkpoint: Path, task: TrainConfig, config: TrainConfig, tmp_path: Path) -> None:
    """Only resolution and dropout are the recipe's, and the outputs are the data set's classes."""
    short = dataclasses.replace(task, steps=1)
    model = dataclasses.replace(
        config.model, image_size=16, num_classes=4, representation_size=None, dropout=0.1, head_bias=0.0
    )
    assert carry(checkpoint, short, tmp_path / "own").config == dataclasses.replace(short, model=model)
    larger = dataclasses.replace(model, image_size=24)
    assert carry(checkpoint, short, tmp_path / "24", 24).config == dataclasses.replace(short, model=larger)


def test_settings_are_told_once_complete(workdir: Path, pretrained: Outcome, task: TrainConfig, tmp_path: Path) -> None:
    told: list[TrainConfig] = []
    config = dataclasses.replace(task, steps=1)
    outcome = finetune(workdir, config, tmp_path, device="cpu", tensorboard=False, on_settings=told.append)
    assert told == [outcome.config]
    widths = [
        each.width for each in (told[0].model, pretrained.model.config, config.model) if isinstance(each, ViTConfig)
    ]
    assert widths[0] == widths[1] != widths[2]


@pytest.mark.usefixtures("pretrained")
def test_size_that_the_patch_does_not_divide(workdir: Path, task: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"image size 18x18 cannot be cut into patches of 4x4.* the nearest: 16, 20"):
        carry(workdir, task, tmp_path, 18)


def test_as_many_classes_still_need_a_new_head(
    workdir: Path, pretrained: Outcome, task: TrainConfig, begun: list[ViT], tmp_path: Path
) -> None:
    three = dataclasses.replace(task, data=dataclasses.replace(task.data, classes=(7, 8, 9)), steps=1)
    assert pretrained.model.config.num_classes == 3
    carry(workdir, three, tmp_path)
    assert begun[0].head is not None
    assert not begun[0].head.weight.any()


@pytest.mark.usefixtures("pretrained")
def test_started_again(workdir: Path, task: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = carry(workdir, task, tmp_path)
    monkeypatch.setattr(run, "train", None)
    assert carry(workdir, task, tmp_path).result == first.result


def test_other_weights_are_another_run(workdir: Path, pretrained: Outcome, task: TrainConfig, tmp_path: Path) -> None:
    """The folder remembers the weights that it started from, by what they are and not by their place."""
    write_google(pretrained.model, tmp_path / "vit.npz")
    short = dataclasses.replace(task, steps=1)
    carry(tmp_path / "vit.npz", short, tmp_path / "run")
    start = json.loads((tmp_path / "run" / "config.json").read_text())["start"]
    assert start.startswith("vit.npz sha256:")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "vit.npz").rename(tmp_path / "elsewhere" / "vit.npz")
    carry(tmp_path / "elsewhere" / "vit.npz", short, tmp_path / "run")
    other = load_model(workdir)
    assert isinstance(other, ViT)
    with torch.no_grad():
        other.norm.bias[0] += 1e-3
    write_google(other, tmp_path / "vit.npz")
    with pytest.raises(ValueError, match=r"holds a run with other settings:\n  start: vit.npz sha256:"):
        carry(tmp_path / "vit.npz", short, tmp_path / "run")


@pytest.mark.usefixtures("pretrained")
def test_far_resolution_must_be_asked_for(workdir: Path, task: TrainConfig, tmp_path: Path) -> None:
    """A checkpoint of 8 pixels under a recipe of 64 would have 64 times the patches."""
    far = dataclasses.replace(task, model=dataclasses.replace(task.model, image_size=64))
    with pytest.raises(ValueError, match=r"64 pixels are far from the 8 .* 64 times the patches; .*--image-size 16"):
        carry(workdir, far, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    asked = carry(workdir, dataclasses.replace(far, steps=1), tmp_path / "asked", image_size=64)
    assert asked.model.config.grid == (16, 16)


# -------------------------------------------------------------------------------------------- the whole protocol


@pytest.fixture
def whole(task: TrainConfig) -> FinetuneConfig:
    """Two rates, one of which hardly moves, and two runs, on the four digits."""
    settings = {field.name: getattr(task, field.name) for field in dataclasses.fields(TrainConfig)}
    data = dataclasses.replace(task.data, train_split="trainval", eval_split="test")
    return FinetuneConfig(
        **settings | {"data": data, "steps": 12, "log_every": 4, "checkpoint_every": 5},
        learning_rates=(1e-6, 0.1),
        held_out=0.25,
        runs=2,
    )


@pytest.fixture
def said() -> list[str]:
    return []


def protocol(checkpoint: Path, config: FinetuneConfig, folder: Path, **options: Any) -> Finetuned:
    return sweep_and_finetune(checkpoint, config, folder, device="cpu", tensorboard=False, **options)


def watch(monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[str, int]], list[str]]:
    """What is trained (label, images) and what is judged on (split), from here on."""
    trained: list[tuple[str, int]] = []
    judged: list[str] = []
    for module in (run, room):
        train, evaluate_split = module.train, module.evaluate_split

        def watched_train(*given: Any, train: Any = train, **options: Any) -> Model:
            trained.append((options["label"], len(options["dataset"])))
            return train(*given, **options)

        def watched_judge(*given: Any, evaluate_split: Any = evaluate_split) -> Any:
            judged.append(given[2].split)
            return evaluate_split(*given)

        monkeypatch.setattr(module, "train", watched_train)
        monkeypatch.setattr(module, "evaluate_split", watched_judge)
    return trained, judged


def contents(folder: Path) -> dict[str, bytes]:
    """Every file that must not depend on how often the work was interrupted."""
    names = ("config.json", "metrics.jsonl", "result.json", "model.safetensors")
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for name in names for path in sorted(folder.rglob(name))
    }


@pytest.mark.usefixtures("pretrained")
def test_search_then_runs_on_all_of_train(
    workdir: Path, whole: FinetuneConfig, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained, judged = watch(monkeypatch)
    told: list[TrainConfig] = []
    longer = dataclasses.replace(whole, steps=60)
    done = protocol(workdir, longer, tmp_path / "out", on_settings=told.append, log=said.append)
    train = load_dataset("digits", "trainval", classes=(3, 4, 5, 6))
    rest, held = hold_out(train, 0.25, 0)
    assert trained == [("rate 1e-06", len(rest)), ("rate 0.1", len(rest)), ("run 0", len(train)), ("run 1", len(train))]
    assert judged == ["held_out"] * 2 + ["test"] * 2  # once each
    assert told == [done.config]
    result = done.result
    slow, fast = result["sweep"]
    assert (slow["learning_rate"], fast["learning_rate"], result["learning_rate"]) == (1e-6, 0.1, 0.1)
    assert slow["accuracy"] < fast["accuracy"]
    assert slow["images"] == len(held)
    scored = [line.split(":")[0] for line in said if line.startswith("learning rate")]
    assert scored == ["learning rate 1e-06", "learning rate 0.1"]
    accuracies = [one["accuracy"] for one in result["runs"]]
    assert [one["seed"] for one in result["runs"]] == [0, 1]
    assert result["accuracy_mean"] == pytest.approx(statistics.fmean(accuracies))
    assert result["accuracy_sd"] == pytest.approx(abs(accuracies[0] - accuracies[1]) / 2**0.5)
    assert result["runs"][0]["loss"] != result["runs"][1]["loss"]
    assert len(result["test"]["per_class"]) == 4


@pytest.mark.usefixtures("pretrained")
def test_from_scratch_starts_from_fresh_weights_of_each_seed(
    workdir: Path, whole: FinetuneConfig, begun: list[Model], tmp_path: Path
) -> None:
    control = dataclasses.replace(whole, learning_rates=(0.1,), from_scratch=True)
    protocol(workdir, control, tmp_path / "out")
    trained = load_model(workdir).state_dict()["blocks.0.mlp.fc1.weight"]
    first, second = (model.state_dict()["blocks.0.mlp.fc1.weight"] for model in begun)
    assert begun[0].config == begun[1].config
    assert not torch.equal(first, second)
    assert not torch.equal(first, trained)
    assert "from scratch" in json.loads((tmp_path / "out" / "run-1" / "config.json").read_text())["start"]


def test_fresh_positions_are_drawn_by_each_seed(
    workdir: Path, pretrained: Outcome, whole: FinetuneConfig, begun: list[Model], tmp_path: Path
) -> None:
    """At the new grid; the class token's row and all other weights are the checkpoint's, and the folder tells."""
    usual = dataclasses.replace(whole, learning_rates=(0.1,), steps=1)
    fresh = dataclasses.replace(usual, fresh_positions=True)
    protocol(workdir, usual, tmp_path / "usual")
    protocol(workdir, fresh, tmp_path / "fresh")
    old, (kept, _, first, second) = pretrained.model.state_dict(), [model.state_dict() for model in begun]
    assert torch.equal(kept["position.table"], interpolate_positions(old["position.table"], (2, 2), (4, 4), 1))
    tables = [model["position.table"] for model in (kept, first, second)]
    for one, two in itertools.combinations(tables, 2):
        assert torch.equal(one[:, :1], two[:, :1])
        assert (one[:, 1:] != two[:, 1:]).all()
    config = begun[0].config
    assert isinstance(config, ViTConfig)
    assert 0.5 < first["position.table"][:, 1:].std() / config.position_std < 2
    for name in kept.keys() - {"position.table"}:
        assert torch.equal(kept[name], first[name]), name
        assert torch.equal(kept[name], second[name]), name
    for part in (".", "run-0", "run-1"):
        settings = json.loads((tmp_path / "fresh" / part / "config.json").read_text())
        assert settings["start"].endswith(", fresh positions")
        assert not json.loads((tmp_path / "usual" / part / "config.json").read_text())["start"].endswith("positions")
    for folder, other in (("usual", fresh), ("fresh", usual)):
        with pytest.raises(ValueError, match=r"other settings:\n  fresh_positions: .*\n  start: .*fresh positions"):
            protocol(workdir, other, tmp_path / folder)
        single = dataclasses.replace(other, runs=1)
        with pytest.raises(ValueError, match=r"other settings:\n  start: .*fresh positions"):
            protocol(workdir, single, tmp_path / folder / "run-0")


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        (ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, position="none"), "'none'"),
        (
            ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, position="sincos2d"),
            "'sincos2d'",
        ),
        (ResNetConfig(image_size=8, body=ResNetBody((1,), width=32, version="v2")), "a ResNet"),
    ],
)
def test_fresh_positions_of_a_model_without_any(
    model: ModelConfig, kind: str, whole: FinetuneConfig, tmp_path: Path
) -> None:
    save_model(build_model(model), tmp_path / "model")
    plain = dataclasses.replace(whole.model, image_size=8, dropout=0.0)
    fresh = dataclasses.replace(whole, model=plain, fresh_positions=True)
    with pytest.raises(ValueError, match=f"the checkpoint has none .*{kind}"):
        protocol(tmp_path / "model", fresh, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("from_scratch", [False, True])
def test_a_head_that_starts_wide(
    from_scratch: bool, workdir: Path, whole: FinetuneConfig, begun: list[Model], tmp_path: Path
) -> None:
    """Drawn by each run's seed; all else starts as with a head of zeros, and the folder tells."""
    zero = dataclasses.replace(whole, learning_rates=(0.1,), steps=1, from_scratch=from_scratch)
    wide = dataclasses.replace(zero, head_std=0.1)
    protocol(workdir, zero, tmp_path / "zero")
    protocol(workdir, wide, tmp_path / "wide")
    kept, other, first, second = [model.state_dict() for model in begun]
    assert not kept["head.weight"].any()
    assert 0.05 < first["head.weight"].std() < 0.2
    assert not torch.equal(first["head.weight"], second["head.weight"])
    for old, new in ((kept, first), (other, second)):
        assert all(torch.equal(old[name], new[name]) for name in kept.keys() - {"head.weight"})
    for part in (".", "run-0", "run-1"):
        settings = json.loads((tmp_path / "wide" / part / "config.json").read_text())
        assert settings["start"].endswith(", head of sd 0.1")
    single = dataclasses.replace(zero, runs=1)
    with pytest.raises(ValueError, match=r"other settings:\n  start: .*head of sd"):
        protocol(workdir, single, tmp_path / "wide" / "run-0")


@pytest.mark.usefixtures("pretrained")
def test_fresh_positions_are_no_part_of_a_plain_run(workdir: Path, whole: FinetuneConfig, tmp_path: Path) -> None:
    single = dataclasses.replace(whole, learning_rates=(), runs=1, fresh_positions=True)
    with pytest.raises(ValueError, match="fresh_positions, head_std, automatic, are for sweep_and_finetune"):
        finetune(workdir, single, tmp_path / "out")


@pytest.mark.usefixtures("pretrained")
def test_what_the_whole_leaves(workdir: Path, whole: FinetuneConfig, tmp_path: Path) -> None:
    done = protocol(workdir, whole, tmp_path / "out")
    parts = ["sweep/lr-1e-06", "sweep/lr-0.1", "run-0", "run-1"]
    for part in parts:
        names = {path.name for path in (tmp_path / "out" / part).iterdir()}
        assert names >= {"config.json", "metrics.jsonl", "result.json"}
        assert ("checkpoints" in names) == part.startswith("run-")  # those of the search are of no use any more
    settings = [json.loads((tmp_path / "out" / part / "config.json").read_text()) for part in parts]
    best = best_rate(done.result["sweep"])
    assert [each["optim"]["lr"] for each in settings] == [1e-6, 0.1, best, best]
    assert [each["seed"] for each in settings] == [0, 0, 0, 1]
    assert {each["steps"] for each in settings} == {12}
    outer = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (outer["learning_rates"], outer["held_out"], outer["runs"]) == ([1e-6, 0.1], 0.25, 2)
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [line["accuracy"] for line in lines] == [
        one["accuracy"] for one in (*done.result["sweep"], *done.result["runs"])
    ]
    model, first = load_model(tmp_path / "out"), load_model(tmp_path / "out" / "run-0")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), first.parameters(), strict=True))
    assert load_card(tmp_path / "out")["classes"] == ["3", "4", "5", "6"]
    assert not (tmp_path / "out" / "sweep" / "lr-0.1" / "model").exists()
    lines = done.summary(tmp_path / "out").splitlines()
    taken = [line for line in lines if line.endswith("  <- chosen")]
    assert len(taken) == 1
    assert taken[0].startswith(f"learning rate {best:<6g} ")
    assert "% of 144 held-out images right, loss " in taken[0]
    assert any(line.startswith("accuracy over 2 runs: ") and " +- " in line for line in lines)
    assert lines[-1].startswith(f"model: {tmp_path / 'out' / 'model'}")


@pytest.mark.usefixtures("pretrained")
def test_interrupted_anywhere_and_started_again(
    workdir: Path, whole: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crashes before each of its records, checkpoints, models and results; what has ended is not trained again."""

    class CrashError(Exception):
        pass

    short = dataclasses.replace(whole, steps=6, runs=1, checkpoint_every=2)
    quiet = protocol(workdir, short, tmp_path / "quiet")
    folder, left, crashed = tmp_path / "killed", 0, 0

    def fail_late(function: Any) -> Any:
        def failing(*given: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise CrashError
            return function(*given, **options)

        return failing

    for owner, name in ((Workdir, "log_metrics"), (Workdir, "write_result"), (room, "save_model"), (run, "save_model")):
        monkeypatch.setattr(owner, name, fail_late(getattr(owner, name)))
    trained, _ = watch(monkeypatch)
    lives = np.random.default_rng(0)
    while True:
        ended = {path.parent.name for path in folder.rglob("result.json")}
        trained.clear()
        left = int(lives.integers(10))  # events of this life
        try:
            done = protocol(workdir, short, folder)
        except CrashError:
            crashed += 1
            again = {label.replace("rate ", "lr-").replace("run ", "run-") for label, _ in trained}
            assert not again & ended
            assert crashed < 60
        else:
            break
    assert crashed > 5
    assert done.result == quiet.result
    assert contents(folder) == contents(tmp_path / "quiet")
    assert (folder / "result.json").read_bytes() == (tmp_path / "quiet" / "result.json").read_bytes()


@pytest.mark.usefixtures("pretrained")
def test_started_again_when_all_has_ended(
    workdir: Path, whole: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = dataclasses.replace(whole, steps=2)
    first, before = protocol(workdir, short, tmp_path / "out"), contents(tmp_path / "out")
    trained, judged = watch(monkeypatch)
    again = protocol(workdir, short, tmp_path / "out")
    assert (trained, judged) == ([], [])
    assert again.result == first.result
    assert again.summary(tmp_path) == first.summary(tmp_path)
    assert contents(tmp_path / "out") == before
    other = dataclasses.replace(short, learning_rates=(1e-6, 0.1, 0.2), runs=3)
    with pytest.raises(
        ValueError, match=r"(?s)other settings:\n  learning_rates: \[1e-06, 0.1\] -> .*\n  runs: 2 -> 3"
    ):
        protocol(workdir, other, tmp_path / "out")


@pytest.mark.usefixtures("pretrained")
def test_one_run_without_search_has_the_folder_for_itself(
    workdir: Path, whole: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rate is no search; the run is the one that `finetune` makes."""
    one = dataclasses.replace(whole, steps=2, learning_rates=(0.05,), runs=1)
    done = protocol(workdir, one, tmp_path / "whole")
    assert done.config.optim.lr == 0.05
    alone = carry(workdir, dataclasses.replace(one.single(0.05)), tmp_path / "alone")
    assert done.result == alone.result == {"test": alone.test.record()}
    assert contents(tmp_path / "whole") == contents(tmp_path / "alone")
    assert not list((tmp_path / "whole").glob("run-*"))
    trained, judged = watch(monkeypatch)
    assert protocol(workdir, one, tmp_path / "whole").result == done.result
    assert (trained, judged) == ([], [])


@pytest.mark.usefixtures("pretrained")
def test_runs_without_search_have_no_sweep(workdir: Path, whole: FinetuneConfig, tmp_path: Path) -> None:
    done = protocol(workdir, dataclasses.replace(whole, steps=1, learning_rates=()), tmp_path)
    assert (done.result["sweep"], done.result["learning_rate"]) == ([], whole.optim.lr)
    assert not (tmp_path / "sweep").exists()
    assert len(done.result["runs"]) == 2


@pytest.mark.usefixtures("pretrained")
def test_a_rate_that_diverges_is_not_taken(
    workdir: Path, whole: FinetuneConfig, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(whole, steps=3, runs=1, learning_rates=(0.1, 1e30))
    done = protocol(workdir, config, tmp_path / "out", log=said.append)
    assert done.result["sweep"][1] == {"learning_rate": 1e30, "accuracy": None}
    assert done.result["learning_rate"] == 0.1
    assert any("not finite at step" in line for line in said)
    assert said[-1] == "learning rate 1e+30: diverged"
    assert "diverged" in done.summary(tmp_path)
    (tmp_path / "out" / "result.json").unlink()
    trained, _ = watch(monkeypatch)
    assert protocol(workdir, config, tmp_path / "out").result == done.result
    assert trained == []


@pytest.mark.usefixtures("pretrained")
def test_a_rate_whose_last_update_broke_the_weights_is_not_taken(
    workdir: Path, whole: FinetuneConfig, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate_split = room.evaluate_split

    def broken(config: TrainConfig, *given: Any) -> Any:
        found = evaluate_split(config, *given)
        return dataclasses.replace(found, losses=found.losses * np.nan) if config.optim.lr == 0.1 else found

    monkeypatch.setattr(room, "evaluate_split", broken)
    done = protocol(workdir, dataclasses.replace(whole, steps=2, runs=1), tmp_path, log=said.append)
    assert "learning rate 0.1: diverged" in said
    assert done.result["sweep"][1] == {"learning_rate": 0.1, "accuracy": None}
    assert done.result["learning_rate"] == 1e-6


@pytest.mark.usefixtures("pretrained")
def test_shortened_search_says_so(workdir: Path, whole: FinetuneConfig, said: list[str], tmp_path: Path) -> None:
    optim = dataclasses.replace(whole.optim, warmup_steps=6)
    config = dataclasses.replace(whole, runs=1, sweep_steps=4, optim=optim, average_decay=0.9)
    protocol(workdir, config, tmp_path, log=said.append)
    assert "Deviation: the search takes 4 steps per rate; the paper's takes the run's own 12" in said
    for part, steps, warmup, decay in (("sweep/lr-0.1", 4, 2, 0.9**3), ("run-0", 12, 6, 0.9)):
        settings = json.loads((tmp_path / part / "config.json").read_text())
        assert (settings["steps"], settings["optim"]["warmup_steps"]) == (steps, warmup)
        assert settings["average_decay"] == pytest.approx(decay)  # the fresh model's share at the end is the same


@pytest.mark.usefixtures("pretrained")
def test_length_in_epochs_counts_all_of_train_in_the_search_too(
    workdir: Path, whole: FinetuneConfig, tmp_path: Path
) -> None:
    protocol(workdir, dataclasses.replace(whole, steps=None, epochs=0.2, runs=1), tmp_path)
    steps = whole.single().total_steps  # of the config with steps; here only to be compared with
    train = load_dataset("digits", "trainval", classes=(3, 4, 5, 6))
    expected = round(0.2 * len(train) / 16)
    assert expected != steps(len(train))
    for part in ("sweep/lr-0.1", "run-0"):
        assert json.loads((tmp_path / part / "metrics.jsonl").read_text().splitlines()[-1])["step"] == expected


@pytest.mark.usefixtures("pretrained")
def test_size_of_the_checkpoint_for_own_images(workdir: Path, whole: FinetuneConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(whole, steps=1, runs=1, learning_rates=(), automatic=("image_size",))
    assert protocol(workdir, config, tmp_path / "own").config.model.image_hw == (8, 8)
    assert protocol(workdir, config, tmp_path / "asked", image_size=12).config.model.image_hw == (12, 12)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": {"eval_resize": 4}}, r"resize=4 must be at least image_size=16"),
        ({"data": {"name": "digit"}}, r"unknown data set 'digit'; the nearest: digits"),
    ],
)
@pytest.mark.usefixtures("pretrained")
def test_wrong_settings_are_refused_before_anything_is_trained(
    change: dict[str, Any], message: str, workdir: Path, whole: FinetuneConfig, tmp_path: Path
) -> None:
    if "data" in change:
        change = {"data": dataclasses.replace(whole.data, **change["data"])}
    with pytest.raises(ValueError, match=message):
        protocol(workdir, dataclasses.replace(whole, **change), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------- a folder that nobody prepared


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Bright and dark images of many sizes, formats and modes; six of the files are broken."""
    formats = [("jpg", "RGB"), ("png", "RGBA"), ("webp", "RGB"), ("bmp", "L"), ("gif", "P"), ("jpeg", "CMYK")]
    rng = np.random.default_rng(0)
    for name, level in (("dark", 40), ("bright", 210)):
        (tmp_path / "mess" / name).mkdir(parents=True)
        for number in range(24):
            suffix, mode = formats[number % len(formats)]
            side = rng.integers(5, 90, 2)
            gray = np.clip(rng.normal(level, 15, (*side, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(gray).convert(mode).save(tmp_path / "mess" / name / f"{number:02}.{suffix}")
    dark = tmp_path / "mess" / "dark"
    (dark / "empty.png").touch()
    (dark / "text.jpg").write_text("no image at all")
    whole = (dark / "00.jpg").read_bytes()
    (dark / "cut.jpg").write_bytes(whole[: len(whole) // 2])
    (dark / "lost.png").symlink_to("nowhere.png")
    bright = tmp_path / "mess" / "bright"
    (bright / "cut.webp").write_bytes((bright / "02.webp").read_bytes()[:40])
    (bright / "z.bmp").write_bytes((bright / "03.bmp").read_bytes()[:60])
    (bright / "notes.txt").write_text("not read")
    return tmp_path / "mess"


BROKEN = ["bright/cut.webp", "bright/z.bmp", "dark/cut.jpg", "dark/empty.png", "dark/lost.png", "dark/text.jpg"]


@pytest.mark.usefixtures("pretrained")
def test_folder_that_nobody_prepared(
    workdir: Path, folder: Path, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = DataConfig(name=f"folder:{folder}", train_split="trainval", eval_split="test", crop="none", on_error="skip")
    optim = OptimConfig(name="sgd", lr=0.1, clip_norm=1.0)
    config = FinetuneConfig(
        model=ViTConfig(image_size=8, patch_size=4), data=data, optim=optim, steps=25, batch_size=12,
        precision="float32", learning_rates=(0.01, 0.1), held_out=0.2, automatic=("image_size",),
    )  # fmt: skip
    trained, _ = watch(monkeypatch)
    done = protocol(workdir, config, tmp_path / "out", log=said.append)
    result = done.result
    listed = {Path(each["path"]).relative_to(folder).as_posix(): each["reason"] for each in result["unreadable"]}
    assert list(listed) == BROKEN
    assert "zero bytes" in listed["dark/empty.png"]
    assert "No such file" in listed["dark/lost.png"]
    assert "6 images cannot be read and are left out; they are listed at the end" in said
    assert (result["test"]["skipped"], len(result["test"]["per_class"])) == (0, 2)
    assert [row["class"] for row in result["test"]["per_class"]] == ["bright", "dark"]
    assert trained[-1][1] + result["test"]["images"] == 48  # every readable image, in one part or the other
    assert result["test"]["accuracy"] > 0.8
    lines = done.summary(tmp_path / "out").splitlines()
    assert "6 files could not be read and were left out:" in lines
    for path, reason in listed.items():
        assert f"  {folder / path}: {reason}" in lines
    assert load_card(tmp_path / "out")["classes"] == ["bright", "dark"]
    assert protocol(workdir, config, tmp_path / "out").result == result


@pytest.mark.usefixtures("pretrained")
def test_folder_is_not_skipped_over_unless_asked(workdir: Path, folder: Path, tmp_path: Path) -> None:
    data = DataConfig(name=f"folder:{folder}", train_split="trainval", eval_split="test", crop="none")
    config = FinetuneConfig(model=ViTConfig(image_size=8, patch_size=4), data=data, steps=5, batch_size=48)
    with pytest.raises(ValueError, match=r"cannot read the image .*mess/(dark|bright)/"):
        protocol(workdir, config, tmp_path / "out")


# ----------------------------------------------------------------------------------------- told before it begins


@pytest.mark.usefixtures("pretrained")
def test_what_it_will_take_is_told_before_training(
    workdir: Path, whole: FinetuneConfig, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps, images, memory and time; and not again where all has ended."""
    train = room.train

    def first_told(*given: Any, **options: Any) -> Model:
        assert any("what this will take" in line for line in said)
        return train(*given, **options)

    monkeypatch.setattr(room, "train", first_told)
    protocol(workdir, whole, tmp_path / "out", log=said.append)
    (told,) = [line for line in said if line.startswith("what this will take:")]
    assert "582 training and 145 test images, 4 classes" in told
    assert "2 learning rates x 12 steps of 16 images, scored on 144 held-out images: " in told
    assert "2 runs of 12 steps of 16 images (0.3 epochs), then the test: " in told
    assert "measured  micro-batches of 16, " in told
    assert "total     about 0:0" in told
    said.clear()
    protocol(workdir, whole, tmp_path / "out", log=said.append)
    assert not any("what this will take" in line for line in said)


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("wrong", ["checkpoint", "size", "workdir", "rates", "device"])
def test_cheap_errors_come_before_the_data(
    wrong: str, workdir: Path, whole: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "load_splits", lambda *_: pytest.fail("the data was read"))
    (tmp_path / "something").mkdir()
    (tmp_path / "something" / "else.txt").write_text("else")
    checkpoint, out, size, device = workdir, tmp_path / "out", None, "cpu"
    match wrong:
        case "checkpoint":
            checkpoint, expected = tmp_path / "nothing", "there is nothing at"
        case "size":
            size, expected = 18, "cannot be cut into patches"
        case "workdir":
            out, expected = tmp_path / "something", "is not empty and holds no run"
        case "rates":
            whole = dataclasses.replace(whole, optim=dataclasses.replace(whole.optim, lr=0.3))
            expected = r"optim.lr is 0.3 and learning_rates are 1e-06, 0.1, which are tried instead"
        case _:
            device, expected = "quantum", "device 'quantum' is unknown"
    with pytest.raises(UserError, match=expected):
        sweep_and_finetune(checkpoint, whole, out, tensorboard=False, image_size=size, device=device)


def test_own_trains_at_the_rate_that_is_asked_for(workdir: Path, pretrained: Outcome, tmp_path: Path) -> None:
    """From Python too: a rate beside a search that would not try it is an error, and without a search it is taken."""
    config = dataclasses.replace(own(), data=DataConfig(classes=(3, 4), crop="none"), steps=1, batch_size=8)
    config = dataclasses.replace(config, optim=OptimConfig(name="sgd", lr=0.2), automatic=())
    with pytest.raises(UserError, match=r"optim.lr is 0.2 .* set learning_rates=\(\) and sweep_steps=None"):
        protocol(workdir, dataclasses.replace(config, model=pretrained.config.model), tmp_path / "refused")
    alone = dataclasses.replace(config, model=pretrained.config.model, learning_rates=(), sweep_steps=None)
    protocol(workdir, alone, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["optim"]["lr"] == 0.2


@pytest.mark.usefixtures("pretrained")
def test_own_searches_in_short(workdir: Path, tmp_path: Path) -> None:
    """The default for own images: three rates, each for a fifth of the steps."""
    config = dataclasses.replace(
        own(), data=DataConfig(classes=(3, 4), crop="none", train_split="trainval", eval_split="test"), steps=100,
        automatic=("batch_size", "warmup_steps", "sweep_steps", "image_size"), precision="float32",
    )  # fmt: skip
    done = protocol(workdir, config, tmp_path)
    assert [score["learning_rate"] for score in done.result["sweep"]] == [0.003, 0.01, 0.03]
    for part, steps, warmup in (("sweep/lr-0.01", 20, 4), ("run-0", 100, 20)):
        settings = json.loads((tmp_path / part / "config.json").read_text())
        assert (settings["steps"], settings["optim"]["warmup_steps"]) == (steps, warmup)
    assert done.config.model.image_size == 8  # the checkpoint's own


@pytest.mark.usefixtures("pretrained")
def test_begun_on_one_device_and_continued_on_another(
    workdir: Path, whole: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The micro-batch is no setting of a run: it may be another where memory is another."""
    several = dataclasses.replace(whole, steps=4, runs=1)
    protocol(workdir, dataclasses.replace(several, microbatch=4), tmp_path / "out")
    (tmp_path / "out" / "result.json").unlink()
    assert protocol(workdir, several, tmp_path / "out").result["runs"]
    settings = json.loads((tmp_path / "out" / "run-0" / "config.json").read_text())
    assert settings["microbatch"] == 4  # as it was begun


def test_positions_are_interpolated_as_the_checkpoint_says(
    pretrained: Outcome, whole: FinetuneConfig, begun: list[Model], tmp_path: Path
) -> None:
    """By the method of its family, which the fine-tuned model keeps; or by the one that is asked for."""
    config = pretrained.model.config
    assert isinstance(config, ViTConfig)
    source = ViT(dataclasses.replace(config, position_interpolation="bicubic"))
    source.load_state_dict(pretrained.model.state_dict())
    save_model(source, tmp_path / "checkpoint")
    one = dataclasses.replace(whole, learning_rates=(), runs=1, steps=1)
    protocol(tmp_path / "checkpoint", one, tmp_path / "own")
    protocol(tmp_path / "checkpoint", one, tmp_path / "asked", interpolation="corners")
    table = source.state_dict()["position.table"]
    for start, method, out in zip(begun, ("bicubic", "corners"), ("own", "asked"), strict=True):
        expected = interpolate_positions(table, (2, 2), (4, 4), 1, method)  # pyright: ignore[reportArgumentType]
        assert torch.equal(start.state_dict()["position.table"], expected)
        tuned = load_model(tmp_path / out).config
        assert isinstance(tuned, ViTConfig)
        assert tuned.position_interpolation == method


@pytest.mark.usefixtures("pretrained")
def test_test_images_are_prepared_as_the_checkpoint_says(pretrained: Outcome, said: list[str], tmp_path: Path) -> None:
    prepared = Preprocessing(8, 10, interpolation="bicubic")
    save_model(pretrained.model, tmp_path / "checkpoint", extra={"preprocessing": prepared.to_card()})
    config = dataclasses.replace(
        own(), data=DataConfig(classes=(3, 4), crop="none"), steps=1, batch_size=8, learning_rates=(), sweep_steps=None,
        automatic=("image_size", "preprocessing"),
    )  # fmt: skip
    protocol(tmp_path / "checkpoint", config, tmp_path / "out", log=said.append)
    assert f"test images: {prepared.describe()}" in said
    assert Preprocessing.read(load_card(tmp_path / "out"), "card") == prepared
