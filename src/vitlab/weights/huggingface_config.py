"""Hugging Face's JSON files: config.json, the configuration of a model from it and from the model's arrays, and
preprocessor_config.json, which says how images are prepared."""

import dataclasses
import logging
import math
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, Rotary, Variant, ViTConfig
from vitlab.models.image_size import ImageSize
from vitlab.preprocessing import Interpolation, Preprocessing, pair
from vitlab.settings import read_fields
from vitlab.weights.folder import CONFIG, multi_label_settings, processed_size, read_settings
from vitlab.weights.huggingface_layout import FAMILIES, HEADS, part_names, select_for_mean
from vitlab.weights.json_fields import HUGGINGFACE_IMAGES, HUGGINGFACE_SIZE, NAMES
from vitlab.weights.layout import count_units, require_shape

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
CLASSES = {
    "vit": "ViT",
    "deit": "DeiT",
    "dinov2": "Dinov2",
    "dinov2_with_registers": "Dinov2WithRegisters",
    "dinov3_vit": "DINOv3ViT",
    "ijepa": "IJepa",
    "clip": "CLIP",
    "clip_vision_model": "CLIPVision",
    "siglip_vision_model": "SiglipVision",
}
"""`model_type` -> the beginning of the names of their classes."""
GELU: dict[str, Literal["erf", "tanh", "quick"]] = {
    "gelu": "erf",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "quick_gelu": "quick",
}


# -------------------------------------------------------------------------------------------------------- reading


def check_setting(settings: dict[str, Any], name: str, default: Any, *, supported: Collection[Any]) -> Any:
    """The value of a setting. Raises UserError for one that cannot be computed here."""
    value = settings.get(name, default)
    if value not in supported:
        raise UserError(f"{CONFIG} says {name}={value!r}; supported: {', '.join(map(repr, supported))}.")
    return value


def check_sizes(settings: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Raises UserError where config.json has other sizes than the arrays, as when some are missing."""
    for name, size in sizes.items():
        if settings.get(name, size) != size:
            raise UserError(f"{CONFIG} says {name}={settings[name]!r} and the arrays are for {size!r}; get them again")


def read_classes(settings: dict[str, Any]) -> list[str] | None:
    """The names of the outputs in order, where there are any."""
    labels = settings.get("id2label")
    try:
        names = None if labels is None else [labels[str(i)] for i in range(len(labels))]
        read_fields({"id2label": names}, {"id2label": NAMES}, CONFIG)
        return names and list(map(str, names))
    except (KeyError, TypeError) as error:
        raise UserError(f"{CONFIG} says id2label={labels!r}; it must name the outputs '0', '1' and so on.") from error


def read_images(folder: Path) -> dict[str, Any]:
    """The settings in a folder; empty where there are none. A whole processor (transformers 5) has them beside those of
    its tokenizer, and they count first, as for transformers."""
    file = folder / PROCESSOR
    images = read_settings(file, {"image_processor": dict}).get("image_processor") if file.is_file() else None
    if images is not None:
        images = read_fields(images, HUGGINGFACE_IMAGES, f"{file}: image_processor")
    elif (file := folder / IMAGES).is_file():
        images = read_settings(file, HUGGINGFACE_IMAGES)
    for name in ("size", "crop_size"):
        if images is not None and isinstance(images.get(name), dict):
            images[name] = read_fields(images[name], HUGGINGFACE_SIZE, f"{file}: {name}")
    return images or {}


def read_preprocessing(images: dict[str, Any], kind: str, folder: Path) -> Preprocessing:
    """The settings of their image processor.

    Where it leaves images at different sizes, or pads them with black, they are squashed to size instead, with a
    warning. Raises UserError for invalid settings.
    """
    name = images.get("image_processor_type") or images.get("feature_extractor_type") or FAMILIES[kind].processor
    name = re.sub("(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", str(name))
    images = PROCESSORS.get(name, PROCESSORS["ViT"]) | images
    mean, std = read_normalization(images, kind)
    if images.get("resample") not in RESAMPLE:
        raise UserError(f"{folder / IMAGES} says resample={images.get('resample')!r}; allowed: Pillow's 0 to 5.")
    size = images["size"]
    if isinstance(size, int) and not images.get("default_to_square", name not in ("Bit", "CLIP")):
        size = {"shortest_edge": size}
    shortest = size.get("shortest_edge") if isinstance(size, dict) and "longest_edge" not in size else None
    resize: Any = shortest or read_size({"size": size})
    image_size = None if shortest else resize
    if images.get("do_center_crop"):
        image_size = read_size(images)
    is_squashed = not shortest and resize == image_size
    is_cropped = isinstance(resize, int) and resize >= max(pair(image_size or 0))
    if not images.get("do_resize", True) or not image_size or not (is_squashed or is_cropped):
        names = ("do_resize", "size", "do_center_crop", "crop_size")
        settings = ", ".join(f"{name}={images.get(name)!r}" for name in names)
        logger.warning("%s: images are squashed to size: %s is not supported", folder / IMAGES, settings)
        is_squashed = True
    return Preprocessing(
        image_size=image_size,
        resize=None if is_squashed else resize,
        keep_aspect=is_squashed or bool(shortest),
        interpolation=RESAMPLE[images["resample"]],
        crop_offset="floor",
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
    )


def read_normalization(images: dict[str, Any], kind: str) -> tuple[list[float], list[float]]:
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
    size = images.get("crop_size" if images.get("do_center_crop") else "size")
    return to_size([size.get("height"), size.get("width")] if isinstance(size, dict) else size)


def to_size(size: Any) -> Any:
    """An image size as in our configurations; None for anything else."""
    if isinstance(size, list) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0] if size[0] == size[1] else tuple(size)
    return size if isinstance(size, int) else None


# ---------------------------------------------------------------------------------------- the model of the arrays


def infer_config(kind: str, settings: dict[str, Any], arrays: dict[str, Tensor], images: dict[str, Any]) -> ModelConfig:
    """The model of the arrays and of config.json. Raises UserError for one that computes something else. Changes
    `arrays`: missing biases of q, k and v become zeros, and what a classifier on CLIP or SigLIP skips is dropped."""
    if kind == "bit":
        return _infer_resnet(settings, arrays, images)
    reads_mean = FAMILIES[kind].skips != "" and "ForImageClassification" in str(settings.get("architectures"))
    if reads_mean:
        select_for_mean(kind, arrays)
    return _infer_vit(kind, settings.get("vision_config", settings), arrays, reads_mean)


def _infer_vit(kind: str, settings: dict[str, Any], arrays: dict[str, Tensor], reads_mean: bool) -> ViTConfig:
    """The configuration of a ViT. `reads_mean` is of a classifier on the image tower of CLIP or SigLIP."""
    family = FAMILIES[kind]
    width, channels, patch_size, _ = _shape(arrays, family.names["embedding"], 4)
    depth = len({name.removeprefix(family.blocks).split(".")[0] for name in arrays if name.startswith(family.blocks)})
    sizes = {"num_hidden_layers": depth, "hidden_size": width, "patch_size": patch_size, "num_channels": channels}
    check_sizes(settings, sizes)
    if not check_setting(settings, "qkv_bias", True, supported=(True, False)):
        for name in (f"{family.blocks}{i}.{part}.bias" for i in range(depth) for part in family.qkv):
            arrays.setdefault(name, torch.zeros(width))
    is_rotary = "position.table" not in family.names
    swiglu = bool(family.swiglu_setting and settings.get(family.swiglu_setting))
    activations = ("silu",) if swiglu and is_rotary else tuple(GELU)
    activation = check_setting(settings, "hidden_act", family.activation, supported=activations)
    head = next((name for name in HEADS if f"{name}.weight" in arrays), None)
    has_pooler = "pooler.dense.weight" in arrays and not head
    if has_pooler:
        check_setting(settings, "pooler_act", "tanh", supported=("tanh",))
    size = to_size(settings.get("image_size", ViTConfig.image_size))
    dinov2 = kind.startswith("dinov2")
    if size is None or (dinov2 and isinstance(size, tuple)):
        allowed = "one number, because DINOv2's positions are for square images" if dinov2 else "a number, or two"
        raise UserError(f"{CONFIG} says image_size={settings['image_size']!r}; allowed: {allowed}.")
    pool = "token" if family.pool == "token+gap" and not head else family.pool
    if reads_mean or (pool == "map" and "head.probe" not in arrays):
        pool = "gap"
    variant = Variant(
        gelu=GELU.get(activation, "erf"),
        swiglu=swiglu,
        layer_norm_eps=settings.get("layer_norm_eps", family.eps),
        pre_norm=family.pre_norm,
        final_norm="none" if family.pre_norm and reads_mean else "tokens",
        layer_scale=settings.get("layerscale_value", 1.0) if "branch1.scale" in family.names else None,
        distilled=kind == "deit" and head in HEADS[1:],
        rotary=Rotary(base=float(settings.get("rope_theta", 100.0))) if is_rotary else None,
        position_interpolation="bicubic_antialias" if kind == "dinov2_with_registers" else "bicubic",
    )
    registers = int(family.pre_norm and reads_mean)  # CLIP's class token
    if family.names["registers"] in arrays and not (family.skips or variant.distilled):
        registers = require_shape(CONFIG, arrays, family.names["registers"], 3)[1]
    (fc2,) = part_names(kind, "mlp.fc2", variant)
    return ViTConfig(
        image_size=to_size([side // patch_size * patch_size for side in pair(size)]),  # what convolutions see
        in_chans=channels,
        patch_size=patch_size,
        width=width,
        depth=depth,
        heads=settings.get("num_attention_heads", family.heads),
        mlp_dim=_shape(arrays, f"{family.blocks}0.{fc2}", 2)[1],
        num_classes=_shape(arrays, head, 2)[0] if head else 0,
        pool=pool,
        representation_size=_shape(arrays, "pooler.dense", 2)[0] if has_pooler else None,
        position="none" if is_rotary else "1d",
        variant=dataclasses.replace(variant, registers=registers),
    )


def _infer_resnet(settings: dict[str, Any], arrays: dict[str, Tensor], images: dict[str, Any]) -> ResNetConfig:
    layer_types = ("preactivation", "bottleneck")
    v2 = check_setting(settings, "layer_type", "preactivation", supported=layer_types) == "preactivation"
    check_setting(settings, "global_padding", None, supported=(None,) if v2 else ("SAME", "same"))
    check_setting(settings, "embedding_dynamic_padding", False, supported=(not v2,))
    for name, value in {"hidden_act": "relu", "num_groups": 32, "width_factor": 1}.items():
        check_setting(settings, name, value, supported=(value,))
    parts = [name.split(".") for name in arrays if name.startswith("encoder.stages.")]
    body = ResNetBody(
        layers=count_units({(part[2], part[4]) for part in parts}),
        width=_shape(arrays, "embedder.convolution", 4)[0],
        version="v2" if v2 else "v1",
        weight_eps=1e-8,
        weight_eps_on="variance",
        group_norm_eps=1e-5,  # no setting changes these
    )
    check_sizes(settings, {"depths": list(body.layers)})
    check_setting(settings, "output_stride", 32, supported=[2**i for i in range(16) if 2**i >= body.stride])
    num_classes = _shape(arrays, "classifier.1", 2)[0] if "classifier.1.weight" in arrays else 0
    return ResNetConfig(image_size=read_size(images) or ResNetConfig.image_size, body=body, num_classes=num_classes)


def _shape(arrays: dict[str, Tensor], layer: str, ndim: int) -> tuple[int, ...]:
    return require_shape("the file", arrays, f"{layer}.weight", ndim)


# -------------------------------------------------------------------------------------------------------- writing


def model_settings(kind: str, config: ViTConfig, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model with this metadata."""
    act = {"erf": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}[config.variant.gelu]
    prepared = Preprocessing.read(metadata, "extra", config.image_size).at(config.image_size)
    height, width = processed_size(prepared, config)
    settings: dict[str, Any] = {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": "silu" if kind == "dinov3_vit" and config.variant.swiglu else act,
        "layer_norm_eps": config.variant.layer_norm_eps,
        "image_size": height if height == width else [height, width],
        "patch_size": config.patch_size,
        "num_channels": config.in_chans,
    }
    if kind.startswith("dino"):
        settings["layerscale_value"] = config.variant.layer_scale
    if kind in ("dinov2_with_registers", "dinov3_vit"):
        settings["num_register_tokens"] = config.variant.registers
    if kind.startswith("dinov2"):
        settings |= {"mlp_ratio": dinov2_mlp_ratio(config), "use_swiglu_ffn": config.variant.swiglu}
    else:
        settings["intermediate_size"] = config.mlp_dim
    if kind == "dinov3_vit":
        assert config.variant.rotary
        settings |= {"rope_theta": config.variant.rotary.base, "key_bias": True, "use_gated_mlp": config.variant.swiglu}
    elif not FAMILIES[kind].skips:
        settings["qkv_bias"] = True
    if config.representation_size:
        settings["pooler_output_size"] = config.representation_size
    suffix = "Model"
    if kind == "clip_vision_model" and config.num_classes:
        suffix = "ModelWithProjection"
        settings["projection_dim"] = config.num_classes
    elif config.num_classes:
        suffix = "ForImageClassificationWithTeacher" if config.variant.distilled else "ForImageClassification"
        if kind == "clip":
            settings = {"vision_config": settings}
        labels = list(metadata.get("classes") or (f"LABEL_{i}" for i in range(config.num_classes)))
        settings["id2label"] = {str(i): label for i, label in enumerate(labels)}
        settings["label2id"] = {label: i for i, label in enumerate(labels)}
    settings |= multi_label_settings(metadata)
    return {"architectures": [CLASSES[kind] + suffix], "model_type": kind, **settings}


def dinov2_mlp_ratio(config: ViTConfig) -> int | None:
    """The whole number from which their DINOv2 computes the width of this MLP; None if there is none."""
    widths = {ratio: config.width * ratio for ratio in range(1, 65)}
    if config.variant.swiglu:
        widths = {ratio: (width * 2 // 3 + 7) // 8 * 8 for ratio, width in widths.items()}
    return next((ratio for ratio, width in widths.items() if width == config.mlp_dim), None)


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
