"""Checks that requests name no file but an uploaded one.

Gradio takes the path of a file from the request. Mounted on an application, it does not compare it with its upload
folder, and it fetches what looks like a URL.
"""

import json
import os
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.io import check_regular, parse_json, read_regular

POSTED = ("upload", "queue/join", "reset", "cancel")
"""What the page posts to, below Gradio's /gradio_api/; every other endpoint is closed."""
BODY_BYTES = 2**20
"""Largest request that is not an upload."""


def find_upload(path: str, folder: Path, limit: int) -> Path:
    """The file at `path`, links resolved. Raises UserError unless it is a regular file of at most `limit` bytes inside
    `folder`; nothing outside the folder is opened or reported."""
    refusal = UserError(f"{path!r} is not an uploaded file; drop an image on the page.")
    try:
        inside = os.path.abspath(path)  # noqa: PTH100  (removes `..` without following links)
        if not Path(inside).is_relative_to(folder):
            raise refusal
        file = Path(inside).resolve(strict=True)
        if not file.is_relative_to(folder.resolve()):
            raise refusal
        check_regular(file)
        size = file.stat().st_size
    except (OSError, RuntimeError, ValueError) as error:  # missing, a loop of links, a NUL, not a regular file
        raise refusal from error
    if size > limit:
        raise UserError(f"{file.name} has {size / 2**20:.1f} MB; at most {limit / 2**20:g} MB are allowed.")
    return file


def read_upload(path: str, folder: Path, limit: int) -> bytes:
    """The bytes of an uploaded file. Raises UserError as `find_upload` does."""
    file = find_upload(path, folder, limit)
    try:
        return read_regular(file, limit)
    except OSError as error:
        raise UserError(f"{file.name} cannot be read ({error.strerror}); drop it again.") from error


def paths_in(request: Any) -> list[Any]:
    """Every value of a key "path" in a request's JSON, which Gradio may take for a file."""
    if isinstance(request, dict):
        paths = [request["path"]] if "path" in request else []
        return paths + [path for value in request.values() for path in paths_in(value)]
    return [path for value in request for path in paths_in(value)] if isinstance(request, list) else []


class OnlyUploads:
    """ASGI middleware that passes on what the page itself posts, if it names no file outside of `folder`."""

    def __init__(self, app: Any, folder: Path, limit: int) -> None:
        self.app, self.folder, self.limit = app, folder, limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        endpoint = scope["path"].removeprefix("/gradio_api/").rstrip("/")
        if endpoint not in POSTED:
            await _refuse(send, 404, "The page has no such endpoint.")
        elif endpoint == "upload":
            await self.app(scope, receive, send)
        elif (body := await _body(receive)) is None:
            await _refuse(send, 413, f"A request has at most {BODY_BYTES:,} bytes.")
        else:
            try:
                self._check(body)
            except UserError as error:
                await _refuse(send, 403, str(error))
            else:
                await self.app(scope, _replay(body, receive), send)

    def _check(self, body: bytes) -> None:
        for path in paths_in(parse_json(body, "the request")):
            if not isinstance(path, str):
                raise UserError(f"a file's path is {str(path)[:40]!r}; it must be text.")
            find_upload(path, self.folder, self.limit)


async def _body(receive: Any) -> bytes | None:
    """The whole body of a request; None where it is too large."""
    body, more = b"", True
    while more and len(body) <= BODY_BYTES:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return None if len(body) > BODY_BYTES else body


def _replay(body: bytes, receive: Any) -> Any:
    """A `receive` that returns the body again, then what follows it."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def received() -> Any:
        return next(messages, None) or await receive()

    return received


async def _refuse(send: Any, status: int, reason: str) -> None:
    kind = (b"content-type", b"application/json")
    await send({"type": "http.response.start", "status": status, "headers": [kind]})
    await send({"type": "http.response.body", "body": json.dumps({"detail": reason}).encode()})
