"""Hugging Face's JSON files: config.json, and preprocessor_config.json, which says how images are prepared."""

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from PIL import Image

from vitlab.errors import UserError
from vitlab.models import ViTConfig
from vitlab.models.config import ImageSize
from vitlab.preprocessing import Interpolation, Preprocessing
from vitlab.weights.folder import CARD, read_settings

logger = logging.getLogger(__name__)

IMAGES = "preprocessor_config.json"
HALF = [0.5] * 3, [0.5] * 3
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
OPENAI = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
NORMALIZATION = {
    **dict.fromkeys(("deit", "dinov2", "dinov2_with_registers", "dinov3_vit", "vit_mae", "vit_msn", "ijepa"), IMAGENET),
    **dict.fromkeys(("clip", "clip_vision_model"), OPENAI),
}
"""`model_type` -> mean and std of a folder without preprocessor_config.json; of others HALF."""
_SHORTEST = {"resample": 3, "size": {"shortest_edge": 224}, "crop_size": 224, "do_center_crop": True}
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {"resample": 2, "size": 224},
    "DeiT": {"resample": 3, "size": 256, "crop_size": 224, "do_center_crop": True},
    "Bit": _SHORTEST,
    "CLIP": _SHORTEST,
    "Siglip": {"resample": 3, "size": 224},
    "DINOv3ViT": {"resample": 2, "size": 224},
}
"""Defaults of their image processors."""
PROCESSOR_OF = {
    "deit": "DeiT",
    **dict.fromkeys(("dinov2", "dinov2_with_registers", "bit"), "Bit"),
    "dinov3_vit": "DINOv3ViT",
    **dict.fromkeys(("clip", "clip_vision_model"), "CLIP"),
    **dict.fromkeys(("siglip", "siglip_vision_model"), "Siglip"),
}
"""`model_type` -> the image processor of a folder that names none; of others ViT's."""
RESAMPLE: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Pillow's numbers."""


CLASSES = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}
GELU: dict[str, Literal["erf", "tanh", "quick"]] = {
    "gelu": "erf",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "quick_gelu": "quick",
}


# -------------------------------------------------------------------------------------------------------- reading


def check_setting(card: dict[str, Any], name: str, default: Any, *supported: Any) -> Any:
    """The value of a setting. Raises UserError for one that cannot be computed here."""
    value = card.get(name, default)
    if value not in supported:
        raise UserError(f"{CARD} says {name}={value!r}; supported: {', '.join(map(repr, supported))}.")
    return value


def check_sizes(card: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Raises UserError where config.json has other sizes than the arrays, as when some are missing."""
    for name, size in sizes.items():
        if card.get(name, size) != size:
            raise UserError(f"{CARD} says {name}={card[name]!r} and the arrays are for {size!r}; get the files again")


def read_classes(card: dict[str, Any]) -> list[str] | None:
    """The names of the outputs in order, where there are any."""
    labels = card.get("id2label")
    try:
        return None if labels is None else [str(labels[str(i)]) for i in range(len(labels))]
    except (KeyError, TypeError) as error:
        raise UserError(f"{CARD} says id2label={labels!r}; it must name the outputs '0', '1' and so on.") from error


def read_images(folder: Path) -> dict[str, Any]:
    """The settings in a folder; empty where there are none."""
    return read_settings(folder / IMAGES) if (folder / IMAGES).is_file() else {}


def read_preprocessing(images: dict[str, Any], kind: str, folder: Path) -> Preprocessing:
    """The settings of their image processor.

    Where it leaves images at different sizes, or pads them with black, they are squashed to size instead, with a
    warning. Raises UserError for invalid settings.
    """
    name = str(
        images.get("image_processor_type") or images.get("feature_extractor_type") or PROCESSOR_OF.get(kind, "ViT")
    )
    name = re.sub("(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", name)
    images = PROCESSORS.get(name, PROCESSORS["ViT"]) | images
    mean, std = read_normalization(images, kind)
    size, crop = images["size"], images.get("do_center_crop")
    if name in ("Bit", "CLIP") and isinstance(size, int):
        size = {"shortest_edge": size}
    shortest = size.get("shortest_edge") if isinstance(size, dict) and "longest_edge" not in size else None
    squashed = None if shortest else read_size({"size": size})
    image_size = read_size(images) if crop else squashed
    if images.get("resample") not in RESAMPLE:
        raise UserError(f"{folder / IMAGES} says resample={images.get('resample')!r}; allowed: Pillow's 0 to 5.")
    resize = shortest or (squashed if isinstance(squashed, int) and squashed != image_size else None)
    fits = image_size and (resize is None or (isinstance(resize, int) and resize >= max(_pair(image_size))))
    if not images.get("do_resize", True) or not fits or not (shortest or squashed):
        names = ("do_resize", "size", "do_center_crop", "crop_size")
        settings = ", ".join(f"{name}={images.get(name)!r}" for name in names)
        logger.warning("%s: images are squashed to size: %s gives no one size", folder / IMAGES, settings)
        resize = None
    return Preprocessing(
        image_size=image_size,
        resize=resize,
        keep_aspect=bool(shortest) or resize is None,
        interpolation=RESAMPLE[images["resample"]],
        crop_offset="floor",
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
    )


def read_normalization(images: dict[str, Any], kind: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation, of images in [0, 1]."""
    if not images:
        return NORMALIZATION.get(kind, HALF)
    factor = images.get("rescale_factor", 1 / 255) if images.get("do_rescale", True) else 1.0
    if not isinstance(factor, float) or not math.isclose(factor, 1 / 255, rel_tol=1e-3):
        raise UserError(f"{IMAGES} does not bring images to [0, 1] (rescale_factor 1/255) before it normalizes.")
    if not images.get("do_normalize", True):
        return [0.0] * 3, [1.0] * 3
    mean, std = images.get("image_mean"), images.get("image_std")
    if not (isinstance(mean, list) and isinstance(std, list) and all(map(_is_number, [*mean, *std]))):
        raise UserError(f"{IMAGES} lacks image_mean and image_std; add those that the model was trained with.")
    return mean, std


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int)


def read_size(images: dict[str, Any]) -> ImageSize | None:
    """The size of the processed images, where it is given."""
    size = images.get("crop_size" if images.get("do_center_crop") else "size")
    return to_size([size.get("height"), size.get("width")] if isinstance(size, dict) else size)


def to_size(size: Any) -> Any:
    """An image size as in our configurations; None for anything else."""
    if isinstance(size, list) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0] if size[0] == size[1] else tuple(size)
    return size if isinstance(size, int) else None


def _pair(size: ImageSize) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


# -------------------------------------------------------------------------------------------------------- writing


def model_settings(kind: str, config: ViTConfig, classes: Sequence[str] | None) -> dict[str, Any]:
    """The config.json of a model."""
    suffix = "ForImageClassification" + ("WithTeacher" if config.distilled else "") if config.num_classes else "Model"
    settings: dict[str, Any] = {
        "architectures": [CLASSES[kind] + suffix],
        "model_type": kind,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}[config.gelu],
        "layer_norm_eps": config.layer_norm_eps,
        "image_size": config.image_size if isinstance(config.image_size, int) else list(config.image_size),
        "patch_size": config.patch_size,
        "num_channels": config.in_chans,
        "qkv_bias": True,
    }
    if kind.startswith("dinov2"):
        settings |= {"mlp_ratio": config.mlp_dim // config.width, "layerscale_value": config.layer_scale}
        settings |= {"num_register_tokens": config.registers} if config.registers else {}
    else:
        settings["intermediate_size"] = config.mlp_dim
        settings |= {"pooler_output_size": config.representation_size} if config.representation_size else {}
    if config.num_classes:
        labels = list(classes) if classes else [f"LABEL_{i}" for i in range(config.num_classes)]
        settings["id2label"] = {str(i): label for i, label in enumerate(labels)}
        settings["label2id"] = {label: i for i, label in enumerate(labels)}
    return settings


def image_settings(config: ViTConfig, card: dict[str, Any]) -> dict[str, Any]:
    """The settings for a model with this card. Their processors always antialias, and have no area averaging."""
    prepared = Preprocessing.read(card, "extra", config.image_size)
    assert prepared.image_size is not None
    crop_size = size = dict(zip(("height", "width"), _pair(prepared.image_size), strict=True))
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
