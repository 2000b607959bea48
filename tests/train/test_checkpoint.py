"""Checkpoints: exact, complete or absent, and verified."""

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_disk import small_disk
from small_step import CONFIG, make_step, new_state

from vitlab.config import OptimConfig
from vitlab.errors import UserError
from vitlab.train import checkpoint
from vitlab.train.checkpoint import (
    CheckpointWriter,
    CorruptCheckpointError,
    TrainState,
    load_latest,
    read_checkpoint,
    save_checkpoint,
)

TENSORS = {
    "w": torch.arange(6.0).reshape(2, 3).T,  # not contiguous
    "half": torch.tensor([1.0, -2.5], dtype=torch.bfloat16),
    "count": torch.tensor(2**40),
    "step": torch.tensor(7.0),
    "bytes": torch.arange(5, dtype=torch.uint8),
    "empty": torch.zeros(0, 3),
    "odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-42]),
}
STATE = {"examples": 12, "nested": {"rate": 0.1, "names": ["a", "b"]}, "nothing": None}


def same_state(one: TrainState, two: TrainState) -> bool:
    first, second = one.tensors(), two.tensors()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("precision", "optimizer", "quantity"), [("float32", "adam", "exp_avg"), ("bfloat16", "sgd", "momentum_buffer")]
)
def test_state_is_restored_to_the_bit(precision: Any, optimizer: Any, quantity: str) -> None:
    """The next step of another model with the restored state is the same."""
    config = dataclasses.replace(CONFIG, precision=precision, optim=OptimConfig(optimizer, lr=1e-2))
    state = new_state(config)
    make_step(config, state)
    saved = {name: tensor.clone() for name, tensor in state.tensors().items()}
    assert {"sums", "weights/head.weight", "average/head.weight", f"optimizer/head.weight/{quantity}"} <= saved.keys()
    assert all(tensor.dtype in (torch.float32, torch.float64) for tensor in saved.values())
    other = new_state(config, seed=1)
    assert not same_state(other, state)
    other.restore(saved, 1, {"skipped": 2, "recorded": 1})
    assert (other.step, other.skipped, other.last_logged_step) == (1, 2, 1)
    assert same_state(other, state)
    for run in (state, other):
        make_step(config, run)
    assert same_state(other, state)
    assert not torch.equal(saved["weights/head.weight"], state.tensors()["weights/head.weight"])


def save_steps(folder: Path, *steps: int, keep: int = 10) -> list[Path]:
    return [save_checkpoint(folder, step, {"w": torch.full((4,), step)}, {"at": step}, keep) for step in steps]


def latest_step(folder: Path, report: Callable[[str], None] = pytest.fail) -> int:
    latest = load_latest(folder, report)
    assert latest is not None
    return latest.step


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_everything_comes_back_exactly(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "new" / "folder", 123, TENSORS, STATE, keep=1)
    assert path.name == "step-000000123"
    loaded = load_latest(tmp_path / "new" / "folder", pytest.fail)
    assert loaded is not None
    assert (loaded.path, loaded.step, loaded.state) == (path, 123, STATE)
    assert loaded.tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        back = loaded.tensors[name]
        assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape), name
        bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (back, tensor)]  # of NaN and -0.0 too
        assert torch.equal(*bits), name


def test_the_last_few_stay_and_what_a_killed_run_left_is_cleared(tmp_path: Path) -> None:
    save_steps(tmp_path, 5, 10, 900, keep=2)
    assert names(tmp_path) == ["step-000000010", "step-000000900"]
    shutil.copytree(tmp_path / "step-000000900", tmp_path / "tmp-step-000001000")
    (tmp_path / "tmp-step-000001000" / checkpoint.STATE).unlink()
    assert latest_step(tmp_path) == 900
    save_steps(tmp_path, 1000, keep=2)
    assert names(tmp_path) == ["step-000000900", "step-000001000"]


def test_everything_is_on_the_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed = []
    really = os.fsync

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        flushed.append((name, (tmp_path / "step-000000001").exists()))
        really(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    save_steps(tmp_path, 1)
    before = [(name, False) for name in ("state.safetensors", "state.json", "tmp-step-000000001")]
    assert flushed == [*before, (tmp_path.name, True)]


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        (checkpoint.TENSORS, flip_bit),
        (checkpoint.STATE, lambda path: path.write_text(path.read_text().replace('"at": 20', '"at": 21'))),
        (checkpoint.STATE, lambda path: path.write_bytes(b"\0\xff")),
        (checkpoint.TENSORS, Path.unlink),
    ],
)
def test_a_corrupt_one_is_reported_and_skipped(tmp_path: Path, file: str, damage: Any) -> None:
    _, newest = save_steps(tmp_path, 10, 20)
    damage(newest / file)
    reports: list[str] = []
    assert latest_step(tmp_path, reports.append) == 10
    (report,) = reports
    assert newest.name in report
    assert file in report
    flip_bit(tmp_path / "step-000000010" / checkpoint.TENSORS)
    with pytest.raises(UserError, match="every"):
        load_latest(tmp_path, reports.append)
    assert len(reports) == 3


def test_a_valid_one_stays_and_a_corrupt_one_is_replaced(tmp_path: Path) -> None:
    _, newest = save_steps(tmp_path, 10, 20)
    before = (newest / checkpoint.TENSORS).stat().st_ino
    save_steps(tmp_path, 20)
    assert (newest / checkpoint.TENSORS).stat().st_ino == before
    flip_bit(newest / checkpoint.TENSORS)
    save_steps(tmp_path, 20)
    assert read_checkpoint(newest).state == {"at": 20}
    flip_bit(newest / checkpoint.TENSORS)
    save_steps(tmp_path, 15, keep=1)  # stopped between the two: a corrupt later one counts for none
    assert latest_step(tmp_path, lambda _: None) == 15


def test_a_later_format_is_refused(tmp_path: Path) -> None:
    (path,) = save_steps(tmp_path, 10)
    record = json.loads((path / checkpoint.STATE).read_text())
    record.pop("checksum")
    record["format"] = 99
    record["checksum"] = checkpoint._checksum(record)
    (path / checkpoint.STATE).write_text(json.dumps(record))
    with pytest.raises(ValueError, match="99") as caught:
        load_latest(tmp_path, pytest.fail)
    assert not isinstance(caught.value, CorruptCheckpointError)


@pytest.mark.parametrize("large", ["tensors", "state"])
def test_a_full_disk_leaves_the_last_good_one(tmp_path: Path, large: str) -> None:
    save_steps(tmp_path, 10)
    tensors = {"w": torch.zeros(5000 if large == "tensors" else 1)}
    with pytest.raises(OSError, match="step 20"), small_disk():
        save_checkpoint(tmp_path, 20, tensors, {"text": "a" * 10_000}, keep=1)
    assert latest_step(tmp_path) == 10


@pytest.mark.usefixtures("unchecked")
def test_a_killed_writer_never_leaves_a_corrupt_checkpoint(tmp_path: Path) -> None:
    """Killed at many moments; the last one announced, or a later one, is always there and whole."""

    def write(folder: Path, announce: Any) -> None:
        for step in itertools.count(1):
            save_checkpoint(folder, step, {"w": torch.full((300_000,), step)}, {"at": step}, keep=2)
            announce.send(step)

    for kill in range(0, 6, 2):
        receiver, announce = multiprocessing.Pipe(duplex=False)
        folder = tmp_path / str(kill)
        writer = multiprocessing.get_context("fork").Process(target=write, args=(folder, announce), daemon=True)
        writer.start()
        announce.close()
        announced = receiver.recv()
        time.sleep(0.004 * kill)
        writer.kill()
        with contextlib.suppress(EOFError):
            while True:
                announced = receiver.recv()
        latest = load_latest(folder, pytest.fail)
        assert latest is not None
        assert latest.step >= announced
        assert latest.tensors["w"].unique().tolist() == [latest.step] == [latest.state["at"]]


def test_the_writer_keeps_what_it_was_given(tmp_path: Path) -> None:
    """Whatever happens to the tensors while it writes; the end waits for the last."""
    weights = torch.zeros(1000)
    with CheckpointWriter(tmp_path, keep=2) as writer:
        for step in (1, 2, 3):
            writer.save(step, {"w": weights}, {"at": step})
            weights += 1
    latest = load_latest(tmp_path, pytest.fail)
    assert latest is not None
    assert (latest.step, latest.state, latest.tensors["w"].unique().tolist()) == (3, {"at": 3}, [2.0])


@pytest.mark.parametrize("then", ["check", "wait", "save", "the end"])
def test_the_writer_says_what_went_wrong(then: str, tmp_path: Path) -> None:
    (folder := tmp_path / "a file").touch()

    def should_continue() -> None:
        with CheckpointWriter(folder, keep=1) as writer:
            writer.save(7, {"w": torch.zeros(2)}, {})
            while then == "check":
                writer.check()
            if then == "wait":
                writer.wait()
            if then == "save":
                writer.save(8, {"w": torch.zeros(2)}, {})

    with pytest.raises(OSError, match="step 7"):
        should_continue()
