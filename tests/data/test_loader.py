"""The order is a pure function of (seed, epoch, position): whatever the start, the ranks, the workers."""

import dataclasses
import itertools
import logging
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from vitlab.data import loader
from vitlab.data.dataset import Dataset, Entries, Labels
from vitlab.data.decode import Entry, ImageError
from vitlab.data.loader import Batch, epoch_order, eval_batches, example_at, train_batches
from vitlab.data.transforms import EvalTransform, TrainTransform
from vitlab.rng import Stream, example_uniforms

TRAIN, EVAL = TrainTransform(8, crop="inception"), EvalTransform(8)


def in_memory(n: int) -> Dataset:
    rng = np.random.default_rng(n)
    pixels = rng.integers(0, 256, (n, 8, 8, 3)).astype(np.uint8)
    return Dataset("noise", "train", ("a", "b", "c"), rng.integers(0, 3, n), pixels)


@pytest.fixture
def on_disk(tmp_path: Path) -> Dataset:
    """Eleven images of different sizes; number 4 is empty, number 7 is text."""
    rng = np.random.default_rng(0)
    entries = []
    for i in range(11):
        path = tmp_path / f"{i}.png"
        Image.fromarray(rng.integers(0, 256, (8 + i, 20 - i, 3)).astype(np.uint8)).save(path)
        entries.append(Entry(str(path)))
    (tmp_path / "4.png").write_bytes(b"")
    (tmp_path / "7.png").write_text("no image")
    return Dataset("disk", "train", ("a", "b"), np.arange(11) % 2, entries=entries)


def take(batches: Iterator[Batch], count: int) -> Batch:
    """The next `count` batches as one."""
    return join(list(itertools.islice(batches, count)))


def join(parts: list[Batch]) -> Batch:
    images, labels, indices = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("images", "labels", "indices")
    )
    return Batch(images, labels, indices, sum(part.skipped for part in parts))


def same(a: Batch, b: Batch) -> None:
    np.testing.assert_array_equal(a.indices, b.indices)
    np.testing.assert_array_equal(a.labels, b.labels)
    np.testing.assert_array_equal(a.images, b.images)


# ---------------------------------------------------------------------------------------------- the order


@given(st.integers(1, 300), st.integers(0, 2**64 - 1), st.integers(0, 10**6))
def test_an_epoch_is_a_permutation(n: int, seed: int, epoch: int) -> None:
    np.testing.assert_array_equal(np.sort(epoch_order(n, seed, epoch)), np.arange(n))


def test_the_order_never_changes() -> None:
    """Literals: a resumed run counts on them, on every machine and in every version."""
    assert epoch_order(8, 0, 0).tolist() == [1, 2, 3, 5, 0, 4, 7, 6]
    assert epoch_order(8, 42, 7).tolist() == [3, 6, 4, 1, 0, 2, 7, 5]
    assert len({tuple(epoch_order(50, seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 100), st.integers(1, 6))
@settings(max_examples=25)
def test_any_start_continues_the_uninterrupted_stream(n: int, batch_size: int, start: int, count: int) -> None:
    data = in_memory(n)
    stop = start + count * batch_size
    whole = take(train_batches(data, TRAIN, batch_size=50, seed=5), -(-stop // 50))
    part = take(train_batches(data, TRAIN, batch_size=batch_size, seed=5, start=start), count)
    same(part, Batch(whole.images[start:stop], whole.labels[start:stop], whole.indices[start:stop]))
    assert [example_at(data, 5, start + i)[1] for i in range(len(part.indices))] == part.indices.tolist()
    np.testing.assert_array_equal(part.labels, data.labels[part.indices])


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), st.integers(0, 50))
@settings(max_examples=25)
def test_ranks_partition_the_global_batch(n: int, world_size: int, share: int, start: int) -> None:
    data, batch_size = in_memory(n), world_size * share
    whole = train_batches(data, TRAIN, batch_size=batch_size, seed=1, start=start)
    ranks = [
        train_batches(data, TRAIN, batch_size=batch_size, seed=1, start=start, rank=r, world_size=world_size)
        for r in range(world_size)
    ]
    for _ in range(4):
        same(join([next(rank) for rank in ranks]), next(whole))


def test_every_epoch_shows_every_example_once_and_new() -> None:
    data = in_memory(10)
    three = take(train_batches(data, TRAIN, batch_size=6, seed=0), 5)  # batches cross the borders
    for epoch in range(3):
        assert sorted(three.indices[10 * epoch : 10 * epoch + 10].tolist()) == list(range(10))
    where = [(three.indices == 3).nonzero().flatten()[e] for e in range(3)]
    assert not torch.equal(three.images[where[0]], three.images[where[1]])


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 9))
@settings(max_examples=25)
def test_evaluation_covers_everything_once(n: int, world_size: int, share: int) -> None:
    data = in_memory(n)
    parts = [
        batch
        for rank in range(world_size)
        for batch in eval_batches(data, EVAL, batch_size=share * world_size, rank=rank, world_size=world_size)
    ]
    assert all(1 <= len(batch.labels) <= share for batch in parts)
    seen = join(parts)
    assert sorted(seen.indices.tolist()) == list(range(n))
    assert data.pixels is not None
    np.testing.assert_allclose(
        seen.images.permute(0, 2, 3, 1), data.pixels[seen.indices.numpy()] / 127.5 - 1, atol=1e-6
    )


# ------------------------------------------------------------------------- files, workers, bad images


def test_workers_change_nothing(on_disk: Dataset) -> None:
    options = {"batch_size": 4, "seed": 0, "start": 2, "on_error": "skip"}
    state = torch.get_rng_state()
    inline = take(train_batches(on_disk, TRAIN, **options), 5)  # pyright: ignore[reportArgumentType]
    workers = take(train_batches(on_disk, TRAIN, **options, workers=2), 5)  # pyright: ignore[reportArgumentType]
    same(inline, workers)
    assert inline.skipped == workers.skipped == 20 - len(inline.labels) > 0
    np.testing.assert_array_equal(torch.get_rng_state(), state)  # a resumed run draws from it


@pytest.mark.parametrize("layers", [0, 2])
def test_the_size_of_pieces_changes_nothing(on_disk: Dataset, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sets = Labels.of_lists([[i % 3, (i + 1) % 3] for i in range(11)])
    data = dataclasses.replace(on_disk, classes=("a", "b", "c"), labels=sets.firsts, label_sets=sets)
    transform = TrainTransform(8, randaugment_layers=layers, randaugment_magnitude=10)
    found = []
    for piece in (64, 7, 3, 1):
        monkeypatch.setattr(loader, "PIECE", piece)
        batches = train_batches(data, transform, batch_size=9, seed=2, on_error="skip", draws=4)
        found.append(list(itertools.islice(batches, 4)))
        evaluated = join(list(eval_batches(data, EVAL, batch_size=9, on_error="skip")))
        assert evaluated.indices.tolist() == [0, 1, 2, 3, 5, 6, 8, 9, 10]
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            same(one, two)
            assert one.skipped == two.skipped == 9 - len(two.labels)
            np.testing.assert_array_equal(one.targets, two.targets)
            np.testing.assert_array_equal(one.draws, two.draws)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("fast", [False, True])
def test_batches_on_a_gpu_are_those_of_the_cpu(on_disk: Dataset, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "PIECE", 3)
    options: Any = {"batch_size": 8, "seed": 0, "on_error": "skip", "workers": 2}
    transform = TrainTransform(8, fast=fast)
    there = train_batches(on_disk, transform, **options, device="cuda")
    for here in itertools.islice(train_batches(on_disk, transform, **options), 20):
        batch = next(there)
        assert batch.images.is_cuda
        assert batch.labels.is_cuda
        np.testing.assert_allclose(batch.images.cpu(), here.images, atol=1e-5)
        np.testing.assert_array_equal(batch.indices.cpu(), here.indices)


@pytest.mark.parametrize("workers", [0, 1])
def test_damage_that_shows_in_the_pixels_is_reported_alike(on_disk: Dataset, tmp_path: Path, workers: int) -> None:
    """A JPEG with a good header and end and a broken table in its midst."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)
    Image.fromarray(noise).save(tmp_path / "0.jpg")
    data = (tmp_path / "0.jpg").read_bytes()
    half = len(data) // 2
    (tmp_path / "0.jpg").write_bytes(data[:half] + b"\xff\xc4\x00\x15\x00" + b"\xff" * 16 + data[half:])
    entries = [Entry(str(tmp_path / "0.jpg")), *on_disk.entries[1:4]]
    broken = dataclasses.replace(on_disk, labels=on_disk.labels[:4], entries=entries)
    batch = next(train_batches(broken, TRAIN, batch_size=8, seed=0, workers=workers, on_error="skip"))
    assert sorted(batch.indices.tolist()) == [1, 1, 2, 2, 3, 3]
    assert batch.skipped == 2
    for batches in (
        train_batches(broken, TRAIN, batch_size=8, seed=0, workers=workers),
        eval_batches(broken, EVAL, batch_size=4, workers=workers),
    ):
        with pytest.raises(ImageError, match=r"0\.jpg: corrupt or truncated"):
            next(batches)


def test_a_worker_that_dies_says_what_to_do(on_disk: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object, **__: object) -> Iterator[None]:
        yield from ()
        raise RuntimeError("DataLoader worker (pid(s) 17) exited unexpectedly")

    monkeypatch.setattr(loader, "DataLoader", dies)
    with pytest.raises(ValueError, match=r"pid\(s\) 17.* out of memory.*data\.workers is 3.*--shm-size"):
        next(train_batches(on_disk, TRAIN, batch_size=4, seed=0, workers=3))


class Deadly(Entry):
    def open(self) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@pytest.mark.slow
def test_a_killed_worker_ends_the_stream_and_nothing_else(on_disk: Dataset) -> None:
    """The error comes when the next batch is asked for, and not in the midst of whatever goes on until then."""
    entries = [on_disk.entries[0]] * 8
    entries[epoch_order(8, 0, 0)[7]] = Deadly("deadly")
    data = dataclasses.replace(on_disk, labels=np.zeros(8, np.int64), entries=entries)
    before = signal.getsignal(signal.SIGCHLD)
    batches = train_batches(data, TRAIN, batch_size=2, seed=0, workers=1)
    next(batches)
    time.sleep(1)  # would be ended by torch's own handler
    with pytest.raises(ValueError, match="a process that reads images was killed"):
        list(batches)
    assert signal.getsignal(signal.SIGCHLD) == before


@pytest.mark.parametrize("workers", [0, 1])
def test_skip_counts_and_tells_once(on_disk: Dataset, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    for _ in range(2):
        seen = join(list(eval_batches(on_disk, EVAL, batch_size=4, workers=workers, on_error="skip")))
        assert sorted(seen.indices.tolist()) == [0, 1, 2, 3, 5, 6, 8, 9, 10]
        assert seen.skipped == 2
    seen = take(train_batches(on_disk, TRAIN, batch_size=11, seed=0, workers=workers, on_error="skip"), 4)
    assert seen.skipped == 8
    assert caplog.text.count("4.png: the file is empty") == 3  # once for each of the three streams
    assert caplog.text.count("7.png: not an image") == 3


@pytest.mark.parametrize("workers", [0, 1])
def test_raise_names_the_image(on_disk: Dataset, workers: int) -> None:
    with pytest.raises(ImageError, match=r"4\.png: the file is empty"):
        list(eval_batches(on_disk, EVAL, batch_size=4, workers=workers))


def test_images_in_memory_that_could_not_be_read_are_skipped_alike(caplog: pytest.LogCaptureFixture) -> None:
    data = in_memory(6)
    data.failures[2] = ImageError("2.png", "zero bytes")
    seen = join(list(eval_batches(data, EVAL, batch_size=4, on_error="skip")))
    assert seen.indices.tolist() == [0, 1, 3, 4, 5]
    assert seen.skipped == 1
    assert "2.png: zero bytes" in caplog.text
    with pytest.raises(ImageError, match=r"2\.png"):
        take(train_batches(data, TRAIN, batch_size=6, seed=0), 1)


def test_a_batch_without_any_readable_image(on_disk: Dataset) -> None:
    bad = on_disk.take(np.array([4, 7]))
    with pytest.raises(ValueError, match=r"none of the 2 images of a batch can be read; one: .*\.png"):
        next(train_batches(bad, TRAIN, batch_size=2, seed=0, on_error="skip"))
    (empty,) = eval_batches(bad, EVAL, batch_size=2, on_error="skip")
    assert empty.images.shape == (0, 3, 8, 8)
    assert empty.skipped == 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_share_without_any_readable_image(on_disk: Dataset, workers: int) -> None:
    """Of one of two processes: the other has an image. What stands in has all that an image has, but no place."""
    sets = Labels.of_lists([[i % 3, (i + 1) % 3] for i in range(11)])
    data = dataclasses.replace(on_disk, classes=("a", "b", "c"), labels=sets.firsts, label_sets=sets)
    four = data.take(np.array([4, 7, 5, 6]))
    options: Any = {"batch_size": 4, "seed": 0, "on_error": "skip", "draws": 5, "workers": workers}
    whole = list(itertools.islice(train_batches(four, TRAIN, **options), 12))
    shares = [itertools.islice(train_batches(four, TRAIN, **options, rank=r, world_size=2), 12) for r in (0, 1)]
    empty = 0
    for one, *parts in zip(whole, *shares, strict=True):
        same(join([part for part in parts if len(part.indices)]), dataclasses.replace(one, skipped=0))
        assert sum(part.skipped for part in parts) == one.skipped
        for part in parts:
            assert len(part.images) == len(part.labels) == max(1, len(part.indices))
            if not len(part.indices):
                empty += 1
                assert part.skipped == 2
                assert (part.images == 0).all()
                assert part.images.shape == (1, 3, 8, 8)
                assert part.targets is not None
                assert part.targets.shape == (1, 3)
                assert part.targets.any()
                assert part.draws is not None
                assert part.draws.shape == (1, 5)
    assert empty


def test_all_labels_of_a_image_come_along(on_disk: Dataset) -> None:
    """Multi-hot, in the order of the batch, without those that could not be read; from workers and after a restart."""
    lists = [[i % 3, *([(i + 1) % 3] if i % 2 else [])] for i in range(11)]
    sets = Labels.of_lists(lists)
    data = dataclasses.replace(on_disk, classes=("a", "b", "c"), labels=sets.firsts, label_sets=sets)
    options: Any = {"batch_size": 4, "seed": 0, "on_error": "skip"}
    whole = list(itertools.islice(train_batches(data, TRAIN, **options), 6))
    for batch in whole:
        assert batch.targets is not None
        assert batch.targets.dtype == torch.bool
        assert batch.targets.tolist() == [[c in lists[i] for c in range(3)] for i in batch.indices.tolist()]
        assert batch.labels.tolist() == [lists[i][0] for i in batch.indices.tolist()]
    later = list(itertools.islice(train_batches(data, TRAIN, **options, start=12, workers=1), 3))
    for one, two in zip(whole[3:], later, strict=True):
        same(one, two)
        np.testing.assert_array_equal(one.targets, two.targets)
    assert next(eval_batches(on_disk, EVAL, batch_size=4)).targets is None


def test_files_and_memory_agree(on_disk: Dataset) -> None:
    """The same images, read one by one and held in memory, give the same batches to 1e-3."""
    data = in_memory(9)
    assert data.pixels is not None
    listed = [TRAIN.apply(list(data.pixels[[i]]), 3, 0, np.array([i])) for i in range(9)]
    seen = take(train_batches(data, TRAIN, batch_size=9, seed=3), 1)
    np.testing.assert_allclose(torch.cat(listed)[seen.indices], seen.images, atol=1e-3)


# ---------------------------------------------------------------------------------------- wrong settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 9, "world_size": 2}, "batch_size=9 .* multiple of their number 2"),
        ({"rank": 1}, "rank must be 0 to 0"),
        ({"workers": -1}, "workers 0 or more"),
        ({"on_error": "ignore"}, "not 'ignore'"),
        ({"seed": -1}, "seed and start must be 0 or more"),
        ({"transform": TrainTransform(8, fast=True)}, "fast decoding has no effect on noise"),
        ({"dataset": in_memory(3).take(np.array([], int))}, "noise has no images"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_batches(**{"dataset": in_memory(5), "transform": TRAIN, "batch_size": 4, "seed": 0} | options)


def test_an_example_is_that_of_the_sets_own_order() -> None:
    """As shards on a server have one."""

    class Backwards(Entries):
        def __init__(self, paths: list[str]) -> None:
            self.paths = paths

        def __len__(self) -> int:
            return len(self.paths)

        def entry(self, index: int) -> Entry:
            return Entry(self.paths[index])

        def take(self, indices: np.ndarray) -> "Backwards":
            return Backwards([self.paths[i] for i in indices])

        def join(self, other: Entries) -> "Backwards":
            return Backwards([*self.paths, *(entry.file for entry in other)])

        def order(self, seed: int, epoch: int) -> np.ndarray:
            return np.arange(len(self))[::-1]

    data = dataclasses.replace(in_memory(5), entries=Backwards(list("abcde")))
    batch = next(train_batches(data, TRAIN, batch_size=7, seed=0))
    assert batch.indices.tolist() == [4, 3, 2, 1, 0, 4, 3]
    assert [example_at(data, 0, g) for g in range(7)] == [(0, 4), (0, 3), (0, 2), (0, 1), (0, 0), (1, 4), (1, 3)]


# ------------------------------------------------------------------------------------- numbers of each example's own


def test_draws_depend_on_seed_epoch_and_index_alone() -> None:
    """Neither the batch nor the rank, and the images are the same with them and without."""
    data = in_memory(11)
    whole = next(train_batches(data, TRAIN, batch_size=22, seed=5, draws=7))
    assert whole.draws is not None
    assert whole.draws.shape == (22, 7)
    assert len(set(whole.draws.flatten().tolist())) == 22 * 7
    for g, row in enumerate(whole.draws):
        epoch, index = example_at(data, 5, g)
        np.testing.assert_array_equal(
            row, example_uniforms(5, np.array([epoch]), np.array([index]), 7, Stream.EXAMPLE_DRAWS)[0]
        )
    parts = [next(train_batches(data, TRAIN, batch_size=22, seed=5, draws=7, rank=r, world_size=2)) for r in (0, 1)]
    assert torch.equal(torch.cat([part.draws for part in parts if part.draws is not None]), whole.draws)
    plain = next(train_batches(data, TRAIN, batch_size=22, seed=5))
    assert plain.draws is None
    same(plain, whole)


def test_draws_of_unreadable_images_are_left_out(on_disk: Dataset) -> None:
    batch = next(train_batches(on_disk, TRAIN, batch_size=11, seed=0, on_error="skip", draws=3))
    assert batch.draws is not None
    expected = example_uniforms(0, np.zeros(9, np.int64), batch.indices.numpy(), 3, Stream.EXAMPLE_DRAWS)
    np.testing.assert_array_equal(batch.draws, expected)


def test_draws_of_a_test_image_are_the_same_each_time() -> None:
    found = []
    for batch_size in (5, 64):
        batches = eval_batches(in_memory(37), EVAL, batch_size=batch_size, draws=10)
        found.append(torch.cat([batch.draws for batch in batches if batch.draws is not None]))
    assert torch.equal(*found)
    assert found[0].shape == (37, 10)
