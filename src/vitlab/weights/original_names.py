"""Recognizes the code base that named the tensors of a file, and renames them to timm's names, for `timm.py`.

| code base | how it is recognized |
|---|---|
| timm, DINO, MAE, DeiT, I-JEPA | `patch_embed.proj.weight`; a decoder, predictor or projection head is left out |
| DINOv2, DINOv3 | the same, with `mask_token`, `register_tokens` or `storage_tokens`; blocks may be in chunks |
| CLIP of OpenAI and of open_clip | `class_embedding` beside `conv1.weight` |
| torchvision | `conv_proj.weight` |
| BiT of timm | `stem.conv.weight` |

All of them may have a prefix (`module.`, `model.`, `backbone.`, `teacher.backbone.`, `visual.trunk.`, any other): it
precedes the tensor that the table names. Tensors with another prefix do not belong to this model.
"""

import collections
import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitlab.errors import UserError, first_ten
from vitlab.preprocessing import Interpolation
from vitlab.weights.huggingface_layout import HALF, IMAGENET, OPENAI
from vitlab.weights.layout import require_shape
from vitlab.weights.timm_architectures import check_family, named_args

Tensors = dict[str, Tensor]
DINOV3 = named_args("vit_small_patch16_dinov3")
"""timm's arguments of DINOv3's positions; `eps` is LayerNorm's."""
WRAPPERS = re.compile(r"(?<![^.])(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
"""Parts of names that torch.compile, FSDP, activation checkpointing and DataParallel insert, at any place."""
PREFERRED = re.compile(r"(^|[._])(teacher|ema|target_encoder|base_encoder|encoder_q)[._]")
"""Prefixes of the model to evaluate, as in `teacher.backbone.`: DINO's teacher, an average, I-JEPA's encoder."""
PRETRAINING_ONLY = re.compile(
    r"decoder[._]|predictor|projector|(dino|ibot)_head\.|head\.(mlp|last_layer|\d+)\b|mask(ed)?_(token|embed)$"
    r"|local_cls_norm\.|n_averaged$"
)
"""Tensors, by timm's names, that only pre-training uses: decoders, projection heads, mask tokens."""
HEAD = re.compile(r"(?:.*\.)?(?:head|heads|classifier|fc|linear)(?=\.)")
"""The layer of a tensor that may be the ViT's head: `module.fc.` of `module.fc.weight`."""


class Naming(NamedTuple):
    """How a code base names its tensors."""

    anchors: tuple[str, ...]
    """Tensors that each of its files has, behind a common prefix."""
    names: tuple[tuple[str, str], ...] = ()
    """Patterns of its names -> timm's; all others are the same."""


_TIMM = Naming(
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
_TORCHVISION = Naming(
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
_CLIP = Naming(
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
_BIT = Naming(("stem.conv.weight",))
NAMINGS = (_TIMM, _TORCHVISION, _CLIP, _BIT)
UNREAD = (
    (r"lora_|adapter", "unmerged adapters of peft: merge them (merge_and_unload) and save the whole model"),
    (r"embeddings\.|patch_embeddings|vision_model\.", "Hugging Face's: give their folder, which has a config.json"),
    (r"^embedding\.weight$|\.attention\.qkv\.", "vitlab's: give the folder of save_model, which has a config.json"),
    (r"layers\.\d+\.ln1\.", "mmpretrain's, which are not read"),
    (r"layer\d\.\d+\.(conv|bn)\d|\.running_mean$", "those of a convolutional network with BatchNorm"),
)
"""Pattern of a name that is not read, and how the error describes it."""


class Images(NamedTuple):
    """How a code base prepares images, where no file says it."""

    mean_std: tuple[list[float], list[float]] = HALF
    size: int | None = None
    """Side of the model's input; None is the size of its position table."""
    crop: float | None = None
    """The part of the resized image's shorter side that is cropped; None squashes the whole image."""
    interpolation: Interpolation = "bilinear"


IMAGENET_IMAGES = Images(IMAGENET, crop=0.875, interpolation="bicubic")
OPENAI_IMAGES = Images(OPENAI, crop=1.0, interpolation="bicubic")


@dataclass(frozen=True)
class Origin:
    """Where the tensors of a file come from, as far as names and shapes show it."""

    code_base: str
    images: Images = field(default_factory=Images)
    args: Mapping[str, Any] = field(default_factory=dict)
    """timm's `model_args` that the names show."""
    eps: float | None = None
    """LayerNorm's eps; None is the default of timm's architecture."""
    antialias: bool = True
    """Whether positions are resampled with antialiasing."""
    described: Mapping[str, Any] = field(default_factory=dict)
    """What open_clip_config.json says: `heads`, `gelu`, `layer_norm_eps` and `pool` as in `Assumptions`, `image_size`,
    and timm's `architecture`. Empty without such a file."""
    prefix: str = ""
    left_out: tuple[str, ...] = ()
    """Tensors of the file that do not belong to this model."""

    def describe_left_out(self) -> str:
        """`left out: decoder (12), mask_token (1)`: their numbers by the first part of their names."""
        counts = collections.Counter(name.split(".")[0] for name in self.left_out)
        return "left out: " + ", ".join(f"{part} ({count})" for part, count in counts.items())


def to_timm_names(where: str, tensors: Mapping[str, Tensor], prefix: str | None = None) -> tuple[Tensors, Origin]:
    """The tensors of one model by timm's names, and their origin. `prefix` chooses among several models. Raises
    UserError for names that are not read, and for several models where none is the one to evaluate."""
    stored = {WRAPPERS.sub("", name): tensor for name, tensor in tensors.items()}
    if len(stored) < len(tensors):  # without wrappers, two names would be one
        stored = dict(tensors)
    naming, prefixes = find_models(where, stored)
    prefix = choose_model(where, prefixes, prefix)
    by_prefix: dict[str, Tensors] = {}  # prefix of a model -> its tensors; "" also has those of no model
    for name, tensor in stored.items():
        owner = max(filter(name.startswith, prefixes), key=len, default="")  # the longest prefix that fits
        by_prefix.setdefault(owner, {})[name] = tensor
    model = rename(by_prefix.pop(prefix, {}), prefix, naming)
    unowned = by_prefix.pop("", {})  # may hold the head
    width = None if naming is _BIT else require_shape(where, model, "patch_embed.proj.weight", 4)[0]
    if "head.weight" not in model:
        model, unowned = take_head(model, unowned, width)
    origin = find_origin(naming, stored.keys(), model.keys())
    outside = sorted([*unowned, *itertools.chain(*by_prefix.values())])  # of no model, and of the other models
    pretraining = [prefix + name for name in model if PRETRAINING_ONLY.match(name)]
    model = {name: tensor for name, tensor in model.items() if not PRETRAINING_ONLY.match(name)}
    if naming is _CLIP:
        model = complete_clip(where, model)
    if origin.code_base == "DINOv3":
        model, heads = complete_dinov3(where, model)
        origin = replace(origin, args={**origin.args, **heads})
    return model, replace(origin, prefix=prefix, left_out=(*outside, *pretraining))


def find_models(where: str, tensors: Mapping[str, Tensor]) -> tuple[Naming, list[str]]:
    """The naming of the tensors, and the prefixes of all models that have it."""
    for naming in NAMINGS:
        first, *others = naming.anchors
        prefixes = [name.removesuffix(first) for name in tensors if re.search(rf"(^|\.){re.escape(first)}$", name)]
        prefixes = [prefix for prefix in prefixes if all(prefix + other in tensors for other in others)]
        if prefixes:
            return naming, prefixes
    check_family(where, tensors.keys())
    guess = next((theirs for pattern, theirs in UNREAD if any(re.search(pattern, name) for name in tensors)), "unknown")
    raise UserError(
        f"{where} has {len(tensors)} tensors whose names are {guess}: {first_ten(sorted(tensors)) or 'none'}. Names "
        f"that are read, behind any prefix: timm, DINO, DINOv2, DINOv3, MAE, open_clip, OpenAI's CLIP, torchvision."
    )


def choose_model(where: str, prefixes: list[str], given: str | None) -> str:
    """The given prefix, the only one, or the prefix of the model to evaluate."""
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


def rename(tensors: Mapping[str, Tensor], prefix: str, naming: Naming) -> Tensors:
    """The tensors of a model by timm's names."""
    renamed = {}
    unprefixed = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    for name, tensor in _join_chunks(unprefixed).items():
        for pattern, replacement in naming.names:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def _join_chunks(tensors: Mapping[str, Tensor]) -> Tensors:
    """The blocks of DINOv2's and DINOv3's training, which come in chunks (`blocks.CHUNK.NUMBER.`), in one sequence."""
    block = re.compile(r"^blocks\.(\d{1,4})\.(\d{1,4})\.")
    order = sorted({(int(match[1]), int(match[2])) for name in tensors if (match := block.match(name))})
    joined = {chunk_and_number: f"blocks.{i}." for i, chunk_and_number in enumerate(order)}
    return {
        block.sub(lambda match: joined[int(match[1]), int(match[2])], name): tensor for name, tensor in tensors.items()
    }


def take_head(model: Tensors, unowned: Tensors, width: int | None) -> tuple[Tensors, Tensors]:
    """`model`, which has no head, with a linear layer on its tokens as its head if the file has exactly one; and
    `unowned` without that layer. `module.fc.weight` may be the head of `module.encoder.`."""
    layers: dict[str, Tensors] = {}
    for name, tensor in {**unowned, **model}.items():
        if not name.startswith("blocks.") and (match := HEAD.match(name)):
            layers.setdefault(match[0], {})[name] = tensor
    linear = [layer for layer in layers.values() if _is_linear(layer, width)]
    if len(linear) != 1:
        return model, unowned
    head = linear[0]
    unowned = {name: tensor for name, tensor in unowned.items() if name not in head}
    model = {name: tensor for name, tensor in model.items() if name not in head}
    model |= {f"head.{name.rpartition('.')[2]}": tensor for name, tensor in head.items()}
    model.setdefault("head.bias", model["head.weight"].new_zeros(len(model["head.weight"])))
    return model, unowned


def _is_linear(layer: Mapping[str, Tensor], width: int | None) -> bool:
    """Whether these are weight and bias, or only the weight, of one layer on `width` features."""
    leaves = sorted(name.rpartition(".")[2] for name in layer)
    columns = [tensor.shape[1:] for name, tensor in layer.items() if name.endswith(".weight")]
    rows = {tensor.shape[0] for tensor in layer.values() if tensor.ndim}
    return leaves in (["weight"], ["bias", "weight"]) and columns == [(width,)] and len(rows) == 1


def find_origin(naming: Naming, stored: Collection[str], model: Collection[str]) -> Origin:
    """What names show: `stored` are the file's, without wrappers; `model` are the chosen model's, as timm has them."""
    if naming is _CLIP:
        # Only OpenAI's archives have numbers beside the weights; open_clip's models mostly have the exact GELU.
        is_openai = "input_resolution" in stored
        return Origin("CLIP", OPENAI_IMAGES, {"act_layer": "quick_gelu"} if is_openai else {}, eps=1e-5)
    if naming is _TORCHVISION:
        return Origin("torchvision", IMAGENET_IMAGES._replace(interpolation="bilinear"))
    if naming is _BIT:
        return Origin("BiT")
    if "rope_embed.periods" in model or any(name.endswith("storage_tokens") for name in stored):
        args = {name: value for name, value in DINOV3.items() if name != "eps"}
        return Origin("DINOv3", IMAGENET_IMAGES._replace(size=224), args, eps=DINOV3["eps"])
    if any(name.startswith("decoder_") for name in model):
        return Origin("MAE", IMAGENET_IMAGES)
    if "mask_token" in model:
        return Origin("DINOv2", IMAGENET_IMAGES._replace(size=224), antialias="reg_token" in model)
    if any(re.search(r"(^|\.)(teacher|student|dino_head|head\.(mlp|last_layer))\.", name) for name in stored):
        return Origin("DINO", IMAGENET_IMAGES)
    if "norm_pre.weight" in model:
        return Origin("timm", OPENAI_IMAGES)
    # DeiT, DeiT-III, MAE fine-tuned, and what was trained without labels: DINO, iBOT, MoCo, MAE, UNI.
    is_later = {"dist_token", "fc_norm.weight", "blocks.0.ls1.gamma"} & {*model} or "head.weight" not in model
    return Origin("timm", IMAGENET_IMAGES if "cls_token" in model and is_later else Images())


def complete_dinov3(where: str, tensors: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, int]]:
    """The parameters, with zero biases of keys; and timm's argument `num_heads`: a head is four times as wide as there
    are rotary periods. Without valid periods there is no argument. Raises UserError for another model's periods."""
    model = {name: tensor for name, tensor in tensors.items() if not name.endswith(".attn.qkv.bias_mask")}
    biases = [name for name, tensor in model.items() if name.endswith(".attn.qkv.bias") and tensor.ndim]
    for name in biases:
        q, k, v = model[name].tensor_split(3)
        model[name] = torch.cat([q, torch.zeros_like(k), v])  # the file masks the keys' bias
    width = len(model["patch_embed.proj.weight"])
    periods = model.pop("rope_embed.periods", None)
    if periods is None or periods.ndim != 1 or not 0 < 4 * len(periods) <= width:
        return model, {}
    usual = DINOV3["rope_temperature"] ** (torch.arange(len(periods)) / len(periods))
    if not periods.is_meta and not torch.allclose(periods.float(), usual, rtol=0.02):  # they are in bfloat16
        raise UserError(f"{where}: its rotary periods are not DINOv3's (base 100), the only ones that are read.")
    return model, {"num_heads": width // (4 * len(periods))}


def complete_clip(where: str, tensors: Mapping[str, Tensor]) -> Tensors:
    """The tensors in timm's shapes, with CLIP's projection as the head. Raises UserError if it is not a plain ViT."""
    if "norm.weight" not in tensors or any(name.startswith("attn_pool.") for name in tensors):
        raise UserError(
            f"{where} is not a ViT of CLIP: its output is pooled by attention (CoCa, Perception Encoder), or has no "
            f"ln_post, and rotary positions are in no tensor. Give timm's folder of it, with the architecture in "
            f"config.json."
        )
    model = {**tensors, "cls_token": tensors["cls_token"].reshape(1, 1, -1)}
    if "pos_embed" in model:
        model["pos_embed"] = model["pos_embed"][None]
    if "head.weight" in model and model["head.weight"].ndim == 2:
        model["head.weight"] = model["head.weight"].T  # CLIP multiplies by it from the right
        model["head.bias"] = model["head.weight"].new_zeros(len(model["head.weight"]))
    if "norm_pre.weight" not in model:
        model["patch_embed.proj.bias"] = torch.zeros_like(model["norm.weight"])
    return model
