"""Downloads from any address that fsspec opens (`https://`, `s3://`, `gs://`, `hf://`): resumed, checked, atomic.

Checkpoints of the Hugging Face hub go into the cache of huggingface_hub instead (`weights/detect.py`).
"""

import fcntl
import hashlib
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from vitlab.display import ProgressDisplay
from vitlab.errors import UserError

BLOCK = 2**23  # bytes per request: what a broken connection loses
TIMEOUT = 600.0  # seconds for a request
TRIES = 6  # attempts for a request
PAUSE = 0.5  # seconds before the second attempt; every further pause is twice as long
PERMANENT = (400, 401, 403, 404, 405, 410, 451)  # HTTP statuses that another attempt does not change
ERRORS = {
    "aiohttp": "ClientError",
    "huggingface_hub.errors": "HTTPError",
    "botocore.exceptions": "BotoCoreError",
    "gcsfs.retry": "HttpError",
}
"""The errors of file systems that are not an OSError."""
Report = Callable[[int, int], None]
"""Receives the amount that is done, and the total."""
Result = TypeVar("Result")


def cache_folder() -> Path:
    """The folder of downloads and caches: `$XDG_CACHE_HOME/vitlab`, by default `~/.cache/vitlab`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitlab"


def download(
    url: str,
    target: Path,
    digest: str = "",
    size: int | None = None,
    cancelled: threading.Event | None = None,
    quiet: bool = False,
) -> None:
    """Downloads `url` to the file `target`, unless it is there already with that digest.

    digest: "md5:..." or "sha256:...", or "" for none. size: bytes, if known. cancelled: ends the download once it is
    set. The bytes are collected in `.NAME.part` beside `target`, where an interrupted download is resumed; of several
    processes one downloads and the others wait. Raises UserError.
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
                    _complete(url, part, digest, size, cancelled, quiet)
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


def _complete(
    url: str, part: BinaryIO, digest: str, size: int | None, cancelled: threading.Event | None, quiet: bool
) -> None:
    """Appends the missing bytes to `part`. A result with another digest is downloaded again once, from the start."""

    def read_block(filesystem: Any, path: str) -> bytes:
        assert size is not None
        data = filesystem.cat_file(path, start=start, end=min(start + BLOCK, size))
        if not data:
            raise OSError("the server sends less than the file's size")
        return data if len(data) <= BLOCK else data[start:]  # some servers always send the whole file

    def read_all(filesystem: Any, path: str) -> None:
        part.truncate(0)
        with filesystem.open(path, "rb") as file:
            shutil.copyfileobj(file, part, BLOCK)

    if size is None:
        size = retry(url, lambda filesystem, path: filesystem.info(path)["size"], cancelled)
    actual = ""
    for _ in range(2):
        if size is None:  # the server does not say, so no range of it can be requested
            retry(url, read_all, cancelled)
        else:
            with ProgressDisplay(f"downloading {url}", size, "bytes", quiet) as display:
                while (start := part.seek(0, os.SEEK_END)) < size:
                    part.write(retry(url, read_block, cancelled))
                    display.update(part.tell())
        part.seek(0)
        actual = _digest(part, digest)
        if actual == digest:
            return
        part.truncate(0)  # it may have begun with a part of another file
    expected = digest.partition(":")[2]
    raise UserError(
        f"{url} has the {actual.replace(':', ' ')}, expected {expected}: the file was corrupted or replaced"
    )


def retry(
    url: str,
    operation: Callable[[Any, str], Result],
    cancelled: threading.Event | None = None,
    required: bool = True,
) -> Any:
    """The result of `operation(filesystem, path)`, tried TRIES times unless the error is permanent.

    required: whether a file that does not exist is an error; else the result is None. Raises UserError.
    """
    cancelled = cancelled or threading.Event()
    last: BaseException | None = None
    for attempt in range(TRIES):
        if cancelled.wait(PAUSE * 2 ** (attempt - 1) if attempt else 0):
            raise UserError(f"{url} is no longer needed")
        try:
            return operation(*_filesystem(url))
        except _request_errors() as error:
            # fsspec reports any failure of a first request as a missing file, whose cause is the real one.
            last = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            status = _status(last)
            if status in (404, 410) and not required:
                return None
            if status in PERMANENT:
                hint = "check the address"
                if status in (401, 403):
                    hint = "log in (on the Hugging Face hub `hf auth login`, or HF_TOKEN) and accept the terms"
                raise UserError(f"cannot download {url} ({status}: {_reason(last)}): {hint}") from error
    raise UserError(
        f"cannot download {url} ({_reason(last)}; tried {TRIES} times): check the address and the network. The same "
        f"command resumes the download"
    ) from last


def _filesystem(url: str) -> tuple[Any, str]:
    """The file system of an address and the path in it. fsspec caches it per thread and process, so forks are safe."""
    from fsspec.core import url_to_fs  # slow to import

    options: dict[str, Any] = {}
    if url.startswith(("http://", "https://")):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=TIMEOUT, sock_connect=60.0, sock_read=60.0)
        options = {"client_kwargs": {"trust_env": True, "timeout": timeout}}  # trust_env: proxies
    try:
        return url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"{url} cannot be opened ({error}); expected https://, hf://, or with pip install 'vitlab[data]' s3:// or "
            f"gs://"
        ) from error


def _request_errors() -> tuple[type[BaseException], ...]:
    """What the file systems that have been imported raise when a request fails."""
    return OSError, *(getattr(sys.modules[module], name) for module, name in ERRORS.items() if module in sys.modules)


def _reason(error: BaseException | None) -> str:
    return next(iter(str(error).splitlines()), "").rstrip(".:") or type(error).__name__


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error, if there is one."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status
    return 403 if isinstance(error, PermissionError) else 404 if isinstance(error, FileNotFoundError) else None
