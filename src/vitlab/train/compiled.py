"""A cache for torch.compile that survives kills.

torch writes libraries into its cache in place and takes any file there for complete: a process killed while it links
leaves one that no later process can load. So each job compiles into its own folder, which begins with hard links to the
files of the shared cache; new files are linked there once they have been used for a whole step.
"""

import contextlib
import fcntl
import os
import shutil
from multiprocessing.util import Finalize
from pathlib import Path

SHARED, JOB = "vitlab-shared", "vitlab-job-"
"""In torch's cache folder (TORCHINDUCTOR_CACHE_DIR): the shared files, and the prefix of a job's folder."""


class CompileCache:
    """The cache folder of a job while it lives. All its processes on a machine give the same `token`."""

    def __init__(self, token: str) -> None:
        from torch._inductor import config  # takes seconds
        from torch._inductor.runtime.cache_dir_utils import cache_dir

        root = Path(cache_dir())
        if root.name.startswith(JOB):  # set by the process that started this one
            root = root.parent
        config.cpp_cache_precompile_headers = False  # they would be written in place, and outside of this folder
        self._shared, self.folder = root / SHARED, root / f"{JOB}{token}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY)
        with contextlib.suppress(OSError):
            fcntl.flock(self._lock, fcntl.LOCK_SH)
        _remove_unused(root)
        _link_files(self._shared, self.folder)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(self.folder)
        # Also at the end of a process of multiprocessing, which atexit misses; not in a child that was forked.
        self.close = Finalize(None, self._remove, exitpriority=0)
        """Removes the folder, unless another process of the job still uses it."""

    def publish(self) -> None:
        """Shares the files with later jobs; no compilation may be under way."""
        _link_files(self.folder, self._shared)

    def _remove(self) -> None:
        os.close(self._lock)
        _remove_unused(self.folder.parent)


_cache: CompileCache | None = None


def compile_cache(token: str) -> CompileCache:
    """The cache of this process, created by the first call."""
    global _cache  # as torch's own setting is one for the whole process
    if _cache is None:
        _cache = CompileCache(token)
    return _cache


def _remove_unused(root: Path) -> None:
    """Removes the folders of jobs that have ended, however they ended."""
    for folder in root.glob(f"{JOB}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _link_files(source: Path, target: Path) -> None:
    """Links all files below `source` that `target` lacks, but for locks and files being written."""
    for path in source.rglob("*"):
        if path.suffix in (".lock", ".tmp") or not path.is_file():
            continue
        link = target / path.relative_to(source)
        with contextlib.suppress(OSError):  # it exists, or the file system has no links
            link.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, link)
