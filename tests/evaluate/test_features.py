"""Representations against a plain forward pass; what the cache keeps, finds again, and does not trust."""

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.data.dataset import Dataset
from vitlab.data.decode import Entry, ImageError
from vitlab.data.transforms import EvalTransform
from vitlab.evaluate import features as module
from vitlab.evaluate.features import Features, cache_folder, check_features, features, frozen_preprocessing
from vitlab.models import ViTConfig
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import init_distributed

TINY = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, num_classes=3, representation_size=6)


def fewshot(side: int) -> Preprocessing:
    """Google's."""
    return frozen_preprocessing(Preprocessing.google(), (side, side))


@pytest.fixture
def model() -> ViT:
    model = ViT(TINY, generator=torch.Generator().manual_seed(1)).eval()
    assert model.pre_logits is not None
    torch.nn.init.normal_(model.pre_logits.weight, generator=torch.Generator().manual_seed(2))
    return model


@pytest.fixture
def files(tmp_path: Path) -> Dataset:
    """Eleven images of different sizes in files."""
    rng = np.random.default_rng(0)
    entries = []
    for i in range(11):
        path = tmp_path / "images" / f"{i:02d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9 + i, 14, 3), np.uint8)).save(path)
        entries.append(Entry(str(path)))
    return Dataset("made", "train", ("a", "b", "c"), np.arange(11, dtype=np.int64) % 3, entries=entries)


@pytest.fixture
def pixels() -> Dataset:
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (11, 8, 8, 3), np.uint8)
    return Dataset("made", "test", ("a", "b", "c"), np.arange(11, dtype=np.int64) % 3, images)


@pytest.fixture
def count(model: ViT, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Images that went through the model, batch by batch."""
    seen: list[int] = []
    forward = model.forward_features

    def counted(images: torch.Tensor) -> torch.Tensor:
        seen.append(len(images))
        return forward(images)

    monkeypatch.setattr(model, "forward_features", counted)
    return seen


def total(seen: list[int]) -> int:
    number = sum(seen)
    seen.clear()
    return number


def same(one: Features, two: Features) -> bool:
    pairs = [(one.x, two.x), (one.labels, two.labels), (one.indices, two.indices)]
    return all(np.array_equal(a, b) for a, b in pairs) and one.skipped == two.skipped


def cached(folder: Path) -> set[Path]:
    return set(folder.glob("*.npz"))


# --------------------------------------------------------------------------------------------------------- numbers


def test_what_the_head_would_see(model: ViT, files: Dataset) -> None:
    found = features(model, files, preprocessing=fewshot(8), batch_size=4)
    assert found.x.shape == (11, 6)
    assert found.x.dtype == np.float32
    transform = EvalTransform((8, 8), fewshot(8))
    assert model.head is not None
    for i in range(11):
        with torch.no_grad():
            images = transform.apply([files.image(i)])
            logits = model(images)
            expected = model.head(torch.from_numpy(found.x[i : i + 1]))
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-6)
    assert found.labels.tolist() == files.labels.tolist()
    assert found.indices.tolist() == list(range(11))
    assert not same(found, features(model, files, preprocessing=Preprocessing(8, 10)))
    assert not same(found, features(model, files, preprocessing=Preprocessing.google(8, 9)))
    assert not same(found, features(model, files))


def test_batches_and_workers_make_no_difference(model: ViT, files: Dataset) -> None:
    whole = features(model, files, batch_size=64)
    for batch_size, workers in ((1, 0), (4, 0), (4, 1)):
        found = features(model, files, batch_size=batch_size, workers=workers)
        np.testing.assert_allclose(found.x, whole.x, rtol=1e-5, atol=1e-6)


def test_waits_for_the_device_once_for_a_chunk(
    model: ViT, files: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Places and representations come over together, also where some of a chunk are known; the numbers are the same."""
    google = Preprocessing.google()  # resizes on the device
    whole = features(model, files, preprocessing=google, batch_size=1)
    monkeypatch.setattr(module, "CHUNK", 4)
    copies: list[int] = []
    cpu = torch.Tensor.cpu

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(len(tensor))
        return cpu(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", counted)
        found = features(model, files, preprocessing=google, batch_size=1)
    assert copies == [4, 4, 4, 4, 3, 3]
    assert same(found, whole)
    good = (tmp_path / "images" / "02.png").read_bytes()
    for number in (2, 3, 9):
        (tmp_path / "images" / f"{number:02d}.png").write_bytes(b"")
    stat = (tmp_path / "images" / "02.png").stat()
    assert (
        features(model, files, preprocessing=google, batch_size=1, on_error="skip", cache=tmp_path / "cache").skipped
        == 3
    )
    (tmp_path / "images" / "02.png").write_bytes(good)
    os.utime(tmp_path / "images" / "02.png", ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    again = features(model, files, preprocessing=google, batch_size=1, on_error="skip", cache=tmp_path / "cache")
    assert again.indices.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 10]
    assert np.array_equal(again.x, whole.x[again.indices])


def test_keeps_representations_and_no_tokens(files: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class token is a view of all tokens, which must not stay until a chunk is complete."""
    cat, kept = torch.cat, []
    plain = ViT(dataclasses.replace(TINY, representation_size=None), generator=torch.Generator().manual_seed(1))

    def noted(tensors: list[torch.Tensor], *given: Any, **options: Any) -> torch.Tensor:
        if tensors[0].shape[-1] == TINY.width and tensors[0].ndim == 2:
            kept.extend((each.untyped_storage().nbytes(), each.numel() * each.element_size()) for each in tensors)
        return cat(tensors, *given, **options)

    monkeypatch.setattr(torch, "cat", noted)
    features(plain, files, batch_size=4)
    assert kept == [(numbers, numbers) for numbers in (4 * 8 * 4, 4 * 8 * 4, 3 * 8 * 4)]


def test_back_in_training_mode_after_an_error(model: ViT, pixels: Dataset) -> None:
    with torch.no_grad():
        model.norm.bias.fill_(torch.nan)
    model.train()
    with pytest.raises(ValueError, match="not finite"):
        features(model, pixels)
    assert model.training


def test_leaves_the_model_and_the_generators_alone(model: ViT, pixels: Dataset) -> None:
    before = torch.get_rng_state(), np.random.get_state(legacy=False)  # noqa: NPY002
    model.train()
    features(model, pixels)
    assert model.training
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(np.random.get_state(legacy=False)) == str(before[1])  # noqa: NPY002


def test_size_before_the_crop() -> None:
    assert fewshot(224) == Preprocessing((224, 224), 256, keep_aspect=False, antialias=False, crop_offset="floor")
    assert frozen_preprocessing(Preprocessing.google(384, 400), (384, 384)).resize == 439
    assert frozen_preprocessing(Preprocessing.google(), (224, 160)).resize == 256
    own = Preprocessing(224, 256, interpolation="bicubic")
    assert frozen_preprocessing(own, (224, 224)) == own.at((224, 224))


# ----------------------------------------------------------------------------------------------------------- cache


@pytest.mark.parametrize("kind", ["files", "pixels"])
def test_computed_once(kind: str, model: ViT, count: list[int], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    dataset = request.getfixturevalue(kind)
    first = features(model, dataset, cache=tmp_path / "cache")
    assert total(count) == 11
    assert len(cached(tmp_path / "cache")) == 1
    assert same(first, features(model, dataset, cache=tmp_path / "cache"))
    assert same(first, features(model, dataset))
    assert total(count) == 11


def test_labels_are_no_part_of_it(model: ViT, pixels: Dataset, count: list[int], tmp_path: Path) -> None:
    """Two tasks on the same images share their features."""
    first = features(model, pixels, cache=tmp_path)
    other = dataclasses.replace(pixels, name="other", labels=pixels.labels[::-1].copy())
    second = features(model, other, cache=tmp_path)
    assert total(count) == 11
    assert np.array_equal(first.x, second.x)
    assert second.labels.tolist() == pixels.labels[::-1].tolist()


def test_anything_else_is_a_part_of_it(model: ViT, pixels: Dataset, files: Dataset, tmp_path: Path) -> None:
    changed = dataclasses.replace(pixels, pixels=np.array(pixels.pixels))
    assert changed.pixels is not None
    changed.pixels[3, 0, 0, 0] ^= 1
    other = ViT(TINY)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1e-3
    exact = ViT(dataclasses.replace(TINY, gelu="erf")).eval()
    exact.load_state_dict(model.state_dict())
    turned = pixels.take(np.arange(11)[::-1])
    cut = dataclasses.replace(files, entries=[entry._replace(border=1) for entry in files.entries])
    calls: list[tuple[ViT, Dataset, Preprocessing | None]] = [
        (model, pixels, None), (model, changed, None), (other, pixels, None), (exact, pixels, None),
        (model, pixels, Preprocessing(8, 9)), (model, turned, None), (model, files, None), (model, cut, None),
    ]  # fmt: skip
    for number, (each, dataset, prepared) in enumerate(calls, 1):
        found = features(each, dataset, preprocessing=prepared, cache=tmp_path / "cache")
        assert same(found, features(each, dataset, preprocessing=prepared))
        assert len(cached(tmp_path / "cache")) == number


def test_file_that_changes_is_looked_at_again(model: ViT, files: Dataset, count: list[int], tmp_path: Path) -> None:
    first = features(model, files, cache=tmp_path / "cache")
    path = Path(files.entries[4].file)
    size, old = path.stat().st_size, path.stat().st_mtime_ns
    os.utime(path, ns=(old, old + 1_000_000))
    assert path.stat().st_size == size
    total(count)
    assert same(first, features(model, files, cache=tmp_path / "cache"))
    assert total(count) == 11


def test_interrupted_and_continued(
    model: ViT, files: Dataset, count: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was computed is not computed again, and the numbers are those of a call left alone, to the bit."""
    monkeypatch.setattr(module, "CHUNK", 3)
    whole = features(model, files, batch_size=2)  # chunks of 4, 4 and 3
    total(count)
    read = Entry.read

    def interrupted(entry: Entry) -> np.ndarray:
        if entry.file.endswith("09.png"):
            raise KeyboardInterrupt
        return read(entry)

    with monkeypatch.context() as patch:
        patch.setattr(Entry, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            features(model, files, batch_size=2, cache=tmp_path / "cache")
    assert total(count) == 8
    assert len(cached(tmp_path / "cache")) == 2
    assert same(whole, features(model, files, batch_size=2, cache=tmp_path / "cache"))
    assert total(count) == 3
    assert len(cached(tmp_path / "cache")) == 3
    assert [path for path in (tmp_path / "cache").iterdir() if path.suffix != ".npz"] == []


def test_damaged_chunk_is_computed_again(
    model: ViT, pixels: Dataset, count: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 4)
    whole = features(model, pixels, batch_size=2, cache=tmp_path)
    paths = sorted(cached(tmp_path))
    assert len(paths) == 3
    total(count)
    for path, damage in itertools.product(paths, damages()):
        good = path.read_bytes()
        path.write_bytes(damage(good))
        assert same(whole, features(model, pixels, batch_size=2, cache=tmp_path))
        assert 0 < total(count) <= 4
        assert path.read_bytes() == good


def damages() -> Iterator:
    yield lambda data: b""
    yield lambda data: data[:-40]
    yield lambda data: b"not an archive"
    for place in (0.3, 0.5, 0.7):
        yield lambda data, place=place: flipped(data, int(len(data) * place))


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


def test_archive_of_another_shape_is_not_taken(model: ViT, pixels: Dataset, count: list[int], tmp_path: Path) -> None:
    whole = features(model, pixels, cache=tmp_path)
    (path,) = cached(tmp_path)
    good = {"known": np.ones(11, bool), "x": np.zeros((11, 6), np.float32)}
    for wrong in ({"x": np.zeros((11, 5), np.float32)}, {"x": np.zeros((11, 6))}, {"known": np.ones(10, bool)},
                  {"known": np.ones(11)}, {"x": np.array([{}] * 11, dtype=object)}):  # fmt: skip
        np.savez(path, **good | wrong)  # pyright: ignore[reportArgumentType]
        total(count)
        assert same(whole, features(model, pixels, cache=tmp_path))
        assert total(count) == 11


def test_cache_lies_where_the_users_caches_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "vitlab" / "features"


# ------------------------------------------------------------------------------------------------------- bad input


def test_unreadable_images(model: ViT, files: Dataset, count: list[int], tmp_path: Path) -> None:
    """Left out, or an error; never taken from the cache in silence, and tried again once they are mended."""
    path = Path(files.entries[5].file)
    good = path.read_bytes()
    path.write_bytes(b"")
    whole = features(model, files.take(np.delete(np.arange(11), 5)))
    for _ in range(2):
        found = features(model, files, on_error="skip", cache=tmp_path / "cache")
        assert found.skipped == 1
        assert found.indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
        np.testing.assert_allclose(found.x, whole.x, rtol=1e-5, atol=1e-6)
        assert found.labels.tolist() == whole.labels.tolist()
    assert total(count) == 20
    with pytest.raises(ImageError, match=r"05\.png: the file is empty"):
        features(model, files, cache=tmp_path / "cache")
    stat = path.stat()
    path.write_bytes(good)
    os.utime(path, ns=(stat.st_mtime_ns, stat.st_mtime_ns))
    found = features(model, files, cache=tmp_path / "cache")
    assert (found.skipped, len(found.x)) == (0, 11)
    np.testing.assert_allclose(found.x, features(model, files).x, rtol=1e-5, atol=1e-6)


def test_image_that_can_be_read_again(
    model: ViT, files: Dataset, count: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk failed for a moment: the file is the same, and only it is computed."""
    read = Entry.read

    def failing(entry: Entry) -> np.ndarray:
        if entry.file.endswith("05.png"):
            raise ImageError(entry.file, "Input/output error")
        return read(entry)

    with monkeypatch.context() as patch:
        patch.setattr(Entry, "read", failing)
        assert features(model, files, on_error="skip", cache=tmp_path / "cache").skipped == 1
    assert total(count) == 10
    found = features(model, files, on_error="skip", cache=tmp_path / "cache")
    assert total(count) == 1
    np.testing.assert_allclose(found.x, features(model, files).x, rtol=1e-5, atol=1e-6)
    total(count)
    assert same(found, features(model, files, cache=tmp_path / "cache"))
    assert total(count) == 0


def test_nothing_to_look_at(model: ViT, files: Dataset) -> None:
    with pytest.raises(ValueError, match="made has no images in its split 'train'"):
        features(model, files.take(np.arange(0)))
    for entry in files.entries:
        Path(entry.file).write_bytes(b"")
    with pytest.raises(ValueError, match=r"none of the 11 images of made \(train\) could be read"):
        features(model, files, on_error="skip")


def test_weights_that_are_broken(model: ViT, files: Dataset, tmp_path: Path) -> None:
    with torch.no_grad():
        model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"representation of .*00\.png is not finite; its weights are broken"):
        features(model, files, cache=tmp_path / "cache")
    assert not cached(tmp_path / "cache")


def test_arrays_that_nothing_is_learned_from() -> None:
    x, labels = np.zeros((4, 2), np.float32), np.array([0, 1, 2, 2])
    check_features(x, labels, 3)
    with pytest.raises(ValueError, match="4 representations and 3 labels"):
        check_features(x, labels[:3], 3)
    with pytest.raises(ValueError, match="0 representations and 0 labels"):
        check_features(x[:0], labels[:0], 3)
    with pytest.raises(ValueError, match="the labels are 0 to 2; 2 classes go from 0 on"):
        check_features(x, labels, 2)
    x[1, 1], x[2, 0] = np.nan, np.inf
    with pytest.raises(ValueError, match="2 of 4 representations are not finite"):
        check_features(x, labels, 3)


# -------------------------------------------------------------------------------------------------------- progress


def test_progress_of_long_work(
    model: ViT, pixels: Dataset, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    features(model, pixels, batch_size=4, label="made test")
    assert capsys.readouterr().err == ""  # done in a moment
    monkeypatch.setattr(module, "PLAIN_SECONDS", 0.0)
    features(model, pixels, batch_size=4, label="made test")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("made test: 4/11 images · ")
    assert lines[-1].endswith(" img/s · ETA 0:00")
    features(model, pixels, batch_size=4)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kept", [False, True])
def test_several_processes(
    kept: bool, model: ViT, files: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    in_ranks: Callable[[int, Callable[[], Any]], list[Any]],
) -> None:  # fmt: skip
    """Chunks of 2 in turn, one of which is known: each process returns what one alone finds."""
    monkeypatch.setattr(module, "CHUNK", 2)
    cache = tmp_path / "cache" if kept else None
    (tmp_path / "images" / "05.png").write_bytes(b"")
    alone = features(model, files, batch_size=2, on_error="skip")
    if cache:
        features(model, files.take(np.arange(2)), batch_size=2, cache=cache)

    def job() -> Features:
        with init_distributed() as world:
            return features(model, files, batch_size=2, on_error="skip", cache=cache, world=world)

    for found in in_ranks(3, job):
        np.testing.assert_array_equal(found.x, alone.x)
        np.testing.assert_array_equal(found.indices, alone.indices)
        assert found.skipped == alone.skipped == 1
    assert not cache or len(list(cache.glob("*.npz"))) == 6
