"""What is read from the JSON files of checkpoints: the types of all fields, for `vitlab.settings.read_fields`, and the
fields of models with several labels per image."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from vitlab.settings import PositiveFloat, PositiveInt

_SIDES = PositiveInt | tuple[PositiveInt, PositiveInt]
NAMES = tuple[str | int | float, ...]
"""The names of classes."""
EXTRA: dict[str, Any] = {
    "classes": NAMES,
    "multi_label": bool,
    "dataset": str,
    "source": str,
    "reject_below": Annotated[float, Ge(0), Le(1)],
    "temperature": PositiveFloat,
    "coverage_masses": tuple[float, ...],
}
"""`extra` in our config.json. `Preprocessing.read` checks its `preprocessing`."""

_VISION_MODEL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size"), PositiveInt),
    **dict.fromkeys(("num_channels", "intermediate_size", "num_groups", "width_factor", "output_stride"), PositiveInt),
    **dict.fromkeys(("hidden_act", "pooler_act", "layer_type", "global_padding"), str),
    **dict.fromkeys(("qkv_bias", "use_swiglu_ffn", "use_gated_mlp", "embedding_dynamic_padding"), bool),
    **dict.fromkeys(("layer_norm_eps", "rope_theta"), PositiveFloat),
    "layerscale_value": float,
    "image_size": _SIDES,
    "depths": tuple[PositiveInt, ...],
}
HUGGINGFACE_MODEL: dict[str, Any] = _VISION_MODEL | {
    "architectures": tuple[str, ...],
    "problem_type": str,
    "id2label": dict,
    "vision_config": _VISION_MODEL,
}
"""config.json; `read_classes` checks its `id2label`."""
HUGGINGFACE_SIZE: dict[str, Any] = dict.fromkeys(
    ("height", "width", "shortest_edge", "longest_edge"), PositiveInt | None
)
"""`size` and `crop_size` of preprocessor_config.json, where they are objects."""
HUGGINGFACE_IMAGES: dict[str, Any] = {
    **dict.fromkeys(("image_processor_type", "feature_extractor_type"), str),
    **dict.fromkeys(("do_resize", "do_center_crop", "do_rescale", "do_normalize"), bool | None),
    **dict.fromkeys(("size", "crop_size"), _SIDES | dict | None),
    "resample": Annotated[int, Ge(0), Le(5)],
    "rescale_factor": PositiveFloat,
    "image_mean": tuple[float, ...],
    "image_std": tuple[PositiveFloat, ...],
}
"""preprocessor_config.json."""

OPEN_CLIP: dict[str, Any] = {
    "model_cfg": {
        "quick_gelu": bool,
        "vision_cfg": {
            "image_size": _SIDES,
            **dict.fromkeys(("width", "head_width"), PositiveInt),
            **dict.fromkeys(("timm_model_name", "timm_pool"), str),
            "pool_type": Literal["tok", "avg"],
            "final_ln_after_pool": bool,
            "norm_kwargs": {"eps": PositiveFloat},
            "act_kwargs": {"approximate": Literal["none", "tanh"]},
        },
    },
    "preprocess_cfg": {
        **dict.fromkeys(("interpolation", "resize_mode"), str),
        "mean": tuple[float, ...],
        "std": tuple[PositiveFloat, ...],
    },
}
"""open_clip_config.json."""

_TIMM_ARGS: dict[str, Any] = {
    **dict.fromkeys(("num_heads", "depth", "embed_dim", "in_chans", "attn_pool_num_heads"), PositiveInt),
    **dict.fromkeys(("patch_size", "img_size"), _SIDES),
    **dict.fromkeys(("global_pool", "act_layer", "norm_layer", "pos_embed", "rope_type", "rope_grid_indexing"), str),
    **dict.fromkeys(("dynamic_img_size", "pool_include_prefix", "final_norm", "rope_rotate_half"), bool),
    **dict.fromkeys(("use_abs_pos_emb", "use_fc_norm", "use_post_transformer_norm", "use_rot_pos_emb"), bool),
    "init_values": float,
    "rope_temperature": PositiveFloat,
    "rope_grid_offset": float,
    "ref_feat_shape": tuple[PositiveInt, PositiveInt] | None,
}
_TIMM_IMAGES: dict[str, Any] = {
    **dict.fromkeys(("input_size", "test_input_size"), tuple[PositiveInt, PositiveInt, PositiveInt]),
    **dict.fromkeys(("crop_pct", "test_crop_pct"), PositiveFloat),
    **dict.fromkeys(("crop_mode", "interpolation"), str),
    "mean": tuple[float, ...],
    "std": tuple[PositiveFloat, ...],
    "label_names": tuple | dict,
}
TIMM: dict[str, Any] = _TIMM_IMAGES | {
    "architecture": str,
    "global_pool": str,
    "problem_type": str,
    "model_args": _TIMM_ARGS,
    "pretrained_cfg": _TIMM_IMAGES,
}
"""config.json; older files have on the first level what newer ones have in `pretrained_cfg`."""

PROBLEM_TYPE, MULTI_LABEL = "problem_type", "multi_label_classification"
"""The setting of Hugging Face's config.json for a model whose classes each have a sigmoid; timm's ignores it."""
THRESHOLDS = "label_thresholds"
"""The threshold of each of these classes, in their order; a name of ours, which both ignore."""


def multi_label_settings(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """What config.json of the other formats says of a model of several labels per image; empty for any other."""
    if not metadata.get("multi_label"):
        return {}
    thresholds = {THRESHOLDS: metadata[THRESHOLDS]} if THRESHOLDS in metadata else {}
    return {PROBLEM_TYPE: MULTI_LABEL, **thresholds}


def multi_label_metadata(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `multi_label_settings`."""
    if settings.get(PROBLEM_TYPE) != MULTI_LABEL:
        return {}
    thresholds = {THRESHOLDS: settings[THRESHOLDS]} if THRESHOLDS in settings else {}
    return {"multi_label": True, **thresholds}
