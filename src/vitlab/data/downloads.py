"""Downloads from `https://` and `hf://` by fsspec: checked, and complete or not there.

Checkpoints of the Hugging Face hub go into the cache of huggingface_hub instead (`weights/detect.py`).
"""

import fcntl
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from vitlab.display import ProgressDisplay
from vitlab.errors import DISK_FULL, UserError, quoted

TIMEOUT = 60.0  # seconds without a byte
TRIES = 6
PAUSE = 0.5  # seconds before the second attempt; every further pause is twice as long
PERMANENT = (400, 401, 403, 404, 405, 410, 451)  # HTTP statuses that another attempt does not change


def cache_folder() -> Path:
    """The folder of downloads and caches: `$XDG_CACHE_HOME/vitlab`, by default `~/.cache/vitlab`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitlab"


def download(
    url: str, target: Path, digest: str = "", cancelled: threading.Event | None = None, quiet: bool = False
) -> None:
    """Downloads `url` to the file `target`, unless it is there already with that digest.

    digest: "md5:..." or "sha256:...", or "" for none. cancelled: ends the download once it is set. The bytes are
    collected in `.NAME.part` beside `target`; of several processes one downloads and the others wait. Raises UserError.
    """
    part_path = target.with_name(f".{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if _is_complete(target, digest):
            return
        with part_path.open("a+b") as part:
            # Threads and processes exclude each other. Unlocked explicitly, as forked processes share the lock.
            fcntl.flock(part, fcntl.LOCK_EX)
            try:
                if _is_complete(target, digest):  # another process has moved its part there meanwhile
                    part_path.unlink(missing_ok=True)
                else:
                    _fetch(url, part, digest, cancelled, quiet)
                    os.fsync(part.fileno())
                    part_path.replace(target)
            finally:
                fcntl.flock(part, fcntl.LOCK_UN)
    except OSError as error:
        raise UserError(f"cannot write {target}, the download of {url}: {error.strerror or error}") from error


def _is_complete(target: Path, digest: str) -> bool:
    if not target.exists():
        return False
    with target.open("rb") as file:
        return _digest(file, digest) == digest


def _digest(file: BinaryIO, like: str) -> str:
    """The digest of a file in the form of `like`, "md5:..." or "sha256:..."; "" for "", which every file has."""
    kind = like.partition(":")[0]
    return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}" if kind else ""  # pyright: ignore[reportArgumentType]


def _fetch(url: str, part: BinaryIO, digest: str, cancelled: threading.Event | None, quiet: bool) -> None:
    """Writes the file at `url` to `part`. Raises UserError for another digest."""
    from fsspec.callbacks import Callback

    def report(size: int | None, done: int) -> None:
        if cancelled and cancelled.is_set():
            raise UserError(f"{url} is no longer needed")
        display.update(done, total=size or done)

    def fetch(filesystem: Any, path: str) -> None:
        part.truncate(0)
        filesystem.get_file(path, part, callback=Callback(hooks={"report": report}))

    with ProgressDisplay(f"downloading {url}", 0, "bytes", quiet) as display:
        retry(url, fetch, cancelled)
    part.seek(0)
    if (actual := _digest(part, digest)) != digest:
        part.truncate(0)
        raise UserError(
            f"{url} has the {actual.replace(':', ' ')}, expected {digest.partition(':')[2]}: the file was corrupted or "
            f"replaced"
        )


def read_url(url: str, limit: int, required: bool = True) -> bytes | None:
    """The first `limit` bytes of a file; None if it does not exist and is not `required`. Raises UserError."""

    def read(filesystem: Any, path: str) -> bytes:
        with filesystem.open(path, "rb") as file:
            return file.read(limit)

    return retry(url, read, required=required)


def retry(
    url: str, operation: Callable[[Any, str], Any], cancelled: threading.Event | None = None, required: bool = True
) -> Any:
    """The result of `operation(filesystem, path)`, tried TRIES times unless the error is permanent. required: whether a
    file that does not exist is an error; else the result is None. Raises UserError."""
    cancelled = cancelled or threading.Event()
    last_error: BaseException | None = None
    for attempt in range(TRIES):
        if cancelled.wait(PAUSE * 2 ** (attempt - 1) if attempt else 0):
            raise UserError(f"{url} is no longer needed")
        try:
            return operation(*_filesystem(url))
        except _request_errors() as error:
            if getattr(error, "errno", None) in DISK_FULL:
                raise
            # fsspec reports any failure of a first request as a missing file, whose cause is the real one.
            last_error = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            status = _status(last_error)
            if status in (404, 410) and not required:
                return None
            if status in PERMANENT:
                hint = "check the address"
                if status in (401, 403):
                    hint = "log in (on the Hugging Face hub `hf auth login`, or HF_TOKEN) and accept the terms"
                raise UserError(f"cannot download {url} ({status}: {_reason(last_error)}): {hint}") from error
    raise UserError(
        f"cannot download {url} ({_reason(last_error)}; tried {TRIES} times): check the address and the network, or "
        f"download it elsewhere and give its path"
    ) from last_error


def check_address(url: str) -> None:
    """Raises UserError for an address that is not of http(s) or of the Hugging Face hub."""
    if not url.startswith(("http://", "https://", "hf://")):
        raise UserError(
            f"{quoted(url)} cannot be opened; give https:// or hf://. Download what is in a bucket first (`aws s3 "
            f"sync`, `gcloud storage rsync`) and give its path, or make it readable by https://"
        )


def _filesystem(url: str) -> tuple[Any, str]:
    """The file system of an address and the path in it. fsspec caches it per thread and process, so forks are safe."""
    from fsspec.core import url_to_fs  # slow to import

    if url.startswith("hf://"):
        return url_to_fs(url)
    check_address(url)
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=TIMEOUT, sock_read=TIMEOUT)
    return url_to_fs(url, client_kwargs={"trust_env": True, "timeout": timeout})  # trust_env: proxies


def _request_errors() -> tuple[type[BaseException], ...]:
    """What the file systems that have been imported raise when a request fails."""
    errors = (("aiohttp", "ClientError"), ("huggingface_hub.errors", "HTTPError"))
    return OSError, *(getattr(sys.modules[module], name) for module, name in errors if module in sys.modules)


def _reason(error: BaseException | None) -> str:
    return next(iter(str(error).splitlines()), "").rstrip(".:") or type(error).__name__


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error, if there is one."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status
    return 403 if isinstance(error, PermissionError) else 404 if isinstance(error, FileNotFoundError) else None
