"""A download is complete and has its digest, or the message says what is wrong."""

import hashlib
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from shard_files import Server, serving

from vitlab.data import downloads
from vitlab.data.downloads import download, read_url
from vitlab.errors import UserError

DATA = np.random.default_rng(0).bytes(300_000)
SHA256 = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PAUSE", 0.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "0.tar").write_bytes(DATA)
    with serving(tmp_path / "served") as started:
        yield started


@pytest.mark.parametrize(
    ("digest", "sized"), [(SHA256, False), (f"md5:{hashlib.md5(DATA).hexdigest()}", True), ("", True)]
)
def test_a_file_is_downloaded_once(server: Server, tmp_path: Path, digest: str, sized: bool) -> None:
    """Also from a server that does not say its size."""
    target, server.sized = tmp_path / "out" / "0.tar", sized
    for _ in range(2):
        download(f"{server.address}/0.tar", target, digest)
        assert target.read_bytes() == DATA
        assert server.sent["0.tar"] == len(DATA)
    assert [path.name for path in target.parent.iterdir()] == ["0.tar"]
    target.write_bytes(b"corrupt")
    download(f"{server.address}/0.tar", target, digest)
    assert target.read_bytes() == (DATA if digest else b"corrupt")
    with pytest.raises(UserError, match=r"cannot write .*0.tar/1.tar"):
        download(f"{server.address}/0.tar", target / "1.tar")


def test_buckets_are_downloaded_first(tmp_path: Path) -> None:
    for url in ("s3://bucket/0.tar", "gs://bucket/0.tar", "file:///0.tar", "nonsense://x"):
        with pytest.raises(UserError, match=rf"{url} cannot be opened; give https://.*aws s3 sync"):
            download(url, tmp_path / "none")


@pytest.mark.parametrize("part", [b"", bytes(len(DATA) + 9)])
def test_a_broken_connection_is_tried_again(server: Server, tmp_path: Path, part: bytes) -> None:
    """From the start, whatever is left there of a killed process."""
    (tmp_path / ".0.tar.part").write_bytes(part)
    server.stops["0.tar"] = [100_000, 50]
    download(f"{server.address}/0.tar", tmp_path / "0.tar", SHA256)
    assert (tmp_path / "0.tar").read_bytes() == DATA
    assert server.sent["0.tar"] == 100_050 + len(DATA)
    assert [path.name for path in tmp_path.glob("*0.tar*")] == ["0.tar"]


def test_a_wrong_digest_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "served" / "0.tar").write_bytes(DATA[:-1] + b"x")
    with pytest.raises(UserError, match=rf"0.tar has the sha256 [0-9a-f]{{64}}, expected {SHA256[7:]}"):
        download(f"{server.address}/0.tar", tmp_path / "0.tar", SHA256)
    assert not (tmp_path / "0.tar").exists()


def test_a_server_that_stops_for_good(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or is too slow: the error is raised after six attempts, and says what to do without a network."""
    url = f"{server.address}/0.tar"
    server.stops["0.tar"] = [0] * 100
    with pytest.raises(UserError, match=r"0.tar \(.*tried 6 times\).*give its path"):
        download(url, tmp_path / "0.tar", SHA256)
    assert server.asked["0.tar"] == 6
    server.stops, server.pause = {}, 1.0
    with monkeypatch.context() as patch:
        patch.setattr(downloads, "TIMEOUT", 0.2)
        patch.setattr(downloads, "TRIES", 2)
        with pytest.raises(UserError, match="tried 2 times"):
            download(url, tmp_path / "0.tar")
    server.shutdown()
    server.server_close()
    with pytest.raises(UserError, match="tried 6 times"):
        read_url(url, 10)


@pytest.mark.parametrize(
    ("status", "message"), [(401, "HF_TOKEN"), (403, "HF_TOKEN"), (400, "400: .*address"), (404, "404: .*address")]
)
def test_permanent_errors_are_not_retried(server: Server, tmp_path: Path, status: int, message: str) -> None:
    server.status = status
    with pytest.raises(UserError, match=message):
        download(f"{server.address}/0.tar", tmp_path / "0.tar")
    assert server.asked["0.tar"] == 1
    assert status != 404 or read_url(f"{server.address}/0.tar", 10, required=False) is None


def test_no_redirect_leaves_the_web(server: Server, tmp_path: Path) -> None:
    server.redirect = "file:///etc/hostname"
    with pytest.raises(UserError, match="tried 6 times"):
        download(f"{server.address}/0.tar", tmp_path / "0.tar")


def test_processes_and_threads_share_a_folder(server: Server, tmp_path: Path) -> None:
    """One of them downloads, the others wait for it; after a fork the connections are new ones."""
    address = f"{server.address}/0.tar"
    download(address, tmp_path / "before.tar")
    with multiprocessing.get_context("fork").Pool(3) as pool:
        pool.starmap(download, [(address, tmp_path / "0.tar", SHA256)] * 6, chunksize=1)
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda _: download(address, tmp_path / "1.tar", SHA256), range(6)))
    assert (tmp_path / "0.tar").read_bytes() == (tmp_path / "1.tar").read_bytes() == DATA
    assert server.sent["0.tar"] == 3 * len(DATA)


def test_a_canceled_download_does_not_wait(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two attempts, nor in the midst of the file."""
    monkeypatch.setattr(downloads, "PAUSE", 60.0)
    server.dead = True
    for _ in range(2):
        cancelled = threading.Event()
        threading.Timer(0.1, cancelled.set).start() if server.dead else cancelled.set()
        with pytest.raises(UserError, match="no longer needed"):
            download(f"{server.address}/0.tar", tmp_path / "0.tar", cancelled=cancelled)
        server.dead = False


def test_addresses_with_spaces_and_other_letters(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "served" / "my flowers [2] Blümchen"
    folder.mkdir()
    (folder / "é 1.tar").write_bytes(b"flowers")
    for address in ("my flowers [2] Blümchen/é 1.tar", "my%20flowers%20%5B2%5D%20Bl%C3%BCmchen/%C3%A9%201.tar"):
        assert read_url(f"{server.address}/{address}", 7) == b"flowers"
