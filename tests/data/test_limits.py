"""What an image file may cost; tests/test_bombs.py has the files that are refused."""

import numpy as np
import pytest
from image_files import encode

from vitlab.data.limits import content_refusal


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"progressive": True, "quality": 100}),
        ("PNG", {"compress_level": 0}),
        ("TIFF", {"compression": "tiff_lzw"}),
        ("WEBP", {"lossless": True}),
        ("PPM", {}),
    ],
)
def test_what_encoders_write_is_not_refused(kind: str, options: dict[str, object]) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    assert content_refusal(encode(noise, kind, **options)) is None
