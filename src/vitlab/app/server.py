"""Serves the page on loopback, in one process, without a network."""

import contextlib
import json
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from vitlab.app.session import MAX_BYTES, Session, read_examples
from vitlab.errors import UserError
from vitlab.inspection.page import page

HOST = "127.0.0.1"
PORTS = range(7860, 7960)
"""Tried in this order by default."""
UPLOAD_SECONDS = 120
"""Seconds for a whole request, with its image; a slower one is dropped."""
LEAD = (
    "Choose an image to see what the model predicts for it, and which of its patches the prediction attends to. "
    "Nothing leaves this computer."
)


def launch(
    path: str | Path, *, port: int | None = None, device: str = "auto", announce: Callable[[str], object] = print
) -> None:
    """Serves the page of the checkpoint at `path`, or of all in that folder, until it is interrupted.

    It listens on 127.0.0.1 alone, on `port` or the first free of PORTS. `announce` gets the address. No image is
    written to disk. Raises UserError for a port in use, and for no checkpoint.
    """
    with listen(port) as server:
        server.session = Session(path, device)
        announce(f"http://{HOST}:{server.server_port}/")
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


def listen(port: int | None = None) -> "Server":
    """A server on loopback. Raises UserError where the port, or every one of PORTS, is in use."""
    ports = PORTS if port is None else (port,)
    for number in ports:
        with contextlib.suppress(OSError, OverflowError):
            return Server((HOST, number), Handler)
    raise UserError(f"port {ports[0]} of {HOST} is not available; give another.")


class Server(ThreadingHTTPServer):
    """A thread for each request; `session` handles one at a time."""

    session: Session
    request_queue_size = 64

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # HTTPServer would resolve the host's name
        self.server_name, self.server_port = HOST, self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # the browser has gone
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """GET / is the page; POST /inspect?checkpoint=NAME&name=FILE, with the image as its body, its parts as JSON."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    timeout = 60

    def setup(self) -> None:
        super().setup()
        self._deadline = threading.Timer(UPLOAD_SECONDS, self._stop_reading)
        self._deadline.daemon = True
        self._deadline.start()

    def finish(self) -> None:
        self._deadline.cancel()
        super().finish()

    def _stop_reading(self) -> None:
        with contextlib.suppress(OSError):  # the client has gone
            self.connection.shutdown(socket.SHUT_RD)

    def do_GET(self) -> None:
        if not self._is_allowed():
            return
        if self.path != "/":
            self._send(404, "text/plain", b"There is no such page.")
            return
        session = self.server.session
        context = {"names": list(session.paths), "message": session.message(), "max_bytes": MAX_BYTES}
        context["examples"] = read_examples()
        text = page(
            "app.html.j2", "Predictions and attention", LEAD, scripts=("viewer.js", "app.js"), app=True, **context
        )
        self._send(200, "text/html; charset=utf-8", text.encode())

    def do_POST(self) -> None:
        if not self._is_allowed():
            return
        try:
            url = urlsplit(self.path)
            length = int(self.headers.get("Content-Length", ""))
            if length < 0:
                raise ValueError
        except ValueError:  # of more digits than Python reads, too
            self._send(400, "text/plain", b"The address or the length of the request is invalid.")
            return
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        if url.path != "/inspect":
            self._send(404, "text/plain", b"There is no such page.")
        elif length > MAX_BYTES + 1:  # the page sends one byte too many, at most
            self._send(413, "text/plain", b"The image is too large.")
        else:
            data = self.rfile.read(length)
            if len(data) < length:
                self._send(408, "text/plain", f"The image has not come in {UPLOAD_SECONDS} seconds.".encode())
                return
            parts = self.server.session.inspect(query.get("checkpoint", ""), query.get("name", ""), data)
            self._send(200, "application/json", json.dumps(parts).encode())

    def _is_allowed(self) -> bool:
        """Refuses other host names for 127.0.0.1, and requests from pages of other origins."""
        hosts = [f"{name}:{self.server.server_port}" for name in (HOST, "localhost")]
        host = self.headers.get("Host")
        allowed = host in hosts and self.headers.get("Origin") in (None, f"http://{host}")
        if not allowed:
            self._send(403, "text/plain", b"Requests from other origins are refused.")
        return allowed

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def end_headers(self) -> None:
        """With the headers of every page, also of the errors that Python sends for requests it cannot read."""
        self.send_header("Content-Security-Policy", "frame-ancestors 'none'")  # the page's own policy is in its head
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Logs nothing."""
