"""The splits of a run, and the images in them that cannot be read."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitlab.config import DataConfig, OptimConfig, TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.runs.pretrain import pretrain
from vitlab.runs.splits import Splits, drop_unreadable, require_readable_classes
from vitlab.train.distributed import init_distributed


def folder_splits(folder: Path, size: int) -> Splits:
    """A folder's splits of two classes; in each, one image of ten is corrupt."""
    for split in ("train", "val", "test"):
        for name in ("ants", "bees"):
            (folder / split / name).mkdir(parents=True)
            for number in range(5):
                Image.new("RGB", (size, size), (40 * number,) * 3).save(folder / split / name / f"{number}.png")
        (folder / split / "bees" / "2.png").write_bytes(b"")
    train, val, test = (load_dataset(f"folder:{folder}", split, on_error="skip") for split in ("train", "val", "test"))
    return Splits(train, val, test)


@pytest.mark.parametrize("size", [8, 100])
def test_drop_unreadable(size: int, tmp_path: Path) -> None:
    """Also of images so small that they were decoded into memory before."""
    splits = folder_splits(tmp_path, size)
    assert (splits.train.pixels is None) == (size == 100)
    readable = drop_unreadable(splits)
    for before, after in ((splits.train, readable.train), (splits.val, readable.val), (splits.test, readable.test)):
        assert after.labels.tolist() == [0] * 5 + [1] * 4
        assert all(np.array_equal(after.image(i), before.image(i + (i > 6))) for i in range(9))
    assert splits.record == {}
    paths = [str(tmp_path / split / "bees" / "2.png") for split in ("test", "train", "val")]
    reason = "the file is empty (zero bytes)"
    assert readable.record == {"unreadable": [{"path": path, "reason": reason} for path in paths]}


def test_a_class_without_a_readable_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It would be trained as a class that no image shows; in the test it is only not measured. Before pre-training one
    image of each class is decoded, or all up to the first that can be."""
    splits = folder_splits(tmp_path, 100)
    decoded: list[int] = []
    image = Dataset.image
    with monkeypatch.context() as patch:
        patch.setattr(Dataset, "image", lambda self, index: decoded.append(index) or image(self, index))
        require_readable_classes(splits.train)
    assert sorted(decoded) == [0, 5]
    for path in (tmp_path / "test" / "bees").iterdir():
        path.write_bytes(b"")
    assert drop_unreadable(splits).test.labels.tolist() == [0] * 5
    assert "no image of bees in" in caplog.text
    for path in (tmp_path / "train" / "bees").iterdir():
        path.write_bytes(b"")
    model = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8)
    data, optim = DataConfig(f"folder:{tmp_path}", on_error="skip"), OptimConfig(lr=0.01)
    config = TrainConfig(model=model, data=data, optim=optim, batch_size=2, epochs=None, steps=1)
    for use in (
        lambda: drop_unreadable(splits),
        lambda: require_readable_classes(splits.train),
        lambda: pretrain(config, tmp_path / "run", device="cpu"),
    ):
        with pytest.raises(UserError, match="no image of bees"):
            use()


def test_rank_0_decodes_for_all(tmp_path: Path, in_ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An image may fail in one process alone: all have the same images."""
    splits = folder_splits(tmp_path, 100)
    image = type(splits.test).image

    def failing(self: Any, index: int) -> Any:
        assert os.environ["RANK"] == "0"
        if index == 3:
            raise ImageError("3.png", "the server is gone for a moment")
        return image(self, index)

    monkeypatch.setattr(type(splits.test), "image", failing)

    def job() -> tuple[list[int], list[str]]:
        with init_distributed() as world:
            readable = drop_unreadable(splits, world)
            sizes = [len(dataset) for dataset in (readable.train, readable.val, readable.test)]
            return sizes, [file["reason"] for file in readable.unreadable or ()]

    first, second = in_ranks(2, job)
    assert first == second
    assert first[0] == [8, 8, 8]
    assert "the server is gone for a moment" in first[1]
