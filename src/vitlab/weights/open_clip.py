"""open_clip_config.json, which describes the model and the images of open_clip's weights beside it, for `timm.py`."""

import dataclasses
import logging
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.weights.detect import OPEN_CLIP_CONFIG
from vitlab.weights.folder import read_settings
from vitlab.weights.json_fields import OPEN_CLIP
from vitlab.weights.original_names import OPENAI_IMAGES, Images, Origin

logger = logging.getLogger(__name__)


def describe_open_clip(weights: Path, tensors: dict[str, Tensor], origin: Origin) -> tuple[dict[str, Tensor], Origin]:
    """The tensors of an open_clip model by timm's names, and their origin with what the config beside the weights says.
    Both stay as they are where there is none. Raises UserError for an invalid config."""
    path = weights.parent / OPEN_CLIP_CONFIG
    if not path.is_file() or not (origin.code_base == "CLIP" or "visual." in origin.prefix):
        return tensors, origin
    settings = read_settings(path, OPEN_CLIP)
    model = settings.get("model_cfg", {})
    vision = model.get("vision_cfg", {})
    size = vision.get("image_size", 224)
    described: dict[str, Any] = {"image_size": tuple(size) if isinstance(size, list) else size}
    if origin.code_base == "CLIP":
        is_tanh = vision.get("act_kwargs", {}).get("approximate") == "tanh"
        has_mean = vision.get("pool_type") == "avg"
        described["heads"] = vision.get("width", 768) // vision.get("head_width", 64)
        described["gelu"] = "quick" if model.get("quick_gelu") else "tanh" if is_tanh else "erf"
        described["layer_norm_eps"] = vision.get("norm_kwargs", {}).get("eps", 1e-5)
        described["pool"] = "gap" if has_mean else "token"
        if has_mean and vision.get("final_ln_after_pool"):
            tensors = {re.sub(r"^norm\.", "fc_norm.", name): tensor for name, tensor in tensors.items()}
    else:  # the image tower is one of timm's
        described["architecture"] = vision.get("timm_model_name", "")
        described["pool"] = vision.get("timm_pool") or None
    images = _read_images(settings.get("preprocess_cfg", {}), path)
    return tensors, dataclasses.replace(origin, images=images, described=described)


def _read_images(settings: dict[str, Any], path: Path) -> Images:
    """How the config's `preprocess_cfg` prepares images."""
    mode = settings.get("resize_mode", "shortest")
    if mode not in ("shortest", "squash"):
        logger.warning("%s: images are squashed to size: resize_mode=%r is not supported", path, mode)
    mean, std = OPENAI_IMAGES.mean_std
    return Images(
        mean_std=(settings.get("mean", mean), settings.get("std", std)),
        crop=1.0 if mode == "shortest" else None,
        interpolation="bilinear" if settings.get("interpolation") == "bilinear" else "bicubic",
    )
