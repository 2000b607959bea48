"""Google's `.npz` of a Vision Transformer, a hybrid or a ResNet: read and written.

An array's name is its path in the Flax model. Three spellings are in use, with or without a prefix in front:

| spelling | the four parts of a block | position table |
|---|---|---|
| `stored`, the published files | numbered in one row | `Transformer/posembed_input/pos_embedding` |
| `linen`, the code that reads them | numbered by kind | the same |
| `big_vision` | as `linen` | `pos_embedding`, without a row for the class token; none for `sincos2d` |

Only `big_vision` knows attention pooling (`MAPHead_0`). What a ResNet's arrays are called is in `vitlab.weights.bit`.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.config import ImageSize, ModelConfig, ResNetConfig, ViTConfig, check_divisible
from vitlab.models.resnet_config import ResNetBody
from vitlab.models.vit import Model
from vitlab.weights.bit import PART, body_layout, body_read, holds_resnet, infer_body, infer_resnet, resnet_layout
from vitlab.weights.npz import (
    Slot,
    Spelling,
    dense,
    last_axis,
    need,
    outline_arrays,
    read_npz,
    to_google,
    to_ours,
    without_ones,
    write_npz,
)
from vitlab.weights.shapes import check_shapes

Prefix = Literal["", "params/", "opt/target/"]

_LINEN = ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
BLOCK_PARTS: dict[Spelling, tuple[str, str, str, str]] = {
    "stored": ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"),
    "linen": _LINEN,
    "big_vision": _LINEN,
}

TABLE = "Transformer/posembed_input/pos_embedding"
OTHER_TABLES = ("Transformer/pos_embedding", "pos_embedding")  # big_vision, earlier and today

STACKED = "Transformer/encoderblock/"
"""Where big_vision keeps all blocks in one, along a leading axis, when it scans over them."""

MAP = "MAPHead_0"
MAP_PARTS = ("probe", "MultiHeadDotProductAttention_0", "LayerNorm_0", "MlpBlock_0")
"""The attention pooling's parts; in early files they stand outside of `MAPHead_0`."""

OTHER_KINDS = {"MixerBlock_": "an MLP-Mixer", "img/": "a model of images and text", "txt/": "a model of text"}
"""A file with a name that starts so holds another kind of model."""

ASSUMED: dict[str, tuple[Any, ...]] = {
    "pool": ("token", "gap", "map"),
    "position": ("1d", "sincos2d"),
    "position_at": ("stem",),
    "gelu": ("tanh",),
    "layer_norm_eps": (1e-6,),
    "encoder": ("full",),
    "layer_scale": (None,),
    "registers": (0,),
    "distilled": (False,),
}
"""What Google's code computes, for settings that an `.npz` does not tell."""


def google_layout(config: ModelConfig, spelling: Spelling = "stored") -> dict[str, Slot]:
    """Every array of a model: Google's name -> its shape there and our parameter."""
    if isinstance(config, ResNetConfig):
        return resnet_layout(config, spelling)
    d, p = config.width, config.patch_size
    norm1, msa, norm2, mlp = BLOCK_PARTS[spelling]
    channels = config.stem.channels if config.stem else 3
    slots = body_layout(config.stem, spelling, "stem") if config.stem else {}
    if config.has_class_token:
        slots["cls"] = Slot((1, 1, d), "cls")
    slots |= dense("embedding", "embedding", (p, p, channels, d))
    if config.position == "1d":
        table = OTHER_TABLES[-1] if spelling == "big_vision" else TABLE
        slots[table] = Slot((1, config.num_position_prefix + config.num_patches, d), "position.table")
    for i in range(config.depth):
        theirs, ours = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        slots |= _norm(f"{theirs}/{norm1}", f"{ours}.norm1", d)
        slots |= _attention(f"{theirs}/{msa}", f"{ours}.attention", config)
        slots |= _norm(f"{theirs}/{norm2}", f"{ours}.norm2", d)
        slots |= _mlp(f"{theirs}/{mlp}", f"{ours}.mlp", config)
    slots |= _norm("Transformer/encoder_norm", "norm", d)
    if config.pool == "map":
        probe, msa, norm, mlp = MAP_PARTS
        slots[f"{MAP}/{probe}"] = Slot((1, 1, d), "map.probe")
        slots |= _attention(f"{MAP}/{msa}", "map.attention", config)
        slots |= _norm(f"{MAP}/{norm}", "map.norm", d)
        slots |= _mlp(f"{MAP}/{mlp}", "map.mlp", config)
    if config.representation_size:
        slots |= dense("pre_logits", "pre_logits", (d, config.representation_size))
    if config.num_classes:
        slots |= dense("head", "head", (config.num_features, config.num_classes))
    return slots


def _norm(theirs: str, ours: str, width: int) -> dict[str, Slot]:
    return {
        f"{theirs}/scale": Slot((width,), f"{ours}.weight"),
        f"{theirs}/bias": Slot((width,), f"{ours}.bias"),
    }


def _attention(theirs: str, ours: str, config: ViTConfig) -> dict[str, Slot]:
    d, heads = config.width, (config.heads, config.width // config.heads)
    slots = {}
    for third, name in enumerate(("query", "key", "value")):
        slots[f"{theirs}/{name}/kernel"] = Slot((d, *heads), f"{ours}.qkv.weight", third)
        slots[f"{theirs}/{name}/bias"] = Slot(heads, f"{ours}.qkv.bias", third)
    return slots | dense(f"{theirs}/out", f"{ours}.out", (*heads, d))


def _mlp(theirs: str, ours: str, config: ViTConfig) -> dict[str, Slot]:
    first = dense(f"{theirs}/Dense_0", f"{ours}.fc1", (config.width, config.mlp_dim))
    return first | dense(f"{theirs}/Dense_1", f"{ours}.fc2", (config.mlp_dim, config.width))


def read_google(path: Path | str, *, image_size: ImageSize | None = None) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the parameters, by our names and in the stored precision, of a Google `.npz`.

    Reads every kind, spelling and prefix, and stacked blocks; an optimizer's state beside the weights is left alone.
    The sizes are the arrays' own; what no array tells is as in Google's code: tanh GELU, its epsilons, no dropout, the
    mean over patches where there is neither class token nor attention pooling, and sin-cos positions where a file of
    big_vision's has no table.

    `image_size` matters only where the arrays leave it open: for a position table whose rows form no square, and for
    sin-cos positions and ResNets, which are for 224 unless it is given. A hybrid's is a multiple of its stride.

    Raises ValueError for a damaged file or another kind of model, naming every array that does not fit.
    """
    path = Path(path)
    _understand(path, _as_today(_unstack(outline_arrays(path))), image_size)  # before the memory is filled
    arrays = _as_today(_unstack(read_npz(path)))
    config, layout = _understand(path, arrays, image_size)
    parts: dict[str, list[Tensor]] = {}
    for name, slot in layout.items():
        parts.setdefault(slot.ours, []).append(to_ours(name, arrays.pop(name)))
    return config, {ours: torch.cat(part).contiguous() for ours, part in parts.items()}


def _understand(
    path: Path, arrays: dict[str, Tensor], image_size: ImageSize | None
) -> tuple[ModelConfig, dict[str, Slot]]:
    """The model that the arrays are of, and what each of them is; raises UserError where they are not all of one."""
    _check_kind(path, arrays)
    if holds_resnet(arrays):
        config, spelling = infer_resnet(path, arrays, image_size)
    else:
        config, spelling = _infer_vit(path, arrays, image_size)
    layout = google_layout(config, spelling)
    check_shapes(
        f"{path} looks like {_what(config)}",
        {name: without_ones(slot.shape) for name, slot in layout.items()},
        {name: without_ones(tuple(array.shape)) for name, array in arrays.items()},
    )
    return config, layout


def write_google(model: Model, path: Path | str, *, spelling: Spelling | None = None, prefix: Prefix = "") -> None:
    """Writes a model as Google's code reads it: all of the file or nothing.

    Unless `spelling` is given it is that of the published files, or big_vision's for what only big_vision has. A class
    token with a row in the position table is written as the sum of both in big_vision's spelling, one without as with
    a row of zeros in the others: the same function.

    Raises ValueError for a model which the code that reads the file would compute otherwise.
    """
    config = model.config
    spelling = _native_spelling(config) if spelling is None else spelling
    for name, given, allowed in (("spelling", spelling, get_args(Spelling)), ("prefix", prefix, get_args(Prefix))):
        if given not in allowed:
            raise UserError(f"{name} is {given!r}; allowed: {', '.join(map(repr, allowed))}.")
    _check_sayable(config, spelling)
    if (
        isinstance(config, ViTConfig)
        and config.position == "1d"
        and len(set(config.grid)) > 1
        and _is_square(config.num_patches)
    ):
        side = math.isqrt(config.num_patches)
        raise UserError(
            f"the model has image_size={config.image_size!r}, and its positions for {config.grid[0]}x{config.grid[1]} "
            f"patches would be read as those of {side}x{side}: Google's .npz does not say which. Use save_model."
        )
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if isinstance(config, ViTConfig):
        config, state = _place_class(config, state, spelling == "big_vision")
    arrays = {}
    for name, slot in google_layout(config, spelling).items():
        tensor = state[slot.ours]
        tensor = tensor if slot.third is None else tensor.chunk(3)[slot.third]
        arrays[prefix + name] = to_google(name, tensor, slot.shape)
    write_npz(Path(path), arrays)


def _native_spelling(config: ModelConfig) -> Spelling:
    """The spelling of the code that the model comes from, in which nothing about it is lost."""
    if isinstance(config, ResNetConfig):
        is_bit = config.body.version == "v2" and config.body.pool_padding == "zero"
        return "stored" if is_bit else "big_vision"
    placeless = config.has_class_token and not config.class_position
    return "big_vision" if placeless or config.pool == "map" or config.position == "sincos2d" else "stored"


def _check_sayable(config: ModelConfig, spelling: Spelling) -> None:
    """Raises ValueError for the first setting that Google's code takes otherwise."""
    settings = {}
    if isinstance(config, ResNetConfig):
        where, body, version = "body", config.body, config.body.version
    else:
        where, body, version = "stem", config.stem, "v1"
        settings = {name: (getattr(config, name), allowed) for name, allowed in ASSUMED.items()}
        if spelling != "big_vision":
            settings["pool"] = config.pool, ("token", "gap")
            settings["position"] = config.position, ("1d",)
    if body is not None:
        theirs = dataclasses.replace(body_read(version, spelling), layers=body.layers, width=body.width)
        for item in dataclasses.fields(body):
            settings[f"{where}.{item.name}"] = getattr(body, item.name), (getattr(theirs, item.name),)
    for name, (given, allowed) in settings.items():
        if given not in allowed:
            raise UserError(
                f"the model has {name}={given!r}, which Google's .npz (spelling={spelling!r}) cannot say: the code "
                f"that reads it assumes {' or '.join(map(repr, allowed))}. Use save_model, which keeps every setting."
            )


def _place_class(config: ViTConfig, state: dict[str, Tensor], big_vision: bool) -> tuple[ViTConfig, dict[str, Tensor]]:
    """The same model with a row for the class token in the position table, or without (big_vision)."""
    if config.position != "1d" or not config.has_class_token or config.class_position != big_vision:
        return config, state
    table = state["position.table"]
    if big_vision:
        row, table = table.tensor_split([1], dim=1)
        state["cls"] = state["cls"] + row if row.any() else state["cls"]  # the sum that Eq. 1 forms
    else:
        table = torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)
    return dataclasses.replace(config, class_position=not big_vision), {**state, "position.table": table}


def _unstack(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays with the blocks of a scan one by one."""
    single = {}
    for name, array in arrays.items():
        if name.startswith(STACKED) and array.numel():
            for i, block in enumerate(array):
                single[f"Transformer/encoderblock_{i}/{name.removeprefix(STACKED)}"] = block
        else:
            single[name] = array
    return single


def _as_today(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays by the names of today's code; one whose new name is taken keeps its own."""
    renamed = {}
    for name, array in arrays.items():
        new = re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", name)
        if "probe" in arrays and name.split("/")[0] in MAP_PARTS:
            new = f"{MAP}/{name}"
        renamed[name if new in arrays or new in renamed else new] = array
    return renamed


def _check_kind(path: Path, arrays: dict[str, Tensor]) -> None:
    for start, kind in OTHER_KINDS.items():
        if any(name.startswith(start) for name in arrays):
            raise UserError(
                f"{path} holds {kind}, which is not supported; supported are Vision Transformers, hybrids and "
                f"BiT ResNets."
            )


def _what(config: ModelConfig) -> str:
    if isinstance(config, ResNetConfig):
        return f"a ResNet ({config.body.version}) of width {config.body.width} and layers {config.body.layers}"
    kind = "a hybrid" if config.stem else "a Vision Transformer"
    return f"{kind} of width {config.width} and depth {config.depth}"


def _infer_vit(
    path: Path, arrays: dict[str, Tensor], stated: ImageSize | None
) -> tuple[ViTConfig, Literal["stored", "linen"]]:
    """Every size from the shapes, and how the blocks are spelled; the position table becomes `TABLE` in `arrays`."""
    first = "Transformer/encoderblock_0"
    spelling = "stored" if f"{first}/{BLOCK_PARTS['stored'][1]}/query/kernel" in arrays else "linen"
    _, msa, _, mlp = BLOCK_PARTS[spelling]
    query, hidden = f"{first}/{msa}/query/kernel", f"{first}/{mlp}/Dense_0/kernel"
    need(path, arrays, {"embedding/kernel": 4, query: 3, hidden: 2}, "Vision Transformer")
    has_stem = any(PART.match(name) for name in arrays)
    stem = infer_body(path, arrays, "v1", spelling) if has_stem else None
    size, position, class_position = _infer_positions(path, arrays, spelling, stem, stated)
    blocks = {name.split("/")[1] for name in arrays if name.startswith("Transformer/encoderblock_")}
    has_map = any(name.startswith(f"{MAP}/") for name in arrays)
    try:
        config = ViTConfig(
            image_size=size,
            patch_size=arrays["embedding/kernel"].shape[0],
            width=arrays["embedding/kernel"].shape[3],
            depth=len(blocks),
            heads=arrays[query].shape[1],
            mlp_dim=arrays[hidden].shape[1],
            num_classes=last_axis(arrays, "head/kernel") or 0,
            pool="map" if has_map else "token" if "cls" in arrays else "gap",
            representation_size=last_axis(arrays, "pre_logits/kernel"),
            position=position,
            stem=stem,
            class_position=class_position,
        )
    except ValueError as error:
        raise UserError(f"{path} holds no model that can be built: {error}") from error
    return config, spelling


def _infer_positions(
    path: Path, arrays: dict[str, Tensor], spelling: Spelling, stem: ResNetBody | None, stated: ImageSize | None
) -> tuple[ImageSize, Literal["1d", "sincos2d"], bool]:
    """The image size that the positions are for, their kind, and whether the class token, if any, has one."""
    cls = int("cls" in arrays)
    patch, width = arrays["embedding/kernel"].shape[0], arrays["embedding/kernel"].shape[3]
    name = next((name for name in (TABLE, *OTHER_TABLES) if name in arrays), None)
    if name is None:
        if spelling == "stored" or width % 4 or width < 8:
            raise UserError(f"{path} lacks its position table, {TABLE}; it is damaged: get the file again.")
        return ViTConfig.image_size if stated is None else stated, "sincos2d", not cls
    table = arrays[TABLE] = arrays.pop(name)
    if table.ndim != 3:
        raise UserError(f"{path}: {name} has shape {tuple(table.shape)}; a table is (1, tokens, {width}).")
    size, class_row = _infer_size(path, table.shape[1], cls, patch, stem, stated, name != TABLE)
    return size, "1d", class_row == cls


def _infer_size(
    path: Path, rows: int, cls: int, patch: int, stem: ResNetBody | None, stated: ImageSize | None, may_lack_cls: bool
) -> tuple[ImageSize, int]:
    """Image size from the rows of a table, and whether one of them is the class token's.

    A square decides; `stated` comes before one without a row for the class token, which only big_vision's tables
    may lack: 14 x 16 patches and a class token have 15 x 15 rows.
    """
    if _is_square(rows - cls):
        return math.isqrt(rows - cls) * patch * (stem.stride if stem else 1), cls
    fits = stated is not None and rows == cls + _num_patches(stated, patch, stem)
    if may_lack_cls and not fits and _is_square(rows):
        return math.isqrt(rows) * patch * (stem.stride if stem else 1), 0
    if stated is None:
        raise UserError(
            f"{path} has a position table of {rows} rows, which form no square; say which image size they "
            f"are for: image_size=(height, width). `vitlab convert` takes --image-size, and keeps it with --to vitlab."
        )
    class_row = rows - _num_patches(stated, patch, stem)
    if class_row not in (0, cls):
        raise UserError(
            f"{path} has a position table of {rows} rows, which form no square, and image_size={stated} "
            f"needs {rows - class_row} in patches of {patch}x{patch}; say which image size they are for."
        )
    return stated, class_row


def _is_square(count: int) -> bool:
    return count > 0 and math.isqrt(count) ** 2 == count


def _num_patches(image_size: ImageSize, patch: int, stem: ResNetBody | None) -> int:
    image_hw = (image_size, image_size) if isinstance(image_size, int) else image_size
    check_divisible(image_hw, patch, stem)
    height, width = stem.grid(image_hw) if stem else image_hw
    return (height // patch) * (width // patch)
