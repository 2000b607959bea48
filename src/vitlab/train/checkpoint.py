"""Everything that changes during a run, and checkpoints of it: atomic, verified, exact.

A checkpoint is a folder `step-000000123` with two files: `state.safetensors` (all tensors) and `state.json` (the rest,
with the SHA-256 of the first file and a checksum of itself). It is written under another name, flushed to disk and
renamed, so that a folder of that name is complete.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitlab.checksums import sha256
from vitlab.config import MaskingConfig, TrainConfig
from vitlab.errors import UserError, WriteError
from vitlab.io import sync
from vitlab.models.blocks import freeze_blocks
from vitlab.models.config import ModelConfig
from vitlab.train.distributed import SINGLE, World
from vitlab.train.objectives import create_training_model
from vitlab.train.optim import create_optimizer, load_optimizer_state, optimizer_state
from vitlab.train.parallel import Parallel, full_tensor, is_sharded, shard_like
from vitlab.train.precision import MasterWeights, resolve_precision

FORMAT = 1
TENSORS, STATE = "state.safetensors", "state.json"


@dataclass
class TrainState:
    """Everything that changes during a run."""

    parallel: Parallel
    weights: MasterWeights
    optimizer: torch.optim.Optimizer
    average: dict[str, Tensor] | None
    """The Polyak average of the weights."""
    metric_sums: Tensor
    """Loss, accuracy and gradient norm, summed since the last record; float64 [3]."""
    first_nonfinite_step: Tensor
    """The first step whose loss or gradient was not finite, or 0; float64, 0-d."""
    step: int = 0
    skipped: int = 0
    """Images that could not be read."""
    last_logged_step: int = 0

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.metric_sums.device

    @torch.no_grad()
    def tensors(self, keep: bool = True) -> dict[str, Tensor]:
        """All tensors of a checkpoint, in full; gathered one at a time, as a device may not have memory for all.

        A collective where they are sharded: ranks that do not save call it with `keep=False`.
        """
        named = {f"weights/{name}": master for name, master in self.weights.masters.items()}
        named |= {f"average/{name}": value for name, value in (self.average or {}).items()}
        named |= {f"optimizer/{name}": value for name, value in optimizer_state(self.optimizer).items()}
        tensors = {"sums": torch.cat([self.metric_sums, self.first_nonfinite_step[None]])}
        for name, tensor in named.items():
            full = full_tensor(tensor)
            if keep:
                tensors[name] = full.cpu() if is_sharded(tensor) else full
        return tensors

    @torch.no_grad()
    def restore(self, tensors: dict[str, Tensor], step: int, scalars: dict[str, Any]) -> None:
        """Restores a checkpoint's tensors and plain data."""
        sections: dict[str, dict[str, Tensor]] = {"weights": {}, "average": {}, "optimizer": {}, "sums": {}}
        for key, value in tensors.items():
            section, _, name = key.partition("/")
            sections[section][name] = value
        masters, average = self.weights.masters, self.average or {}
        for targets, saved in ((masters, sections["weights"]), (average, sections["average"])):
            assert targets.keys() == saved.keys(), "a checkpoint of another model"
            for name, target in targets.items():
                target.copy_(shard_like(saved[name], target))
        load_optimizer_state(
            self.optimizer,
            {
                key: shard_like(value, masters[key.rpartition("/")[0]]) if value.ndim else value
                for key, value in sections["optimizer"].items()
            },
        )
        self.metric_sums.copy_(tensors["sums"][:3])
        self.first_nonfinite_step.copy_(tensors["sums"][3])
        self.weights.copy_masters_to_model()
        self.step = step
        self.skipped = scalars["skipped"]
        self.last_logged_step = scalars["recorded"]

    def scalars(self) -> dict[str, Any]:
        """The plain data of a checkpoint, as `restore` takes it."""
        return {"skipped": self.skipped, "recorded": self.last_logged_step}


def create_state(config: TrainConfig, model: nn.Module, device: torch.device, world: World) -> TrainState:
    """The state of a run before its first step, on every rank with the weights and the precision of rank 0. From then
    on `state.parallel` computes with `model`."""
    freeze_blocks(model, config.trained_blocks)
    # Of rank 0 for all: ranks with different precisions would wait for each other forever.
    precision: Any = world.broadcast_object(lambda: resolve_precision(config.precision, device))
    world.broadcast_tensors(model.parameters())  # after an exchange between hosts, as all between devices
    parallel = Parallel(model.train(), world, device, config, precision)
    weights = MasterWeights(model, precision, sharded=parallel.sharded)
    masters = weights.masters
    average = {n: m.detach().clone() for n, m in masters.items()} if config.average_decay else None
    optimizer = create_optimizer(masters.items(), config.optim)
    metric_sums, first_nonfinite_step = torch.zeros(4, dtype=torch.float64, device=device).split([3, 1])
    return TrainState(parallel, weights, optimizer, average, metric_sums, first_nonfinite_step[0])


def trained_model(model_config: ModelConfig, masking: MaskingConfig | None, state: TrainState) -> nn.Module:
    """A new model with the weights of `state` in float32: averaged where there is an average."""
    weights = state.average or {name: master.detach() for name, master in state.weights.masters.items()}
    with torch.device("meta"):  # draws no numbers
        model = create_training_model(model_config, masking)
    model.load_state_dict({name: full_tensor(tensor).clone() for name, tensor in weights.items()}, assign=True)
    return model.to(state.device).eval()


class CorruptCheckpointError(UserError):
    """A checkpoint that is not what was written."""


@dataclass(frozen=True)
class Checkpoint:
    """A run after `step` updates: its tensors, on the CPU, and JSON data."""

    path: Path
    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


def save_checkpoint(folder: Path, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any], keep: int) -> Path:
    """Writes the checkpoint of `step` in `folder` and deletes all but the last `keep`; returns its folder.

    A valid checkpoint of the same step stays: the run is deterministic. Only one process may write. Raises OSError, and
    leaves the earlier checkpoints untouched.
    """
    final = folder / f"step-{step:09d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_temporary(folder)
        try:
            _verify(final)
        except CorruptCheckpointError:  # corrupt, or as usual missing
            new = folder / f"tmp-{final.name}"
            _write(new, step, tensors, state)
            if final.exists():
                final.rename(folder / f"tmp-corrupt-{final.name}")
            new.rename(final)
            sync(folder)
        # Later ones are corrupt, or this run would have resumed from them: they do not count.
        for old in [path for path in _checkpoints(folder) if path.name <= final.name][keep:]:
            old.rename(folder / f"tmp-old-{old.name}")
        _remove_temporary(folder)
    except (OSError, SafetensorError) as error:
        raise WriteError(
            f"the checkpoint of step {step} cannot be written in {folder}: {error}. The earlier ones are untouched; "
            f"free space or allow writing, then run the same command to resume."
        ) from error
    return final


class CheckpointWriter:
    """Writes checkpoints in a thread, one at a time; a context manager, whose end waits for the last.

    An error in writing is raised by the next call, or at the end.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[Path] | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any]) -> None:
        """Copies all arguments and returns while they are written (see `save_checkpoint`)."""
        self.wait()
        copies = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        self._pending = self._thread.submit(save_checkpoint, self._folder, step, copies, dict(state), self._keep)

    def check(self) -> None:
        """Raises the error of the last write, if it has failed by now."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits until the last checkpoint is on disk."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.wait()
        finally:
            self._thread.shutdown()  # also waits, so that nothing writes to a folder whose lock was released


def load_latest(folder: Path, say: Callable[[str], None], world: World = SINGLE) -> Checkpoint | None:
    """The newest valid checkpoint in `folder`, the same on every rank; None if there are no checkpoints.

    Corrupt ones are reported to `say` and skipped. Raises UserError if none is valid.
    """

    def newest_valid() -> str | None:
        _remove_temporary(folder)
        paths = _checkpoints(folder)
        for path in paths:
            try:
                _verify(path)
                return path.name
            except CorruptCheckpointError as error:
                say(f"{path.name} is corrupt and skipped: {error}")
        if paths:
            raise UserError(
                f"every checkpoint in {folder} is corrupt. Restore one from a backup, or delete the folder to train "
                f"from the beginning."
            )
        return None

    name = world.broadcast_object(newest_valid)
    return read_checkpoint(folder / name) if name else None


def read_checkpoint(path: Path) -> Checkpoint:
    """The verified checkpoint in the folder `path`. Raises CorruptCheckpointError; UserError for a later format."""
    record = _verify(path)
    # Cloned, because the file's memory is not aligned.
    tensors = {name: tensor.clone() for name, tensor in load_file(path / TENSORS).items()}
    return Checkpoint(path, record["step"], tensors, record["state"])


def _write(folder: Path, step: int, tensors: Mapping[str, Tensor], state: dict[str, Any]) -> None:
    folder.mkdir()
    file = folder / TENSORS
    save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
    sync(file)
    record = {"format": FORMAT, "step": step, "state": state, "bytes": file.stat().st_size, "sha256": sha256(file)}
    (folder / STATE).write_text(json.dumps(record | {"checksum": _checksum(record)}, indent=1, sort_keys=True))
    sync(folder / STATE)
    sync(folder)


def _verify(path: Path) -> dict[str, Any]:
    """The record in `state.json`, if both files match it."""
    try:
        record = json.loads((path / STATE).read_bytes())
        checksum = record.pop("checksum")
        if checksum != _checksum(record):
            raise CorruptCheckpointError(f"{STATE} does not match its checksum")
        if record["format"] != FORMAT:
            raise UserError(
                f"{path} has format {record['format']}, and this version reads format {FORMAT}; resume the run with "
                f"the version of vitlab that wrote it."
            )
        if sha256(path / TENSORS) != record["sha256"]:
            raise CorruptCheckpointError(f"{TENSORS} does not match its checksum")
    except OSError as error:
        raise CorruptCheckpointError(f"{Path(error.filename or path).name}: {error.strerror}") from error
    except (UnicodeDecodeError, json.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{STATE} cannot be read: {error!r}") from error
    return record


def _remove_temporary(folder: Path) -> None:
    """Deletes what is half written or half deleted."""
    for path in folder.glob("tmp-*"):
        shutil.rmtree(path)


def _checksum(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _checkpoints(folder: Path) -> list[Path]:
    """The folders of checkpoints, newest first."""
    return sorted(folder.glob("step-" + "[0-9]" * 9), reverse=True)
