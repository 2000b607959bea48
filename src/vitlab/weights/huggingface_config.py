"""Hugging Face's config.json, for `huggingface.py`: `infer_config` reads it, `model_settings` writes it. `settings` are
its content; `arrays` have the names of `huggingface_layout`."""

from collections.abc import Collection, Mapping
from typing import Any, Literal

from vitlab.errors import UserError
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, Rotary, Variant, ViTConfig
from vitlab.models.image_size import ImageSize
from vitlab.preprocessing import Preprocessing, pair
from vitlab.settings import read_fields
from vitlab.weights.folder import CONFIG, processed_size
from vitlab.weights.huggingface_images import read_size, to_size
from vitlab.weights.huggingface_layout import DISTILLED_HEADS, HEADS, Arrays, Family, Readout, part_names, reads_mean
from vitlab.weights.json_fields import NAMES, multi_label_settings
from vitlab.weights.layout import as_size, check_sizes, count_units, require_shape

GELU: dict[str, Literal["erf", "tanh", "quick"]] = {
    "gelu": "erf",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "quick_gelu": "quick",
}
"""Their `hidden_act` -> our `gelu`."""


def check_setting(settings: dict[str, Any], name: str, default: Any, *, supported: Collection[Any]) -> Any:
    """The value of a setting. Raises UserError for one that cannot be computed here."""
    value = settings.get(name, default)
    if value not in supported:
        raise UserError(f"{CONFIG} says {name}={value!r}; supported: {', '.join(map(repr, supported))}.")
    return value


def read_classes(settings: dict[str, Any]) -> list[str] | None:
    """The names of the outputs in order, where there are any."""
    labels = settings.get("id2label")
    try:
        names = None if labels is None else [labels[str(i)] for i in range(len(labels))]
        read_fields({"id2label": names}, {"id2label": NAMES}, CONFIG)
        return names and list(map(str, names))
    except (KeyError, TypeError) as error:
        raise UserError(f"{CONFIG} says id2label={labels!r}; it must name the outputs '0', '1' and so on.") from error


def infer_config(family: Family, settings: dict[str, Any], arrays: Arrays, processor: dict[str, Any]) -> ModelConfig:
    """The configuration of the model with these settings and arrays. `processor` are the settings of the image
    processor, which show the image size of a ResNet. Raises UserError for a model that computes something else."""
    if family.is_resnet:
        return _infer_resnet(settings, arrays, read_size(processor))
    if family.is_image_tower:
        lacks_pooling = family.body.pool == "map" and "head.probe" not in arrays  # as SigLIP's body may
        has_classifier = reads_mean(family, settings) or lacks_pooling
    else:
        has_classifier = _find_head(arrays) is not None
    readout = family.classifier if has_classifier else family.body
    return _infer_vit(family, settings.get("vision_config", settings), arrays, readout)


def _infer_vit(family: Family, settings: dict[str, Any], arrays: Arrays, readout: Readout) -> ViTConfig:
    width, channels, patch_size, _ = _shape(arrays, family.names["embedding"], 4)
    depth = len({name.removeprefix(family.blocks).split(".")[0] for name in arrays if name.startswith(family.blocks)})
    sizes = {"num_hidden_layers": depth, "hidden_size": width, "patch_size": patch_size, "num_channels": channels}
    check_sizes(settings, sizes)
    head = _find_head(arrays)
    variant = _infer_variant(family, settings, arrays, readout)
    (fc2,) = part_names(family, "mlp.fc2", variant)
    has_pooler = "pooler.dense.weight" in arrays and not head
    if has_pooler:
        check_setting(settings, "pooler_act", "tanh", supported=("tanh",))
    return ViTConfig(
        image_size=_infer_image_size(family, settings, patch_size),
        in_chans=channels,
        patch_size=patch_size,
        width=width,
        depth=depth,
        heads=settings.get("num_attention_heads", family.heads),
        mlp_dim=_shape(arrays, f"{family.blocks}0.{fc2}", 2)[1],
        num_classes=_shape(arrays, head, 2)[0] if head else 0,
        pool=readout.pool,
        representation_size=_shape(arrays, "pooler.dense", 2)[0] if has_pooler else None,
        position="none" if family.is_dinov3 else "1d",
        variant=variant,
    )


def _infer_variant(family: Family, settings: dict[str, Any], arrays: Arrays, readout: Readout) -> Variant:
    is_distilled = family.has_distillation_token and _find_head(arrays) in DISTILLED_HEADS
    has_swiglu = bool(family.swiglu_setting and settings.get(family.swiglu_setting))
    activations = ("silu",) if has_swiglu and family.is_dinov3 else tuple(GELU)
    activation = check_setting(settings, "hidden_act", family.activation, supported=activations)
    registers = readout.registers
    if family.names["registers"] in arrays and not (family.is_image_tower or is_distilled):
        registers = require_shape(CONFIG, arrays, family.names["registers"], 3)[1]
    return Variant(
        gelu=GELU.get(activation, "erf"),
        swiglu=has_swiglu,
        layer_norm_eps=settings.get("layer_norm_eps", family.layer_norm_eps),
        pre_norm=family.is_clip,
        final_norm=readout.final_norm,
        layer_scale=settings.get("layerscale_value", 1.0) if family.has_layer_scale else None,
        registers=registers,
        distilled=is_distilled,
        rotary=Rotary(base=float(settings.get("rope_theta", 100.0))) if family.is_dinov3 else None,
        position_interpolation=family.interpolation,
    )


def _infer_image_size(family: Family, settings: dict[str, Any], patch_size: int) -> ImageSize:
    """The image size of the position table. Pixels that no whole patch covers are left out."""
    is_dinov2 = family.is_dinov2
    size = to_size(settings.get("image_size", ViTConfig.image_size))
    if size is None or (is_dinov2 and isinstance(size, tuple)):
        allowed = "one number, because DINOv2's positions are for square images" if is_dinov2 else "a number, or two"
        raise UserError(f"{CONFIG} says image_size={settings['image_size']!r}; allowed: {allowed}.")
    return as_size(*(side // patch_size * patch_size for side in pair(size)))


def _infer_resnet(settings: dict[str, Any], arrays: Arrays, image_size: ImageSize | None) -> ResNetConfig:
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
    return ResNetConfig(image_size=image_size or ResNetConfig.image_size, body=body, num_classes=num_classes)


def _find_head(arrays: Arrays) -> str | None:
    return next((name for name in HEADS if f"{name}.weight" in arrays), None)


def _shape(arrays: Arrays, layer: str, ndim: int) -> tuple[int, ...]:
    return require_shape("the file", arrays, f"{layer}.weight", ndim)


def model_settings(family: Family, config: ViTConfig, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of a model with this metadata."""
    settings = _body_settings(family, config, metadata)
    if not config.num_classes:
        suffix = "Model"
    elif family.written_head == "projection":
        suffix = "ModelWithProjection"
        settings["projection_dim"] = config.num_classes
    else:
        suffix = "ForImageClassificationWithTeacher" if config.variant.distilled else "ForImageClassification"
        if family.is_image_tower:
            settings = {"vision_config": settings}
        labels = list(metadata.get("classes") or (f"LABEL_{i}" for i in range(config.num_classes)))
        settings["id2label"] = {str(i): label for i, label in enumerate(labels)}
        settings["label2id"] = {label: i for i, label in enumerate(labels)}
    settings |= multi_label_settings(metadata)
    return {"architectures": [family.class_name + suffix], "model_type": family.model_type, **settings}


def _body_settings(family: Family, config: ViTConfig, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a model without its head."""
    variant = config.variant
    activation = {"erf": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}[variant.gelu]
    prepared = Preprocessing.read(metadata, "extra", config.image_size).at(config.image_size)
    height, width = processed_size(prepared, config)
    settings: dict[str, Any] = {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": "silu" if family.is_dinov3 and variant.swiglu else activation,
        "layer_norm_eps": variant.layer_norm_eps,
        "image_size": height if height == width else [height, width],
        "patch_size": config.patch_size,
        "num_channels": config.in_chans,
    }
    if family.has_layer_scale:
        settings["layerscale_value"] = variant.layer_scale
    if family.has_registers:
        settings["num_register_tokens"] = variant.registers
    if family.is_dinov2:
        settings["mlp_ratio"] = dinov2_mlp_widths(config)[config.mlp_dim]
    else:
        settings["intermediate_size"] = config.mlp_dim
    if family.is_dinov3:
        assert variant.rotary
        settings |= {"rope_theta": variant.rotary.base, "key_bias": True}
    if family.swiglu_setting:
        settings[family.swiglu_setting] = variant.swiglu
    if not (family.is_dinov3 or family.is_image_tower):
        settings["qkv_bias"] = True
    if config.representation_size:
        settings["pooler_output_size"] = config.representation_size
    return settings


def dinov2_mlp_widths(config: ViTConfig) -> dict[int, int]:
    """Width of the MLPs -> the `mlp_ratio` from which their DINOv2 computes it, the lowest one."""
    ratios = range(64, 0, -1)
    if config.variant.swiglu:
        return {(config.width * ratio * 2 // 3 + 7) // 8 * 8: ratio for ratio in ratios}
    return {config.width * ratio: ratio for ratio in ratios}
