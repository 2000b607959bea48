"""Hugging Face's JSON files: config.json, the configuration of a model from it and from the model's arrays, and
preprocessor_config.json, which says how images are prepared."""

import logging
import math
import re
from collections.abc import Mapping
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
from vitlab.weights.huggingface_layout import FAMILIES, HEADS, fold_class_token
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
    "DINOv3ViT": {"resample": 2, "size": 224},
}
"""Defaults of their image processors."""
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


def check_setting(settings: dict[str, Any], name: str, default: Any, *supported: Any) -> Any:
    """The value of a setting. Raises UserError for one that cannot be computed here."""
    value = settings.get(name, default)
    if value not in supported:
        raise UserError(f"{CONFIG} says {name}={value!r}; supported: {', '.join(map(repr, supported))}.")
    return value


def check_sizes(settings: dict[str, Any], sizes: dict[str, Any]) -> None:
    """Raises UserError where config.json has other sizes than the arrays, as when some are missing."""
    for name, size in sizes.items():
        if settings.get(name, size) != size:
            raise UserError(
                f"{CONFIG} says {name}={settings[name]!r} and the arrays are for {size!r}; get the files again"
            )


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
    size, crop = images["size"], images.get("do_center_crop")
    if isinstance(size, int) and not images.get("default_to_square", name not in ("Bit", "CLIP")):
        size = {"shortest_edge": size}
    shortest = size.get("shortest_edge") if isinstance(size, dict) and "longest_edge" not in size else None
    squashed = None if shortest else read_size({"size": size})
    image_size = read_size(images) if crop else squashed
    if images.get("resample") not in RESAMPLE:
        raise UserError(f"{folder / IMAGES} says resample={images.get('resample')!r}; allowed: Pillow's 0 to 5.")
    resize: Any = shortest or (squashed if squashed != image_size else None)
    fits = image_size and (resize is None or (isinstance(resize, int) and resize >= max(pair(image_size))))
    if not images.get("do_resize", True) or not fits or not (shortest or squashed):
        names = ("do_resize", "size", "do_center_crop", "crop_size")
        settings = ", ".join(f"{name}={images.get(name)!r}" for name in names)
        logger.warning("%s: images are squashed to size: %s is not supported", folder / IMAGES, settings)
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
    """The model of the arrays and of config.json. Raises UserError for one that computes something else."""
    return _infer_resnet(settings, arrays, images) if kind == "bit" else _infer_vit(kind, settings, arrays)


def _infer_vit(kind: str, settings: dict[str, Any], arrays: dict[str, Tensor]) -> ViTConfig:
    """The configuration. Turns `arrays` into a ViT's here: adds zero biases of q, k and v where there are none,
    and drops what a classifier on CLIP or SigLIP does not read.

    With a classifier, the image towers classify the mean over patches: CLIP's without its last LayerNorm, where the
    class token takes part in attention alone, so it is a register here; SigLIP's without its attention pooling.
    """
    family, clip, siglip = FAMILIES[kind], kind.startswith("clip"), kind.startswith("siglip")
    dinov2, dinov3 = kind.startswith("dinov2"), kind == "dinov3_vit"
    mean_of_tower = (clip or siglip) and "ForImageClassification" in str(settings.get("architectures"))
    settings = settings.get("vision_config", settings)
    for name in [name for name in arrays if mean_of_tower and name.startswith("post_layernorm." if clip else "head.")]:
        del arrays[name]
    if clip and mean_of_tower:
        fold_class_token(arrays)
    width, channels, patch_size, _ = _shape(arrays, family.names["embedding"], 4)
    depth = len({name.removeprefix(family.blocks).split(".")[0] for name in arrays if name.startswith(family.blocks)})
    sizes = {"num_hidden_layers": depth, "hidden_size": width, "patch_size": patch_size, "num_channels": channels}
    check_sizes(settings, sizes)
    if not check_setting(settings, "qkv_bias", True, True, False):
        for name in (f"{family.blocks}{i}.{part}.bias" for i in range(depth) for part in family.qkv):
            arrays.setdefault(name, torch.zeros(width))
    gated = dinov3 and bool(settings.get("use_gated_mlp", False))
    swiglu = gated or (dinov2 and bool(settings.get("use_swiglu_ffn", False)))
    activation = check_setting(settings, "hidden_act", *(("gelu", "silu") if gated else (family.activation, *GELU)))
    head = next((name for name in HEADS if f"{name}.weight" in arrays), None)
    pooler = "pooler.dense.weight" in arrays and not head
    if pooler:
        check_setting(settings, "pooler_act", "tanh", "tanh")
    distilled = kind == "deit" and head in HEADS[1:]
    registers = "embeddings.distillation_token" if kind == "deit" and not distilled else "embeddings.register_tokens"
    size = to_size(settings.get("image_size", ViTConfig.image_size))
    if size is None or (dinov2 and isinstance(size, tuple)):
        allowed = "one number, because DINOv2's positions are for square images" if dinov2 else "a number, or two"
        raise UserError(f"{CONFIG} says image_size={settings['image_size']!r}; allowed: {allowed}.")
    has_mean = kind == "ijepa" or mean_of_tower or (siglip and "head.probe" not in arrays)
    return ViTConfig(
        image_size=to_size([side // patch_size * patch_size for side in pair(size)]),  # what convolutions see
        in_chans=channels,
        patch_size=patch_size,
        width=width,
        depth=depth,
        heads=settings.get("num_attention_heads", family.heads),
        mlp_dim=_mlp_dim(kind, swiglu, arrays),
        num_classes=_shape(arrays, head, 2)[0] if head else 0,
        pool="gap" if has_mean else "map" if siglip else "token+gap" if dinov2 and head else "token",
        representation_size=_shape(arrays, "pooler.dense", 2)[0] if pooler else None,
        position="none" if dinov3 else "1d",
        variant=Variant(
            gelu=GELU.get(activation, "erf"),
            swiglu=swiglu,
            layer_norm_eps=settings.get("layer_norm_eps", family.eps),
            pre_norm=clip,
            final_norm="none" if clip and mean_of_tower else "tokens",
            layer_scale=settings.get("layerscale_value", 1.0) if dinov2 or dinov3 else None,
            registers=require_shape(CONFIG, arrays, registers, 3)[1] if registers in arrays else int(clip and has_mean),
            distilled=distilled,
            rotary=Rotary(base=float(settings.get("rope_theta", 100.0))) if dinov3 else None,
            position_interpolation="bicubic_antialias" if kind == "dinov2_with_registers" else "bicubic",
        ),
    )


def _mlp_dim(kind: str, swiglu: bool, arrays: dict[str, Tensor]) -> int:
    family = FAMILIES[kind]
    fc2 = "mlp.weights_out" if swiglu and kind != "dinov3_vit" else family.names.get("mlp.fc2", "mlp.fc2")
    return _shape(arrays, f"{family.blocks}0.{fc2}", 2)[1]


def _infer_resnet(settings: dict[str, Any], arrays: dict[str, Tensor], images: dict[str, Any]) -> ResNetConfig:
    v2 = check_setting(settings, "layer_type", "preactivation", "preactivation", "bottleneck") == "preactivation"
    check_setting(settings, "global_padding", None, *((None,) if v2 else ("SAME", "same")))
    check_setting(settings, "embedding_dynamic_padding", False, not v2)
    for name, value in {"hidden_act": "relu", "num_groups": 32, "width_factor": 1}.items():
        check_setting(settings, name, value, value)
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
    check_setting(settings, "output_stride", 32, *(2**i for i in range(16) if 2**i >= body.stride))
    num_classes = _shape(arrays, "classifier.1", 2)[0] if "classifier.1.weight" in arrays else 0
    return ResNetConfig(image_size=read_size(images) or ResNetConfig.image_size, body=body, num_classes=num_classes)


def _shape(arrays: dict[str, Tensor], layer: str, ndim: int) -> tuple[int, ...]:
    return require_shape("the file", arrays, f"{layer}.weight", ndim)


# -------------------------------------------------------------------------------------------------------- writing


def model_settings(kind: str, config: ViTConfig, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model with this metadata."""
    suffix = (
        "ForImageClassification" + ("WithTeacher" if config.variant.distilled else "")
        if config.num_classes
        else "Model"
    )
    suffix = "ModelWithProjection" if kind == "clip_vision_model" and config.num_classes else suffix
    act = {"erf": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}[config.variant.gelu]
    height, width = processed_size(_preprocessing(config, metadata).at(config.image_size), config)
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
        settings |= {} if kind == "dinov2" else {"num_register_tokens": config.variant.registers}
    if kind.startswith("dinov2"):
        settings |= {"mlp_ratio": dinov2_mlp_ratio(config), "use_swiglu_ffn": config.variant.swiglu}
    else:
        settings["intermediate_size"] = config.mlp_dim
    if kind == "dinov3_vit":
        assert config.variant.rotary
        settings |= {"rope_theta": config.variant.rotary.base, "key_bias": True, "use_gated_mlp": config.variant.swiglu}
    elif not FAMILIES[kind].names.get("pre_norm"):
        settings["qkv_bias"] = True
    if config.representation_size:
        settings["pooler_output_size"] = config.representation_size
    if kind == "clip_vision_model" and config.num_classes:
        settings["projection_dim"] = config.num_classes
    elif config.num_classes:
        settings = {"vision_config": settings} if kind == "clip" else settings
        labels = list(metadata.get("classes") or (f"LABEL_{i}" for i in range(config.num_classes)))
        settings["id2label"] = {str(i): label for i, label in enumerate(labels)}
        settings["label2id"] = {label: i for i, label in enumerate(labels)}
    settings |= multi_label_settings(metadata)
    return {"architectures": [CLASSES[kind] + suffix], "model_type": kind, **settings}


def _preprocessing(config: ViTConfig, metadata: Mapping[str, Any]) -> Preprocessing:
    return Preprocessing.read(metadata, "extra", config.image_size)


def dinov2_mlp_ratio(config: ViTConfig) -> int | None:
    """The whole number from which their DINOv2 computes the width of this MLP; None if there is none."""

    def mlp_dim(ratio: int) -> int:
        return (config.width * ratio * 2 // 3 + 7) // 8 * 8 if config.variant.swiglu else config.width * ratio

    return next((ratio for ratio in range(1, 65) if mlp_dim(ratio) == config.mlp_dim), None)


def image_settings(config: ViTConfig, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The settings for a model with this metadata. Their processors always antialias, and have no area averaging."""
    prepared = _preprocessing(config, metadata)
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
