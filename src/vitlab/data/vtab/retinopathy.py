"""Diabetic Retinopathy as VTAB takes it: "btgraham-300", the preparation of the winner of Kaggle's competition (2015).

A photograph of an eye is scaled so that the eye's radius is 300 pixels, its local average is subtracted, and what lies
outside 90 % of the radius is made gray and cropped. The result is stored as JPEG of quality 72 when it is first
read, since the original takes about a second.

Deviation: SciPy's blur, and Pillow's resize and JPEG, stand in for OpenCV's. Before the JPEG the pixels differ from the
same steps in OpenCV 5 by 4 levels at most: one level of the local average, which is taken four times.
"""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from vitlab.data.decode import Entry, ImageError, Levels, decode_image
from vitlab.io import write_bytes

PREPARED = "btgraham-300"
RADIUS = 300  # pixels
QUALITY = 72


class EyeEntry(Entry):
    """An image ROOT/btgraham-300/SPLIT/NAME, made from ROOT/SPLIT/NAME unless it exists."""

    __slots__ = ()

    def read(self, levels: Levels | None = None) -> np.ndarray:
        prepared = Path(self.file)
        if not prepared.is_file():
            original, buffer = prepared.parents[2] / prepared.parent.name / prepared.name, io.BytesIO()
            Image.fromarray(prepare(decode_image(original))).save(buffer, "JPEG", quality=QUALITY)
            try:
                write_bytes(prepared, buffer.getvalue(), clear=False)  # several workers may make the same image
            except OSError as error:
                raise ImageError(self.file, f"the prepared image cannot be written ({error.strerror})") from error
        return super().read(levels)


def prepare(image: np.ndarray, radius: int = RADIUS) -> np.ndarray:
    """uint8 [H, W, 3] -> uint8 [h, w, 3], at most 1.8 `radius` each way, the eye in the middle."""
    from scipy.ndimage import gaussian_filter  # slow to import

    scaled = _resize(image, radius / eye_radius(image))
    # A kernel of 3 standard deviations each way, mirrored at the edges, as OpenCV's is for bytes.
    blurred = gaussian_filter(scaled.astype(np.float32), (radius / 30, radius / 30, 0), mode="mirror", truncate=3)
    contrast = np.clip(4 * (scaled - np.rint(blurred)) + 128, 0, 255).astype(np.uint8)
    height, width = contrast.shape[:2]
    shown = int(0.9 * radius)
    down, right = np.ogrid[:height, :width]
    contrast[(down - height // 2) ** 2 + (right - width // 2) ** 2 > shown**2] = 128
    top, left = max(height // 2 - shown, 0), max(width // 2 - shown, 0)
    return contrast[top : height // 2 + shown, left : width // 2 + shown]


def eye_radius(image: np.ndarray) -> float:
    """Half the number of pixels on the middle row that are brighter than a tenth of its mean; of a black row H / 2."""
    row = image[len(image) // 2].sum(axis=1, dtype=np.int64)
    radius = float((row > row.mean() / 10).sum()) / 2
    return radius if radius >= 1 else len(image) / 2


def _resize(image: np.ndarray, scale: float) -> np.ndarray:
    """Bilinear without smoothing: the pixel at x + 1/2 is read at (x + 1/2) / scale."""
    height, width = (max(1, round(side * scale)) for side in image.shape[:2])
    affine = (1 / scale, 0, 0, 0, 1 / scale, 0)
    resized = Image.fromarray(image)
    return np.asarray(resized.transform((width, height), Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR))
