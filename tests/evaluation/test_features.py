"""Representations against a plain forward pass, and their cache."""

import copy
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.data.dataset import Dataset
from vitlab.data.decode import Entry, ImageError
from vitlab.data.transforms import EvalTransform, TrainTransform
from vitlab.errors import UserError
from vitlab.evaluation.features import Features, features, frozen_preprocessing
from vitlab.evaluation.options import LoaderOptions
from vitlab.models import ViTConfig
from vitlab.models.variant import override
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import init_distributed

TINY = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, num_classes=3, representation_size=6)
BATCHES, SKIP = LoaderOptions(4), LoaderOptions(4, on_error="skip")


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
    images = np.random.default_rng(1).integers(0, 256, (11, 8, 8, 3), np.uint8)
    return Dataset("made", "test", ("a", "b", "c"), np.arange(11, dtype=np.int64) % 3, images)


@pytest.fixture
def computed(model: ViT, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Images that went through the model since the last call."""
    seen: list[int] = []
    forward = model.forward_features
    monkeypatch.setattr(model, "forward_features", lambda images: seen.append(len(images)) or forward(images))

    def count() -> int:
        number = sum(seen)
        seen.clear()
        return number

    return count


def same(one: Features, two: Features) -> bool:
    pairs = [(one.x, two.x), (one.labels, two.labels), (one.indices, two.indices)]
    return all(np.array_equal(a, b) for a, b in pairs) and one.skipped == two.skipped


def test_the_input_of_the_head(model: ViT, files: Dataset) -> None:
    prepared = frozen_preprocessing(Preprocessing.google(), (8, 8))
    result = features(model, files, BATCHES, preprocessing=prepared)
    assert (result.x.shape, result.x.dtype) == ((11, 6), np.float32)
    assert model.head is not None
    with torch.no_grad():
        images = torch.cat([EvalTransform((8, 8), prepared).apply([files.image(i)]) for i in range(11)])
        torch.testing.assert_close(model(images), model.head(torch.from_numpy(result.x)), rtol=1e-5, atol=1e-6)
    assert (result.labels.tolist(), result.indices.tolist()) == (files.labels.tolist(), list(range(11)))
    for other in (Preprocessing(8, 10), Preprocessing.google(8, 9), None):
        assert not same(result, features(model, files, BATCHES, preprocessing=other))
    one_by_one = features(model, files, LoaderOptions(1, workers=1), preprocessing=prepared)
    np.testing.assert_allclose(one_by_one.x, result.x, rtol=1e-5, atol=1e-6)


def test_computed_once(
    model: ViT, files: Dataset, pixels: Dataset, computed: Callable[[], int], tmp_path: Path
) -> None:
    """Labels and names are not part of the key: two tasks on the same images share their features."""
    for dataset in (files, pixels):
        first = features(model, dataset, cache=tmp_path / "cache")
        assert computed() == 11
        assert same(first, features(model, dataset, cache=tmp_path / "cache"))
        other = dataclasses.replace(dataset, name="other", labels=dataset.labels[::-1].copy())
        second = features(model, other, cache=tmp_path / "cache")
        assert computed() == 0
        assert np.array_equal(first.x, second.x)
        assert second.labels.tolist() == dataset.labels[::-1].tolist()
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == 2 * [".npz"]


def test_key(model: ViT, pixels: Dataset, files: Dataset, tmp_path: Path) -> None:
    """Pixels, files, weights, configuration and preprocessing."""
    changed = dataclasses.replace(pixels, pixels=np.array(pixels.pixels))
    assert changed.pixels is not None
    changed.pixels[3, 0, 0, 0] ^= 1
    other = ViT(TINY)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        next(other.parameters()).view(-1)[0] += 1e-3
    exact = ViT(override(TINY, gelu="erf")).eval()
    exact.load_state_dict(model.state_dict())
    rounded = copy.deepcopy(model).bfloat16()
    turned = pixels.take(np.arange(11)[::-1])
    cut = dataclasses.replace(files, entries=[entry._replace(edge=1) for entry in files.entries])
    calls: list[tuple[ViT, Dataset, Preprocessing | None]] = [
        *((each, pixels, None) for each in (model, other, exact, rounded)),
        *((model, each, None) for each in (changed, turned, files, cut)),
        (model, pixels, Preprocessing(8, 9)),
    ]
    for number, (frozen, dataset, prepared) in enumerate(calls, 1):
        result = features(frozen, dataset, preprocessing=prepared, cache=tmp_path / "cache")
        assert same(result, features(frozen, dataset, preprocessing=prepared))
        assert len(list((tmp_path / "cache").glob("*.npz"))) == number
    stat = os.stat(files.entries[4].file)  # noqa: PTH116
    os.utime(files.entries[4].file, ns=(stat.st_mtime_ns, stat.st_mtime_ns + 1_000_000))
    features(model, files, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").glob("*.npz"))) == len(calls) + 1


def test_corrupt_cache_is_computed_again(
    model: ViT, pixels: Dataset, computed: Callable[[], int], tmp_path: Path
) -> None:
    """Features that are not finite are no cache at all."""
    whole = features(model, pixels, cache=tmp_path)
    (path,) = tmp_path.glob("*.npz")
    good = path.read_bytes()
    flipped = good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 0x10]) + good[len(good) // 2 + 1 :]
    for wrong in (b"", good[:-40], flipped):
        path.write_bytes(wrong)
        computed()
        assert same(whole, features(model, pixels, cache=tmp_path))
        assert computed() == 11
        assert path.read_bytes() == good
    with torch.no_grad():
        model.embedding.bias[0] = torch.nan
    with pytest.raises(UserError, match="not finite"):
        features(model, pixels, cache=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_unreadable_images_are_skipped_and_not_cached(
    model: ViT, files: Dataset, computed: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails for a moment: afterwards all images are there."""
    read = Entry.read

    def failing(entry: Entry, levels: Any = None) -> np.ndarray:
        if entry.file.endswith("05.png"):
            raise ImageError(entry.file, "Input/output error")
        return read(entry, levels)

    with monkeypatch.context() as patch:
        patch.setattr(Entry, "read", failing)
        result = features(model, files, SKIP, cache=tmp_path / "cache")
        assert (result.skipped, result.indices.tolist()) == (1, [0, 1, 2, 3, 4, 6, 7, 8, 9, 10])
        assert result.labels.tolist() == files.labels[result.indices].tolist()
        with pytest.raises(ImageError, match=r"05\.png"):
            features(model, files, cache=tmp_path / "cache")
    whole = features(model, files, SKIP, cache=tmp_path / "cache")
    assert whole.skipped == 0
    np.testing.assert_allclose(whole.x[result.indices], result.x, rtol=1e-5, atol=1e-6)
    computed()
    assert same(whole, features(model, files, SKIP, cache=tmp_path / "cache"))
    assert computed() == 0


def test_preprocessing_of_frozen_models() -> None:
    """Google's few-shot evaluation resizes to 256 / 224 of the image size; other checkpoints bring their own."""
    google = Preprocessing((224, 224), 256, keep_aspect=False, antialias=False, crop_offset="floor")
    assert frozen_preprocessing(Preprocessing.google(), (224, 224)) == google
    assert frozen_preprocessing(Preprocessing.google(384, 400), (384, 384)).resize == 439
    assert frozen_preprocessing(Preprocessing.google(), (224, 160)).resize == 256
    bicubic = Preprocessing(224, 256, interpolation="bicubic")
    assert frozen_preprocessing(bicubic, (224, 224)) == bicubic.at((224, 224))


@pytest.mark.parametrize(("augmented", "cached"), [(False, True), (True, False)])
def test_several_processes(
    augmented: bool,
    cached: bool,
    model: ViT,
    files: Dataset,
    tmp_path: Path,
    in_ranks: Callable[[int, Callable[[], Any]], list[Any]],
) -> None:
    """Each process returns what one alone computes, to the bit; one file holds it all. The smallest batch is that of
    all, for processes of other memory may ask for more."""
    if not cached:
        (tmp_path / "images" / "05.png").write_bytes(b"")
    cache, options = tmp_path / "cache" if cached else None, LoaderOptions(2, on_error="skip")
    view: dict[str, Any] = {"augmentation": TrainTransform((8, 8)), "epoch": 1} if augmented else {}
    alone = features(model, files, options, **view)

    def job() -> Features:
        with init_distributed() as world:
            own = dataclasses.replace(options, batch_size=2 + world.rank)
            return features(model, files, own, cache=cache, world=world, **view)

    assert all(same(result, alone) for result in in_ranks(3, job))
    assert not cached or all(same(result, alone) for result in in_ranks(3, job))
    assert not cached or len(list((tmp_path / "cache").glob("*.npz"))) == 1
