"""A run's folder: config.json, metrics.jsonl, speed.jsonl, runtime.json, result.json, checkpoints/, tensorboard/,
SHA256SUMS.

What the run computes goes to metrics.jsonl, whose bytes are the same however often the run was stopped; what
the clock says goes to speed.jsonl. Each has the checksums of its lines beside it, and SHA256SUMS those of all files
that a finished run leaves.
"""

import contextlib
import hashlib
import json
import logging
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, BinaryIO

from vitlab.errors import UserError
from vitlab.io import MISSING, SUMS, clear_leftovers, find_damage, lock_file, read_sums, replacing_file, write_sums
from vitlab.train.distributed import SINGLE, World
from vitlab.train.logs import Log, damaged_lines, finite

if typing.TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)
LOCK = ".lock"
RUNTIME = "runtime.json"
"""What is chosen for the machine that the run is on, and is no setting: see `read_runtime`."""
LOGS = ("metrics.jsonl", "speed.jsonl")
RESULTS = ("result.json", "predictions.csv", "model/*", "masking.safetensors", "reconstructions.png")
"""What is computed from the trained model, or is the model."""
RECORDS = ("config.json", "runtime.json", *LOGS, ".*.crc", "tensorboard/*", "checkpoints/*/*")
"""What else a finished run leaves; nothing but the run itself can make it again."""
_ABSENT = "not set"


class Workdir:
    """A run's folder, opened by the one process that may write to it; use it in a `with` statement.

    `settings` is the run's whole configuration as plain data. A new or empty folder receives it; a run's
    folder must hold the same, and nothing in any other folder is touched.
    With several processes all open it, one after another folder in the same order; the first writes, and of the others
    every call that would write does nothing (`writes` is for what is written beside it).
    Raises ValueError for another run's folder, a folder of something else, one in use, or one that the other
    processes do not see.
    """

    def __init__(
        self, path: Path | str, settings: Mapping[str, Any], tensorboard: bool = True, world: World = SINGLE
    ) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.world = world
        self.writes = world.is_rank_0
        self._logs: list[Log] = []
        self._lock: BinaryIO | None = None
        self._writer: SummaryWriter | None = None
        if self.writes:
            self._take(settings, tensorboard)
        self.damaged: dict[str, str] = world.broadcast_object(lambda: self._damage)
        """Of a run that has ended: files that are not what it left, and what is wrong with them."""
        ended = world.broadcast_object(lambda: (self.path / "result.json").is_file() or "result.json" in self.damaged)
        self.trained: bool = ended and not any(map(_is_model, self.damaged))
        """Whether the run has ended and its model is whole."""
        self.finished: bool = ended and not any(map(_is_result, self.damaged))
        """Whether the run has ended and everything that is computed from its model is whole. Where it is not, going on
        as with an interrupted run makes it again."""
        if not (self.path / "config.json").is_file():
            self.close()
            raise UserError(
                f"process {world.rank} of {world.world_size} does not see the work folder {self.path} that the first "
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
            clear_leftovers(self.path)
            self._damage = _find_damage(self.path)
            self._check_settings(json.loads(json.dumps(settings)))
            with self._writing():
                self._logs = [Log(self.path / name) for name in LOGS]
        except (ValueError, OSError):
            self._lock.close()
            raise
        self._tensorboard = tensorboard
        self._purge_step: int | None = None

    def check_checkpoints(self) -> None:
        """Raises UserError where a run has ended, its model is damaged, and no checkpoint is left to make it again."""
        lost = sorted(filter(_is_model, self.damaged))
        if lost and not self.world.broadcast_object(lambda: any(self.checkpoints.glob("step-*"))):
            raise UserError(
                f"{', '.join(lost)} of the finished run in {self.path} {self.damaged[lost[0]]}, and no checkpoint is "
                f"left to make the model again. Put back a good copy, or delete the folder to train from the beginning."
            )

    def read_result(self) -> dict[str, Any]:
        """The result of a finished run."""
        return self.world.broadcast_object(lambda: json.loads((self.path / "result.json").read_bytes()))

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Ends the run: writes result.json, whole or not at all, and the checksums of all that the run leaves."""
        self.sync()
        if self.writes:
            with self._writing():
                write_json(self.path / "result.json", result)
                if self._writer is not None:
                    self._writer.close()  # which may write to its file
                    self._writer = None
                write_sums(
                    self.path, [name for name in _left(self.path) if name not in self.damaged or _is_result(name)]
                )
        self.damaged = {name: what for name, what in self.damaged.items() if not _is_result(name)}
        self.finished = self.trained = True

    def log_metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one record of computed figures; those of a step come before the checkpoint of that step."""
        if self.writes:
            self._log(0, step, values)

    def log_speed(self, step: int, values: Mapping[str, Any]) -> None:
        """Appends one record of measured times and rates."""
        if self.writes:
            self._log(1, step, values)

    def _log(self, which: int, step: int, values: Mapping[str, Any]) -> None:
        with self._writing():
            self._logs[which].append(step, values)
            if self._tensorboard:
                self._show(step, values)

    def read_runtime(self) -> dict[str, Any]:
        """What the run has chosen for the machine it ran on last; empty where it has not begun. Only for the first of
        several processes."""
        try:
            runtime = json.loads((self.path / RUNTIME).read_bytes())
            return runtime if isinstance(runtime["microbatch"], int) and runtime["microbatch"] > 0 else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}  # it is chosen anew

    def write_runtime(self, runtime: Mapping[str, Any]) -> None:
        """Keeps what is chosen for this machine, and is no setting of the run."""
        if self.writes and self.read_runtime() != runtime:
            with self._writing():
                write_json(self.path / RUNTIME, runtime)

    def truncate_metrics(self, after_step: int | None, evaluation_due: bool = False) -> None:
        """Forgets what was logged after the checkpoint that the run continues from (None: there is none).

        The steps in between run again and are logged once; so is the evaluation of the checkpoint's own step, where
        that is due. A half-written last line goes as well. A warning names the lines before that are damaged.
        """
        if not self.writes:
            return
        with self._writing():
            for log in self._logs:
                lines = log.truncate(-1 if after_step is None else after_step, evaluation_due)
                if lines and log.path.name not in self.damaged:  # else it was warned of already
                    logger.warning("%s does not match its checksums: %s", log.path, _consequence(log.path))
        self._purge_step = 0 if after_step is None else after_step + 1

    def sync(self) -> None:
        """Brings every record to the disk; before each checkpoint, so that none is missing from before it."""
        with self._writing():
            for log in self._logs:
                log.sync()
            if self._writer is not None:
                self._writer.flush()

    def close(self) -> None:
        """Lets go of the folder. What a full disk did not take was an error when it was logged."""
        for file in (self._writer, *self._logs, self._lock):
            with contextlib.suppress(OSError):
                if file is not None:
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
        written = hashlib.sha256(_to_json(settings)).hexdigest()
        if "config.json" in self._damage and read_sums(self.path)["config.json"] == written:
            del self._damage["config.json"]
            file.unlink()
        if not file.exists():
            with self._writing():
                write_json(file, settings)
            return
        try:
            saved = json.loads(file.read_bytes())
            if isinstance(saved, dict) and "microbatch" in saved:
                saved["microbatch"] = settings.get("microbatch")  # memory decides it: another machine takes another
            differing = _differences(saved, settings)
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
    """Raises UserError unless a run may work in `path`: a new or empty folder, or that of a run."""
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
    content = _to_json(data)
    with replacing_file(path) as file:
        file.write(content)


def _to_json(data: Mapping[str, Any]) -> bytes:
    return json.dumps(finite(data), indent=1, sort_keys=True).encode() + b"\n"


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


def _left(folder: Path) -> set[str]:
    """Names of the files that a run leaves."""
    paths = [path for pattern in (*RESULTS, *RECORDS) for path in folder.glob(pattern) if path.is_file()]
    return {path.relative_to(folder).as_posix() for path in paths}


def _is_result(name: str) -> bool:
    return any(PurePath(name).match(pattern) for pattern in RESULTS)


def _is_model(name: str) -> bool:
    return name.startswith("model/") or name == "masking.safetensors"


def _find_damage(folder: Path) -> dict[str, str]:
    """What is damaged of a run that has ended, with a warning for each file. Checkpoints may be deleted."""
    result = folder / "result.json"
    if result.is_file() and not (folder / SUMS).exists():  # of an older version, or killed before it wrote them
        try:
            json.loads(result.read_bytes())
        except ValueError as error:
            logger.warning("%s cannot be read (%s): it is written anew", result, error)
            return {"result.json": "cannot be read"}
        write_sums(folder, _left(folder))
        return {}
    damage = find_damage(folder)
    damage = {name: what for name, what in damage.items() if what != MISSING or not name.startswith("checkpoints/")}
    for name, what in damage.items():
        logger.warning("%s %s: %s", folder / name, what, _consequence(folder / name))
    return damage


def _consequence(path: Path) -> str:
    """What follows from damage to this file of a run."""
    if path.name == "result.json" or path.suffix in (".csv", ".png"):
        return "it is made again from the run's model"
    if path.suffix == ".jsonl":
        lines = ", ".join(map(str, damaged_lines(path)))
        of = f"line {lines} cannot be trusted, nor curves drawn from it" if lines else "its lines match theirs, though"
        return f"{of}; the model and the result do not depend on it"
    if path.parent.name == "model" or path.name == "masking.safetensors":
        return "the model is made again from the last checkpoint"
    if path.name == "config.json":
        return "it is written again if the settings given are the run's"
    if "checkpoints" in path.parts:
        return "only the making of a damaged model would need it"
    return "it cannot be made again; the model and the result do not depend on it"
