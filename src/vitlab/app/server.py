"""The page on loopback: one process, one port, nobody else's servers."""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vitlab.app.page import STYLE, build_page, gradio, theme
from vitlab.app.state import Limits
from vitlab.app.uploads import OnlyUploads
from vitlab.errors import UserError

HOST = "127.0.0.1"
PORTS = range(7860, 7960)
"""Tried in this order unless one is given: Gradio's own."""
SESSIONS = 32
"""Open pages whose last image is remembered."""
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",  # Gradio's HTML parts are templates that it compiles
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "font-src 'self' data:",
        "connect-src 'self'",
        "object-src 'none'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
"""What the browser may load: from this server and nowhere else."""


def launch(
    path: str | Path,
    *,
    port: int | None = None,
    max_megapixels: float = 50.0,
    max_upload_mb: float = 20.0,
    open_browser: bool = False,
    device: str = "auto",
    announce: Callable[[str], object] = print,
) -> None:
    """Serves the page over the checkpoint at `path`, or over all that lie in that folder, until it is interrupted.

    It listens on 127.0.0.1 only, on `port` or the first free of PORTS, and reaches for no network. `announce` is given
    the address. Images larger than the limits are refused. What is uploaded lies in a folder of its own that
    goes when the server ends. Raises ValueError for a port in use, a wrong limit, no checkpoint, and without Gradio.
    """
    gradio()
    limits = Limits(max_megapixels, max_upload_mb)
    with listen(port) as listener, tempfile.TemporaryDirectory(prefix="vitlab-app-") as uploads:
        os.environ["GRADIO_TEMP_DIR"] = uploads
        app = application(build_page(path, limits=limits, device=device), limits, Path(uploads))
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        announce(address)
        if open_browser:
            webbrowser.open(address)  # which waits in the port's queue until the server is there
        serve(app, listener)


def listen(port: int | None = None) -> socket.socket:
    """A socket that listens on loopback. Raises ValueError where the port, or every one of PORTS, is in use."""
    for number in PORTS if port is None else (port,):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, number))
            listener.listen()
        except (OSError, OverflowError) as error:
            listener.close()
            if port is not None:
                raise UserError(f"port {port} of {HOST} cannot be had ({error}); give another, or none.") from error
        else:
            return listener
    raise UserError(f"the ports {PORTS.start} to {PORTS.stop - 1} of {HOST} are all in use; give another.")


def application(page: Any, limits: Limits, uploads: Path) -> Any:
    """The page as an ASGI application: Gradio's, without its doors to elsewhere, under `POLICY`. It reads images from
    the folder `uploads`, and no other file."""
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    page.state_session_capacity = SESSIONS
    page.has_launched = True  # it has not, but this is what Gradio asks before it looks where a file lies
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app = gradio().mount_gradio_app(
        app, page, "/", server_name=HOST, app_kwargs={"openapi_url": None}, footer_links=[], run_history=False,
        max_file_size=limits.most_bytes, show_error=True, ssr_mode=False, enable_monitoring=False, pwa=False,
        mcp_server=False, theme=theme(), css=STYLE,
    )  # fmt: skip
    app.add_middleware(OnlyUploads, folder=uploads, limit=limits.most_bytes)
    app.add_middleware(Guarded)
    # A page from elsewhere cannot reach in by a name of its own for 127.0.0.1.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return app


def serve(app: Any, listener: socket.socket) -> None:
    """Answers what comes to `listener` until it is interrupted, by Ctrl-C or a signal to end."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    log = logging.getLogger("uvicorn.error")

    def running(_record: logging.LogRecord) -> bool:
        return not server.should_exit  # pages that are still open are cut off at the end, which is no error

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # in order, so that the uploads go
    log.addFilter(running)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass  # the usual way to end it
    finally:
        log.removeFilter(running)


class Guarded:
    """Refuses what other pages ask for, and has the browser refuse whatever is not this server's."""

    HEADERS = (
        (b"content-security-policy", POLICY.encode()),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
    )

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self.HEADERS]
            await send(message)

        given = dict(scope.get("headers", ()))
        own = b"http://" + given.get(b"host", b"")
        if scope["type"] == "http" and given.get(b"origin", own) != own:
            await guarded({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"This page answers to itself only."})
        else:
            await self.app(scope, receive, guarded)
