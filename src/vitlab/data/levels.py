"""Black and white levels of images with over 8 bits: the range that a data set uses, and a warning if it is narrow."""

import contextlib
import dataclasses
import io
import logging
import math

import numpy as np
from PIL import Image

from vitlab.data.dataset import Dataset
from vitlab.data.decode import IMAGE_FORMATS, Entry, ImageError, Levels, decode_image, is_deep
from vitlab.data.limits import content_refusal, size_refusal
from vitlab.errors import UserError, quoted

logger = logging.getLogger(__name__)

MEASURED = 2000  # images that are read to measure the range, evenly spread over the classes
SAMPLED = 16  # images that are read to warn of a narrow range
TAIL = 0.1  # percent of an image's pixels at either end that do not count: dead pixels of a sensor
NARROW = 1 / 4  # fraction of the 16-bit range: 64 of the 256 values that a model sees


def with_levels(dataset: Dataset, levels: Levels | None) -> Dataset:
    """The data set with black and white at `levels`. Raises UserError where the images are not in files."""
    if levels is not None and dataset.pixels is not None:
        raise UserError(f"data.range {levels[0]} {levels[1]} is for files, and {quoted(dataset.name)} has none.")
    return dataclasses.replace(dataset, levels=levels)


def measure_range(dataset: Dataset) -> Levels:
    """The lowest and the highest value in the files of a data set, without TAIL percent of each image's pixels at
    either end; color and 8 bits after decoding. Raises UserError for images in memory, and if none can be read."""
    if not dataset.entries or dataset.entries[0].is_in_memory:
        raise UserError(f"data.range auto is for images in files, and {quoted(dataset.name)} has none; leave it out.")
    ranges = _ranges(dataset, only_deep=False)
    if not ranges:
        raise UserError(f"data.range auto: no image of {quoted(dataset.name)} ({dataset.split}) can be read.")
    low = math.floor(min(low for low, _ in ranges))
    return low, max(math.ceil(max(high for _, high in ranges)), low + 1)


def warn_of_narrow_range(dataset: Dataset) -> None:
    """Warns where gray images of 16 bits use so little of their range that 8 bits lose most of it."""
    ranges = _ranges(dataset, only_deep=True)
    if not ranges:
        return
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    if high - low <= NARROW * 65535:
        logger.warning(
            "%s: its 16-bit images only have values from %d to %d, of these %d differ after the conversion to 8 bits: "
            "give --data.range %d %d, or --data.range auto",
            *(quoted(dataset.name), low, high, round((high - low) / 257) + 1, low, max(high, low + 1)),
        )


def warn_of_lost_bits(dataset: Dataset) -> None:
    """Warns where gray images of 16 bits are resized to 8."""
    if _ranges(dataset, only_deep=True):
        text = "%s: 16-bit images have 8 bits where they are resized; without --size they are copied as they are"
        logger.warning(text, quoted(dataset.name))


def _ranges(dataset: Dataset, only_deep: bool) -> list[tuple[float, float]]:
    """Lowest and highest value of up to MEASURED readable images; with `only_deep` of the 16-bit images among SAMPLED
    ones, and none of remote shards, which would be downloaded."""
    if only_deep and dataset.is_remote:
        return []
    by_class = np.argsort(dataset.labels, kind="stable")
    count = SAMPLED if only_deep else MEASURED
    chosen = by_class[np.unique(np.linspace(0, len(dataset) - 1, count).astype(np.int64))]
    ranges = []
    for index in chosen.tolist() if dataset.entries else ():
        with contextlib.suppress(ImageError):  # reported when the image is read
            values = _stored_values(dataset.entries[index], only_deep)
            if values is not None:
                ranges.append(tuple(map(float, np.percentile(values, (TAIL, 100 - TAIL), method="nearest"))))
    return ranges


def _stored_values(entry: Entry, only_deep: bool) -> np.ndarray | None:
    """The values of an image as stored if it has more than 8 bits; else decoded, or None with `only_deep`."""
    if entry.is_in_memory:
        return None
    data = entry.data()
    values = _deep_values(data)
    if values is None:
        return None if only_deep else decode_image(data, path=entry.path)
    if only_deep:
        decode_image(data, path=entry.path)  # raises for floating-point and 32-bit gray, which need no second warning
    return values


def _deep_values(data: bytes) -> np.ndarray | None:
    """The values of gray of more than 8 bits; None for other images, and for what cannot be read."""
    if data.startswith(b"\xff\xd8") or content_refusal(data):
        return None
    try:
        with Image.open(io.BytesIO(data), formats=tuple(IMAGE_FORMATS)) as image:
            if not is_deep(image) or size_refusal(*image.size, len(data)):
                return None
            values = np.asarray(image)
    except (OSError, ValueError, SyntaxError, ArithmeticError, LookupError, RuntimeError, TypeError, MemoryError):
        return None
    return values[np.isfinite(values)]
