"""Shards as others write them, and a web server that has its moods."""

import functools
import http.server
import io
import re
import tarfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image


def write_shard(path: Path, members: list[tuple[str, bytes]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def pair(key: str, label: object, value: int = 0, side: int = 8) -> list[tuple[str, bytes]]:
    buffer = io.BytesIO()
    Image.new("RGB", (side, side), (value, value, value)).save(buffer, "PNG")
    return [(f"{key}.png", buffer.getvalue()), (f"{key}.cls", str(label).encode())]


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

    asked, sent: how often each file was asked for, and bytes of each. stops: the bytes after which it cuts off a file,
    one number for each time. ranges: whether it knows parts of files. dead: it hangs up without a word.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), functools.partial(_Answer, directory=str(folder)))
        self.asked: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.stops: dict[str, list[int]] = {}
        self.ranges, self.dead = True, False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Answer(http.server.SimpleHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if self.server.dead:
            self.close_connection = True
            return
        self.server.asked[path.name] += 1
        if not path.is_file():
            self.send_error(404)
            return
        data, start = path.read_bytes(), 0
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if asked and self.server.ranges:
            start = int(asked[1])
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        stops = self.server.stops.get(path.name)
        part = data[start:][: stops.pop(0)] if stops else data[start:]
        self.server.sent[path.name] += len(part)
        self.wfile.write(part)
        self.close_connection = True

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
