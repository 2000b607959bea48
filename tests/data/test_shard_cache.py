"""The cache of remote shards holds what there is room for, and what another process removes is downloaded again."""

import hashlib
import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from shard_files import Server, serving

from vitlab.data import downloads, shard_cache
from vitlab.data.shard_cache import ROOM, ShardCache, cache_limit
from vitlab.data.shard_index import File
from vitlab.data.shards import OpenFile
from vitlab.errors import UserError

DATA = np.random.default_rng(0).bytes(3000)
FILES = [File(f"{i}.tar", len(DATA) - i, hashlib.sha256(DATA[i:]).hexdigest()) for i in range(6)]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(downloads, "PAUSE", 0.0)
    (tmp_path / "served").mkdir()
    for i in range(6):
        (tmp_path / "served" / f"{i}.tar").write_bytes(DATA[i:])
    with serving(tmp_path / "served") as started:
        yield started


def test_the_oldest_make_room(server: Server, tmp_path: Path) -> None:
    cache = ShardCache(server.address, tmp_path / "cached", FILES, room=3 * len(DATA), handles=2)
    for i, present in ((0, "0"), (1, "01"), (2, "012"), (0, "012"), (3, "023"), (4, "034"), (0, "034"), (5, "045")):
        cache.fetch(f"{i}.tar")
        assert sorted(path.stem for path in (tmp_path / "cached").glob("*.tar")) == [*present]
    assert server.asked["0.tar"] == 1
    assert cache.opened("0.tar").read(0, 5) == DATA[:5]
    (tmp_path / "cached" / "0.tar").unlink()
    assert cache.opened("0.tar").read(5, 5) == DATA[5:10]  # it is open still
    assert server.asked["0.tar"] == 1
    assert pickle.loads(pickle.dumps(cache)).opened("5.tar").read(0, 5) == DATA[5:10]  # noqa: S301


def test_a_file_that_another_process_removes_is_downloaded_again(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its download and its opening, as a process does that makes room."""
    cache, removals = ShardCache(server.address, tmp_path / "cached", FILES), iter([True, True, False])

    def open_file(path: str) -> OpenFile:
        if next(removals):
            Path(path).unlink()
        return OpenFile(path)

    monkeypatch.setattr(shard_cache, "OpenFile", open_file)
    assert cache.opened("0.tar").read(100, 50) == DATA[100:150]
    assert server.asked["0.tar"] == 3


def test_a_file_that_is_not_listed(tmp_path: Path) -> None:
    (tmp_path / "secret").touch()
    for name in ("train.index.npz", "../secret"):
        with pytest.raises(UserError, match=f"does not list {name}"):
            ShardCache("http://127.0.0.1:9", tmp_path / "cached", FILES).fetch(name)


def test_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ROOM, raising=False)
    assert cache_limit(FILES, 2) is None
    monkeypatch.setenv(ROOM, "0.5")
    assert cache_limit(FILES, 2) == 500_000_000
    for value in ("0.000005", "lots", "-1"):
        monkeypatch.setenv(ROOM, value)
        with pytest.raises(UserError, match=f"{ROOM} is '{value}'"):
            cache_limit(FILES, 2)
    monkeypatch.setenv(ROOM, "0.00002")
    assert cache_limit(FILES, 99) == 20_000  # all of them fit
