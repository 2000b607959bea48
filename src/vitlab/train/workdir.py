"""A run's folder: config.json, metrics.jsonl, speed.jsonl, runtime.json, result.json, checkpoints/, tensorboard/,
SHA256SUMS.

Metrics go to metrics.jsonl, whose bytes do not depend on how often the run was stopped; times go to speed.jsonl.
SHA256SUMS has the checksums of all files of a finished run.
"""

import contextlib
import hashlib
import json
import logging
import os
import shlex
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vitlab.checksums import SUMS, read_sums, sha256, write_sums
from vitlab.errors import UserError, WriteError
from vitlab.io import finite, lock_file, resolved, write_bytes
from vitlab.train.distributed import SINGLE, World
from vitlab.train.run_files import (
    METRICS,
    RUNTIME,
    SPEED,
    clear_run,
    find_corrupt,
    has_report,
    is_result,
    record_report,
    require_same_settings,
    run_files,
)

if typing.TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)
LOCK = ".lock"
"""File that the process with an open folder has locked."""


class Workdir:
    """A run's folder, open in the one process that may write to it; a context manager.

    `settings` is written to config.json of a new folder, and compared with config.json of an existing run. All ranks of
    a `world` open it; only rank 0 writes, and on the others every writing method does nothing. Raises UserError for the
    folder of another run or of something else, one in use, or one that a rank does not see.
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
        self._tensorboard = tensorboard and _is_text(self.path)
        self._writer: SummaryWriter | None = None
        self._purge_step: int | None = None
        if self.writes:
            self._open(settings)  # the other ranks wait for rank 0 in the next line
        self.corrupt: dict[str, str] = world.broadcast_object(lambda: find_corrupt(self.path))
        """Files of a finished run, or of the runs in it, that are missing or not what it wrote: name -> problem."""
        intact = not any(map(is_result, self.corrupt))
        self.finished: bool = intact and world.broadcast_object(lambda: (self.path / "result.json").is_file())
        """Whether the run is over and its results are intact; otherwise they are regenerated."""
        if not (self.path / "config.json").is_file():
            self.close()
            raise UserError(
                f"rank {world.rank} of {world.world_size} does not see the work folder {self.path} that rank 0 has "
                f"opened; give a --workdir on a file system that all machines share."
            )

    def _open(self, settings: Mapping[str, Any]) -> None:
        """Locks the folder, clears leftovers, and opens config.json and the logs."""
        check_folder(self.path)
        try:
            self._lock = lock_file(self.path / LOCK)
        except OSError as error:
            raise UserError(
                f"nothing can be written to the work folder {self.path} ({error.strerror}); give another --workdir, or "
                f"allow writing there."
            ) from error
        if self._lock is None:
            raise UserError(
                f"the work folder {self.path} is in use by process {(self.path / LOCK).read_text()}; wait for it, stop "
                f"it, or give another --workdir."
            )
        try:
            clear_run(self.path)
            self._check_settings(json.loads(json.dumps(settings)))
            with self._writing():
                self._logs = {name: (self.path / name).open("ab") for name in (METRICS, SPEED)}
        except (ValueError, OSError):
            self._lock.close()
            raise

    def _check_settings(self, settings: dict[str, Any]) -> None:
        """Writes config.json, or compares it; a corrupt one of a finished run is written again."""
        file = self.path / "config.json"
        digest = hashlib.sha256(_to_json(settings)).hexdigest()
        if (self.path / SUMS).exists() and read_sums(self.path).get(file.name) == digest != sha256(file):
            logger.warning("%s does not match its checksum: it is regenerated", file)
            file.unlink()
        if file.exists():
            require_same_settings(file, settings)
        else:
            with self._writing():
                write_json(file, settings)

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
                lost = {name for name in self.corrupt if not is_result(name)}  # their checksums stay
                write_sums(self.path, run_files(self.path) - lost)
        self.finished = True

    def write_report(self, make: Callable[[], bool]) -> None:
        """Makes the report of a finished job, unless it is complete and intact: `make()` writes its files, and returns
        whether it could."""
        if self.writes and not has_report(self.path) and make():
            with self._writing():
                record_report(self.path)

    def log(self, name: str, step: int, values: Mapping[str, Any]) -> None:
        """Appends a record to METRICS or SPEED. Metrics of a step come before the checkpoint of that step."""
        if not self.writes:
            return
        line = json.dumps(finite({"step": step, **values}), sort_keys=True) + "\n"
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

    def truncate_logs(self, after_step: int) -> None:
        """Removes log lines after the checkpoint that the run resumes from: these steps run again."""
        self._purge_step = after_step + 1
        for name, file in self._logs.items():
            size = end = 0
            for line in (self.path / name).open("rb"):
                size += len(line)
                if (record := _parse(line)) and record["step"] <= after_step:
                    end = size
            with self._writing():
                file.truncate(end)

    def is_evaluated(self, step: int) -> bool:
        """Whether metrics.jsonl has an evaluation of `step`: a record without a learning rate."""

        def check() -> bool:
            records = read_log(self.path / METRICS)
            return any(record["step"] == step and "lr" not in record for record in records)

        return self.world.broadcast_object(check)

    def read_runtime(self) -> dict[str, Any]:
        """Machine-dependent values of the last start (micro-batch size), not part of the config; {} if unreadable."""
        try:
            runtime = json.loads((self.path / RUNTIME).read_bytes())
            return runtime if isinstance(runtime["microbatch"], int) and runtime["microbatch"] > 0 else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def write_runtime(self, runtime: Mapping[str, Any]) -> None:
        """Saves the machine-dependent values of this start, and the command if it is one of the program."""
        program = Path(sys.argv[0])
        if program.stem == "vitlab" or program.parts[-2:] == ("vitlab", "__main__.py"):
            runtime = {**runtime, "command": shlex.join(["vitlab", *sys.argv[1:]])}
        if self.writes and self.read_runtime() != runtime:
            with self._writing():
                write_json(self.path / RUNTIME, runtime)

    def sync(self) -> None:
        """Flushes every record to disk, before the checkpoint that follows them is written."""
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
        """Re-raises an OSError with the folder and a hint."""
        try:
            yield
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else error
            raise WriteError(
                f"nothing more can be written to the work folder {self.path} ({reason}). Free space or allow writing "
                f"there, then run the same command to resume from the last checkpoint.",
                error.errno,
            ) from error

    def __enter__(self) -> "Workdir":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_text(path: Path) -> bool:
    """Whether Python takes a name for text, as TensorBoard requires; warns otherwise, as in a locale without UTF-8."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError:
        logger.warning("the locale is not UTF-8: there are no files for TensorBoard in %s", ascii(str(path)))
        return False
    return True


def check_folder(path: Path) -> None:
    """Raises UserError unless `path` is in UTF-8, and new, an empty folder, or a run's."""
    resolved(path)
    try:
        os.fsencode(path.absolute()).decode()
    except UnicodeDecodeError as error:
        raise UserError(
            f"the work folder {str(path.absolute())!a} is not valid UTF-8, and safetensors reads no other names; give "
            f"another --workdir."
        ) from error
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
    write_bytes(path, _to_json(data))


def _to_json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(data), indent=1, sort_keys=True).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    """The record in a line of a log; None if the line is incomplete or corrupt."""
    with contextlib.suppress(ValueError):
        record = json.loads(line) if line.endswith(b"\n") else None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            return record
    return None
