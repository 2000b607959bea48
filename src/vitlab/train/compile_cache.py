"""A cache for torch.compile that survives kills.

torch writes libraries into its cache in place and takes any file there for complete: a process killed while it links
leaves one that no later process can load. So each process compiles into its own folder, which begins with hard links to
the files of a shared one; new files are linked there once they have been used for a whole step.
"""

import contextlib
import fcntl
import functools
import os
import shutil
import sys
import tempfile
from multiprocessing.util import Finalize
from pathlib import Path

SHARED, JOB = "vitlab-shared", "vitlab-job-"
"""In torch's cache folder (TORCHINDUCTOR_CACHE_DIR): the shared files; a process's folder, JOB + a token."""


class CompileCache:
    """The cache folder of this process until it ends."""

    def __init__(self) -> None:
        from torch._inductor import config  # takes seconds
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        config.cpp_cache_precompile_headers = False  # they would be written in place, and outside of this folder
        root = Path(cache_dir())
        if root.name.startswith(JOB):  # set by the process that started this one
            root = root.parent
        root.mkdir(parents=True, exist_ok=True)
        self._shared = root / SHARED
        _remove_unused(root)
        new = Path(tempfile.mkdtemp(prefix="new-", dir=root))
        self._lock = os.open(new, os.O_RDONLY)  # until this process ends, in whatever way
        with contextlib.suppress(OSError):  # the file system knows no locks: nothing there is removed
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.folder = new.rename(new.with_name(JOB + new.name))  # locked before another process can remove it
        _link_files(self._shared, self.folder)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder)
        # Also at the end of a process of multiprocessing, which atexit misses; not in a child that was forked.
        self.close = Finalize(None, self._remove, exitpriority=0)

    def publish(self) -> None:
        """Shares the files with later processes; no compilation may be under way."""
        _link_files(self.folder, self._shared)

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


@functools.cache
def compile_cache() -> CompileCache:
    """The cache of this process, created by the first call."""
    return CompileCache()


def cpp_compiler() -> str | None:
    """The path of the compiler that torch.compile uses, or None."""
    return shutil.which(os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++"))


def _remove_unused(root: Path) -> None:
    """Removes the folders of processes that have ended: those that can be locked."""
    for folder in root.glob(f"{JOB}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _link_files(source: Path, target: Path) -> None:
    """Links all files below `source` that `target` lacks, except locks and files being written."""
    for path in source.rglob("*"):
        if path.suffix in (".lock", ".tmp") or not path.is_file():
            continue
        link = target / path.relative_to(source)
        with contextlib.suppress(OSError):  # it exists, or the file system has no links
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, link)
