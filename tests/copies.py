"""Images made up by code, and what may become of a copy."""

import io
from collections.abc import Callable

import numpy as np
from PIL import Image

from vitlab.data.dedup import thumbnail

Change = Callable[[np.ndarray], np.ndarray]


def photograph(seed: int, height: int = 120, width: int = 150) -> np.ndarray:
    """Soft shapes of many sizes, as photographs have them."""
    random = np.random.default_rng(seed)
    total = np.zeros((height, width, 3))
    for side in (3, 6, 12, 24):
        layer = Image.fromarray(random.integers(0, 256, (side, side, 3), dtype=np.uint8))
        total += np.asarray(layer.resize((width, height), Image.Resampling.BICUBIC), float) / side**0.7
    return np.interp(total, (total.min(), total.max()), (10, 245)).astype(np.uint8)


def jpeg(quality: int) -> Change:
    def change(image: np.ndarray) -> np.ndarray:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        return np.asarray(Image.open(file))

    return change


def resized(scale: float) -> Change:
    return lambda p: np.asarray(Image.fromarray(p).resize((round(p.shape[1] * scale), round(p.shape[0] * scale))))


def cropped(share: float) -> Change:
    """Off the top and the left, the hardest place."""
    return lambda p: p[round(share * p.shape[0]) :, round(share * p.shape[1]) :]


CHANGES: dict[str, Change] = {
    "half the size": resized(0.5),
    "larger": resized(1.4),
    "JPEG 90": jpeg(90),
    "JPEG 30": jpeg(30),
    "darker": lambda p: (p * 0.7).astype(np.uint8),
    "less contrast": lambda p: (p * 0.6 + 60).astype(np.uint8),
    "gray": lambda p: np.asarray(Image.fromarray(p).convert("L").convert("RGB")),
    "cropped by 2%": cropped(0.02),
    "cropped by 4%": cropped(0.04),
    "cropped by 6%": cropped(0.06),
}


def thumbs_of(images: list[np.ndarray]) -> np.ndarray:
    return np.stack([thumbnail(image) for image in images])
