"""Serves the page on loopback, in one process, without a network."""

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

from vitlab.app.page import build_page, gradio, theme
from vitlab.app.state import Limits
from vitlab.app.uploads import OnlyUploads
from vitlab.errors import UserError
from vitlab.inspect.page import render, static

HOST = "127.0.0.1"
PORTS = range(7860, 7960)
"""Tried in this order by default, as Gradio does."""
SESSIONS = 32
"""Open pages whose last image is stored."""
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self' 'unsafe-inline' 'unsafe-eval'",  # Gradio compiles templates of its HTML parts
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
"""The browser loads from this server alone."""


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
    """Serves the page of the checkpoint at `path`, or of all in that folder, until it is interrupted.

    It listens on 127.0.0.1 alone, on `port` or the first free of PORTS. `announce` gets the address. Larger images are
    refused; uploads are stored in a temporary folder. Raises UserError for a port in use, an invalid limit, no
    checkpoint, and without Gradio.
    """
    gradio()
    limits = Limits(max_megapixels, max_upload_mb)
    with listen(port) as listener, tempfile.TemporaryDirectory(prefix="vitlab-app-") as uploads:
        os.environ["GRADIO_TEMP_DIR"] = uploads
        app = application(build_page(path, limits=limits, device=device), limits, Path(uploads))
        address = f"http://{HOST}:{listener.getsockname()[1]}/"
        announce(address)
        if open_browser:
            webbrowser.open(address)  # which waits in the port's queue until the server runs
        serve(app, listener)


def listen(port: int | None = None) -> socket.socket:
    """A socket that listens on loopback. Raises UserError where the port, or every one of PORTS, is in use."""
    for number in PORTS if port is None else (port,):
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, number))
            listener.listen()
        except (OSError, OverflowError) as error:
            listener.close()
            if port is not None:
                raise UserError(f"port {port} of {HOST} is not available ({error}); give another, or none.") from error
        else:
            return listener
    raise UserError(f"the ports {PORTS.start} to {PORTS.stop - 1} of {HOST} are all in use; give another.")


def application(page: Any, limits: Limits, uploads: Path) -> Any:
    """The page as an ASGI application under `POLICY`; it reads no files but images in the folder `uploads`."""
    from fastapi import FastAPI
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    page.state_session_capacity = SESSIONS
    page.has_launched = True  # without it, Gradio does not check where an uploaded file is
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    head = render("head.html.j2", style=static("viewer.css") + static("app.css"), script=static("viewer.js"))
    app = gradio().mount_gradio_app(
        app, page, "/", server_name=HOST, app_kwargs={"openapi_url": None}, footer_links=[], run_history=False,
        max_file_size=limits.max_bytes, show_error=True, ssr_mode=False, enable_monitoring=False, pwa=False,
        mcp_server=False, theme=theme(), head=str(head),
    )  # fmt: skip
    app.add_middleware(OnlyUploads, folder=uploads, limit=limits.max_bytes)
    app.add_middleware(SecurityHeaders)
    # Another page cannot reach this one through a host name of its own for 127.0.0.1.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return app


def serve(app: Any, listener: socket.socket) -> None:
    """Serves `listener` until Ctrl-C or SIGTERM."""
    import uvicorn

    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    log = logging.getLogger("uvicorn.error")

    def running(_record: logging.LogRecord) -> bool:
        return not server.should_exit  # open pages are cut off at the end, which is not an error

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the uploads are removed
    log.addFilter(running)
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        log.removeFilter(running)


class SecurityHeaders:
    """Adds the policy to every response, and refuses requests from pages of other origins."""

    HEADERS = (
        (b"content-security-policy", POLICY.encode()),
        (b"referrer-policy", b"no-referrer"),
        (b"x-content-type-options", b"nosniff"),
    )

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self.HEADERS]
            await send(message)

        headers = dict(scope.get("headers", ()))
        origin = b"http://" + headers.get(b"host", b"")
        if scope["type"] == "http" and headers.get(b"origin", origin) != origin:
            await send_with_headers({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b"Requests from other origins are refused."})
        else:
            await self.app(scope, receive, send_with_headers)
