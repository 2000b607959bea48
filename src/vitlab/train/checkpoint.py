"""Save and restore a whole run: atomic, verified, exact.

A checkpoint is a folder `step-000000123` with two files: `state.safetensors` (every tensor) and `state.json`
(the rest, with the size and SHA-256 of the tensors' file and a checksum of its own). It is written aside,
flushed to the disk and renamed: a folder of that name is whole, or was damaged later, which reading notices.
"""

import hashlib
import json
import os
import shutil
import types
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from vitlab.errors import UserError
from vitlab.io import sync

FORMAT = 1
TENSORS, STATE = "state.safetensors", "state.json"


class CorruptCheckpointError(UserError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """One saved moment of a run: after `step` updates."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    """On the CPU, with the dtypes and shapes that were saved."""
    state: dict[str, Any]
    """Plain data."""


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any], keep: int) -> Path:
    """Writes the checkpoint of `step` under `folder` and deletes all but the last `keep`; returns its folder.

    A valid checkpoint of the same step stays as it is, for a run makes the same one again. Only one process
    may write, and it clears up what a killed one left behind.
    Raises OSError if the disk is full or forbids it; the checkpoints before are untouched then.
    """
    final = folder / f"step-{step:09d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        if not (final.is_dir() and _is_valid(final)):
            aside = folder / f"tmp-{final.name}"
            _write(aside, step, tensors, state)
            if final.exists():
                final.rename(folder / f"tmp-damaged-{final.name}")
            aside.rename(final)
            sync(folder)
        # Later ones are damaged, or this run would have started from them: they count for nothing.
        for old in [path for path in _steps(folder) if path.name <= final.name][keep:]:
            old.rename(folder / f"tmp-old-{old.name}")
        _clear(folder)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"the checkpoint of step {step} could not be written under {folder}: {error}. The ones before it "
            f"are untouched; make room or allow writing, then start the same command again."
        ) from error
    return final


class CheckpointWriter:
    """Writes checkpoints beside the training, one at a time; use it in a `with` statement.

    Its end waits for the last. An error in writing is raised by the next call, or at the end.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[Path] | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any]) -> None:
        """Copies all that is given, and returns while it is being written (see `save_checkpoint`)."""
        self.wait()
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._under_way = self._thread.submit(save_checkpoint, self._folder, step, copies, dict(state), self._keep)

    def check(self) -> None:
        """Raises what went wrong in writing, if anything did by now."""
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self) -> None:
        """Until the last checkpoint is on the disk."""
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._thread.shutdown()  # waits as well, so that nothing writes to a folder that was let go


def load_latest(folder: Path, on_damaged: Callable[[Path, str], None]) -> Checkpoint | None:
    """The newest checkpoint under `folder` that is whole, or None where there is none at all.

    `on_damaged` is told of each that had to be passed over, and why. Removes what a killed process left half written.
    Raises ValueError if none is whole.
    """
    _clear(folder)
    reasons = []
    for path in _steps(folder):
        try:
            return read_checkpoint(path)
        except CorruptCheckpointError as error:
            on_damaged(path, str(error))
            reasons.append(f"{path.name}: {error}")
    if reasons:
        raise UserError(
            f"every checkpoint in {folder} is damaged ({'; '.join(reasons)}). Put back a good copy of one, "
            f"or delete the folder to train from the beginning."
        )
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in the folder `path`, verified.

    Raises DamagedCheckpointError if it is not what was written, ValueError if a later version wrote it.
    """
    record = _verify(path)
    try:
        # Cloned, because the file's memory is neither aligned nor our own.
        tensors = {name: tensor.clone() for name, tensor in load_file(path / TENSORS).items()}
    except SafetensorError as error:
        raise CorruptCheckpointError(f"{TENSORS} cannot be read: {error}") from error
    return Checkpoint(path, record["step"], tensors, record["state"])


def _write(aside: Path, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any]) -> None:
    aside.mkdir()
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, aside / TENSORS)
    sync(aside / TENSORS)
    with (aside / TENSORS).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    size = (aside / TENSORS).stat().st_size
    record = {"format": FORMAT, "step": step, "state": state, "bytes": size, "sha256": digest}
    with (aside / STATE).open("w") as file:
        json.dump(record | {"checksum": _checksum(record)}, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())
    sync(aside)


def _verify(path: Path) -> dict[str, Any]:
    """The record in `state.json`, if both files agree with it."""
    try:
        record = json.loads((path / STATE).read_bytes())
        checksum = record.pop("checksum")
        if checksum != _checksum(record):
            raise CorruptCheckpointError(f"{STATE} does not match its checksum")
        if record["format"] != FORMAT:
            raise UserError(
                f"{path} has format {record['format']} and this version reads format {FORMAT}; continue the "
                f"run with the version of vitlab that wrote it."
            )
        size = (path / TENSORS).stat().st_size
        if size != record["bytes"]:
            raise CorruptCheckpointError(f"{TENSORS} has {size} bytes where {record['bytes']} were written")
        with (path / TENSORS).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
                raise CorruptCheckpointError(f"{TENSORS} does not match its checksum")
    except OSError as error:
        raise CorruptCheckpointError(f"{Path(error.filename or path).name}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{STATE} cannot be read: {error!r}") from error
    return record


def _is_valid(path: Path) -> bool:
    try:
        _verify(path)
    except CorruptCheckpointError:
        return False
    return True


def _clear(folder: Path) -> None:
    """Deletes what is half written or half deleted."""
    for leftover in folder.glob("tmp-*"):
        shutil.rmtree(leftover)


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _steps(folder: Path) -> list[Path]:
    """Folders of checkpoints, newest first."""
    return sorted(folder.glob("step-" + "[0-9]" * 9), reverse=True)
