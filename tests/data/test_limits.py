"""What an image file may cost; tests/test_bombs.py has the files that are refused."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitlab.data.limits import (
    DENSE_PIXELS,
    MAX_PIXELS,
    MAX_SIDE,
    PIXELS_PER_BYTE,
    content_refusal,
    size_refusal,
)


@pytest.mark.parametrize(
    ("size", "num_bytes", "reason"),
    [
        ((9459, 9459), 10**6, None),
        ((MAX_PIXELS + 1, 1), 10**9, "more than the"),
        ((MAX_SIDE, 100), 10**6, None),
        ((MAX_SIDE + 1, 100), 10**6, "a side has at most"),
        ((4096, DENSE_PIXELS // 4096), 1, None),
        ((4097, DENSE_PIXELS // 4096), 4097 * 4096 // PIXELS_PER_BYTE, "no content"),
        ((4097, DENSE_PIXELS // 4096), 4097 * 4096 // PIXELS_PER_BYTE + 1, None),
    ],
)
def test_limits_of_pixels(size: tuple[int, int], num_bytes: int, reason: str | None) -> None:
    refusal = size_refusal(*size, num_bytes)
    assert refusal is None if reason is None else refusal is not None and reason in refusal


@pytest.mark.parametrize(
    ("suffix", "options"),
    [
        ("JPEG", {"progressive": True, "quality": 100}),
        ("JPEG", {"exif": True}),
        ("PNG", {"compress_level": 0}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("WEBP", {"lossless": True}),
        ("GIF", {}),
        ("PPM", {}),
    ],
)
def test_what_encoders_write_is_not_refused(suffix: str, options: dict[str, Any]) -> None:
    image, file = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)), io.BytesIO()
    if options.get("exif"):
        tags = image.getexif()
        tags[0x010E], tags[0x0112] = "a description", 6
        options = {"exif": tags}
    image.save(file, suffix, **options)
    assert content_refusal(file.getvalue()) is None
