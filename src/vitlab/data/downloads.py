"""Downloads from any address that fsspec opens (`https://`, `s3://`, `gs://`, `hf://`): resumed, checked, atomic.

Checkpoints of the Hugging Face hub go into the cache of huggingface_hub instead (`weights/hub.py`).
"""

import fcntl
import hashlib
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from vitlab.display import ProgressDisplay
from vitlab.errors import UserError
from vitlab.io import JSON_BYTES

BLOCK = 2**23  # bytes per request: what a broken connection loses
TIMEOUT = 600.0  # seconds for a request
TRIES = 6  # attempts for a request
PAUSE = 0.5  # seconds before the second attempt; every further pause is twice as long

REQUEST_ERRORS = {
    "aiohttp": "ClientError",
    "huggingface_hub.errors": "HTTPError",
    "botocore.exceptions": "BotoCoreError",
    "gcsfs.retry": "HttpError",
}
"""The errors of file systems that are not an OSError."""
RETRIED = (408, 416, 425, 429)
"""The statuses 4xx that are not permanent."""
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
        while not (target.exists() and digest_of(target, digest) == digest):
            with part_path.open("a+b") as part:
                # Threads and processes exclude each other. Unlocked explicitly, as forked processes share the lock.
                fcntl.flock(part, fcntl.LOCK_EX)
                try:
                    if _is_at(part, part_path):  # else another process has moved it to `target` meanwhile
                        _complete(url, part, digest, size, cancelled, quiet)
                        os.fsync(part.fileno())
                        part_path.replace(target)
                        return
                finally:
                    fcntl.flock(part, fcntl.LOCK_UN)
    except OSError as error:
        raise UserError(f"cannot write {target}, the download of {url}: {error.strerror or error}") from error


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _complete(
    url: str, part: BinaryIO, digest: str, size: int | None, cancelled: threading.Event | None, quiet: bool
) -> None:
    """Appends to `part` what it lacks. A result with another digest is downloaded again once, from the start."""
    if size is None:
        size = retry(url, lambda filesystem, path: filesystem.info(path)["size"], cancelled)
    actual = ""
    for _ in range(2):
        if size is None:  # the server does not say, so no range of it can be requested
            part.truncate(0)
            part.write(retry(url, lambda filesystem, path: filesystem.cat_file(path), cancelled))
        else:
            with ProgressDisplay(f"downloading {url}", size, "bytes", quiet) as display:
                while (start := part.seek(0, os.SEEK_END)) < size:
                    data = _read_block(url, start, min(start + BLOCK, size), cancelled)
                    part.write(data if len(data) <= BLOCK else data[start:])  # some servers always send the whole file
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


def _read_block(url: str, start: int, end: int, cancelled: threading.Event | None) -> bytes:
    def read(filesystem: Any, path: str) -> bytes:
        data = filesystem.cat_file(path, start=start, end=end)
        if not data:
            raise OSError("the server sends less than the file's size")
        return data

    return retry(url, read, cancelled)


def read_small(url: str, limit: int = JSON_BYTES) -> bytes | None:
    """The content of a file of at most `limit` bytes; None if it does not exist. Raises UserError."""

    def read(filesystem: Any, path: str) -> bytes:
        with filesystem.open(path, "rb") as file:
            return file.read(limit + 1)

    data = retry(url, read, missing=None)
    if data is not None and len(data) > limit:
        raise UserError(f"{url} has more than {limit:,} bytes; check the address")
    return data


_REQUIRED: Any = object()


def retry(
    url: str,
    operation: Callable[[Any, str], Result],
    cancelled: threading.Event | None = None,
    missing: Any = _REQUIRED,
) -> Result:
    """The result of `operation(filesystem, path)`, tried TRIES times unless the error is permanent.

    missing: what is returned for a file that does not exist (default: raise UserError).
    """
    cancelled = cancelled or threading.Event()
    last: BaseException | None = None
    for attempt in range(TRIES):
        if cancelled.wait(PAUSE * 2 ** (attempt - 1) if attempt else 0):
            raise UserError(f"{url} is no longer needed")
        try:
            return operation(*_filesystem(url))
        except UserError:
            raise
        except _request_errors() as error:
            # fsspec reports any failure of a first request as a missing file, whose cause is the real one.
            last = error.__cause__ if isinstance(error, FileNotFoundError) and error.__cause__ else error
            status, reason = _status(last), _reason(last)
            if status in (404, 410) and missing is not _REQUIRED:
                return missing
            if status is not None and 400 <= status < 500 and status not in RETRIED:
                hint = "check the address"
                if status in (401, 403):
                    hint = "log in (on the Hugging Face hub `hf auth login`, or HF_TOKEN) and accept the terms"
                raise UserError(f"cannot download {url} ({status}: {reason}): {hint}") from error
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
    except ImportError as error:
        raise UserError(f"{url} cannot be opened ({error}): pip install 'vitlab[data]'") from error
    except ValueError as error:
        raise UserError(f"{url} cannot be opened ({error}); expected https://, s3://, gs:// or hf://") from error


def _request_errors() -> tuple[type[BaseException], ...]:
    """What the file systems that have been used raise when a request fails."""
    modules = ((sys.modules.get(module), name) for module, name in REQUEST_ERRORS.items())
    return OSError, *(getattr(module, name) for module, name in modules if module is not None)


def _reason(error: BaseException | None) -> str:
    return next(iter(str(error).splitlines()), "").rstrip(".:") or type(error).__name__


def _status(error: BaseException) -> int | None:
    """The HTTP status behind an error, if there is one."""
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(status, int):
        return status
    return 403 if isinstance(error, PermissionError) else 404 if isinstance(error, FileNotFoundError) else None


def digest_of(path: Path, like: str) -> str:
    """The digest of a file in the form of `like`, "md5:..." or "sha256:..."; "" for "", which every file has."""
    with path.open("rb") as file:
        return _digest(file, like)


def _digest(file: BinaryIO, like: str) -> str:
    kind = like.partition(":")[0]
    return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}" if kind else ""  # pyright: ignore[reportArgumentType]
