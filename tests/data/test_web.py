"""Servers that trickle, or lead elsewhere."""

import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from vitlab.data import downloads as fetch
from vitlab.data import store, web
from vitlab.data.shard_index import File
from vitlab.errors import UserError


@contextmanager
def answering(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """The address of a server that lets `answer` write to whoever connects."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection = listener.accept()[0]
                connection.recv(2**16)
                answer(connection)
                connection.close()
            except OSError:  # closed by the other side, or at the end
                if listener.fileno() < 0:
                    return

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/x"
    finally:
        listener.close()


def trickling(head: bytes) -> Callable[[socket.socket], None]:
    """Sends `head`, and then a byte every twentieth of a second."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(1200):
            connection.sendall(b"x")
            time.sleep(0.05)

    return answer


def sending(text: str) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(text.encode())


HEAD = b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n"


@pytest.mark.parametrize("head", [HEAD, b"HTTP/1.1 200 OK\r\nX-Long: ", b"HT"], ids=["body", "header", "status"])
def test_a_server_that_trickles_is_left(head: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "WATCH", 0.5)
    with answering(trickling(head)) as address:
        with pytest.raises(UserError, match=r"127.0.0.1 trickles: \d+ bytes in \d s, where 100 a second are needed"):
            store.get(address)
        with pytest.raises(UserError, match="trickles"), (tmp_path / "part").open("w+b") as part:
            store.download(address, part, File("x", 10**6, ""))
        with pytest.raises(UserError, match="trickles"):
            fetch.download_file([address], tmp_path, "md5:" + "0" * 32)
        with pytest.raises(UserError, match="trickles"):
            store.size_of(address) if head != HEAD else store.get(address)


def test_pauses_are_no_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "WATCH", 0.1)

    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 60\r\n\r\n")
        for _ in range(3):
            time.sleep(0.3)
            connection.sendall(b"x" * 20)

    with answering(answer) as address:
        assert store.get(address) == b"x" * 60


def test_a_small_file_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(3000):
            connection.sendall(bytes(2**20))

    with answering(answer) as address:
        with pytest.raises(UserError, match=r"has more than 16,777,216 bytes, or takes more than 300 s"):
            store.get(address)
        monkeypatch.setattr(store, "DEADLINE", 0.0)
        with pytest.raises(UserError, match="or takes more than 0 s"):
            store.get(address)


@pytest.mark.parametrize("to", ["file:///etc/hostname", "ftp://127.0.0.1/x", "data:text/plain,x", "FILE:/etc/hostname"])
def test_no_redirect_leaves_the_web(to: str, tmp_path: Path) -> None:
    for code in (301, 302, 303, 307, 308):
        text = f"HTTP/1.1 {code} Moved\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        with answering(sending(text)) as address:
            for job in (store.get, store.size_of, lambda at: fetch.download_file([at], tmp_path, "md5:" + "0" * 32)):
                with pytest.raises(UserError, match="which is no web address"):
                    job(address)


def test_redirects_within_the_web_are_followed() -> None:
    with answering(sending("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")) as there:
        for to in (there, f"//{there.partition('//')[2]}"):
            with answering(sending(f"HTTP/1.1 302 Moved\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n")) as address:
                assert store.get(address) == b"ok"


def test_a_ring_of_redirects_is_not_tried_again() -> None:
    ring = sending("HTTP/1.1 302 Moved\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n")
    said = r"\(the server says 302 [^;]*\): look at the address"
    with answering(ring) as address, pytest.raises(UserError, match=said):
        store.get(address)


def test_other_libraries_are_guarded_for_a_while() -> None:
    before = getattr(urllib.request, "_opener", None)
    with web.guarded_urlopen(), pytest.raises(urllib.error.URLError, match="unknown url type: file"):
        urllib.request.urlopen(Path(__file__).as_uri())
    assert getattr(urllib.request, "_opener", None) is before
