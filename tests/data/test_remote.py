"""Remote shards: every image once an epoch, wherever a run starts, with a cache for a few of the shards."""

import contextlib
import hashlib
import itertools
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shard_files import Server, serving, write_folders

from vitlab.data import downloads, remote
from vitlab.data.dataset import Dataset
from vitlab.data.identity import exact_fingerprint
from vitlab.data.loader import eval_batches, train_batches
from vitlab.data.registry import load_dataset
from vitlab.data.remote import CACHE_LIMIT, ShardCache, _open_cached, window_order
from vitlab.data.shard_index import File, ShardIndex
from vitlab.data.shards import OpenFile
from vitlab.data.transforms import EvalTransform, TrainTransform
from vitlab.data.write_shards import ShardSettings, write_shards
from vitlab.errors import UserError

TRAIN, EVAL = TrainTransform(8, crop="inception"), EvalTransform(8)
BATCH: Any = {"batch_size": 4, "seed": 3}


@pytest.fixture(autouse=True)
def _quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "PAUSE", 0.0)
    monkeypatch.setattr(remote, "WINDOW", 3)
    monkeypatch.setattr(remote, "CONNECTIONS", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(CACHE_LIMIT, raising=False)


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


@settings(max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 9), st.integers(0, 99), st.integers(0, 9))
def test_at_most_window_shards_are_in_use(counts: list[int], window: int, seed: int, epoch: int) -> None:
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
    one, two = (window_order(np.repeat(np.arange(20), 9), 5, 0, epoch) for epoch in (0, 1))
    assert not np.array_equal(one, two)


@pytest.mark.parametrize("split", ["train", "trainval"])
def test_a_remote_set_equals_the_local_one(server: Server, written: Path, split: str) -> None:
    remote_set, local = both(server, written, split)
    assert remote_set.classes == local.classes
    assert remote_set.labels.tolist() == local.labels.tolist()
    assert not any(name.endswith(".tar") for name in server.asked)  # nothing is fetched before it is needed
    for i in range(len(local)):
        np.testing.assert_array_equal(remote_set.image(i), local.image(i))
        assert remote_set.path(i) == local.path(i).replace(str(written), server.address)
    assert max(server.asked[path.name] for path in written.glob("*.tar")) == 1


def test_every_image_once_an_epoch(server: Server, written: Path) -> None:
    remote_set, local = both(server, written)
    n = len(remote_set)
    batches = list(itertools.islice(train_batches(remote_set, TRAIN, **BATCH, workers=2), 2 * n // 4))
    seen = np.concatenate([batch.indices for batch in batches])
    assert sorted(seen[:n]) == sorted(seen[n : 2 * n]) == list(range(n))
    assert seen[:n].tolist() != seen[n : 2 * n].tolist()
    assert [label for batch in batches for label in batch.labels.tolist()] == local.labels[seen].tolist()
    evaluated = eval_batches(remote_set, EVAL, batch_size=5)
    for one, two in zip(evaluated, eval_batches(local, EVAL, batch_size=5), strict=True):
        np.testing.assert_array_equal(one.images, two.images)


def test_any_start_continues_and_ranks_share(server: Server, written: Path) -> None:
    remote_set, _ = both(server, written)
    whole = list(itertools.islice(train_batches(remote_set, TRAIN, **BATCH), 30))
    for start in (4, 20, 44, 56):
        (part,) = itertools.islice(train_batches(remote_set, TRAIN, **BATCH, first_example=start), 1)
        np.testing.assert_array_equal(part.indices, whole[start // 4].indices)
        np.testing.assert_array_equal(part.images, whole[start // 4].images)
    ranks = [train_batches(remote_set, TRAIN, **BATCH, first_example=8, rank=r, world_size=2) for r in (0, 1)]
    for i in range(2, 13):
        parts = [next(rank) for rank in ranks]
        assert [x for part in parts for x in part.indices.tolist()] == whole[i].indices.tolist()


def size(path: Path) -> int:
    """Of a file that another thread may remove."""
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_size
    return 0


def test_a_limited_cache(server: Server, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = max(path.stat().st_size for path in written.glob("train-*.tar"))
    monkeypatch.setenv(CACHE_LIMIT, f"{7 * largest / 1e9:.12f}")
    remote_set, local = both(server, written)
    for batch in itertools.islice(train_batches(remote_set, TRAIN, **BATCH, workers=2), 3 * len(remote_set) // 4):
        assert batch.labels.tolist() == local.labels[batch.indices].tolist()
        assert sum(map(size, (tmp_path / "cache").rglob("*.tar"))) <= 9 * largest  # and two that are being added
    downloaded = sum(server.asked[path.name] for path in written.glob("train-*.tar"))
    # Each once an epoch, and a few again where two epochs meet, or where a worker is behind the others.
    assert downloaded <= 3 * 12 + 18


def test_shards_are_downloaded_before_they_are_needed(server: Server, written: Path) -> None:
    """And not many more than the next ones."""
    remote_set, _ = both(server, written)
    assert isinstance(remote_set.entries, remote.RemoteEntries)
    order = remote_set.entries.order(3, 0)
    requests = ((np.zeros(4, np.int64), order[i : i + 4]) for i in range(0, len(order), 4))
    seen = set()
    for done, (_, indices) in enumerate(remote_set.entries.read_ahead(requests), 1):
        seen |= {remote_set.entries[int(i)].file.rpartition("/")[2] for i in indices}
        there = {path.name for path in remote_set.entries.cache.folder.glob("*.tar")}
        assert seen <= there
        assert len(server.asked) - 3 <= len(seen) + 2 + 2 + 1, done  # 3 other files


def test_a_server_that_no_longer_answers(server: Server, written: Path) -> None:
    """`on_error="skip"` does not skip it."""
    batches = train_batches(both(server, written)[0], TRAIN, **BATCH, workers=1, on_error="skip")
    next(batches)
    server.dead = True
    with pytest.raises(UserError, match=r"train-.*tar .*tried 6 times"):
        list(itertools.islice(batches, 30))


def test_a_damaged_shard_is_refused(
    server: Server, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "train-000002.tar"
    other = tmp_path / "other"
    other.mkdir()
    for path in written.iterdir():
        data = path.read_bytes()
        (other / path.name).write_bytes(data[:-1] + b"x" if path.name == name else data)
    with serving(other) as damaged, pytest.raises(UserError, match=rf"{name} has the sha256"):
        load_dataset(f"shards:{damaged.address}", "train").image(9)
    monkeypatch.setattr(remote, "JSON_BYTES", 100)
    (other / "index.json").write_text("<html>welcome</html>")
    with serving(other) as damaged, serving(tmp_path) as empty:
        for each, message in ((empty, "no index.json"), (damaged, "not an index"), (server, "not an index")):
            with pytest.raises(UserError, match=message):
                load_dataset(f"shards:{each.address}", "train")


def test_another_set_at_the_same_address(written: Path, tmp_path: Path) -> None:
    """What is cached of the first is not used for the second: images are identified by the index."""
    write_folders(tmp_path / "in", {"ant": 4, "bee": 4}, seed=5)
    write_shards(f"folder:{tmp_path / 'in'}", tmp_path / "new", ShardSettings(records=4))
    served, digests = tmp_path / "served", []
    with serving(served) as server:
        for folder in (written, written, tmp_path / "new"):
            served.unlink(missing_ok=True)
            served.symlink_to(folder)
            remote_set = load_dataset(f"shards:{server.address}", "train")
            local = load_dataset(f"shards:{folder}", "train")
            np.testing.assert_array_equal(remote_set.image(0), local.image(0))
            digests.append(exact_fingerprint("", remote_set))
    assert digests[0] == digests[1] != digests[2]


DATA = np.random.default_rng(0).bytes(3000)
FILES = tuple(File(f"{i}.tar", len(DATA) - i, hashlib.sha256(DATA[i:]).hexdigest()) for i in range(6))


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Server]:
    (tmp_path / "served").mkdir()
    for i in range(6):
        (tmp_path / "served" / f"{i}.tar").write_bytes(DATA[i:])
    with serving(tmp_path / "served") as started:
        yield started


def test_the_least_recently_used_are_removed(files: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_LIMIT, f"{3 * len(DATA) / 1e9:.12f}")
    cache = ShardCache(files.address, tmp_path / "cached", ShardIndex({"train": FILES}))
    for i, present in ((0, "0"), (1, "01"), (2, "012"), (0, "012"), (3, "023"), (4, "034"), (0, "034"), (5, "045")):
        cache.fetch(f"{i}.tar")
        assert sorted(path.stem for path in (tmp_path / "cached").glob("*.tar")) == [*present]
    assert _open_cached(cache, "0.tar").read(0, 5) == DATA[:5]
    (tmp_path / "cached" / "0.tar").unlink()
    assert _open_cached(cache, "0.tar").read(5, 5) == DATA[5:10]  # it is still open
    assert files.asked["0.tar"] == 1
    assert _open_cached(pickle.loads(pickle.dumps(cache)), "5.tar").read(0, 5) == DATA[5:10]  # noqa: S301
    monkeypatch.setenv(CACHE_LIMIT, "lots")
    with pytest.raises(UserError, match=CACHE_LIMIT):
        ShardCache(files.address, tmp_path, ShardIndex({"train": FILES}))
    with pytest.raises(UserError, match=r"\.\./secret"):
        cache.fetch("../secret")


def test_a_file_that_another_process_removes_is_downloaded_again(
    files: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its download and its opening, as a process with a limited cache does."""
    cache = ShardCache(files.address, tmp_path / "cached", ShardIndex({"train": FILES}))
    removals = iter([True, True, False])

    def open_file(path: str) -> OpenFile:
        if next(removals):
            Path(path).unlink()
        return OpenFile(path)

    monkeypatch.setattr(remote, "OpenFile", open_file)
    assert _open_cached(cache, "0.tar").read(100, 50) == DATA[100:150]
    assert files.asked["0.tar"] == 3
