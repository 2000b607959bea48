"""A run's folder: config.json, metrics.jsonl, speed.jsonl, result.json, checkpoints/, tensorboard/.

What the run computes goes to metrics.jsonl, whose bytes are the same however often the run was stopped; what
the clock says goes to speed.jsonl.
"""

import contextlib
import json
import math
import os
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from vitlab.errors import UserError
from vitlab.files import lock_file, replacing_file
from vitlab.train.distributed import ALONE, Ranks

if typing.TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

LOCK = ".lock"
_ABSENT = "not set"


class Workdir:
    """A run's folder, opened by the one process that may write to it; use it in a `with` statement.

    `settings` is the run's whole configuration as plain data. A new or empty folder receives it; a run's
    folder must hold the same, and nothing in any other folder is touched.
    Of several `ranks` all open it, one after another folder in the same order; the first writes, and of the others
    every call that would write does nothing (`writes` is for what is written beside it).
    Raises ValueError for another run's folder, a folder of something else, one in use, or one that the other
    processes do not see.
    """

    def __init__(
        self, path: Path | str, settings: Mapping[str, Any], tensorboard: bool = True, ranks: Ranks = ALONE
    ) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.ranks = ranks
        self.writes = ranks.first
        self._open: list[BinaryIO] = []
        self._writer: SummaryWriter | None = None
        if self.writes:
            self._take(settings, tensorboard)
        self.finished: bool = ranks.share(lambda: (self.path / "result.json").is_file())
        """Whether the run has ended and left its result."""
        if not (self.path / "config.json").is_file():
            self.close()
            raise UserError(
                f"process {ranks.rank} of {ranks.world_size} does not see the work folder {self.path} that the first "
                f"has opened; give a --workdir on a file system that all machines share."
            )

    def _take(self, settings: Mapping[str, Any], tensorboard: bool) -> None:
        """Locks the folder and opens its logs."""
        check_folder(self.path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.path)
        except OSError as error:
            raise UserError(
                f"nothing can be written to the work folder {self.path} ({error.strerror}); give another --workdir, or "
                f"allow writing there."
            ) from error
        try:
            self._check_settings(json.loads(json.dumps(settings)))
            with self._writing():
                self._metrics = (self.path / "metrics.jsonl").open("ab")
                self._speed = (self.path / "speed.jsonl").open("ab")
        except (ValueError, OSError):
            self._lock.close()
            raise
        self._open = [self._metrics, self._speed, self._lock]
        self._tensorboard = tensorboard
        self._purge_step: int | None = None

    def read_result(self) -> dict[str, Any]:
        """The result of a finished run."""
        return self.ranks.share(lambda: json.loads((self.path / "result.json").read_bytes()))

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Ends the run: writes result.json, whole or not at all."""
        self.sync()
        if self.writes:
            with self._writing():
                write_json(self.path / "result.json", result)
        self.finished = True

    def log_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one record of computed figures; those of a step come before the checkpoint of that step."""
        if self.writes:
            self._log(self._metrics, step, values)

    def log_speed(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one record of measured times and rates."""
        if self.writes:
            self._log(self._speed, step, values)

    def _log(self, file: BinaryIO, step: int, values: Mapping[str, Any]) -> None:
        with self._writing():
            _append(file, step, values)
            if self._tensorboard:
                self._show(step, values)

    def truncate_metrics(self, after_step: int | None) -> None:
        """Forgets what was logged after the checkpoint that the run continues from (None: there is none).

        The steps in between run again and are logged once. A half-written last line goes as well.
        """
        if not self.writes:
            return
        with self._writing():
            for file in (self._metrics, self._speed):
                _truncate(file, -1 if after_step is None else after_step)
        self._purge_step = 0 if after_step is None else after_step + 1

    def sync(self) -> None:
        """Brings every record to the disk; before each checkpoint, so that none is missing from before it."""
        with self._writing():
            for file in self._open[:2]:
                os.fsync(file.fileno())
            if self._writer is not None:
                self._writer.flush()

    def close(self) -> None:
        """Lets go of the folder. What a full disk did not take was an error when it was logged."""
        for file in (*([self._writer] if self._writer is not None else []), *self._open):
            with contextlib.suppress(OSError):
                file.close()

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Says of an error in writing to the folder which folder it is, and what to do."""
        try:
            yield
        except OSError as error:
            raise OSError(
                f"nothing more can be written to the work folder {self.path} ({error.strerror or error}). Make room or "
                f"allow writing there, then start the same command again: it continues from the last checkpoint."
            ) from error

    def __enter__(self) -> "Workdir":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: types.TracebackType | None
    ) -> None:
        self.close()

    def _check_settings(self, settings: dict[str, Any]) -> None:
        file = self.path / "config.json"
        if not file.exists():
            with self._writing():
                write_json(file, settings)
            return
        try:
            differing = _differences(json.loads(file.read_bytes()), settings)
        except ValueError as error:
            raise UserError(f"{file} is not readable JSON ({error}); give another --workdir.") from error
        if differing:
            raise UserError(
                f"the work folder {self.path} holds a run with other settings:\n  "
                + "\n  ".join(differing)
                + "\nGive another --workdir, or the same settings to continue that run."
            )

    def _show(self, step: int, values: Mapping[str, Any]) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter  # here, because its import takes a second

            self._writer = SummaryWriter(str(self.path / "tensorboard"), purge_step=self._purge_step)
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self._writer.add_scalar(name, value, step)


def check_folder(path: Path) -> None:
    """Raises UserError for what cannot be a run's folder: a file, or a folder of something else."""
    if path.exists() and not path.is_dir():
        raise UserError(f"the work folder {path} is a file; give the name of a folder.")
    if not path.exists() or (path / "config.json").is_file():
        return
    others = sorted(each.name for each in path.iterdir() if not each.name.startswith((LOCK, ".config.json")))
    if others:
        raise UserError(
            f"the work folder {path} is not empty and holds no run (config.json is missing; it has "
            f"{', '.join(others[:5])}{', ...' if len(others) > 5 else ''}). Give a new or empty folder."
        )


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Writes a JSON file that is whole or not there at all."""
    text = json.dumps(_finite(data), indent=1, sort_keys=True) + "\n"
    with replacing_file(path) as file:
        file.write(text.encode())


def _lock(folder: Path) -> BinaryIO:
    """Takes the folder for this process until it ends, however it ends."""
    file = lock_file(folder / LOCK)
    if file is None:
        holder = (folder / LOCK).read_text()
        raise UserError(
            f"the work folder {folder} is in use by process {holder}; wait for it, stop it, or give another --workdir."
        )
    return file


def _differences(old: Any, new: Any, name: str = "") -> list[str]:
    """`name: old -> new` for every setting in which two configurations differ.

    A setting that one of them does not know, and the other has switched off, is no difference: a run goes on under a
    later version that has more settings.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        prefix = f"{name}." if name else ""
        return [
            line
            for key in sorted(old.keys() | new.keys())
            for line in _differences(old.get(key, _ABSENT), new.get(key, _ABSENT), prefix + key)
        ]
    known = [value for value in (old, new) if value is not _ABSENT]
    switched_off = len(known) == 1 and (known[0] is None or known[0] is False)
    return [] if old == new or switched_off else [f"{name}: {old} -> {new}"]


def _append(file: BinaryIO, step: int, values: Mapping[str, Any]) -> None:
    file.write(json.dumps(_finite({"step": step, **values}), sort_keys=True).encode() + b"\n")
    file.flush()


def _finite(value: Any) -> Any:
    """JSON knows no infinity and no NaN: they become null."""
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _truncate(file: BinaryIO, after_step: int) -> None:
    """Cuts a log before its first record later than `after_step`, or its first line that is no record."""
    size = 0
    for line in Path(file.name).read_bytes().splitlines(keepends=True):
        try:
            later = not line.endswith(b"\n") or json.loads(line)["step"] > after_step
        except (ValueError, KeyError, TypeError):
            later = True
        if later:
            break
        size += len(line)
    os.truncate(file.fileno(), size)
