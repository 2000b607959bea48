"""open_clip_config.json, which describes the model and the images of the open_clip weights beside it."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.weights.detect import OPEN_CLIP_CONFIG
from vitlab.weights.folder import read_settings
from vitlab.weights.json_fields import OPEN_CLIP
from vitlab.weights.original_names import OPENAI_IMAGES, Origin

logger = logging.getLogger(__name__)


def describe_open_clip(weights: Path, origin: Origin, tensors: dict[str, Tensor]) -> Origin:
    """`origin` with what the config says, where one lies beside an open_clip model; `tensors` get the norm's name of
    timm. Raises UserError for an invalid config."""
    path = weights.parent / OPEN_CLIP_CONFIG
    if not path.is_file() or not (origin.code_base == "CLIP" or "visual." in origin.prefix):
        return origin
    settings = read_settings(path, OPEN_CLIP)
    model, images = settings.get("model_cfg", {}), settings.get("preprocess_cfg", {})
    vision = model.get("vision_cfg", {})
    mode = images.get("resize_mode", "shortest")
    if mode not in ("shortest", "squash"):
        logger.warning("%s: images are squashed to size: resize_mode=%r is not supported", path, mode)
    prepared = OPENAI_IMAGES._replace(
        mean_std=(images.get("mean", OPENAI_IMAGES.mean_std[0]), images.get("std", OPENAI_IMAGES.mean_std[1])),
        crop=1.0 if mode == "shortest" else None,
        interpolation="bilinear" if images.get("interpolation") == "bilinear" else "bicubic",
    )
    size = vision.get("image_size", 224)
    described: dict[str, Any] = {"image_size": tuple(size) if isinstance(size, list) else size}
    if origin.code_base == "CLIP":
        is_tanh = vision.get("act_kwargs", {}).get("approximate") == "tanh"
        described |= {
            "heads": vision.get("width", 768) // vision.get("head_width", 64),
            "gelu": "quick" if model.get("quick_gelu") else "tanh" if is_tanh else "erf",
            "layer_norm_eps": vision.get("norm_kwargs", {}).get("eps", 1e-5),
            "pool": "gap" if vision.get("pool_type") == "avg" else "token",
        }
        if described["pool"] == "gap" and vision.get("final_ln_after_pool"):
            tensors |= {f"fc_norm.{leaf}": tensors.pop(f"norm.{leaf}") for leaf in ("weight", "bias")}
    else:
        described |= {"architecture": vision.get("timm_model_name", ""), "pool": vision.get("timm_pool") or None}
    return dataclasses.replace(origin, images=prepared, described=described)
