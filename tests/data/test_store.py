"""A file from the web is whole and right, or the message says what is wrong; whatever the server does in between."""

import errno
import hashlib
import http.client
import multiprocessing
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shard_files import Server, serving

from vitlab.data import store as module
from vitlab.data.shard_index import File
from vitlab.data.shards import OpenFile
from vitlab.data.store import Store, get, size_of

DATA = np.random.default_rng(0).bytes(300_000)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAUSE", 0.0)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "served"
    folder.mkdir()
    for i in range(6):
        (folder / f"{i}.tar").write_bytes(DATA[i:])
    with serving(folder) as started:
        yield started


def store_of(server: Server, tmp_path: Path, room: int | None = None) -> Store:
    files = [File(f"{i}.tar", len(DATA) - i, hashlib.sha256(DATA[i:]).hexdigest()) for i in range(6)]
    return Store(server.address, tmp_path / "kept", files, room)


def test_a_file_is_fetched_once(server: Server, tmp_path: Path) -> None:
    store = store_of(server, tmp_path)
    for _ in range(2):
        path = Path(store.fetch("0.tar"))
        assert path == tmp_path / "kept" / "0.tar"
        assert path.read_bytes() == DATA
    assert server.asked == {"0.tar": 1}
    assert store.read("1.tar", 1000, 20) == DATA[1001:1021]
    assert [each.name for each in sorted((tmp_path / "kept").iterdir())] == ["0.tar", "1.tar"]


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_that_is_cut_off_is_continued(server: Server, tmp_path: Path, ranges: bool) -> None:
    server.ranges = ranges
    server.stops["0.tar"] = [100_000, 150_000] if ranges else [100_000, 299_999, 50]
    assert Path(store_of(server, tmp_path).fetch("0.tar")).read_bytes() == DATA
    assert server.asked["0.tar"] == (3 if ranges else 4)
    assert server.sent["0.tar"] == (len(DATA) if ranges else len(DATA) + 400_049)


def test_a_killed_process_is_continued(server: Server, tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / ".0.tar.part").write_bytes(DATA[:200_000])
    assert Path(store_of(server, tmp_path).fetch("0.tar")).read_bytes() == DATA
    assert server.sent["0.tar"] == 100_000


@pytest.mark.parametrize("size", [50_000, len(DATA), len(DATA) + 9])
def test_a_beginning_of_another_file_is_thrown_away(server: Server, tmp_path: Path, size: int) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / ".0.tar.part").write_bytes(bytes(size))
    assert Path(store_of(server, tmp_path).fetch("0.tar")).read_bytes() == DATA


def test_a_wrong_sum_is_refused(server: Server, tmp_path: Path) -> None:
    (tmp_path / "served" / "0.tar").write_bytes(DATA[:-1] + b"x")
    with pytest.raises(
        ValueError, match=r"0.tar has the sha256 [0-9a-f]{64}, not [0-9a-f]{64} as the set's index says"
    ):
        store_of(server, tmp_path).fetch("0.tar")
    assert not (tmp_path / "kept" / "0.tar").exists()


def test_a_server_that_stops_for_good(server: Server, tmp_path: Path) -> None:
    """After six times without a byte; a byte each time is progress."""
    store = store_of(server, tmp_path)
    server.stops["0.tar"] = [5] * 20 + [0] * 100
    with pytest.raises(
        ValueError, match=r"0.tar \(the connection was cut off; tried 6 times\): look at the address and"
    ):
        store.fetch("0.tar")
    assert server.asked["0.tar"] == 26
    server.stops.clear()
    assert Path(store.fetch("0.tar")).read_bytes() == DATA
    assert server.sent["0.tar"] == len(DATA)  # what was there has stayed


def test_a_server_that_is_not_there(server: Server, tmp_path: Path) -> None:
    store = store_of(server, tmp_path)
    server.shutdown()
    server.server_close()
    with pytest.raises(ValueError, match=r"cannot fetch http://127.*0.tar \(.*Connection refused; tried 6 times\)"):
        store.fetch("0.tar")
    with pytest.raises(ValueError, match=r"cannot fetch .*index.json \(.*Connection refused"):
        get(f"{server.address}/index.json")


def test_a_file_that_is_not_there(server: Server, tmp_path: Path) -> None:
    assert get(f"{server.address}/index.json") is None
    store = Store(server.address, tmp_path / "kept", [File("9.tar", 5, "")])
    with pytest.raises(ValueError, match=r"9.tar \(the server says 404 .*\): look at the address"):
        store.fetch("9.tar")
    assert server.asked["9.tar"] == 1
    with pytest.raises(ValueError, match="the server says 404"):
        size_of(f"{server.address}/9.tar")


def test_small_files_and_sizes(server: Server, tmp_path: Path) -> None:
    (tmp_path / "served" / "classes.json").write_text('["a"]')
    assert get(f"{server.address}/classes.json") == b'["a"]'
    server.stops["classes.json"] = [2]
    assert get(f"{server.address}/classes.json") == b'["a"]'  # half of it is none of it
    assert size_of(f"{server.address}/3.tar") == len(DATA) - 3


def test_a_folder_that_cannot_be_written(server: Server, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("a file")
    with pytest.raises(ValueError, match=r"cannot keep http://127.*0.tar in .*kept: (File exists|Not a directory)"):
        store_of(server, tmp_path).fetch("0.tar")


def test_the_oldest_make_room(server: Server, tmp_path: Path) -> None:
    store = store_of(server, tmp_path, room=3 * len(DATA))
    store.handles = 2

    def there() -> list[str]:
        return sorted(path.name for path in (tmp_path / "kept").glob("*.tar"))

    for i, kept in ((0, "0"), (1, "01"), (2, "012"), (0, "012"), (3, "023"), (4, "034"), (0, "034"), (5, "045")):
        store.fetch(f"{i}.tar")
        assert there() == [f"{name}.tar" for name in kept]
    assert server.asked["0.tar"] == 1
    assert store.read("0.tar", 0, 5) == DATA[:5]
    (tmp_path / "kept" / "0.tar").unlink()
    assert store.read("0.tar", 5, 5) == DATA[5:10]  # it is open still
    assert server.asked["0.tar"] == 1


def fetch_all(store: Store) -> list[bool]:
    return [Path(store.fetch(f"{i}.tar")).read_bytes() == DATA[i:] for i in range(6)]


def test_processes_share_a_folder(server: Server, tmp_path: Path) -> None:
    """Each file is fetched by one of them, while the others wait for it; a process may be spawned with it."""
    store = store_of(server, tmp_path)
    store.read("0.tar", 0, 5)  # with a file open
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert all(map(all, pool.map(fetch_all, [store] * 6, chunksize=1)))
    assert server.asked == {f"{i}.tar": 1 for i in range(6)}


def test_a_file_that_somebody_removes_meanwhile_is_fetched_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As another process does that makes room, between our finding it there and our opening it."""
    store, times = store_of(server, tmp_path), iter([True, True, False])

    def open_file(path: str) -> OpenFile:
        if next(times):
            Path(path).unlink()
        return OpenFile(path)

    monkeypatch.setattr(module, "OpenFile", open_file)
    assert store.read("0.tar", 100, 50) == DATA[100:150]
    assert server.asked["0.tar"] == 3


def test_what_is_not_needed_any_more_is_not_insisted_on(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is stopped does not wait for a server that is gone."""
    monkeypatch.setattr(module, "PAUSE", 0.2)
    store, over = store_of(server, tmp_path), threading.Event()
    server.dead = True
    threading.Timer(0.1, over.set).start()
    with pytest.raises(ValueError, match=r"0.tar is not needed any more"):
        store.fetch("0.tar", over)


def test_a_network_that_breaks_down_is_waited_for(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no fault of the disk, whatever kind of error the system makes of it."""
    read, failures = (
        http.client.HTTPResponse.read,
        [OSError(errno.EHOSTUNREACH, "No route to host"), ssl.SSLError("bad")],
    )

    def read_or_fail(answer: http.client.HTTPResponse, size: int | None = None) -> bytes:
        if failures:
            raise failures.pop()
        return read(answer, size)

    monkeypatch.setattr(http.client.HTTPResponse, "read", read_or_fail)
    assert Path(store_of(server, tmp_path).fetch("0.tar")).read_bytes() == DATA
    assert server.asked["0.tar"] == 3


def test_addresses_with_spaces_and_other_letters(server: Server, tmp_path: Path) -> None:
    folder = tmp_path / "served" / "my flowers [2] Blümchen"
    folder.mkdir()
    (folder / "é 1.tar").write_bytes(b"flowers")
    for address in ("my flowers [2] Blümchen/é 1.tar", "my%20flowers%20%5B2%5D%20Bl%C3%BCmchen/%C3%A9%201.tar"):
        assert get(f"{server.address}/{address}") == b"flowers"


def test_a_file_that_is_not_listed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("")
    for name in ("train.index.npz", "../secret"):
        with pytest.raises(ValueError, match=rf"the index of http://127.* lists no {name}: write the set again"):
            store_of(server, tmp_path).fetch(name)
