"""Whose names the tensors of a file have, and those names as timm's.

| whose | how they are recognized |
|---|---|
| timm, DINO, MAE, DeiT, I-JEPA | `patch_embed.proj.weight`; a decoder, predictor or projection head is left out |
| DINOv2, DINOv3 | the same, with `mask_token`, `register_tokens` or `storage_tokens`; blocks may be in chunks |
| CLIP of OpenAI and of open_clip | `class_embedding` beside `conv1.weight` |
| torchvision | `conv_proj.weight` |
| BiT of timm | `stem.conv.weight` |

All of them may have a prefix (`module.`, `model.`, `backbone.`, `teacher.backbone.`, `visual.trunk.`, any other): it
precedes the tensor that the table names. Tensors with another prefix are not of this model.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitlab.errors import UserError, first_ten
from vitlab.weights.huggingface_layout import HALF, IMAGENET, OPENAI
from vitlab.weights.layout import require_shape
from vitlab.weights.timm_architectures import SUPPORTED, named_args
from vitlab.weights.unsupported import family_of_tensors, why_unsupported

WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
"""What torch.compile, FSDP, activation checkpointing and DataParallel put into names, anywhere."""
PREFERRED = re.compile(r"(^|[._])(teacher|ema|target_encoder|base_encoder|encoder_q)[._]")
"""Prefixes of the one of several models that is evaluated: DINO's teacher, an average, I-JEPA's and MoCo's encoder."""
LEFT_OUT = re.compile(
    r"decoder[._]|predictor|projector|(dino|ibot)_head\.|head\.(mlp|last_layer|\d+)\b|mask(ed)?_(token|embed)$"
    r"|local_cls_norm\.|n_averaged$"
)
"""Parts that only pre-training uses."""
HEAD = re.compile(r"(?:.*\.)?(?:head|heads|classifier|fc|linear)(?=\.)")
"""A linear layer beside the ViT that may be its head."""


class Naming(NamedTuple):
    """How a code base names its tensors."""

    whose: str
    anchors: tuple[str, ...]
    """Tensors that each of their files has, behind a common prefix."""
    names: tuple[tuple[str, str], ...] = ()
    """Patterns of their names -> timm's; all others are the same."""


_TIMM = Naming(
    "timm",
    ("patch_embed.proj.weight",),
    (
        (r"^(register|storage)_tokens$", "reg_token"),
        (r"^pre_logits\.fc\.", "pre_logits."),  # timm before 0.6
        (r"\.mlp\.w12\.", ".mlp.fc1."),
        (r"\.mlp\.w1\.", ".mlp.fc1_g."),
        (r"\.mlp\.w2\.", ".mlp.fc1_x."),
        (r"\.mlp\.w3\.", ".mlp.fc2."),
    ),
)
_CLIP = Naming(
    "CLIP",
    ("class_embedding", "conv1.weight"),
    (
        (r"^class_embedding$", "cls_token"),
        (r"^positional_embedding$", "pos_embed"),
        (r"^conv1\.", "patch_embed.proj."),
        (r"^ln_pre\.", "norm_pre."),
        (r"^ln_post\.", "norm."),
        (r"^proj$", "head.weight"),
        (r"^transformer\.resblocks\.", "blocks."),
        (r"\.ln_(\d)\.", r".norm\1."),
        (r"\.ls_(\d)\.", r".ls\1."),
        (r"\.attn\.in_proj_", ".attn.qkv."),
        (r"\.attn\.out_proj\.", ".attn.proj."),
        (r"\.mlp\.c_fc\.", ".mlp.fc1."),
        (r"\.mlp\.c_proj\.", ".mlp.fc2."),
    ),
)
_TORCHVISION = Naming(
    "torchvision",
    ("conv_proj.weight",),
    (
        (r"^class_token$", "cls_token"),
        (r"^encoder\.pos_embedding$", "pos_embed"),
        (r"^conv_proj\.", "patch_embed.proj."),
        (r"^encoder\.ln\.", "norm."),
        (r"^heads\.(head|pre_logits)\.", r"\1."),
        (r"^encoder\.layers\.encoder_layer_", "blocks."),
        (r"\.ln_(\d)\.", r".norm\1."),
        (r"\.self_attention\.in_proj_", ".attn.qkv."),
        (r"\.self_attention\.out_proj\.", ".attn.proj."),
        (r"\.mlp\.(0|linear_1)\.", ".mlp.fc1."),
        (r"\.mlp\.(3|linear_2)\.", ".mlp.fc2."),
    ),
)
NAMINGS = (_TIMM, _TORCHVISION, _CLIP, Naming("BiT", ("stem.conv.weight",)))
OTHERS = (
    (r"lora_|adapter", "unmerged adapters of peft: merge them (merge_and_unload) and save the whole model"),
    (r"embeddings\.|patch_embeddings|vision_model\.", "Hugging Face's: give their folder, which has a config.json"),
    (r"^embedding\.weight$|\.attention\.qkv\.", "vitlab's: give the folder of save_model, which has a config.json"),
    (r"layers\.\d+\.ln1\.", "mmpretrain's, which are not read"),
    (r"layer\d\.\d+\.(conv|bn)\d|\.running_mean$", "those of a convolutional network with BatchNorm"),
)
"""Pattern of a tensor of other code, and what its names are."""
READ = "those of timm, DINO, DINOv2, DINOv3, MAE, open_clip, OpenAI's CLIP and torchvision, behind any prefix"


class Images(NamedTuple):
    """How a code base prepares images, where no file says it."""

    mean_std: tuple[list[float], list[float]] = HALF
    size: int | None = None
    """Side of the model's input; None is the size of its position table."""
    crop: float | None = None
    """The part of the resized image's shorter side that is cropped; None squashes the whole image."""
    interpolation: Any = "bilinear"


DINOV3 = named_args("vit_small_patch16_dinov3")
"""timm's arguments of its positions, and LayerNorm's eps."""
UNKNOWN_IMAGES = Images()
IMAGENET_IMAGES = Images(IMAGENET, crop=0.875, interpolation="bicubic")
OPENAI_IMAGES = Images(OPENAI, crop=1.0, interpolation="bicubic")


@dataclass(frozen=True)
class Origin:
    """Where the tensors of a file come from, as far as names and shapes show it."""

    whose: str
    images: Images = UNKNOWN_IMAGES
    args: Mapping[str, Any] = field(default_factory=dict)
    """timm's `model_args` that follow."""
    eps: float | None = None
    """LayerNorm's; None is what follows from the rest."""
    antialias: bool = True
    """Whether positions are resampled with antialiasing."""
    described: Mapping[str, Any] = field(default_factory=dict)
    """What a file beside it says, by the names of `Assumptions`, `image_size` and timm's `architecture`."""
    prefix: str = ""
    left_out: tuple[str, ...] = ()
    """Tensors of the file that are not of this model."""


def to_timm_names(
    where: str, tensors: Mapping[str, Tensor], prefix: str | None = None
) -> tuple[dict[str, Tensor], Origin]:
    """The tensors of one model by timm's names, and their origin. `prefix` chooses among several models.

    Raises UserError for names that are not read, and for several models where none is the one to evaluate.
    """
    unwrapped = {WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}
    stored = unwrapped if len(unwrapped) == len(tensors) else dict(tensors)
    naming, prefixes = _find_models(where, stored)
    prefix = _choose(where, prefixes, prefix)
    others = tuple(other for other in prefixes if len(other) > len(prefix))
    own = [name for name in stored if name.startswith(prefix) and not name.startswith(others)]
    inside = _join_chunks({name.removeprefix(prefix): stored[name] for name in own})
    named = {_rename(name, naming): tensor for name, tensor in inside.items()}
    outside = stored.keys() - {*own}
    width = None if naming.whose == "BiT" else require_shape(where, named, "patch_embed.proj.weight", 4)[0]
    beside = {name: stored[name] for name in outside if not any(name.startswith(other) for other in prefixes if other)}
    outside -= _take_head(named, beside, width)
    origin = _find_origin(naming, stored.keys(), named)
    dropped = [name for name in named if LEFT_OUT.match(name)]
    for name in dropped:
        del named[name]
    if naming is _CLIP:
        _complete_clip(where, named)
    if origin.whose == "DINOv3":
        rotary = {name: value for name, value in DINOV3.items() if name != "eps"}
        origin = replace(origin, args=rotary | _complete_dinov3(where, named, width))
    return named, replace(origin, prefix=prefix, left_out=(*sorted(outside), *(prefix + name for name in dropped)))


def _find_models(where: str, tensors: Mapping[str, Tensor]) -> tuple[Naming, list[str]]:
    """Whose names they are, and the prefixes of the models with them."""
    for naming in NAMINGS:
        first, *others = naming.anchors
        prefixes = [name.removesuffix(first) for name in tensors if re.search(rf"(^|\.){re.escape(first)}$", name)]
        prefixes = [prefix for prefix in prefixes if all(prefix + other in tensors for other in others)]
        if prefixes:
            return naming, prefixes
    if family := family_of_tensors(tensors.keys()):
        raise UserError(f"{where}: {why_unsupported(family)}. {SUPPORTED}")
    guess = next((whose for pattern, whose in OTHERS if any(re.search(pattern, name) for name in tensors)), "unknown")
    raise UserError(
        f"{where} has {len(tensors)} tensors whose names are {guess}: {first_ten(sorted(tensors)) or 'none'}. Names "
        f"that are read: {READ}."
    )


def _choose(where: str, prefixes: list[str], given: str | None) -> str:
    if given is not None:
        chosen = [prefix for prefix in prefixes if prefix.removesuffix(".") == given.removesuffix(".")]
    else:
        chosen = prefixes if len(prefixes) == 1 else list(filter(PREFERRED.search, prefixes))
    if len(chosen) != 1:
        raise UserError(
            f"{where} holds models whose names begin with {first_ten([repr(prefix) for prefix in prefixes])}; give one "
            f"of these, as `--assume.prefix` of convert, or assume={{'prefix': ...}}."
        )
    return chosen[0]


def _rename(name: str, naming: Naming) -> str:
    for pattern, replacement in naming.names:
        name = re.sub(pattern, replacement, name)
    return name


def _join_chunks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The blocks of DINOv2's and DINOv3's training, which come in chunks (`blocks.CHUNK.NUMBER.`), in one sequence."""
    parts = {name: match for name in tensors if (match := re.match(r"blocks\.(\d{1,4})\.(\d{1,4})\.", name))}
    order = sorted({(int(match[1]), int(match[2])) for match in parts.values()})
    numbers = {key: number for number, key in enumerate(order)}

    def join(name: str) -> str:
        match = parts.get(name)
        return f"blocks.{numbers[int(match[1]), int(match[2])]}.{name[match.end() :]}" if match else name

    return {join(name): tensor for name, tensor in tensors.items()}


def _take_head(named: dict[str, Tensor], beside: Mapping[str, Tensor], width: int | None) -> set[str]:
    """Where a ViT has no head, the one linear layer on its tokens becomes it; returns its names in `beside`."""
    if "head.weight" in named:
        return set()
    groups: dict[str, dict[str, Tensor]] = {}
    for source in (beside, named):
        for name, tensor in source.items():
            if not name.startswith("blocks.") and (match := HEAD.match(name)):
                groups.setdefault(match[0], {})[name] = tensor
    layers = [layer for layer in groups.values() if _is_linear(layer, width)]
    if len(layers) != 1:
        return set()
    for name, tensor in layers[0].items():
        named.pop(name, None)
        named[f"head.{name.rpartition('.')[2]}"] = tensor
    named.setdefault("head.bias", named["head.weight"].new_zeros(len(named["head.weight"])))
    return {name for name in layers[0] if name in beside}


def _is_linear(layer: Mapping[str, Tensor], width: int | None) -> bool:
    """Whether these are weight and bias, or only the weight, of one layer on `width` features."""
    leaves = sorted(name.rpartition(".")[2] for name in layer)
    rows = [tensor.shape[0] for tensor in layer.values() if tensor.ndim]
    weight = next((tensor for name, tensor in layer.items() if name.endswith(".weight")), None)
    is_weight = weight is not None and weight.ndim == 2 and weight.shape[1] == width
    return is_weight and leaves in (["weight"], ["bias", "weight"]) and len({*rows}) == 1


def _find_origin(naming: Naming, stored: Collection[str], named: Mapping[str, Tensor]) -> Origin:
    """What names show; `stored` are the whole file's, without wrappers."""
    if naming is _CLIP:
        # Only OpenAI's archives have numbers beside the weights; open_clip's models mostly have the exact GELU.
        args = {"act_layer": "quick_gelu"} if "input_resolution" in stored else {}
        return Origin("CLIP", OPENAI_IMAGES, args, eps=1e-5)
    if naming is not _TIMM:
        bilinear = IMAGENET_IMAGES._replace(interpolation="bilinear")
        return Origin(naming.whose, bilinear) if naming is _TORCHVISION else Origin(naming.whose)
    if "rope_embed.periods" in named or any(name.endswith("storage_tokens") for name in stored):
        return Origin("DINOv3", IMAGENET_IMAGES._replace(size=224), eps=DINOV3["eps"])
    if any(name.startswith("decoder_") for name in named):
        return Origin("MAE", IMAGENET_IMAGES)
    if "mask_token" in named:
        return Origin("DINOv2", IMAGENET_IMAGES._replace(size=224), antialias="reg_token" in named)
    if any(re.search(r"(^|\.)(teacher|student|dino_head|head\.mlp|head\.last_layer)\.", name) for name in stored):
        return Origin("DINO", IMAGENET_IMAGES)
    if "norm_pre.weight" in named:
        return Origin("timm", OPENAI_IMAGES)
    has_class, has_head = "cls_token" in named, "head.weight" in named
    # DeiT, DeiT-III, MAE fine-tuned, and what was trained without labels: DINO, iBOT, MoCo, MAE, UNI.
    is_later = {"dist_token", "fc_norm.weight", "blocks.0.ls1.gamma"} & named.keys() or not has_head
    return Origin("timm", IMAGENET_IMAGES if has_class and is_later else UNKNOWN_IMAGES)


def _complete_dinov3(where: str, named: dict[str, Tensor], width: int | None) -> dict[str, Any]:
    """In place: the biases of keys, which a mask makes zero, become zero. Returns the number of heads, which the
    periods show: Dh is four times theirs."""
    for name in [name for name in named if name.endswith(".attn.qkv.bias_mask")]:
        del named[name]
    for name in [name for name in named if name.endswith(".attn.qkv.bias") and named[name].ndim]:
        q, k, v = (named[name][i * len(named[name]) // 3 : (i + 1) * len(named[name]) // 3] for i in range(3))
        named[name] = torch.cat([q, torch.zeros_like(k), v])
    periods = named.pop("rope_embed.periods", None)
    if periods is None or width is None or periods.ndim != 1 or not 4 * len(periods) <= width:
        return {}
    usual = DINOV3["rope_temperature"] ** (torch.arange(len(periods)) / len(periods))
    if not periods.is_meta and not torch.allclose(periods.float(), usual, rtol=0.02):  # they are in bfloat16
        raise UserError(f"{where}: its rotary periods are not DINOv3's (base 100), the only ones that are read.")
    return {"num_heads": width // (4 * len(periods))}


def _complete_clip(where: str, named: dict[str, Tensor]) -> None:
    """In place: the shapes of timm, and the projection as a head."""
    if "norm.weight" not in named or any(name.startswith("attn_pool.") for name in named):
        raise UserError(
            f"{where} is no ViT of CLIP: its output is pooled by attention (CoCa, Perception Encoder), or has no "
            f"ln_post, and rotary positions are in no tensor. Give timm's folder of it, with the architecture in "
            f"config.json."
        )
    named["cls_token"] = named["cls_token"].reshape(1, 1, -1)
    if "pos_embed" in named:
        named["pos_embed"] = named["pos_embed"][None]
    if "head.weight" in named and named["head.weight"].ndim == 2:
        named["head.weight"] = named["head.weight"].T
        named["head.bias"] = named["head.weight"].new_zeros(len(named["head.weight"]))
    if "norm_pre.weight" not in named:
        named["patch_embed.proj.bias"] = torch.zeros_like(named["norm.weight"])
