"""What an image file may cost; tests/test_bombs.py has the files that are refused."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitlab.data.limits import (
    content_refusal,
)


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
