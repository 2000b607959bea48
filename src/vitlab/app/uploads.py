"""Uploaded files, and the guard at the door that lets requests name no other file.

Gradio takes the place of a file from the request. Mounted on an application, it does not compare it with its upload
folder, and it fetches what looks like an address.
"""

import json
import os
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.io import check_regular, parse_json, read_regular

POSTED = ("upload", "queue/join", "reset", "cancel")
"""What the page posts to, below Gradio's /gradio_api/; nothing else is open."""
BODY_BYTES = 2**20
"""Largest request that is no upload. A control's values and the place of a file are a few hundred bytes."""


def find_upload(path: str, folder: Path, limit: int) -> Path:
    """The file at `path`, links followed. Raises UserError unless it is a regular one of at most `limit` bytes that
    lies below `folder`; nothing outside the folder is looked at, so the error does not tell what there is."""
    refusal = UserError(f"{path!r} is no file that was dropped here; drop a image on the page.")
    try:
        inside = os.path.abspath(path)  # noqa: PTH100  (takes `..` out without following links)
        if not Path(inside).is_relative_to(folder):
            raise refusal
        found = Path(inside).resolve(strict=True)
        if not found.is_relative_to(folder.resolve()):
            raise refusal
        check_regular(found)
        size = found.stat().st_size
    except (OSError, RuntimeError, ValueError) as error:  # gone, a loop of links, a NUL, or no regular file
        raise refusal from error
    if size > limit:
        raise UserError(f"{found.name} has {size / 2**20:.1f} MB; at most {limit / 2**20:g} MB are allowed.")
    return found


def read_upload(path: str, folder: Path, limit: int) -> bytes:
    """What an uploaded file holds. Raises UserError as `find_upload` does."""
    found = find_upload(path, folder, limit)
    try:
        return read_regular(found, limit)
    except OSError as error:
        raise UserError(f"{found.name} cannot be read ({error.strerror}); drop it again.") from error


def paths_in(request: Any) -> list[Any]:
    """Every value called "path" in a request's JSON: what Gradio may take for the place of a file."""
    found, level = [], [request]
    while level:
        held = [each for each in level if isinstance(each, dict)]
        found += [each["path"] for each in held if "path" in each]
        level = [inner for each in held for inner in each.values()] + [
            inner for each in level if isinstance(each, list) for inner in each
        ]
    return found


class OnlyUploads:
    """An ASGI application that hands on what the page itself posts, where it names no file but those below `folder`."""

    def __init__(self, app: Any, folder: Path, limit: int) -> None:
        self.app, self.folder, self.limit = app, folder, limit

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        door = scope["path"].removeprefix("/gradio_api/").rstrip("/")
        if door not in POSTED:
            await _refuse(send, 404, "The page has no such door.")
        elif door == "upload":
            await self.app(scope, receive, send)
        elif (body := await _body(receive)) is None:
            await _refuse(send, 413, f"A request has at most {BODY_BYTES:,} bytes.")
        else:
            try:
                self._check(body)
            except UserError as error:
                await _refuse(send, 403, str(error))
            else:
                await self.app(scope, _again(body, receive), send)

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


def _again(body: bytes, receive: Any) -> Any:
    """`receive` for the next application: the body, and then what comes after it."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def received() -> Any:
        return next(messages, None) or await receive()

    return received


async def _refuse(send: Any, status: int, reason: str) -> None:
    kind = (b"content-type", b"application/json")
    await send({"type": "http.response.start", "status": status, "headers": [kind]})
    await send({"type": "http.response.body", "body": json.dumps({"detail": reason}).encode()})
