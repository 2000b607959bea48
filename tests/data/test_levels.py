"""Black and white of images of more than 8 bits: from the decoded values to a run and what takes its model."""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import encode
from PIL import Image

from vitlab.app.session import read_image
from vitlab.config import DataConfig, OptimConfig, TrainConfig
from vitlab.data.decode import Entry, ImageError, decode_image
from vitlab.data.levels import measure_range, warn_of_narrow_range
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.evaluation.accuracy import evaluate_checkpoint
from vitlab.evaluation.predict import predict
from vitlab.models import ViTConfig
from vitlab.runs.pretrain import pretrain
from vitlab.weights import load_checkpoint

VALUES = np.array([[20, 40, 70, 100, 200]])


@pytest.mark.parametrize(
    ("data", "levels", "expected"),
    [
        (encode(VALUES.astype(np.uint16), "PNG"), (40, 100), [0, 0, 128, 255, 255]),
        (encode(VALUES.astype(np.uint16), "TIFF"), (40, 4095), [0, 0, 2, 4, 10]),
        (encode(VALUES.astype(np.uint8), "PNG"), (40, 100), [0, 0, 128, 255, 255]),
        (encode(VALUES.astype(np.int32) - 1000, "TIFF"), (-960, -900), [0, 0, 128, 255, 255]),
        (encode(VALUES.astype(np.float32), "TIFF"), (40, 100), [0, 0, 128, 255, 255]),
        (encode(VALUES.astype(np.uint16), "PNG"), None, [0, 0, 0, 0, 1]),
    ],
)
def test_levels_of_a_file_are_black_and_white(data: bytes, levels: Any, expected: list[int]) -> None:
    assert decode_image(data, levels=levels)[0].tolist() == [[value] * 3 for value in expected]
    assert read_image(data, "x", levels)[0, :, 0].tolist() == expected


def deep_color() -> bytes:
    """A PNG of 8x8 pixels with 16 bits a channel, which Pillow does not write."""
    file = b"\x89PNG\r\n\x1a\n"
    header, data = struct.pack(">IIBBBBB", 8, 8, 16, 2, 0, 0, 0), zlib.compress(bytes(8 * 49))
    for kind, part in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b"")):
        file += struct.pack(">I", len(part)) + kind + part + struct.pack(">I", zlib.crc32(kind + part))
    return file


def test_a_range_of_16_bits_is_not_of_8(tmp_path: Path) -> None:
    """Else an ordinary image would be black, without a word."""
    (tmp_path / "x.jpg").write_bytes(encode(np.zeros((8, 8, 3), np.uint8), "JPEG"))
    (tmp_path / "x.png").write_bytes(deep_color())
    for read in (Entry.read, Entry.open):
        for name in ("x.jpg", "x.png"):
            with pytest.raises(ImageError, match=r"color of 16 bits is read as 8.*40 4095"):
                read(Entry(str(tmp_path / name)), (40, 4095))
    with pytest.raises(UserError, match="is for files"):
        load_dataset("digits", "train", levels=(40, 100))
    with pytest.raises(UserError, match="is for images in files"):
        measure_range(load_dataset("digits", "train"))


def write_set(folder: Path, kind: type = np.uint16, suffix: str = "png", scale: int = 1) -> str:
    """Two classes, of values near 40 and 100, with a pixel that is broken."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for name, value in (("dark", 40), ("bright", 100)):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = (value + rng.integers(-3, 4, (40, 40))) * scale
                pixels[0, 0] = 65535 if i == 0 else pixels[0, 0]
                Image.fromarray(pixels.astype(kind)).save(folder / split / name / f"{i}.{suffix}")
    return f"folder:{folder}"


@pytest.mark.parametrize(
    ("kind", "scale", "warned"),
    [(np.uint16, 1, True), (np.uint16, 400, False), (np.uint8, 1, False), (np.float32, 1, False)],
)
def test_a_narrow_range_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type, scale: int, warned: bool
) -> None:
    warn_of_narrow_range(load_dataset(write_set(tmp_path, kind, "tif", scale), "train", on_error="skip"))
    assert ("give --data.range 37 103, or --data.range auto" in caplog.text) == warned


def test_a_run_and_all_that_takes_its_model_have_the_range(tmp_path: Path) -> None:
    data = DataConfig(write_set(tmp_path / "set"), range="auto", crop="none", flip=False)
    model = ViTConfig(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_dim=16, num_classes=2)
    config = TrainConfig(model=model, data=data, optim=OptimConfig(lr=5e-3), steps=40, batch_size=8)
    finished = pretrain(config, tmp_path / "run", device="cpu", tensorboard=False)
    assert finished.result["test"]["accuracy"] == 1
    assert finished.config.data.range == (37, 103)
    assert load_checkpoint(tmp_path / "run").preprocessing.range == (37, 103)
    assert evaluate_checkpoint(tmp_path / "run").accuracy == 1
    files = [tmp_path / "set" / "test" / label / "1.png" for label in ("dark", "bright")]
    images = [*files, *map(Image.open, files)]
    assert [p.top[0][0] for p in predict(tmp_path / "run", images)] == ["dark", "bright"] * 2
