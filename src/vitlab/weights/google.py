"""Google's `.npz` of a Vision Transformer, a hybrid or a ResNet: read and written by `google_layout`'s tables."""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.errors import UserError, first_ten, warn_once
from vitlab.io import NPZ_ERRORS, reading_npz, write_arrays
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, Variant, ViTConfig
from vitlab.models.image_size import ImageSize
from vitlab.models.vit import Model
from vitlab.preprocessing import Preprocessing, pair
from vitlab.weights.google_layout import (
    BIG_VISION_TABLE,
    BLOCK_PARTS,
    RESNET_NAMES,
    TABLE,
    Spelling,
    google_body,
    google_layout,
    to_google,
    to_ours,
)
from vitlab.weights.layout import (
    as_size,
    check_arrays,
    check_supported,
    count_units,
    cpu_state,
    read_state,
    require_shape,
)

PREFIXES = ("opt/target/", "params/", "img/")
"""Prefixes, one after another. Where names have one, arrays without it (optimizer state, another tower) are ignored."""
TABLES = (TABLE, "Transformer/pos_embedding", BIG_VISION_TABLE)
BFLOAT16 = np.dtype("V2")
"""How NumPy, which has no bfloat16, reads one."""
STACKED = "Transformer/encoderblock/"
"""big_vision stores all blocks as one, along a leading axis, when it scans over them."""
RESNET_ARRAY = re.compile(r"(resnet/|root_block/|conv_root/|gn_root/|block\d+/unit\d+/)")
UNIT = re.compile(r"(?:resnet/)?block(\d{1,4})/unit(\d{1,4})/")
SUPPORTED: dict[str, tuple[Any, ...]] = {"pool": ("token", "gap", "map"), "position": ("1d", "sincos2d")}
"""Values that are fixed in Google's code; an `.npz` cannot represent others."""


# -------------------------------------------------------------------------------------------------------- reading


def read_google(path: Path | str, *, image_size: ImageSize | None = None) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the parameters, by our names and in the stored precision, of a Google `.npz`.

    Reads every kind, spelling and prefix, and stacked blocks; ignores an optimizer state. Sizes follow from the arrays;
    the rest is as in Google's code: tanh GELU, its epsilons, no dropout, `pool='gap'` if the file has neither class
    token nor attention pooling, and sin-cos positions for big_vision's files without a table. The image is of
    `image_size` where the position table has as many rows, else square; of 224 pixels, in whole patches, without one.
    Raises UserError for a corrupt file or another kind of model, naming every array that does not fit.
    """
    path = Path(path)
    arrays = _normalize(read_npz(path))
    has_resnet = any(map(RESNET_ARRAY.match, arrays))
    is_resnet = has_resnet and not any(name.startswith("Transformer/") for name in arrays)  # a hybrid has both
    try:
        config, spelling = _infer_resnet(arrays) if is_resnet else _infer_vit(arrays, image_size)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    layout = google_layout(config, spelling)
    kind = "ResNet" if is_resnet else "ViT"
    check_arrays(
        f"{path} looks like a {kind} of {config.num_parameters:,} parameters",
        {name: dataclasses.replace(slot, shape=_without_ones(slot.shape)) for name, slot in layout.items()},
        arrays,
    )
    return config, read_state(layout, arrays, to_ours)


def metadata_google(path: Path, **_: Any) -> dict[str, Any]:
    """`preprocessing`: as in Google's code, for an .npz has no metadata."""
    return {"preprocessing": Preprocessing.google().to_metadata()}


def read_npz(path: Path) -> dict[str, Tensor]:
    """The model's arrays by name, without a prefix. Raises UserError for a corrupt file and for other types."""
    try:
        with reading_npz(path) as archive:
            prefix = ""  # in the end "params/img/" for a file with params/img/cls and params/txt/embedding
            for part in PREFIXES:
                prefix += part if any(name.startswith(prefix + part) for name in archive) else ""
            if prefix.endswith("img/"):
                root = prefix.removesuffix("img/")
                tops = {name.removeprefix(root).split("/")[0] for name in archive if name.startswith(root)}
                others = sorted(tops - {"img"})
                warn_once(f"{path}: of big_vision's two towers the image tower is read; left out: {first_ten(others)}.")
            arrays = {name.removeprefix(prefix): archive[name] for name in archive if name.startswith(prefix)}
    except NPZ_ERRORS as error:
        raise UserError(
            f"{path} cannot be read as an .npz of plain arrays ({error}). It is corrupt, or holds pickled objects, "
            f"which are never loaded; get the file again."
        ) from error
    return {name: _to_torch(path, name, array) for name, array in arrays.items()}


def _to_torch(path: Path, name: str, array: np.ndarray | bytes) -> Tensor:
    if not isinstance(array, np.ndarray) or array.dtype not in (BFLOAT16, np.float16, np.float32, np.float64):
        what = getattr(array, "dtype", "not an array")
        raise UserError(f"{path}: {name} is {what}; weights are arrays of float16, bfloat16, float32 or float64.")
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _normalize(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays of single blocks by the names of today's code, a GroupNorm's as (C). An array keeps its name if the
    new one is taken; `check_arrays` then reports it."""
    normalized: dict[str, Tensor] = {}
    for name, array in arrays.items():
        if name.startswith(STACKED) and array.numel():
            part = name.removeprefix(STACKED)
            normalized |= {f"Transformer/encoderblock_{i}/{part}": block for i, block in enumerate(array)}
        else:
            # Some published files number their convolutions.
            new = re.sub(r"/standardized_conv2d_\d+/", "/standardized_conv2d/", name)
            normalized[name if new in normalized else new] = array.reshape(_without_ones(tuple(array.shape)))
    return normalized


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """(1, 1, 1, C) as (C); any other shape as it is."""
    return shape[3:] if len(shape) == 4 and shape[:3] == (1, 1, 1) else shape


def _infer_vit(arrays: dict[str, Tensor], image_size: ImageSize | None) -> tuple[ViTConfig, Spelling]:
    """Every size from the shapes, and the spelling: `linen` also for big_vision's files, which differ only in the name
    of the position table. Renames it in `arrays`, as `_infer_positions` does."""
    first = "Transformer/encoderblock_0"
    spelling: Spelling = "stored" if f"{first}/{BLOCK_PARTS['stored'][1]}/query/kernel" in arrays else "linen"
    _, msa, _, mlp = BLOCK_PARTS[spelling]
    patch, _, channels, width = require_shape("the file", arrays, "embedding/kernel", 4)
    _, heads, _ = require_shape("the file", arrays, f"{first}/{msa}/query/kernel", 3)
    _, mlp_dim = require_shape("the file", arrays, f"{first}/{mlp}/Dense_0/kernel", 2)
    stem = _infer_body(arrays, "v1", spelling) if any(map(RESNET_ARRAY.match, arrays)) else None
    stride = patch * (stem.stride if stem else 1)
    has_class = "cls" in arrays
    sincos_fits = spelling == "linen" and width % 4 == 0 and width >= 8
    grid, class_rows = _infer_positions(arrays, stride, image_size, sincos_fits)
    has_map = any(name.startswith("MAPHead_0/") for name in arrays)
    config = ViTConfig(
        image_size=as_size(grid[0] * stride, grid[1] * stride),
        in_chans=3 if stem else channels,
        patch_size=patch,
        width=width,
        depth=len({name.split("/")[1] for name in arrays if name.startswith("Transformer/encoderblock_")}),
        heads=heads,
        mlp_dim=mlp_dim,
        num_classes=_out_features(arrays, "head") or 0,
        pool="map" if has_map else "token" if has_class else "gap",
        representation_size=_out_features(arrays, "pre_logits"),
        position="1d" if TABLE in arrays else "sincos2d",
        stem=stem,
        variant=Variant(class_position=class_rows == int(has_class)),  # True without a class token
    )
    return config, spelling


def _infer_positions(
    arrays: dict[str, Tensor], stride: int, image_size: ImageSize | None, sincos_fits: bool
) -> tuple[tuple[int, int], int]:
    """The grid of patches, and how many rows of the position table are the class token's.

    Renames the table to TABLE. Raises UserError if there is none and the model cannot have sin-cos positions.
    """
    table = next((name for name in TABLES if name in arrays), None)
    if table is None:
        if not sincos_fits:  # the only kind of positions without a table
            raise UserError(f"the position table, {TABLE}, is missing; get the file again.")
        side = max(224 // stride, 1)
        return (side, side), 0
    rows = require_shape("the file", arrays, table, 3)[1]
    arrays[TABLE] = arrays.pop(table)
    given_grid = None if image_size is None else (pair(image_size)[0] // stride, pair(image_size)[1] // stride)
    # The class token has a row in a table called TABLE; in a table of another name it may have none.
    has_class = int("cls" in arrays)
    class_row_options = [has_class] if table == TABLE else [has_class, 0]
    return _infer_grid(rows, class_row_options, given_grid)


def _out_features(arrays: Mapping[str, Tensor], layer: str) -> int | None:
    """Output size of a layer; None if the file has no such layer."""
    kernel = arrays.get(f"{layer}/kernel")
    return kernel.shape[-1] if kernel is not None and kernel.ndim else None


def _infer_grid(rows: int, class_row_options: list[int], given: tuple[int, int] | None) -> tuple[tuple[int, int], int]:
    """Grid of a position table, and how many of its `rows` are the class token's, one of `class_row_options`. The grid
    is the `given` one if that fits, otherwise a square."""
    candidates = [(given, class_rows) for class_rows in class_row_options if given]
    for class_rows in class_row_options:
        side = math.isqrt(max(rows - class_rows, 0))
        candidates.append(((side, side), class_rows))
    for grid, class_rows in candidates:
        if 0 < math.prod(grid) == rows - class_rows:
            return grid, class_rows
    raise UserError(
        f"the position table has {rows} rows, which form no square; give the size of its images, image_size=(height, "
        f"width) (`--image-size` of convert)."
    )


def _infer_body(arrays: Mapping[str, Tensor], version: str, spelling: Spelling) -> ResNetBody:
    body = google_body(version, spelling)
    width = require_shape("the file", arrays, f"{RESNET_NAMES[version][spelling].parts['root']}/kernel", 4)[-1]
    units = {(match[1], match[2]) for name in arrays if (match := UNIT.match(name))}
    return dataclasses.replace(body, layers=count_units(units), width=width)


def _infer_resnet(arrays: Mapping[str, Tensor]) -> tuple[ResNetConfig, Spelling]:
    spelling: Spelling = "stored" if any(name.startswith("resnet/") for name in arrays) else "linen"
    v2 = spelling == "stored" or any(name.startswith("root_block/") for name in arrays)
    body = _infer_body(arrays, "v2" if v2 else "v1", spelling)
    num_classes = _out_features(arrays, RESNET_NAMES[body.version][spelling].parts["head"]) or 0
    return ResNetConfig(body=body, num_classes=num_classes), spelling


# -------------------------------------------------------------------------------------------------------- writing


def write_google(model: Model, path: Path | str, metadata: Any = None) -> None:
    """Writes a model as Google's code reads it, in float32, all or nothing: in the spelling of the published files, or
    of big_vision for what only it has. An .npz has no `metadata`. Raises UserError for a model that differs there."""
    config = model.config
    spelling = _native_spelling(config)
    _check_representable(config, spelling)
    state, layout = cpu_state(model), google_layout(config, spelling)
    arrays = {name: to_google(name, slot.select(state), slot.shape) for name, slot in layout.items()}
    write_arrays(Path(path), {name: array.float().contiguous().numpy() for name, array in arrays.items()})


def _native_spelling(config: ModelConfig) -> Spelling:
    """The spelling of the code that the model comes from; it loses nothing about the model."""
    if isinstance(config, ResNetConfig):
        is_bit = config.body.version == "v2" and config.body.pool_padding == "zero"
        return "stored" if is_bit else "big_vision"
    no_class_row = config.has_class_token and not config.variant.class_position
    return "big_vision" if no_class_row or config.pool == "map" or config.position == "sincos2d" else "stored"


def _check_representable(config: ModelConfig, spelling: Spelling) -> None:
    """Raises UserError for a setting that Google's code takes otherwise."""
    if isinstance(config, ResNetConfig):
        part, body, version = "body", config.body, config.body.version
    else:
        part, body, version = "stem", config.stem, "v1"
        free = ("stem", "class_position", "representation_size", "in_chans")
        check_supported("Google's .npz", config, SUPPORTED, free)
        if config.position == "1d" and config.grid[0] != config.grid[1]:
            raise UserError(
                f"the model has image_size={config.image_size!r}: Google's .npz has no image size, and its position "
                f"table is read as a square. Use save_model (`--to vitlab`)."
            )
    if body is not None:
        theirs = dataclasses.replace(google_body(version, spelling), layers=body.layers, width=body.width)
        supported = {item.name: (getattr(theirs, item.name),) for item in dataclasses.fields(body)}
        check_supported("Google's .npz", body, supported, prefix=f"{part}.")
