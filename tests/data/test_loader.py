"""The order is a pure function of (seed, epoch, position): whatever the start, the ranks, the workers."""

import dataclasses
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_files import example_at, pixels_of
from PIL import Image

from vitlab.data import loader, workers
from vitlab.data.dataset import Dataset, Labels
from vitlab.data.decode import Entry, ImageError, Levels
from vitlab.data.loader import Batch, epoch_order, eval_batches, train_batches
from vitlab.data.transforms import EvalTransform, TrainTransform
from vitlab.errors import UserError
from vitlab.rng import Stream, example_uniforms

TRAIN, EVAL = TrainTransform(8, crop="inception"), EvalTransform(8)
SEVERAL = [[i % 3, *([(i + 1) % 3] if i % 2 else [])] for i in range(11)]
SKIP: dict[str, Any] = {"on_error": "skip", "seed": 0}


def in_memory(n: int) -> Dataset:
    rng = np.random.default_rng(n)
    pixels = rng.integers(0, 256, (n, 8, 8, 3)).astype(np.uint8)
    return Dataset("noise", "train", ("a", "b", "c"), rng.integers(0, 3, n), pixels)


@pytest.fixture
def on_disk(tmp_path: Path) -> Dataset:
    """Eleven images of different sizes, some with two labels; number 4 is empty, number 7 is text."""
    rng = np.random.default_rng(0)
    entries = [Entry(str(tmp_path / f"{i}.png")) for i in range(11)]
    for i, entry in enumerate(entries):
        Image.fromarray(rng.integers(0, 256, (8 + i, 20 - i, 3)).astype(np.uint8)).save(entry.file)
    (tmp_path / "4.png").write_bytes(b"")
    (tmp_path / "7.png").write_text("no image")
    sets = Labels.of_lists(SEVERAL)
    return Dataset("disk", "train", ("a", "b", "c"), sets.first_labels, entries=entries, label_sets=sets)


def join(batches: Iterable[Batch], count: int | None = None) -> Batch:
    """All batches, or the next `count`, as one."""
    parts = list(itertools.islice(batches, count))
    images, labels, indices = (torch.cat([getattr(p, name) for p in parts]) for name in ("images", "labels", "indices"))
    return Batch(images, labels, indices, sum(part.skipped for part in parts))


def same(a: Batch, b: Batch, *further: str) -> None:
    for name in ("indices", "labels", "images", *further):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def same_streams(one: Iterator[Batch], two: Iterator[Batch], count: int) -> None:
    for a, b in zip(itertools.islice(one, count), itertools.islice(two, count), strict=True):
        same(a, b, "skipped", "targets", "uniforms")


def test_the_order_never_changes() -> None:
    """Literals: a resumed run counts on them, on every machine and in every version."""
    assert epoch_order(in_memory(8), 0, 0).tolist() == [1, 2, 3, 5, 0, 4, 7, 6]
    assert epoch_order(in_memory(8), 42, 7).tolist() == [3, 6, 4, 1, 0, 2, 7, 5]
    orders = {tuple(epoch_order(in_memory(50), seed, epoch)) for seed in (0, 1, 2**64 - 1) for epoch in (0, 1, 10**6)}
    assert len(orders) == 9
    assert all(sorted(order) == list(range(50)) for order in orders)


@given(st.integers(1, 30), st.integers(1, 12), st.integers(0, 100), st.integers(1, 6))
@settings(max_examples=12)
def test_any_start_continues_the_uninterrupted_stream(n: int, batch_size: int, start: int, count: int) -> None:
    data = in_memory(n)
    stop = start + count * batch_size
    whole = join(train_batches(data, TRAIN, batch_size=50, seed=5), -(-stop // 50))
    part = join(train_batches(data, TRAIN, batch_size=batch_size, seed=5, first_example=start), count)
    same(part, Batch(whole.images[start:stop], whole.labels[start:stop], whole.indices[start:stop]))
    assert [example_at(data, 5, start + i)[1] for i in range(len(part.indices))] == part.indices.tolist()
    np.testing.assert_array_equal(part.labels, data.labels[part.indices])


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 4), st.integers(0, 50))
@settings(max_examples=15)
def test_ranks_partition_the_global_batch(n: int, world_size: int, local: int, start: int) -> None:
    data = in_memory(n)
    options: dict[str, Any] = {"batch_size": world_size * local, "seed": 1, "first_example": start}
    whole = train_batches(data, TRAIN, **options)
    ranks = [train_batches(data, TRAIN, **options, rank=r, world_size=world_size) for r in range(world_size)]
    for _ in range(4):
        same(join([next(rank) for rank in ranks]), next(whole))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 9))
@settings(max_examples=15)
def test_evaluation_covers_everything_once(n: int, step: int, batch_size: int) -> None:
    data, rows = in_memory(n), np.arange(n)
    assert join(eval_batches(data, EVAL, batch_size=batch_size)).indices.tolist() == rows.tolist()
    shards = [rows[rank::step] for rank in range(min(step, n))]
    parts = [b for shard in shards for b in eval_batches(data, EVAL, batch_size=batch_size, indices=shard)]
    assert all(1 <= len(batch.labels) <= batch_size for batch in parts)
    whole = join(parts)
    assert whole.indices.tolist() == np.concatenate(shards).tolist()
    expected = pixels_of(data)[whole.indices.numpy()] / 127.5 - 1
    np.testing.assert_allclose(whole.images.permute(0, 2, 3, 1), expected, atol=1e-6)


def test_workers_and_restarts_change_nothing(on_disk: Dataset) -> None:
    """Multi-hot labels come in the order of the batch, without those of unreadable images."""
    state = torch.get_rng_state()
    whole = list(itertools.islice(train_batches(on_disk, TRAIN, **SKIP, batch_size=4), 6))
    same_streams(iter(whole[3:]), train_batches(on_disk, TRAIN, **SKIP, batch_size=4, first_example=12, workers=2), 3)
    np.testing.assert_array_equal(torch.get_rng_state(), state)  # a resumed run draws from it
    assert sum(batch.skipped for batch in whole) == 24 - sum(len(batch.labels) for batch in whole) > 0
    for batch in whole:
        assert batch.targets is not None
        assert batch.targets.tolist() == [[c in SEVERAL[i] for c in range(3)] for i in batch.indices.tolist()]
        assert batch.labels.tolist() == [SEVERAL[i][0] for i in batch.indices.tolist()]
    assert next(eval_batches(in_memory(3), EVAL, batch_size=4)).targets is None


@pytest.mark.parametrize("layers", [0, 2])
def test_the_size_of_chunks_changes_nothing(on_disk: Dataset, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    transform = TrainTransform(8, randaugment_layers=layers, randaugment_magnitude=10)
    whole = list(itertools.islice(train_batches(on_disk, transform, **SKIP, batch_size=9, num_uniforms=4), 3))
    for size in (7, 1):
        monkeypatch.setattr(loader, "CHUNK", size)
        same_streams(iter(whole), train_batches(on_disk, transform, **SKIP, batch_size=9, num_uniforms=4), 3)
        evaluated = join(eval_batches(on_disk, EVAL, batch_size=9, on_error="skip"))
        assert evaluated.indices.tolist() == [0, 1, 2, 3, 5, 6, 8, 9, 10]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("fast", [False, True])
def test_batches_on_a_gpu_are_those_of_the_cpu(on_disk: Dataset, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "CHUNK", 3)
    options: dict[str, Any] = SKIP | {"batch_size": 8, "workers": 2}
    transform = TrainTransform(8, fast_decode=fast)
    on_gpu = train_batches(on_disk, transform, **options, device="cuda")
    for expected in itertools.islice(train_batches(on_disk, transform, **options), 20):
        batch = next(on_gpu)
        assert batch.images.is_cuda
        assert batch.labels.is_cuda
        np.testing.assert_allclose(batch.images.cpu(), expected.images, atol=1e-5)
        np.testing.assert_array_equal(batch.indices.cpu(), expected.indices)


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_images_are_raised_or_skipped(
    on_disk: Dataset, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Also one whose corruption shows only when its pixels are decoded: a JPEG with a broken table in its midst."""
    corrupt = Path(on_disk.entries[0].file).with_name("0.jpg")
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3)).astype(np.uint8)).save(corrupt)
    data = corrupt.read_bytes()
    half = len(data) // 2
    corrupt.write_bytes(data[:half] + b"\xff\xc4\x00\x15\x00" + b"\xff" * 16 + data[half:])
    broken = dataclasses.replace(on_disk, entries=[Entry(str(corrupt)), *list(on_disk.entries)[1:]])
    trained = join(train_batches(broken, TRAIN, **SKIP, batch_size=11, workers=workers), 2)
    evaluated = join(eval_batches(broken, EVAL, batch_size=4, workers=workers, on_error="skip"))
    for times, result in ((2, trained), (1, evaluated)):
        assert sorted(result.indices.tolist()) == sorted([1, 2, 3, 5, 6, 8, 9, 10] * times)
        assert result.skipped == 3 * times
    for name in ("0.jpg", "4.png", "7.png"):
        assert caplog.text.count(f"{name}: ") == 2  # once for each stream
    for part, name in ((broken, r"0\.jpg"), (on_disk, r"4\.png")):
        with pytest.raises(ImageError, match=name):
            list(eval_batches(part, EVAL, batch_size=4, workers=workers))
    with pytest.raises(ImageError):
        next(train_batches(broken, TRAIN, batch_size=11, seed=0, workers=workers))


def test_a_batch_without_any_readable_image(on_disk: Dataset) -> None:
    bad, in_pixels = on_disk.take(np.array([4, 7])), in_memory(2)
    in_pixels.failures = {i: ImageError(f"{i}.png", "zero bytes") for i in range(2)}
    for data in (bad, in_pixels):
        with pytest.raises(ValueError, match=r"none of the 2 images of a batch can be read; one: .*\.png"):
            next(train_batches(data, TRAIN, **SKIP, batch_size=2))
        (empty,) = eval_batches(data, EVAL, batch_size=2, on_error="skip")
        assert (empty.images.shape, empty.skipped) == ((0, 3, 8, 8), 2)


def test_a_worker_that_dies_says_what_to_do(on_disk: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*_: object, **__: object) -> Iterator[None]:
        yield from ()
        raise RuntimeError("DataLoader worker (pid(s) 17) exited unexpectedly")

    monkeypatch.setattr(loader, "DataLoader", die)
    with pytest.raises(ValueError, match=r"pid\(s\) 17.*data\.workers \(now 3\)"):
        next(train_batches(on_disk, TRAIN, batch_size=4, seed=0, workers=3))


class Deadly(Entry):
    def open(self, levels: Levels | None = None) -> np.ndarray:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


@pytest.mark.slow
def test_a_killed_worker_ends_the_stream_and_nothing_else(on_disk: Dataset) -> None:
    """The error is raised with the next batch, not in the midst of whatever runs until then."""
    entries = [on_disk.entries[0]] * 8
    entries[epoch_order(in_memory(8), 0, 0)[7]] = Deadly("deadly")
    data = dataclasses.replace(on_disk, labels=np.zeros(8, np.int64), entries=entries, label_sets=None)
    before = signal.getsignal(signal.SIGCHLD)
    batches = train_batches(data, TRAIN, batch_size=2, seed=0, workers=1)
    next(batches)
    time.sleep(1)  # would be ended by torch's own handler
    with pytest.raises(ValueError, match="a DataLoader worker was killed"):
        list(batches)
    assert signal.getsignal(signal.SIGCHLD) == before


def test_invalid_settings() -> None:
    empty = in_memory(3).take(np.array([], int))
    for data, transform in ((in_memory(5), TrainTransform(8, fast_decode=True)), (empty, TRAIN)):
        with pytest.raises(UserError, match="noise"):
            train_batches(data, transform, batch_size=4, seed=0)


def test_draws_depend_on_seed_epoch_and_index_alone(on_disk: Dataset) -> None:
    """Not on the batch nor the rank; and the images are the same with them and without."""
    data = in_memory(11)
    options: dict[str, Any] = {"batch_size": 22, "seed": 5}
    whole = next(train_batches(data, TRAIN, **options, num_uniforms=7))
    assert whole.uniforms is not None
    for g, row in enumerate(whole.uniforms):
        epoch, index = map(np.array, example_at(data, 5, g))
        expected = example_uniforms(5, epoch[None], index[None], 7, Stream.EXAMPLE_DRAWS)[0]
        np.testing.assert_array_equal(row, expected)
    parts = [next(train_batches(data, TRAIN, **options, num_uniforms=7, rank=r, world_size=2)) for r in (0, 1)]
    assert torch.equal(torch.cat([part.uniforms for part in parts if part.uniforms is not None]), whole.uniforms)
    same(next(train_batches(data, TRAIN, **options)), whole)
    readable = next(train_batches(on_disk, TRAIN, **SKIP, batch_size=11, num_uniforms=3))
    expected = example_uniforms(0, np.zeros(9, np.int64), readable.indices.numpy(), 3, Stream.EXAMPLE_DRAWS)
    np.testing.assert_array_equal(readable.uniforms, expected)
    evaluated = next(eval_batches(data, EVAL, batch_size=5, num_uniforms=10))  # those of seed 0 and epoch 0
    expected = example_uniforms(0, np.zeros(5, np.int64), np.arange(5), 10, Stream.EXAMPLE_DRAWS)
    np.testing.assert_array_equal(evaluated.uniforms, expected)


@pytest.mark.parametrize("transform", [TRAIN, EVAL])
def test_several_threads_read_the_same_images(
    transform: Any, on_disk: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But augmented in the main thread alone: RandAugment sets the generator from which dropout draws."""
    names = set[str]()

    def read(chunks: Any, *args: Any, method: Any = loader._ChunkDataset._read) -> Any:
        names.add(threading.current_thread().name)
        return method(chunks, *args)

    def load(cores: int) -> Batch:
        names.clear()
        monkeypatch.setattr(workers, "available_cores", lambda: cores)
        return join(eval_batches(on_disk, transform, batch_size=6, on_error="skip"))

    monkeypatch.setattr(loader._ChunkDataset, "_read", read)
    alone = load(1)
    assert names == {"MainThread"}
    together = load(3)
    assert ("MainThread" in names) == (transform is TRAIN)
    assert together.indices.tolist() == alone.indices.tolist() == [0, 1, 2, 3, 5, 6, 8, 9, 10]
    assert torch.equal(together.images, alone.images)
    assert together.skipped == alone.skipped == 2
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("vitlab-read")]
