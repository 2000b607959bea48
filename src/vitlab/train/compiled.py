"""torch.compile in a run that may be killed at any moment: a cache that holds whole files only, and signals that stop
the compiling.

torch writes libraries into its cache in place, and takes a file that is there for a whole one: a process killed while
it links leaves one that no later process can load. So each job compiles into a cache folder of its own, which begins
with hard links to the files of the shared one; its own new files are linked there once they have been used for a whole
step.
"""

import contextlib
import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

SHARED, OWN = "vitlab-shared", "vitlab-job-"
"""Below torch's cache folder (TORCHINDUCTOR_CACHE_DIR): the shared files, and the beginning of a job's folder."""


class StoppedError(RuntimeError):
    """The run was asked to stop (SIGTERM, Ctrl-C); it is saved, and the same command continues it."""


class CompileCache:
    """The cache folder of this job (all its processes on this machine give the same `token`), as long as it lives."""

    def __init__(self, token: str) -> None:
        from torch._inductor import config
        from torch._inductor.runtime.cache_dir_utils import cache_dir  # takes seconds

        root = Path(cache_dir())
        if root.name.startswith(OWN):  # set by the process that started this one
            root = root.parent
        config.cpp_cache_precompile_headers = False  # they would be written in place, and outside of this folder
        self._shared, self.folder = root / SHARED, root / f"{OWN}{token}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        remove_unused(root)
        _link_files(self._shared, self.folder)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder)
        # Also at the end of a process of multiprocessing, which atexit misses; not in a child that was forked.
        self._finalizer = Finalize(None, self._remove, exitpriority=0)

    def publish(self) -> None:
        """Shares the files with later jobs; all that was begun must have ended."""
        _link_files(self.folder, self._shared)

    def close(self) -> None:
        """Removes the folder, unless another process of the job uses it still."""
        self._finalizer()

    def _remove(self) -> None:
        os.close(self._lock)
        remove_unused(self.folder.parent)


_cache: CompileCache | None = None


def compile_cache(token: str) -> CompileCache:
    """The cache of this process, made at the first call."""
    global _cache  # as torch's own setting is one for the whole process
    if _cache is None:
        _cache = CompileCache(token)
    return _cache


def remove_unused(root: Path) -> None:
    """Removes the cache folders of jobs that have ended, however they ended."""
    for folder in root.glob(f"{OWN}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _link_files(source: Path, target: Path) -> None:
    """Links all files below `source` that `target` has not; neither locks nor what is being written."""
    for path in source.rglob("*"):
        if path.suffix in (".lock", ".tmp") or not path.is_file():
            continue
        link = target / path.relative_to(source)
        with contextlib.suppress(OSError):  # it is there already, or this file system knows no links
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, link)


class _Interrupted(BaseException):
    """A signal. No Exception, which torch.compile would wrap in one of its own."""


@contextlib.contextmanager
def stops_at_once() -> Iterator[None]:
    """SIGTERM and Ctrl-C within end what runs at once, with StoppedError: for the compiling before a run's first step,
    which takes minutes and changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        if callable(handler := before[number]):
            handler(number, frame)  # stops the run after the step where this exception gets lost, as in a destructor
        raise _Interrupted

    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for number in before:
            signal.signal(number, interrupt)
        yield
    except _Interrupted:
        raise StoppedError(
            "stopped while the model was compiled, before the first step: what was saved before stands, and the same "
            "command continues."
        ) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
