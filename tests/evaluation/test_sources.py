"""Images in every form that `predict` takes."""

import functools
import inspect
import io
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.data import downloads
from vitlab.data.decode import ImageError
from vitlab.errors import UserError
from vitlab.evaluation import sources as module
from vitlab.evaluation.sources import find_images, read_image

PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("a.png", "b.png", "c[1].png", "below/d.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(PIXELS).save(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def encoded() -> bytes:
    Image.fromarray(PIXELS).save(out := io.BytesIO(), "PNG")
    return out.getvalue()


def planes(dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    tensor = torch.from_numpy(PIXELS).permute(2, 0, 1)
    return tensor if dtype == torch.uint8 else (tensor.double() / 255).to(dtype)


@pytest.mark.parametrize(
    "source",
    [
        PIXELS,
        np.stack([PIXELS, PIXELS]),
        planes(),
        planes(torch.float32),
        torch.stack([planes(torch.float64)] * 2),
        encoded(),
        bytearray(encoded()),
        memoryview(encoded()),
        io.BytesIO(encoded()),
        Image.open(io.BytesIO(encoded())),
    ],
    ids=lambda source: type(source).__name__,
)
def test_images_in_memory(source: Any) -> None:
    """The pixels of the file, of one image or of each in a batch."""
    found = list(find_images([source, source]))
    assert [name for name, _ in found] == [f"image {n}" for n in range(len(found))]
    for name, image in found:
        np.testing.assert_array_equal(read_image(image, name), PIXELS)


def test_images_are_converted_as_files() -> None:
    """Gray ones and arrays of any strides; transparency over white, the orientation of EXIF, 16 bits as 8."""
    gray, clear = PIXELS[..., 0], np.dstack([PIXELS, np.zeros_like(PIXELS[..., 0])])
    exif, turned = Image.Exif(), io.BytesIO()
    exif[274] = 6
    Image.fromarray(PIXELS).save(turned, "PNG", exif=exif)
    for source, expected in (
        *((each, np.dstack([gray] * 3)) for each in (gray, gray[..., None], torch.from_numpy(gray.copy())[None])),
        (clear, np.full_like(PIXELS, 255)),
        (PIXELS[:, ::-1], PIXELS[:, ::-1]),
        (Image.open(turned), np.rot90(PIXELS, -1)),
        (Image.fromarray(gray.astype(np.uint16) * 257), np.dstack([gray] * 3)),
    ):
        ((name, image),) = find_images([source])
        np.testing.assert_array_equal(read_image(image, name), expected)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (planes(torch.float32) * 2 - 1, r"values from -.*give floats from 0 to 1, or uint8"),
        (planes(torch.float32) * torch.nan, "give floats from 0 to 1"),
        (planes()[0], r"give a tensor \[3, height, width\]"),
        (torch.from_numpy(PIXELS), "image 0 is uint8"),
        (PIXELS / 255, r"image 0 is float64 \[6, 8, 3\]; give uint8"),
        (PIXELS.transpose(2, 0, 1), r"uint8 \[3, 6, 8\]; give"),
        (np.zeros((0, 8, 3), np.uint8), "with no dimension 0"),
        ("nowhere.png", "there is no file or folder"),
        ("*.gif", "no file matches"),
        ("file:///a*.png", "cannot be opened; give https"),
    ],
)
def test_what_is_ambiguous_or_missing_is_refused(source: Any, message: str, photos: Path) -> None:
    with pytest.raises(UserError, match=message):
        list(find_images(["a.png", source]) if isinstance(source, str) else find_images([source]))
    (first, (name, error)) = find_images(iter(["a.png", source]))  # from an iterator it stands for the image
    assert first[0] == "a.png"
    with pytest.raises(ImageError):
        read_image(error, name)


def test_what_is_no_image_is_refused() -> None:
    """As without jaxtyping, which checks types in tests alone."""
    with pytest.raises(UserError, match="image 0 has the type int; give a path, bytes, a PIL image"):
        list(inspect.unwrap(module._expand)(42, 0))


def test_patterns_and_folders(photos: Path) -> None:
    names = [name for name, _ in find_images(["*.png", "c[1].png", "below", "**/d.png", str(photos / "[ab].png")])]
    here = [str(photos / name) for name in ("a.png", "b.png")]
    assert names == ["a.png", "b.png", "c[1].png", "c[1].png", "below/d.png", "below/d.png", *here]


def test_a_broken_image_in_memory_has_its_error(photos: Path) -> None:
    for broken in (Image.open(io.BytesIO(encoded()[:-40])), encoded()[:50], b"", io.BytesIO(b"no image")):
        ((name, image),) = find_images([broken])
        with pytest.raises(ImageError):
            read_image(image, name)


@pytest.fixture
def address(photos: Path) -> Iterator[str]:
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(photos))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_addresses(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloaded when they are read, up to a size; what is not there is an error of this image."""
    monkeypatch.setattr(downloads, "PAUSE", 0.0)
    (name, image), missing = find_images([f"{address}/a.png", f"{address}/x.png"])
    assert name == f"{address}/a.png"
    np.testing.assert_array_equal(read_image(image, name), PIXELS)
    with pytest.raises(ImageError, match="404"):
        read_image(missing[1], missing[0])
    monkeypatch.setattr(module, "MAX_BYTES", 100)
    with pytest.raises(ImageError, match="more than 0 MiB"):
        read_image(image, name)
