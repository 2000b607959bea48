"""Hugging Face's preprocessor_config.json, which says how images are prepared, for `huggingface.py`: `read_processor`
and `read_preprocessing` read it, `image_settings` writes it."""

import dataclasses
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
from vitlab.weights.huggingface_layout import Family
from vitlab.weights.json_fields import HUGGINGFACE_IMAGES, HUGGINGFACE_SIZE
from vitlab.weights.layout import as_size

logger = logging.getLogger(__name__)

IMAGES = "preprocessor_config.json"
WHOLE_PROCESSOR = "processor_config.json"
"""A file of transformers 5, which has the settings beside those of a tokenizer."""
_SHORTEST = {"resample": 3, "size": {"shortest_edge": 224}, "crop_size": 224, "do_center_crop": True}
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {"resample": 2, "size": 224},
    "DeiT": {"resample": 3, "size": 256, "crop_size": 224, "do_center_crop": True},
    "Bit": _SHORTEST,
    "CLIP": _SHORTEST,
    "Siglip": {"resample": 3, "size": 224},
}
"""Default settings by image processor. A processor that is not listed has ViT's."""
RESAMPLE: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Pillow's numbers."""


def read_processor(folder: Path) -> dict[str, Any]:
    """The settings of the image processor in a folder; empty if there are none. As in transformers, those of a whole
    processor come first."""
    whole, file = folder / WHOLE_PROCESSOR, folder / IMAGES
    settings = read_settings(whole, {"image_processor": dict}).get("image_processor") if whole.is_file() else None
    where = str(file) if settings is None else f"{whole}: image_processor"
    if settings is None:
        settings = read_settings(file) if file.is_file() else {}
    settings = read_fields(settings, HUGGINGFACE_IMAGES, where)
    for name in ("size", "crop_size"):
        if isinstance(settings.get(name), dict):
            settings[name] = read_fields(settings[name], HUGGINGFACE_SIZE, f"{where}: {name}")
    return settings


def read_preprocessing(settings: dict[str, Any], family: Family, folder: Path) -> Preprocessing:
    """What an image processor with these settings does. If it leaves images at different sizes or pads them with black,
    they are squashed to size instead, with a warning. Raises UserError for invalid settings."""
    name = settings.get("image_processor_type") or settings.get("feature_extractor_type") or family.processor
    name = re.sub("(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", str(name))
    settings = PROCESSORS.get(name, PROCESSORS["ViT"]) | settings
    mean, std = read_mean_std(settings, family)
    if settings.get("resample") not in RESAMPLE:
        raise UserError(f"{folder / IMAGES} says resample={settings.get('resample')!r}; allowed: Pillow's 0 to 5.")
    size, is_shorter_side = _read_resize(settings, name)
    image_size = None if is_shorter_side else size
    if settings.get("do_center_crop"):
        image_size = read_size(settings)
    squashed = Preprocessing(
        image_size=image_size,
        interpolation=RESAMPLE[settings["resample"]],
        crop_offset="floor",
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
    )
    if settings.get("do_resize", True) and image_size:
        if size == image_size and not is_shorter_side:
            return squashed
        if isinstance(size, int) and size >= max(pair(image_size)):
            return dataclasses.replace(squashed, resize=size, keep_aspect=is_shorter_side)
    text = ", ".join(f"{name}={settings.get(name)!r}" for name in ("do_resize", "size", "do_center_crop", "crop_size"))
    logger.warning("%s: images are squashed to size: %s is not supported", folder / IMAGES, text)
    return squashed


def _read_resize(settings: dict[str, Any], processor: str) -> tuple[ImageSize | None, bool]:
    """The size to resize to; True if the shorter side gets it, False if both sides do."""
    size = settings["size"]
    if isinstance(size, int) and not settings.get("default_to_square", processor not in ("Bit", "CLIP")):
        return size, True
    if isinstance(size, dict) and "longest_edge" not in size and size.get("shortest_edge"):
        return size["shortest_edge"], True
    return to_size(size), False


def read_mean_std(settings: dict[str, Any], family: Family) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of images in [0, 1]."""
    if not settings:
        return family.mean_std
    factor = settings.get("rescale_factor", 1 / 255) if settings.get("do_rescale", True) else 1.0
    if not isinstance(factor, float) or not math.isclose(factor, 1 / 255, rel_tol=1e-3):
        raise UserError(f"{IMAGES} does not bring images to [0, 1] (rescale_factor 1/255) before it normalizes.")
    if not settings.get("do_normalize", True):
        return [0.0] * 3, [1.0] * 3
    mean_std: Any = settings.get("image_mean"), settings.get("image_std")
    if not all(isinstance(values, list) and {*map(type, values)} <= {int, float} for values in mean_std):
        raise UserError(f"{IMAGES} lacks image_mean and image_std; add those that the model was trained with.")
    return mean_std


def read_size(settings: dict[str, Any]) -> ImageSize | None:
    """The size of the processed images; None if they have no one size."""
    return to_size(settings.get("crop_size" if settings.get("do_center_crop") else "size"))


def to_size(size: Any) -> ImageSize | None:
    """A number, [height, width] or {"height": ..., "width": ...} as in our configurations; None for anything else."""
    if isinstance(size, dict):
        size = [size.get("height"), size.get("width")]
    if isinstance(size, list) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return as_size(*size)
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
