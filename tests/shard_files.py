"""Shards as other tools write them, and a web server that can fail in several ways."""

import functools
import http.server
import io
import re
import tarfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from image_files import encode
from PIL import Image


def write_shard(path: Path, members: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def pair(key: str, label: object, value: int = 0, side: int = 8) -> list[tuple[str, bytes]]:
    image = encode(Image.new("RGB", (side, side), (value, value, value)), "PNG")
    return [(f"{key}.png", image), (f"{key}.cls", str(label).encode())]


def write_folders(path: Path, counts: dict[str, int], seed: int = 0, side: int = 70) -> None:
    """Class folders with so many small JPEGs each, all different, and too large for a set to be held in memory."""
    random = np.random.default_rng(seed)
    for name, count in counts.items():
        (path / name).mkdir(parents=True)
        for i in range(count):
            rough = Image.fromarray(random.integers(0, 256, (4, 5, 3), dtype=np.uint8))
            rough.resize((side + i % 3, side)).save(path / name / f"{i:03d}.jpg")


class Server(http.server.ThreadingHTTPServer):
    """Serves a folder on 127.0.0.1.

    asked, sent: requests for each file, and bytes of each. stops: the bytes after which it cuts off a file, one number
    for each time. ranges: whether it supports ranges. sized: whether it says the size of a file. dead: it closes every
    connection. status, redirect: the response to every request instead. pause: seconds after every thousand bytes.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(_Answer, directory=str(folder)))
        self.asked: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.stops: dict[str, list[int]] = {}
        self.ranges, self.sized, self.dead = True, True, False
        self.status, self.redirect, self.pause = 200, "", 0.0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(http.server.SimpleHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_HEAD(self) -> None:
        if self.server.sized:
            return super().do_HEAD()
        return self.send_error(405)

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if self.server.dead:
            self.close_connection = True
            return None
        self.server.asked[path.name] += 1
        if self.server.status != 200:
            return self.send_error(self.server.status)
        if self.server.redirect:
            self.send_response(302)
            self.send_header("Location", self.server.redirect)
            return self.end_headers()
        if not path.is_file():
            return self.send_error(404)
        data = path.read_bytes()
        size = len(data)
        requested = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if requested and self.server.ranges:
            start, stop = int(requested[1]), min(int(requested[2]) + 1, size)
            data = data[start:stop]
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        else:
            self.send_response(200)
        if self.server.sized:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        stops = self.server.stops.get(path.name)
        part = data[: stops.pop(0)] if stops else data
        self.server.sent[path.name] += len(part)
        for start in range(0, len(part), 1000 if self.server.pause else max(len(part), 1)):
            self.wfile.write(part[start : start + 1000] if self.server.pause else part)
            time.sleep(self.server.pause)
        self.close_connection = True
        return None

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
