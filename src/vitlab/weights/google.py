"""Google's `.npz` of a Vision Transformer, a hybrid or a ResNet: read and written.

The name of an array is its path in the Flax model. Three spellings are in use, with or without a prefix:

| spelling | the four parts of a block | position table |
|---|---|---|
| `stored`, the published files | numbered in one row | `Transformer/posembed_input/pos_embedding` |
| `linen`, the code that reads them | numbered by kind | the same |
| `big_vision` | as `linen` | `pos_embedding`, without a row for the class token; none for `sincos2d` |

Only `big_vision` has attention pooling (`MAPHead_0`). The names of a ResNet's arrays are in `vitlab.weights.bit`.
"""

import dataclasses
import math
import re
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.config import ImageSize, ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.resnet_config import ResNetBody
from vitlab.models.vit import Model
from vitlab.preprocessing import Preprocessing
from vitlab.weights.bit import PART, body_layout, google_body, infer_body, infer_resnet, resnet_layout
from vitlab.weights.layout import (
    Layout,
    Slot,
    check_arrays,
    check_supported,
    cpu_state,
    read_state,
    require_shape,
)
from vitlab.weights.npz import Spelling, dense, read_npz, to_google, to_ours, write_npz

_LINEN = ("LayerNorm_0", "MultiHeadDotProductAttention_0", "LayerNorm_1", "MlpBlock_0")
BLOCK_PARTS: dict[Spelling, tuple[str, str, str, str]] = {
    "stored": ("LayerNorm_0", "MultiHeadDotProductAttention_1", "LayerNorm_2", "MlpBlock_3"),
    "linen": _LINEN,
    "big_vision": _LINEN,
}
TABLE = "Transformer/posembed_input/pos_embedding"
OTHER_TABLES = ("Transformer/pos_embedding", "pos_embedding")  # big_vision, earlier and today
STACKED = "Transformer/encoderblock/"
"""big_vision stores all blocks as one, along a leading axis, when it scans over them."""
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
"""Values that are fixed in Google's code; an `.npz` cannot represent others."""


def google_layout(config: ModelConfig, spelling: Spelling = "stored") -> Layout:
    """Every array of a model."""
    if isinstance(config, ResNetConfig):
        return resnet_layout(config, spelling)
    d, p = config.width, config.patch_size
    norm1, msa, norm2, mlp = BLOCK_PARTS[spelling]
    channels = config.stem.channels if config.stem else 3
    layout = body_layout(config.stem, spelling, "stem") if config.stem else {}
    if config.has_class_token:
        layout["cls"] = Slot((1, 1, d), "cls")
    layout |= dense("embedding", "embedding", (p, p, channels, d))
    if config.position == "1d":
        table = OTHER_TABLES[-1] if spelling == "big_vision" else TABLE
        layout[table] = Slot((1, config.num_position_prefix + config.num_patches, d), "position.table")
    for i in range(config.depth):
        theirs, ours = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        layout |= _norm(f"{theirs}/{norm1}", f"{ours}.norm1", d)
        layout |= _attention(f"{theirs}/{msa}", f"{ours}.attention", config)
        layout |= _norm(f"{theirs}/{norm2}", f"{ours}.norm2", d)
        layout |= _mlp(f"{theirs}/{mlp}", f"{ours}.mlp", config)
    layout |= _norm("Transformer/encoder_norm", "norm", d)
    if config.pool == "map":
        layout["MAPHead_0/probe"] = Slot((1, 1, d), "map.probe")
        layout |= _attention("MAPHead_0/MultiHeadDotProductAttention_0", "map.attention", config)
        layout |= _norm("MAPHead_0/LayerNorm_0", "map.norm", d)
        layout |= _mlp("MAPHead_0/MlpBlock_0", "map.mlp", config)
    if config.representation_size:
        layout |= dense("pre_logits", "pre_logits", (d, config.representation_size))
    if config.num_classes:
        layout |= dense("head", "head", (config.num_features, config.num_classes))
    return layout


def _norm(theirs: str, ours: str, width: int) -> Layout:
    return {f"{theirs}/scale": Slot((width,), f"{ours}.weight"), f"{theirs}/bias": Slot((width,), f"{ours}.bias")}


def _attention(theirs: str, ours: str, config: ViTConfig) -> Layout:
    d, heads = config.width, (config.heads, config.width // config.heads)
    layout = {}
    for i, name in enumerate(("query", "key", "value")):
        rows = i * d, (i + 1) * d
        layout[f"{theirs}/{name}/kernel"] = Slot((d, *heads), f"{ours}.qkv.weight", rows)
        layout[f"{theirs}/{name}/bias"] = Slot(heads, f"{ours}.qkv.bias", rows)
    return layout | dense(f"{theirs}/out", f"{ours}.out", (*heads, d))


def _mlp(theirs: str, ours: str, config: ViTConfig) -> Layout:
    first = dense(f"{theirs}/Dense_0", f"{ours}.fc1", (config.width, config.mlp_dim))
    return first | dense(f"{theirs}/Dense_1", f"{ours}.fc2", (config.mlp_dim, config.width))


# -------------------------------------------------------------------------------------------------------- reading


def read_google(path: Path | str, *, image_size: ImageSize | None = None) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the parameters, by our names and in the stored precision, of a Google `.npz`.

    Reads every kind, spelling and prefix, and stacked blocks; ignores an optimizer state. Sizes follow from the arrays;
    the rest is as in Google's code: tanh GELU, its epsilons, no dropout, the mean over patches without class token and
    attention pooling, and sin-cos positions for big_vision's files without a table.

    `image_size` matters where the arrays leave it open: for a position table whose rows form no square, and for sin-cos
    positions and ResNets, whose default is 224. A hybrid's is a multiple of its stride.

    Raises ValueError for a corrupt file or another kind of model, naming every array that does not fit.
    """
    path = Path(path)
    arrays = _current_names(read_npz(path))
    is_resnet = any(map(PART.match, arrays)) and not any(name.startswith("Transformer/") for name in arrays)
    infer = infer_resnet if is_resnet else _infer_vit
    try:
        config, spelling = infer(arrays, image_size)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    layout = google_layout(config, spelling)
    kind = "ResNet" if is_resnet else "ViT"
    check_arrays(
        f"{path} looks like a {kind} of {config.num_parameters:,} parameters",
        {name: dataclasses.replace(slot, shape=_without_ones(slot.shape)) for name, slot in layout.items()},
        {name: array.reshape(_without_ones(tuple(array.shape))) for name, array in arrays.items()},
    )
    return config, read_state(layout, arrays, to_ours)


def card_google(path: Path) -> dict[str, Any]:
    """`preprocessing`: that of Google's code, for an .npz has no card."""
    return {"preprocessing": Preprocessing.google().to_card()}


def _current_names(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays of single blocks, by the names of today's code; one whose new name is taken keeps its name."""
    renamed: dict[str, Tensor] = {}
    for name, array in arrays.items():
        if name.startswith(STACKED) and array.numel():
            part = name.removeprefix(STACKED)
            renamed |= {f"Transformer/encoderblock_{i}/{part}": block for i, block in enumerate(array)}
        else:
            new = re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", name)
            renamed[name if new in renamed else new] = array
    return renamed


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(1, 1, 1, C) as (C); any other shape as it is."""
    return shape[3:] if len(shape) == 4 and shape[:3] == (1, 1, 1) else shape


def _infer_vit(arrays: dict[str, Tensor], image_size: ImageSize | None) -> tuple[ViTConfig, Spelling]:
    """Every size from the shapes, and the spelling; the position table becomes `TABLE` in `arrays`."""
    first = "Transformer/encoderblock_0"
    spelling: Spelling = "stored" if f"{first}/{BLOCK_PARTS['stored'][1]}/query/kernel" in arrays else "linen"
    _, msa, _, mlp = BLOCK_PARTS[spelling]
    patch, _, _, width = require_shape("the file", arrays, "embedding/kernel", 4)
    _, heads, _ = require_shape("the file", arrays, f"{first}/{msa}/query/kernel", 3)
    _, mlp_dim = require_shape("the file", arrays, f"{first}/{mlp}/Dense_0/kernel", 2)
    stem = infer_body(arrays, "v1", spelling) if any(map(PART.match, arrays)) else None
    size, position, class_position = _infer_positions(arrays, spelling, stem, image_size)
    has_map = any(name.startswith("MAPHead_0/") for name in arrays)
    config = ViTConfig(
        image_size=size,
        patch_size=patch,
        width=width,
        depth=len({name.split("/")[1] for name in arrays if name.startswith("Transformer/encoderblock_")}),
        heads=heads,
        mlp_dim=mlp_dim,
        num_classes=_bias_length(arrays, "head") or 0,
        pool="map" if has_map else "token" if "cls" in arrays else "gap",
        representation_size=_bias_length(arrays, "pre_logits"),
        position=position,
        stem=stem,
        class_position=class_position,
    )
    return config, spelling


def _bias_length(arrays: dict[str, Tensor], layer: str) -> int | None:
    kernel = arrays.get(f"{layer}/kernel")
    return kernel.shape[-1] if kernel is not None and kernel.ndim else None


def _infer_positions(
    arrays: dict[str, Tensor], spelling: Spelling, stem: ResNetBody | None, image_size: ImageSize | None
) -> tuple[ImageSize, Literal["1d", "sincos2d"], bool]:
    """Image size, kind of position embedding, and whether the class token, if any, has a row in it."""
    cls = int("cls" in arrays)
    patch, width = arrays["embedding/kernel"].shape[0], arrays["embedding/kernel"].shape[3]
    name = next((name for name in (TABLE, *OTHER_TABLES) if name in arrays), None)
    if name is None:
        if spelling == "stored" or width % 4 or width < 8:
            raise UserError(f"the position table, {TABLE}, is missing; get the file again.")
        return ViTConfig.image_size if image_size is None else image_size, "sincos2d", not cls
    rows = require_shape("the file", arrays, name, 3)[1]
    arrays[TABLE] = arrays.pop(name)
    size, class_row = _infer_size(rows, cls, patch, stem, image_size, name != TABLE)
    return size, "1d", class_row == cls


def _infer_size(
    rows: int, cls: int, patch: int, stem: ResNetBody | None, size: ImageSize | None, may_lack_cls: bool
) -> tuple[ImageSize, int]:
    """Image size from the rows of a table, and the number of rows of the class token.

    A square decides. The given `size` comes before a square without a row for the class token, which only big_vision's
    tables may lack: 14 x 16 patches and a class token have 15 x 15 rows.
    """
    stride = patch * (stem.stride if stem else 1)
    if _is_square(rows - cls):
        return math.isqrt(rows - cls) * stride, cls
    patches = 0 if size is None else ViTConfig(image_size=size, patch_size=patch, stem=stem).num_patches
    fits = size is not None and rows == cls + patches
    if may_lack_cls and not fits and _is_square(rows):
        return math.isqrt(rows) * stride, 0
    problem = f"the position table has {rows} rows, which form no square"
    if size is None:
        raise UserError(f"{problem}; give its image size: image_size=(height, width), or `--image-size` of convert.")
    if rows - patches not in (0, cls):
        raise UserError(
            f"{problem}, and image_size={size} needs {patches} in patches of {patch}x{patch}; give the image "
            f"size of the table."
        )
    return size, rows - patches


def _is_square(count: int) -> bool:
    return count > 0 and math.isqrt(count) ** 2 == count


# -------------------------------------------------------------------------------------------------------- writing


def write_google(model: Model, path: Path | str, card: Any = None) -> None:
    """Writes a model as Google's code reads it, all or nothing: in the spelling of the published files, or in that of
    big_vision for what only big_vision has. An .npz has no `card`. Raises ValueError for a model that the code would
    compute otherwise."""
    config = model.config
    spelling = _native_spelling(config)
    _check_representable(config, spelling)
    state, layout = cpu_state(model), google_layout(config, spelling)
    write_npz(Path(path), {name: to_google(name, slot.select(state), slot.shape) for name, slot in layout.items()})


def _native_spelling(config: ModelConfig) -> Spelling:
    """The spelling of the code that the model comes from, in which nothing about it is lost."""
    if isinstance(config, ResNetConfig):
        is_bit = config.body.version == "v2" and config.body.pool_padding == "zero"
        return "stored" if is_bit else "big_vision"
    no_class_row = config.has_class_token and not config.class_position
    return "big_vision" if no_class_row or config.pool == "map" or config.position == "sincos2d" else "stored"


def _check_representable(config: ModelConfig, spelling: Spelling) -> None:
    """Raises UserError for a setting that Google's code takes otherwise."""
    if isinstance(config, ResNetConfig):
        part, body, version = "body", config.body, config.body.version
    else:
        part, body, version = "stem", config.stem, "v1"
        check_supported("Google's .npz", config, ASSUMED)
        (height, width), side = config.grid, math.isqrt(config.num_patches)
        if config.position == "1d" and height != width and side**2 == height * width:
            raise UserError(
                f"the model has image_size={config.image_size!r}, and its positions for {height}x{width} patches would "
                f"be read as those of {side}x{side}: Google's .npz has no image size. Use save_model."
            )
    if body is not None:
        theirs = dataclasses.replace(google_body(version, spelling), layers=body.layers, width=body.width)
        supported = {item.name: (getattr(theirs, item.name),) for item in dataclasses.fields(body)}
        check_supported("Google's .npz", body, supported, f"{part}.")
