"""A run's folder: config.json, metrics.jsonl, speed.jsonl, runtime.json, result.json, checkpoints/, tensorboard/,
SHA256SUMS.

What the run computes goes to metrics.jsonl, whose bytes do not depend on how often the run was stopped; times go to
speed.jsonl. SHA256SUMS has the checksums of all files of a finished run.
"""

import contextlib
import hashlib
import json
import logging
import math
import os
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from vitlab.errors import UserError
from vitlab.io import (
    MISSING,
    SUMS,
    clear_leftovers,
    find_corrupt_files,
    lock_file,
    read_sums,
    replacing_file,
    write_sums,
)
from vitlab.settings import update_settings
from vitlab.train.distributed import SINGLE, World

if typing.TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)
LOCK, RUNTIME, METRICS, SPEED = ".lock", "runtime.json", "metrics.jsonl", "speed.jsonl"
TRAINING_KEYS = {"lr", "images_per_s"}
"""A log record of training has one of these keys; a record of an evaluation has none."""
MODEL = ("model/*", "masking.safetensors")
RESULTS = ("result.json", "predictions.csv", *MODEL, "reconstructions.png")
"""The model, and what is computed from it."""
RECORDS = ("config.json", RUNTIME, METRICS, SPEED, "tensorboard/*", "checkpoints/*/*")
"""Files that only training itself can regenerate."""
_ABSENT = "not set"


class Workdir:
    """A run's folder, open in the one process that may write to it; a context manager.

    `settings` is the run's whole configuration as plain data: a new or empty folder receives it, and that of a run must
    hold the same. All ranks of a `world` open it; only rank 0 writes, and on the others every writing method does
    nothing. Raises UserError for the folder of another run or of something else, one in use, or one that a rank does
    not see.
    """

    def __init__(
        self, path: Path | str, settings: Mapping[str, Any], tensorboard: bool = True, world: World = SINGLE
    ) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.world = world
        self.writes = world.is_rank_0
        self._logs: dict[str, BinaryIO] = {}
        self._lock: BinaryIO | None = None
        self._tensorboard = tensorboard
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None
        if self.writes:
            self._open(settings)
        self.damaged: dict[str, str] = world.broadcast_object(lambda: self._damage)
        """Files of a finished run that are not what it left: name -> what is wrong."""
        ended = world.broadcast_object(lambda: (self.path / "result.json").is_file() or "result.json" in self.damaged)
        self.trained: bool = ended and not any(_matches(name, MODEL) for name in self.damaged)
        """Whether the run is over and its model intact."""
        self.finished: bool = ended and not any(_matches(name, RESULTS) for name in self.damaged)
        """Whether the run is over and everything computed from its model intact; otherwise it is regenerated."""
        if not (self.path / "config.json").is_file():
            self.close()
            raise UserError(
                f"rank {world.rank} of {world.world_size} does not see the work folder {self.path} that rank 0 has "
                f"opened; give a --workdir on a file system that all machines share."
            )

    def _open(self, settings: Mapping[str, Any]) -> None:
        check_folder(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(self.path)
        except OSError as error:
            raise UserError(
                f"nothing can be written to the work folder {self.path} ({error.strerror}); give another --workdir, or "
                f"allow writing there."
            ) from error
        try:
            clear_leftovers(self.path)
            self._damage = _find_damage(self.path)
            self._check_settings(json.loads(json.dumps(settings)))
            with self._writing():
                self._logs = {name: (self.path / name).open("ab") for name in (METRICS, SPEED)}
        except (ValueError, OSError):
            self._lock.close()
            raise

    def _check_settings(self, settings: dict[str, Any]) -> None:
        file = self.path / "config.json"
        digest = hashlib.sha256(_to_json(settings)).hexdigest()
        if "config.json" in self._damage and read_sums(self.path)["config.json"] == digest:
            del self._damage["config.json"]
            file.unlink()
        if not file.exists():
            with self._writing():
                write_json(file, settings)
            return
        try:
            saved = json.loads(file.read_bytes())
        except ValueError as error:
            raise UserError(f"{file} is not readable JSON ({error}); give another --workdir.") from error
        if isinstance(saved, dict):
            saved = update_settings(saved)
            if "microbatch" in saved:  # depends on the machine's memory; a run may continue on another machine
                saved["microbatch"] = settings.get("microbatch")
        if differences := _differences(saved, settings):
            raise UserError(
                f"the work folder {self.path} holds a run with other settings:\n  "
                + "\n  ".join(differences)
                + "\nGive another --workdir, or the same settings to continue that run."
            )

    def check_checkpoints(self) -> None:
        """Raises UserError for a finished run whose model is damaged, if no checkpoint is left to make it again."""
        damaged = sorted(name for name in self.damaged if _matches(name, MODEL))
        if damaged and not self.world.broadcast_object(lambda: any(self.checkpoints.glob("step-*"))):
            raise UserError(
                f"{', '.join(damaged)} of the finished run in {self.path} {self.damaged[damaged[0]]}, and no "
                f"checkpoint is left to regenerate the model from. Restore it, or delete the folder to train again."
            )

    def read_result(self) -> dict[str, Any]:
        """The result of a finished run."""
        return self.world.broadcast_object(lambda: json.loads((self.path / "result.json").read_bytes()))

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Ends the run: writes result.json atomically, and the checksums of all files of the run."""
        self.sync()
        if self.writes:
            with self._writing():
                write_json(self.path / "result.json", result)
                if self._writer is not None:
                    self._writer.close()  # which may write to its file
                    self._writer = None
                names = _files(self.path)
                write_sums(self.path, [n for n in names if n not in self.damaged or _matches(n, RESULTS)])
        self.damaged = {name: problem for name, problem in self.damaged.items() if not _matches(name, RESULTS)}
        self.finished = self.trained = True

    def log_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends a record of computed figures. Those of a step come before the checkpoint of that step."""
        self._log(METRICS, step, values)

    def log_speed(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends a record of measured times and rates."""
        self._log(SPEED, step, values)

    def _log(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        if not self.writes:
            return
        line = json.dumps(_finite({"step": step, **values}), sort_keys=True) + "\n"
        with self._writing():
            self._logs[name].write(line.encode())
            self._logs[name].flush()
            if not self._tensorboard:
                return
            if self._writer is None:
                from torch.utils.tensorboard import SummaryWriter  # takes a second

                self._writer = SummaryWriter(str(self.path / "tensorboard"), purge_step=self._purge_step)
            for key, value in values.items():
                if isinstance(value, (int, float)):
                    self._writer.add_scalar(key, value, step)

    def truncate_logs(self, after_step: int | None, evaluation_due: bool = False) -> None:
        """Removes what was logged after the checkpoint from which the run continues (None: all).

        These steps run again and are logged again; so is the evaluation of the checkpoint's step if it is due.
        """
        last = -1 if after_step is None else after_step
        self._purge_step = last + 1
        for name, file in self._logs.items():
            size = end = 0
            for line in (self.path / name).open("rb"):
                size += len(line)
                if (record := _parse(line)) and record["step"] <= last:
                    is_due = evaluation_due and record["step"] == last and not record.keys() & TRAINING_KEYS
                    end = end if is_due else size
            with self._writing():
                file.truncate(end)

    def read_runtime(self) -> dict[str, Any]:
        """Choices for the machine on which the run was last, which are not settings; empty if there are none."""
        try:
            runtime = json.loads((self.path / RUNTIME).read_bytes())
            return runtime if isinstance(runtime["microbatch"], int) and runtime["microbatch"] > 0 else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def write_runtime(self, runtime: Mapping[str, Any]) -> None:
        """Saves the choices for this machine."""
        if self.writes and self.read_runtime() != runtime:
            with self._writing():
                write_json(self.path / RUNTIME, runtime)

    def sync(self) -> None:
        """Flushes every record to disk; called before each checkpoint, so that none is missing from before it."""
        with self._writing():
            for file in self._logs.values():
                os.fsync(file.fileno())
            if self._writer is not None:
                self._writer.flush()

    def close(self) -> None:
        """Closes all files and releases the folder."""
        for file in (self._writer, *self._logs.values(), self._lock):
            with contextlib.suppress(OSError):  # a full disk was an error when the record was written
                if file is not None:
                    file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Adds the folder and what to do to an error in writing."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"nothing more can be written to the work folder {self.path} ({error.strerror or error}). Free space "
                f"or allow writing there, then start the same command again: it continues from the last checkpoint."
            ) from error

    def __enter__(self) -> "Workdir":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_folder(path: Path) -> None:
    """Raises UserError unless `path` is new, an empty folder, or that of a run."""
    if path.exists() and not path.is_dir():
        raise UserError(f"the work folder {path} is a file; give the name of a folder.")
    if not path.exists() or (path / "config.json").is_file():
        return
    others = sorted(item.name for item in path.iterdir() if not item.name.startswith((LOCK, ".config.json")))
    if others:
        raise UserError(
            f"the work folder {path} is not empty and holds no run (config.json is missing; it has "
            f"{', '.join(others[:5])}{', ...' if len(others) > 5 else ''}). Give a new or empty folder."
        )


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log, without unreadable lines."""
    with path.open("rb") as lines:
        return [record for record in map(_parse, lines) if record]


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically."""
    content = _to_json(data)
    with replacing_file(path) as file:
        file.write(content)


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record in a line of a log; None if the line is incomplete or corrupt."""
    with contextlib.suppress(ValueError):
        record = json.loads(line) if line.endswith(b"\n") else None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            return record
    return None


def _to_json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(_finite(data), indent=1, sort_keys=True).encode() + b"\n"


def _finite(value: Any) -> Any:
    """`value` with null for infinity and NaN, which JSON does not know."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _take_lock(folder: Path) -> BinaryIO:
    """Locks the folder until this process ends."""
    file = lock_file(folder / LOCK)
    if file is None:
        holder = (folder / LOCK).read_text()
        raise UserError(
            f"the work folder {folder} is in use by process {holder}; wait for it, stop it, or give another --workdir."
        )
    return file


def _differences(old: Any, new: Any, name: str = "") -> list[str]:
    """`name: old -> new` for every setting that differs.

    A setting that one of them lacks and the other has switched off is no difference: a run continues under a later
    version that has more settings.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        prefix = f"{name}." if name else ""
        return [
            line
            for key in sorted(old.keys() | new.keys())
            for line in _differences(old.get(key, _ABSENT), new.get(key, _ABSENT), prefix + key)
        ]
    present = [value for value in (old, new) if value is not _ABSENT]
    switched_off = len(present) == 1 and (present[0] is None or present[0] is False)
    return [] if old == new or switched_off else [f"{name}: {old} -> {new}"]


def _files(folder: Path) -> set[str]:
    """Names of the files that a run leaves."""
    paths = [path for pattern in (*RESULTS, *RECORDS) for path in folder.glob(pattern) if path.is_file()]
    return {path.relative_to(folder).as_posix() for path in paths}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(PurePath(name).match(pattern) for pattern in patterns)


def _find_damage(folder: Path) -> dict[str, str]:
    """The damaged files of a finished run, with a warning for each. Checkpoints may have been deleted."""
    result = folder / "result.json"
    damage = find_corrupt_files(folder)
    if result.is_file() and not (folder / SUMS).exists():  # of an earlier version, or killed before it wrote them
        try:
            json.loads(result.read_bytes())
            write_sums(folder, _files(folder))
        except ValueError as error:
            damage = {"result.json": f"cannot be read ({error})"}
    damage = {name: what for name, what in damage.items() if what != MISSING or not name.startswith("checkpoints/")}
    for name, what in damage.items():
        lost = "it cannot be regenerated; the model and the result do not depend on it"
        consequence = "it is regenerated" if _matches(name, (*RESULTS, "config.json")) else lost
        logger.warning("%s %s: %s", folder / name, what, consequence)
    return damage
