"""A run from its config to its result, and what it leaves behind."""

import contextlib
import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from image_files import put
from pretrained_run import again

from vitlab.config import TrainConfig
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.evaluation.accuracy import evaluate
from vitlab.models import get_config
from vitlab.runs import run
from vitlab.runs.run import RunResult
from vitlab.runs.splits import load_splits
from vitlab.settings import to_dict
from vitlab.train.memory import inference_bytes
from vitlab.train.microbatch import MEMORY_FRACTION
from vitlab.weights import load_model


def test_files_of_a_run(config: TrainConfig, pretrained: RunResult, workdir: Path) -> None:
    settings = json.loads((workdir / "config.json").read_text())
    assert settings.pop("names_and_labels").keys() == {"train", "test"}
    assert settings.pop("classes") == ["0", "1", "2"]
    assert settings.pop("images").keys() == {"train", "val", "test"}
    images = len(load_splits(config.data).train)
    expected = {"command": "pretrain", "start": None, "examples": images, **to_dict(config)}
    assert settings == json.loads(json.dumps(expected))
    assert json.loads((workdir / "result.json").read_text()) == pretrained.result
    assert json.loads((workdir / "speed.jsonl").read_text().splitlines()[-1])["run_seconds"] > 0


def test_evaluations(pretrained: RunResult, workdir: Path) -> None:
    """While training on the val split, in the end on the whole test split."""
    test, val = (load_dataset("digits", split, classes=(0, 1, 2)) for split in ("test", "val"))
    model = load_model(workdir)
    assert pretrained.result == {"test": evaluate(model, test, (8, 8)).record()}
    assert pretrained.result["test"]["accuracy"] > 0.5
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    evaluations = {line["step"]: line for line in lines if "val_accuracy" in line}
    assert list(evaluations) == [10, 15]
    expected = evaluate(model, val, (8, 8)).metrics()
    assert evaluations[15] == {"step": 15} | {f"val_{name}": value for name, value in expected.items()}


def test_finished_run_is_only_read(
    config: TrainConfig, pretrained: RunResult, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "train", None)
    monkeypatch.setattr(run, "evaluate_split", None)
    before = contents(workdir)
    outcome = again(config, workdir)
    assert (outcome, outcome.summary(workdir)) == (pretrained, pretrained.summary(workdir))
    assert contents(workdir) == before


class CrashError(Exception):
    pass


def crash(*_: object) -> None:
    raise CrashError


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a run, but for its lock and its measured times."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "speed.jsonl")]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    ("name", "repaired"),
    [("config.json", True), ("model/model.safetensors", True), ("metrics.jsonl", False), ("SHA256SUMS", False)],
)
def test_a_corrupt_file_is_reported_and_regenerated(
    name: str, repaired: bool, config: TrainConfig, pretrained: RunResult, workdir: Path, tmp_path: Path, caplog: Any
) -> None:
    """By the same command, without training again. What cannot be regenerated stays, and is reported again."""
    folder = tmp_path / "run"
    shutil.copytree(workdir, folder)
    before = contents(folder)
    corrupt = bytearray(before[name])
    corrupt[len(corrupt) // 2] ^= 1
    (folder / name).write_bytes(corrupt)
    assert again(config, folder).result == pretrained.result
    assert [record for record in caplog.records if name in record.getMessage()]
    if repaired:
        (folder / "SHA256SUMS").unlink()  # has the checksum of speed.jsonl
        before.pop("SHA256SUMS")
    assert contents(folder) == (before if repaired else before | {name: bytes(corrupt)})
    caplog.clear()
    assert again(config, folder).result == pretrained.result
    assert bool(caplog.records) != repaired
    if name == "model/model.safetensors":  # without a checkpoint, nothing is trained again unasked
        shutil.rmtree(folder / "checkpoints")
        (folder / name).write_bytes(b"")
        with pytest.raises(UserError, match="no checkpoint"):
            again(config, folder)


def test_evaluation_fits_into_the_memory_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    config = TrainConfig(model=get_config("ViT-Ti/16"), steps=1)
    needed = inference_bytes(config.model, 64, torch.float32, "cuda")
    for memory, batch_size in ((100 * needed, 256), (1.01 * needed / MEMORY_FRACTION, 64), (needed / 10**6, 1)):
        properties = SimpleNamespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, properties=properties: properties)
        assert run.evaluation_options(config, torch.device("cuda")).batch_size == batch_size


@pytest.fixture
def own(config: TrainConfig, tmp_path: Path) -> Callable[..., Any]:
    """Trains one step on `folder:data`, two classes whose files have the same names, or on other words for it."""
    for (label, value), number in itertools.product((("cat", 30), ("dog", 200)), range(8)):
        put(tmp_path / "data" / label / f"{number}.png", value + number)

    def train(name: str = "folder:data") -> Any:
        data = dataclasses.replace(config.data, name=name, classes=None, train_split="train")
        return again(dataclasses.replace(config, data=data, steps=1), tmp_path / "run").result

    return train


def swap(data: Path) -> None:
    for old, new in (("cat", "aside"), ("dog", "cat"), ("aside", "dog")):
        (data / old).rename(data / new)


def rename(data: Path) -> None:
    (data / "cat").rename(data / "cow")


@pytest.mark.parametrize(("change", "finished"), [(swap, True), (rename, False)])
def test_other_classes_are_another_run(
    change: Any, finished: bool, own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(CrashError), monkeypatch.context() as patch:
        if not finished:
            patch.setattr(run, "write_run", crash)
        own()
    change(tmp_path / "data")
    with pytest.raises(UserError, match=r"images\.train\.cat"):
        own()


def test_the_same_images_by_another_name_are_the_same_run(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = own()
    assert own("folder:./data/") == own(f"folder:{tmp_path}/data") == result
    (tmp_path / "data").rename(tmp_path / "moved")
    assert own("folder:moved") == result
    rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"classes: \['cat', 'dog'\] -> \['cow', 'dog'\]"):
        own("folder:moved")
