"""Web addresses, opened as a stranger's: over HTTP alone, wherever they lead, and with an end however slow they are."""

import contextlib
import http.client
import io
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

from vitlab.errors import UserError

TIMEOUT = 60.0
"""Seconds of silence after which a server counts as gone."""
WATCH = 4.0
"""Seconds after which a server's speed is looked at, again and again."""
LEAST = 100.0
"""Bytes a second that it has to send, on average over that time. A pause is no slowness: silence has its own limit."""


class _Watched(io.RawIOBase):
    """What a connection sends, as long as it is not trickled."""

    def __init__(self, raw: Any, host: str) -> None:
        self._raw, self._host, self._sent, self._pieces, self._since = raw, host, 0, 0, time.monotonic()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        count = self._raw.readinto(buffer)
        self._sent += count or 0
        self._pieces += 1
        passed = time.monotonic() - self._since
        if count and passed >= WATCH:
            if self._pieces > 2 and self._sent < LEAST * passed:  # after a pause there is one large piece, or two
                raise UserError(
                    f"the server {self._host} trickles: {self._sent} bytes in {passed:.0f} s, where {LEAST:.0f} a "
                    f"second are needed; try again later, or fetch the file elsewhere"
                )
            self._sent, self._pieces, self._since = 0, 0, time.monotonic()
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Connection(http.client.HTTPConnection):
    def connect(self) -> None:
        if not isinstance(self.timeout, (int, float)):
            self.timeout = TIMEOUT
        super().connect()

    def response_class(self, sock: Any, *args: Any, **options: Any) -> http.client.HTTPResponse:  # pyright: ignore[reportIncompatibleVariableOverride]
        answer = http.client.HTTPResponse(sock, *args, **options)
        answer.fp = io.BufferedReader(_Watched(answer.fp.detach(), self.host))  # pyright: ignore[reportAttributeAccessIssue]
        return answer


class _SecureConnection(_Connection, http.client.HTTPSConnection):  # pyright: ignore[reportIncompatibleVariableOverride]
    pass


class _Http(urllib.request.HTTPHandler):
    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(_Connection, req)  # pyright: ignore[reportReturnType, reportArgumentType]


class _Https(urllib.request.HTTPSHandler):
    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        context = getattr(self, "_context", None)
        return self.do_open(_SecureConnection, req, context=context)  # pyright: ignore[reportReturnType, reportArgumentType]


class Redirect(urllib.request.HTTPRedirectHandler):
    """Follows a server to web addresses alone."""

    def http_error_302(self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any) -> Any:
        to = headers.get("location") or headers.get("uri") or ""
        scheme = to.partition(":")[0].lower() if ":" in to.partition("/")[0] else "http"
        if scheme not in ("http", "https"):
            raise UserError(f"{req.full_url} leads to {to[:60]!r}, which is no web address; look at the address")
        return super().http_error_302(req, fp, code, msg, headers)

    http_error_301 = http_error_303 = http_error_307 = http_error_308 = http_error_302


def opener(redirect: type[Redirect] = Redirect) -> urllib.request.OpenerDirector:
    """What opens web addresses, http: and https: alone, and raises UserError for servers that trickle or lead away."""
    found = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(), _Http(), _Https(), redirect(), urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(), urllib.request.UnknownHandler(),
    ):  # fmt: skip
        found.add_handler(handler)
    return found


@contextlib.contextmanager
def guarded_urlopen() -> Iterator[None]:
    """Within it, other libraries' `urllib.request.urlopen` opens addresses as `opener` does."""
    before = getattr(urllib.request, "_opener", None)
    urllib.request.install_opener(opener())
    try:
        yield
    finally:
        urllib.request.install_opener(before)  # pyright: ignore[reportArgumentType]
