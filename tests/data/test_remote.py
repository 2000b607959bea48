"""Remote shards: every image once an epoch, wherever a run starts, with room for few of the shards."""

import contextlib
import hashlib
import itertools
import logging
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_files import Server, pair, serving, write_folders, write_shard

from vitlab.data import downloads, remote
from vitlab.data.dataset import Dataset
from vitlab.data.loader import eval_batches, train_batches
from vitlab.data.registry import load_dataset
from vitlab.data.remote import ROOM, ShardCache, expand, window_order
from vitlab.data.shard_index import File, ShardIndex
from vitlab.data.shards import OpenFile
from vitlab.data.transforms import EvalTransform, TrainTransform
from vitlab.data.write_shards import ShardSettings, write_shards

TRAIN, EVAL = TrainTransform(8, crop="inception"), EvalTransform(8)
BATCH: Any = {"batch_size": 4, "seed": 3}


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PAUSE", 0.0)
    monkeypatch.setattr(remote, "WINDOW", 3)
    monkeypatch.setattr(remote, "CONNECTIONS", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(ROOM, raising=False)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 images of two classes; train has 12 shards of 4, val and test one each."""
    folder = tmp_path_factory.mktemp("set")
    write_folders(folder / "in", {"ant": 40, "bee": 20})
    write_shards(f"folder:{folder / 'in'}", folder / "out", ShardSettings(records=4))
    return folder / "out"


@pytest.fixture
def server(written: Path) -> Iterator[Server]:
    with serving(written) as started:
        yield started


def both(server: Server, written: Path, split: str = "train") -> tuple[Dataset, Dataset]:
    return load_dataset(f"shards:{server.address}/", split), load_dataset(f"shards:{written}", split)


def tars(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.tar"))


# ----------------------------------------------------------------------------------------------------- order


@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 9), st.integers(0, 99), st.integers(0, 9))
def test_few_shards_are_in_use(counts: list[int], window: int, seed: int, epoch: int) -> None:
    shard = np.repeat(np.arange(len(counts)) * 3, counts)  # numbers may be missing
    order = window_order(shard, window, seed, epoch)
    assert sorted(order.tolist()) == list(range(len(shard)))
    first, last = {}, {}
    for position, number in enumerate(shard[order].tolist()):
        first.setdefault(number, position)
        last[number] = position
    for position in range(len(shard)):
        assert sum(first[s] <= position <= last[s] for s in first) <= max(window, 1)


def test_the_order_never_changes() -> None:
    """Literals: a resumed run counts on them, on every machine and in every version."""
    assert window_order(np.repeat(np.arange(5), 2), 2, 0, 0).tolist() == [0, 5, 1, 4, 9, 8, 2, 3, 7, 6]
    assert window_order(np.repeat(np.arange(5), 2), 2, 7, 3).tolist() == [1, 0, 5, 4, 8, 7, 9, 2, 6, 3]


def test_orders_mix_and_differ() -> None:
    shard = np.repeat(np.arange(20), 100)
    order = window_order(shard, 5, 0, 0)
    assert not np.array_equal(order, window_order(shard, 5, 0, 1))
    assert not np.array_equal(order, window_order(shard, 5, 1, 0))
    middle = shard[order][800:1200]
    assert np.unique(middle).size >= 5
    neighbors = np.mean(middle[1:] == middle[:-1])
    assert 0.12 < neighbors < 0.28  # 1/5, as good as drawn
    few = window_order(np.repeat([0, 1], 500), 5, 0, 0)[:500]
    assert 210 < (few < 500).sum() < 290  # all begin at once: of half the images, half are of each


# ------------------------------------------------------------------------------------------------- same set


def test_any_file_system(written: Path, tmp_path: Path) -> None:
    """With the same order as from a server. Tars without an index are listed."""
    memory = fsspec.filesystem("memory")
    for path in written.iterdir():
        memory.pipe(f"/bucket/set/{path.name}", path.read_bytes())
    near = load_dataset(f"shards:{written}", "train")
    far = load_dataset("shards:memory://bucket/set/", "train")
    for batch in itertools.islice(train_batches(far, TRAIN, **BATCH, workers=0), len(far) // 4):
        assert batch.labels.tolist() == near.labels[batch.indices].tolist()
    memory.rm("/bucket/set/index.json")
    scanned = load_dataset("shards:memory://bucket/set", "train")
    assert scanned.classes == near.classes
    assert scanned.labels.tolist() == near.labels.tolist()


@pytest.mark.parametrize("split", ["train", "val", "trainval"])
def test_a_remote_set_equals_the_local_one(server: Server, written: Path, split: str) -> None:
    far, near = both(server, written, split)
    assert far.classes == near.classes
    assert far.labels.tolist() == near.labels.tolist()
    assert not any(name.endswith(".tar") for name in server.asked)  # nothing is fetched before it is needed
    for i in range(len(near)):
        np.testing.assert_array_equal(far.image(i), near.image(i))
        assert far.path(i) == near.path(i).replace(str(written), server.address)
    assert max(server.asked[path.name] for path in written.glob("*.tar")) == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_every_image_once_an_epoch(server: Server, written: Path, workers: int) -> None:
    far, near = both(server, written)
    n = len(far)
    batches = list(itertools.islice(train_batches(far, TRAIN, **BATCH, workers=workers), 2 * n // 4))
    seen = np.concatenate([batch.indices for batch in batches])
    assert sorted(seen[:n]) == sorted(seen[n : 2 * n]) == list(range(n))
    assert seen[:n].tolist() != seen[n : 2 * n].tolist()
    assert [label for batch in batches for label in batch.labels.tolist()] == near.labels[seen].tolist()
    evaluated = list(eval_batches(far, EVAL, batch_size=5, workers=workers))
    for one, two in zip(evaluated, eval_batches(near, EVAL, batch_size=5), strict=True):
        np.testing.assert_array_equal(one.images, two.images)


def test_any_start_continues_and_ranks_share(server: Server, written: Path) -> None:
    far, _ = both(server, written)
    whole = list(itertools.islice(train_batches(far, TRAIN, **BATCH), 30))
    for start in range(0, 60, 4):
        (part,) = itertools.islice(train_batches(far, TRAIN, **BATCH, start=start), 1)
        np.testing.assert_array_equal(part.indices, whole[start // 4].indices)
        np.testing.assert_array_equal(part.images, whole[start // 4].images)
    ranks = [train_batches(far, TRAIN, **BATCH, start=8, rank=r, world_size=2) for r in (0, 1)]
    for i in range(2, 16):
        parts = [next(rank) for rank in ranks]
        assert [x for part in parts for x in part.indices.tolist()] == whole[i].indices.tolist()


def size(path: Path) -> int:
    """Of a file that another thread may just take away."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


@pytest.mark.parametrize("workers", [0, 2])
def test_room_for_few_shards(
    server: Server, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    largest = max(path.stat().st_size for path in written.glob("train-*.tar"))
    monkeypatch.setenv(ROOM, f"{7 * largest / 1e9:.12f}")
    far, near = both(server, written)
    for batch in itertools.islice(train_batches(far, TRAIN, **BATCH, workers=workers), 3 * len(far) // 4):
        assert batch.labels.tolist() == near.labels[batch.indices].tolist()
        assert sum(map(size, tars(tmp_path))) <= 9 * largest  # and two that are being added
    fetched = sum(server.asked[path.name] for path in written.glob("train-*.tar"))
    # Each once an epoch, and a few again where two epochs meet, or where a worker is behind the others.
    assert fetched <= 3 * 12 + (18 if workers else 6)
    monkeypatch.setenv(ROOM, f"{5 * largest / 1e9:.12f}")
    with pytest.raises(ValueError, match=r"VITLAB_SHARD_CACHE_GB is .* or more for this data set"):
        both(server, written)


def test_shards_come_before_they_are_needed(server: Server, written: Path) -> None:
    """And not many more: a request that is handed out finds its shards, and only the next are on their way."""
    far, _ = both(server, written)
    assert isinstance(far.entries, remote.RemoteEntries)
    order = far.entries.order(3, 0)
    requests = ((np.zeros(4, np.int64), order[i : i + 4]) for i in range(0, len(order), 4))
    seen = set()
    for done, (_, indices) in enumerate(far.entries.read_ahead(requests), 1):
        seen |= {far.entries[int(i)].file.rpartition("/")[2] for i in indices}
        there = {path.name for path in far.entries.cache.folder.glob("*.tar")}
        assert seen <= there
        assert len(server.asked) - 3 <= len(seen) + 2 + 2 + 1, done  # 3 files beside


# ---------------------------------------------------------------------------------------------- what can happen


def test_interrupted_connections(server: Server, written: Path) -> None:
    server.stops = {path.name: [1000, 0, 3000] for path in written.glob("train-*.tar")}
    far, near = both(server, written)
    for batch in itertools.islice(train_batches(far, TRAIN, **BATCH), len(far) // 4):
        assert batch.labels.tolist() == near.labels[batch.indices].tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_server_that_no_longer_answers(server: Server, written: Path, workers: int) -> None:
    """The message is the same from every process; `on_error="skip"` does not skip it."""
    far, _ = both(server, written)
    batches = train_batches(far, TRAIN, **BATCH, workers=workers, on_error="skip")
    next(batches)
    server.dead = True
    with pytest.raises(ValueError, match=r"^cannot download http://127.*train-.*tar \(.*; tried 6 times"):
        list(itertools.islice(batches, 30))


def test_a_damaged_shard_is_refused(server: Server, written: Path, tmp_path: Path) -> None:
    name = "train-000002.tar"
    other = tmp_path / "other"
    other.mkdir()
    for path in written.iterdir():
        data = path.read_bytes()
        (other / path.name).write_bytes(data[:-1] + b"x" if path.name == name else data)
    with serving(other) as server:
        far = load_dataset(f"shards:{server.address}", "train")
        with pytest.raises(ValueError, match=r"train-000002.tar has the sha256 .*, expected"):
            list(itertools.islice(train_batches(far, TRAIN, **BATCH), len(far) // 4))
    with serving(tmp_path) as server:
        (tmp_path / "index.json").write_text("<html>welcome</html>")
        with pytest.raises(ValueError, match=r"neither index.json nor a tar at http"):
            load_dataset(f"shards:{server.address}", "train")


def test_another_set_at_the_same_address(written: Path, tmp_path: Path) -> None:
    """What is cached of the first is not used for the second."""
    write_folders(tmp_path / "in", {"ant": 30, "bee": 30}, seed=5)
    write_shards(f"folder:{tmp_path / 'in'}", tmp_path / "new", ShardSettings(records=4))
    served = tmp_path / "served"
    served.symlink_to(written)
    with serving(served) as server:
        load_dataset(f"shards:{server.address}", "train").image(0)
        served.unlink()
        served.symlink_to(tmp_path / "new")
        far = load_dataset(f"shards:{server.address}", "train")
        near = load_dataset(f"shards:{tmp_path / 'new'}", "train")
        np.testing.assert_array_equal(far.image(0), near.image(0))


# ----------------------------------------------------------------------------------------------------- names


def test_expand() -> None:
    assert expand("train-{008..011}.tar") == [f"train-{n}.tar" for n in ("008", "009", "010", "011")]
    assert expand("{train,test}-{0..1}.tar") == ["train-0.tar", "train-1.tar", "test-0.tar", "test-1.tar"]
    assert expand("train-0.tar") == ["train-0.tar"]
    for wrong in ("{}", "{1..}", "{3..1}", "{a}"):
        with pytest.raises(ValueError, match="expected a range"):
            expand(f"train-{wrong}.tar")


def test_some_of_the_shards(server: Server, written: Path) -> None:
    far = load_dataset(f"shards:{server.address}/{{train,val,test}}-{{000000..000000}}.tar", "train")
    near = load_dataset(f"shards:{written}", "train")
    rows = [i for i in range(len(near)) if "train-000000" in near.path(i)]
    np.testing.assert_array_equal(far.labels, near.labels[rows])
    np.testing.assert_array_equal(far.image(2), near.image(rows[2]))
    with pytest.raises(ValueError, match=r"index.json does not list train-000012.tar \(88 of 90 are missing\)"):
        load_dataset(f"shards:{server.address}/train-0000{{10..99}}.tar", "train")


def test_tars_without_an_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They are downloaded once, all, and then known."""
    caplog.set_level(logging.WARNING)
    served = tmp_path / "served"
    for shard in range(4):
        members = [m for i in range(5) for m in pair(f"{shard}{i}", i % 2, 10 * shard + i, 70)]
        write_shard(served / f"mine-{shard}.tar", members)
    write_shard(served / "test-0.tar", pair("t", 1, 99, 70))
    write_shard(served / "val-0.tar", pair("v", 0, 98, 70))
    (served / "classes.json").write_text('["a", "b"]')
    with serving(served) as server:
        with pytest.raises(ValueError, match=r"neither index.json nor a tar at http.*, or name its tars"):
            load_dataset(f"shards:{server.address}", "train")
        name = f"shards:{server.address}/{{mine-0,mine-1,mine-2,mine-3,test-0,val-0}}.tar"
        for _ in range(2):
            far = load_dataset(name, "train")
            assert far.classes == ("a", "b")
            assert [int(far.image(i)[0, 0, 0]) for i in range(20)] == [10 * s + i for s in range(4) for i in range(5)]
            assert far.labels.tolist() == [0, 1, 0, 1, 0] * 4
            assert int(load_dataset(name, "test").image(0)[0, 0, 0]) == 99
        assert caplog.text.count("downloading its shards once") == 1
        (served / "mine-0.tar").write_bytes((served / "mine-1.tar").read_bytes())
        for path in tars(tmp_path):
            path.unlink()
        with pytest.raises(ValueError, match=r"mine-0.tar has the sha256 .*, expected"):
            load_dataset(name, "train").image(0)


# ----------------------------------------------------------------------------------------------------- cache

DATA = np.random.default_rng(0).bytes(3000)
FILES = tuple(File(f"{i}.tar", len(DATA) - i, hashlib.sha256(DATA[i:]).hexdigest()) for i in range(6))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "served").mkdir()
    for i in range(6):
        (tmp_path / "served" / f"{i}.tar").write_bytes(DATA[i:])
    with serving(tmp_path / "served") as started:
        yield started


def test_the_least_recently_used_make_room(files: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "WINDOW", -1)
    monkeypatch.setenv(ROOM, f"{3 * len(DATA) / 1e9:.12f}")
    cache = ShardCache(files.address, tmp_path / "cached", ShardIndex({"train": FILES}))
    for i, present in ((0, "0"), (1, "01"), (2, "012"), (0, "012"), (3, "023"), (4, "034"), (0, "034"), (5, "045")):
        cache.fetch(f"{i}.tar")
        assert sorted(path.stem for path in (tmp_path / "cached").glob("*.tar")) == [*present]
    assert files.asked["0.tar"] == 1
    assert cache.opened("0.tar").read(0, 5) == DATA[:5]
    (tmp_path / "cached" / "0.tar").unlink()
    assert cache.opened("0.tar").read(5, 5) == DATA[5:10]  # it is still open
    assert files.asked["0.tar"] == 1
    assert pickle.loads(pickle.dumps(cache)).opened("5.tar").read(0, 5) == DATA[5:10]  # noqa: S301
    for value in ("0.000001", "lots", "-1"):
        monkeypatch.setenv(ROOM, value)
        with pytest.raises(ValueError, match=f"{ROOM} is '{value}'"):
            ShardCache(files.address, tmp_path, ShardIndex({"train": FILES}))


def test_a_file_that_another_process_removes_is_downloaded_again(
    files: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its download and its opening, as a process does that makes room."""
    cache = ShardCache(files.address, tmp_path / "cached", ShardIndex({"train": FILES}))
    removals = iter([True, True, False])

    def open_file(path: str) -> OpenFile:
        if next(removals):
            Path(path).unlink()
        return OpenFile(path)

    monkeypatch.setattr(remote, "OpenFile", open_file)
    assert cache.opened("0.tar").read(100, 50) == DATA[100:150]
    assert files.asked["0.tar"] == 3
    for name in ("train.index.npz", "../secret"):
        with pytest.raises(ValueError, match=f"does not list {name}"):
            cache.fetch(name)
