"""Hugging Face's preprocessor_config.json, which says how images are prepared: read and written for `huggingface.py`.
`images` are its settings, `kind` is a `model_type`."""

import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from vitlab.errors import UserError
from vitlab.models import ViTConfig
from vitlab.models.image_size import ImageSize
from vitlab.preprocessing import Interpolation, Preprocessing, pair
from vitlab.settings import read_fields
from vitlab.weights.folder import processed_size, read_settings
from vitlab.weights.huggingface_layout import FAMILIES
from vitlab.weights.json_fields import HUGGINGFACE_IMAGES, HUGGINGFACE_SIZE

logger = logging.getLogger(__name__)

IMAGES, PROCESSOR = "preprocessor_config.json", "processor_config.json"
_SHORTEST = {"resample": 3, "size": {"shortest_edge": 224}, "crop_size": 224, "do_center_crop": True}
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {"resample": 2, "size": 224},
    "DeiT": {"resample": 3, "size": 256, "crop_size": 224, "do_center_crop": True},
    "Bit": _SHORTEST,
    "CLIP": _SHORTEST,
    "Siglip": {"resample": 3, "size": 224},
}
"""Defaults of their image processors; the first are also those of any other."""
RESAMPLE: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Pillow's numbers."""


def read_images(folder: Path) -> dict[str, Any]:
    """The settings in a folder; empty where there are none. A whole processor (transformers 5) has them beside those of
    its tokenizer, and they count first, as for transformers."""
    whole, file = folder / PROCESSOR, folder / IMAGES
    images = read_settings(whole, {"image_processor": dict}).get("image_processor") if whole.is_file() else None
    where = str(file) if images is None else f"{whole}: image_processor"
    if images is None:
        images = read_settings(file) if file.is_file() else {}
    images = read_fields(images, HUGGINGFACE_IMAGES, where)
    for name in ("size", "crop_size"):
        if isinstance(images.get(name), dict):
            images[name] = read_fields(images[name], HUGGINGFACE_SIZE, f"{where}: {name}")
    return images


def read_preprocessing(images: dict[str, Any], kind: str, folder: Path) -> Preprocessing:
    """The settings of their image processor. Where it leaves images at different sizes, or pads them with black, they
    are squashed to size instead, with a warning. Raises UserError for invalid settings."""
    name = images.get("image_processor_type") or images.get("feature_extractor_type") or FAMILIES[kind].processor
    name = re.sub("(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", str(name))
    images = PROCESSORS.get(name, PROCESSORS["ViT"]) | images
    mean, std = read_mean_std(images, kind)
    if images.get("resample") not in RESAMPLE:
        raise UserError(f"{folder / IMAGES} says resample={images.get('resample')!r}; allowed: Pillow's 0 to 5.")
    resize, by_shorter_side = _read_resize(images, name)
    image_size = None if by_shorter_side else resize
    if images.get("do_center_crop"):
        image_size = read_size(images)
    is_squashed = not by_shorter_side and resize == image_size
    is_cropped = isinstance(resize, int) and resize >= max(pair(image_size or 0))
    if not images.get("do_resize", True) or not image_size or not (is_squashed or is_cropped):
        names = ("do_resize", "size", "do_center_crop", "crop_size")
        settings = ", ".join(f"{name}={images.get(name)!r}" for name in names)
        logger.warning("%s: images are squashed to size: %s is not supported", folder / IMAGES, settings)
        is_squashed = True
    return Preprocessing(
        image_size=image_size,
        resize=None if is_squashed else resize,
        keep_aspect=is_squashed or by_shorter_side,
        interpolation=RESAMPLE[images["resample"]],
        crop_offset="floor",
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
    )


def _read_resize(images: dict[str, Any], processor: str) -> tuple[Any, bool]:
    """The size that images are brought to, and whether their shorter side is, or else both sides."""
    size = images["size"]
    if isinstance(size, int) and not images.get("default_to_square", processor not in ("Bit", "CLIP")):
        return size, True
    if isinstance(size, dict) and "longest_edge" not in size and size.get("shortest_edge"):
        return size["shortest_edge"], True
    return to_size(size), False


def read_mean_std(images: dict[str, Any], kind: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation, of images in [0, 1]."""
    if not images:
        return FAMILIES[kind].mean_std
    factor = images.get("rescale_factor", 1 / 255) if images.get("do_rescale", True) else 1.0
    if not isinstance(factor, float) or not math.isclose(factor, 1 / 255, rel_tol=1e-3):
        raise UserError(f"{IMAGES} does not bring images to [0, 1] (rescale_factor 1/255) before it normalizes.")
    if not images.get("do_normalize", True):
        return [0.0] * 3, [1.0] * 3
    mean_std: Any = images.get("image_mean"), images.get("image_std")
    if not all(isinstance(values, list) and {*map(type, values)} <= {int, float} for values in mean_std):
        raise UserError(f"{IMAGES} lacks image_mean and image_std; add those that the model was trained with.")
    return mean_std


def read_size(images: dict[str, Any]) -> ImageSize | None:
    """The size of the processed images, where it is given."""
    return to_size(images.get("crop_size" if images.get("do_center_crop") else "size"))


def to_size(size: Any) -> Any:
    """A number, [height, width] or {"height": ..., "width": ...} as in our configurations; None for anything else."""
    if isinstance(size, dict):
        size = [size.get("height"), size.get("width")]
    if isinstance(size, list) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0] if size[0] == size[1] else tuple(size)
    return size if isinstance(size, int) else None


def image_settings(config: ViTConfig, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for a model with this metadata. Their processors always antialias, and have no area averaging."""
    prepared = Preprocessing.read(metadata, "extra", config.image_size)
    crop_size = size = dict(zip(("height", "width"), processed_size(prepared, config), strict=True))
    if prepared.resize is not None:
        sides = ("shortest_edge",) if prepared.keep_aspect else ("height", "width")
        size = dict.fromkeys(sides, prepared.resize)
    resample = Image.Resampling["BILINEAR" if prepared.is_google else prepared.interpolation.upper()]
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": size,
        "resample": int(resample),
        "do_center_crop": prepared.resize is not None,
        "crop_size": crop_size,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5] * config.in_chans,
        "image_std": [0.5] * config.in_chans,
    }
