"""Google's `.npz` of a Vision Transformer: read and written.

An array's name is its path in the Flax model. Three spellings are in use, with or without a prefix in front:

| spelling | the four parts of a block | position table |
|---|---|---|
| `stored`, the published files | numbered in one row | `Transformer/posembed_input/pos_embedding` |
| `linen`, the code that reads them | numbered by kind | the same |
| `big_vision` | as `linen` | `pos_embedding`, without a row for the class token |

Kernels are (in, out) with the heads apart: (D, k, Dh) for q, k and v, (k, Dh, D) for the output; the patch
embedding is (P, P, 3, D). numpy stores bfloat16 as two bytes without a type, `V2`.
"""

import math
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from vitlab.files import replacing_file
from vitlab.models.config import ViTConfig, check_divisible
from vitlab.models.vit import ViT
from vitlab.weights.shapes import check_shapes, some

Spelling = Literal["stored", "linen", "big_vision"]
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

# A file with names that start with all of these holds another kind of model; the first that fits.
OTHER_KINDS = (
    (("resnet/",), "a BiT ResNet"),
    (("conv_root/", "Transformer/"), "a hybrid (a ViT on a ResNet's feature map)"),
    (("conv_root/",), "a ResNet"),
    (("MAPHead_0/",), "a ViT with an attention-pooling (MAP) head"),
    (("probe",), "a ViT with an attention-pooling (MAP) head"),
    (("MixerBlock_0/",), "an MLP-Mixer"),
    (("img/",), "a model of pictures and text"),
)


@dataclass(frozen=True)
class Slot:
    """One of Google's arrays, and the parameter of ours that holds it."""

    shape: tuple[int, ...]
    ours: str
    third: int | None = None
    """0, 1 or 2 for q, k and v, which are one parameter of ours."""


def google_layout(config: ViTConfig, spelling: Spelling = "stored") -> dict[str, Slot]:
    """Every array of a model: Google's name -> its shape there and our parameter."""
    d, p, heads = config.width, config.patch_size, (config.heads, config.width // config.heads)
    norm1, msa, norm2, mlp = BLOCK_PARTS[spelling]
    table, rows = TABLE, config.num_tokens
    if spelling == "big_vision":
        table, rows = OTHER_TABLES[-1], config.num_patches
    slots = {"cls": Slot((1, 1, d), "cls")} if config.pool == "token" else {}
    slots["embedding/kernel"] = Slot((p, p, 3, d), "embedding.weight")
    slots["embedding/bias"] = Slot((d,), "embedding.bias")
    slots[table] = Slot((1, rows, d), "position.table")
    for i in range(config.depth):
        theirs, ours = f"Transformer/encoderblock_{i}", f"blocks.{i}"
        slots |= _norm(f"{theirs}/{norm1}", f"{ours}.norm1", d)
        for third, name in enumerate(("query", "key", "value")):
            slots[f"{theirs}/{msa}/{name}/kernel"] = Slot((d, *heads), f"{ours}.attention.qkv.weight", third)
            slots[f"{theirs}/{msa}/{name}/bias"] = Slot(heads, f"{ours}.attention.qkv.bias", third)
        slots[f"{theirs}/{msa}/out/kernel"] = Slot((*heads, d), f"{ours}.attention.out.weight")
        slots[f"{theirs}/{msa}/out/bias"] = Slot((d,), f"{ours}.attention.out.bias")
        slots |= _norm(f"{theirs}/{norm2}", f"{ours}.norm2", d)
        slots |= _dense(f"{theirs}/{mlp}/Dense_0", f"{ours}.mlp.fc1", (d, config.mlp_dim))
        slots |= _dense(f"{theirs}/{mlp}/Dense_1", f"{ours}.mlp.fc2", (config.mlp_dim, d))
    slots |= _norm("Transformer/encoder_norm", "norm", d)
    if config.representation_size:
        slots |= _dense("pre_logits", "pre_logits", (d, config.representation_size))
    if config.num_classes:
        slots |= _dense("head", "head", (config.representation_size or d, config.num_classes))
    return slots


def _norm(theirs: str, ours: str, width: int) -> dict[str, Slot]:
    return {
        f"{theirs}/scale": Slot((width,), f"{ours}.weight"),
        f"{theirs}/bias": Slot((width,), f"{ours}.bias"),
    }


def _dense(theirs: str, ours: str, shape: tuple[int, int]) -> dict[str, Slot]:
    return {
        f"{theirs}/kernel": Slot(shape, f"{ours}.weight"),
        f"{theirs}/bias": Slot(shape[1:], f"{ours}.bias"),
    }


def to_ours(name: str, array: Tensor) -> Tensor:
    """The array that Google calls `name`, in the layout of the parameter of ours that holds it."""
    if name == "embedding/kernel":
        return array.permute(3, 2, 0, 1)  # (P, P, 3, D) -> (D, 3, P, P)
    if name.endswith("/out/kernel"):
        return array.flatten(0, 1).T  # (k, Dh, D) -> (D, k Dh)
    if name.endswith("/kernel"):
        return array.flatten(1).T  # (D, k, Dh) -> (k Dh, D); (in, out) -> (out, in)
    return array.flatten() if name.endswith("/bias") else array  # (k, Dh) -> (k Dh)


def to_google(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `to_ours`."""
    if name == "embedding/kernel":
        return tensor.permute(2, 3, 1, 0)
    return (tensor.T if name.endswith("/kernel") else tensor).reshape(shape)


def read_google(
    path: Path | str, *, image_size: int | tuple[int, int] | None = None
) -> tuple[ViTConfig, dict[str, Tensor]]:
    """The configuration and the parameters, by our names and in the stored precision, of a Google `.npz`.

    Reads every spelling and prefix, and stacked blocks; an optimiser's state beside the weights is left
    alone. The sizes are the arrays' own; what no array tells is as in Google's code: tanh GELU, eps 1e-6, no
    dropout, and the mean over patches where there is no class token.

    `image_size` matters only where the arrays leave it open: a position table whose rows form no square, and
    big_vision's fixed sin-cos positions, which have no table and are computed for this size (224 unless
    given). Deviation: from then on these are a learned table like any other.

    Raises ValueError for a damaged file or another kind of model, naming every array that does not fit.
    """
    path = Path(path)
    arrays = _unstack(_read_npz(path))
    _check_kind(path, arrays)
    spelling = _spelling(path, arrays)
    size, table = _positions(path, arrays, spelling, image_size)
    arrays[TABLE] = table
    config = _infer_config(path, arrays, spelling, size)
    layout = google_layout(config, spelling)
    check_shapes(
        f"{path} looks like a Vision Transformer of width {config.width} and depth {config.depth}",
        {name: slot.shape for name, slot in layout.items()},
        {name: tuple(array.shape) for name, array in arrays.items()},
    )
    parts: dict[str, list[Tensor]] = {}
    for name, slot in layout.items():
        parts.setdefault(slot.ours, []).append(to_ours(name, arrays.pop(name)))
    return config, {ours: torch.cat(part).contiguous() for ours, part in parts.items()}


def write_google(model: ViT, path: Path | str, *, spelling: Spelling = "stored", prefix: Prefix = "") -> None:
    """Writes a model as Google's code reads it: all of the file or nothing.

    Raises ValueError for a model which that code would compute otherwise.
    """
    config = model.config
    for name, given, allowed in (("spelling", spelling, get_args(Spelling)), ("prefix", prefix, get_args(Prefix))):
        if given not in allowed:
            raise ValueError(f"{name} is {given!r}; allowed: {', '.join(map(repr, allowed))}.")
    for name, theirs in {"position": "1d", "gelu": "tanh", "layer_norm_eps": 1e-6}.items():
        if getattr(config, name) != theirs:
            raise ValueError(
                f"the model has {name}={getattr(config, name)!r}, which Google's .npz cannot say: the code "
                f"that reads it assumes {theirs!r}. Use save_model, which keeps every setting."
            )
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    if spelling == "big_vision" and config.pool == "token":
        row, state["position.table"] = state["position.table"].tensor_split([1], dim=1)
        if row.any():  # the sum that Eq. 1 forms
            state["cls"] = state["cls"] + row
    arrays = {}
    for name, slot in google_layout(config, spelling).items():
        tensor = state[slot.ours]
        tensor = tensor if slot.third is None else tensor.chunk(3)[slot.third]
        arrays[prefix + name] = _to_numpy(to_google(name, tensor, slot.shape))
    with replacing_file(Path(path)) as file:
        np.savez(file, **arrays)


def sincos_table(grid: tuple[int, int], width: int) -> Float[Tensor, "1 N D"]:
    """big_vision's fixed positions: sin and cos of the column, then of the row, at D/4 wavelengths."""
    assert _has_sincos(width)
    rows, columns = torch.meshgrid(*(torch.arange(side, dtype=torch.float64) for side in grid), indexing="ij")
    omega = 10_000.0 ** -torch.linspace(0, 1, width // 4, dtype=torch.float64)
    x, y = columns.reshape(-1, 1) * omega, rows.reshape(-1, 1) * omega
    return torch.cat([x.sin(), x.cos(), y.sin(), y.cos()], dim=1)[None].float()


def _has_sincos(width: int) -> bool:
    return width % 4 == 0 and width >= 8


def _read_npz(path: Path) -> dict[str, Tensor]:
    """The model's arrays by name, without the prefix that they stand under."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            names, prefix = list(archive.files), ""
            for each in ("opt/target/", "params/"):  # beside them stands an optimiser's state
                inside = [name for name in names if name.startswith(prefix + each)]
                names, prefix = (inside, prefix + each) if inside else (names, prefix)
            arrays = {name.removeprefix(prefix): archive[name] for name in names}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path} cannot be read as an .npz of plain arrays ({error}). It is damaged, or holds pickled "
            f"objects, which are never loaded; get the file again."
        ) from error
    return {name: _to_torch(path, name, array) for name, array in arrays.items()}


def _to_torch(path: Path, name: str, array: np.ndarray | bytes) -> Tensor:
    if isinstance(array, np.ndarray):
        if array.dtype == np.dtype("V2"):
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype in (np.float16, np.float32, np.float64):
            return torch.from_numpy(array)
    given = array.dtype if isinstance(array, np.ndarray) else "no array"
    raise ValueError(f"{path}: {name} is {given}; weights are arrays of float16, bfloat16, float32 or float64.")


def _to_numpy(tensor: Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view("V2")
    return tensor.contiguous().numpy()


def _unstack(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays with the blocks of a scan one by one."""
    single = {}
    for name, array in arrays.items():
        if name.startswith(STACKED) and array.ndim:
            for i, block in enumerate(array):
                single[f"Transformer/encoderblock_{i}/{name.removeprefix(STACKED)}"] = block
        else:
            single[name] = array
    return single


def _check_kind(path: Path, arrays: dict[str, Tensor]) -> None:
    for starts, kind in OTHER_KINDS:
        if all(any(name.startswith(start) for name in arrays) for start in starts):
            raise ValueError(
                f"{path} holds {kind}, which is not supported yet; supported are plain Vision Transformers "
                f"with a class token or the mean over patches."
            )


def _spelling(path: Path, arrays: dict[str, Tensor]) -> Spelling:
    """How the blocks are spelled; raises ValueError unless what the sizes are read from is there."""
    first = "Transformer/encoderblock_0"
    spelling = "stored" if f"{first}/{BLOCK_PARTS['stored'][1]}/query/kernel" in arrays else "linen"
    _, msa, _, mlp = BLOCK_PARTS[spelling]
    wanted = {"embedding/kernel": 4, f"{first}/{msa}/query/kernel": 3, f"{first}/{mlp}/Dense_0/kernel": 2}
    for name, ndim in wanted.items():
        if name not in arrays or arrays[name].ndim != ndim:
            what = f"of shape {tuple(arrays[name].shape)}" if name in arrays else "missing"
            raise ValueError(
                f"{path} is no Vision Transformer of Google's: {name} is {what}, where an array of {ndim} "
                f"axes is needed. It holds {some(sorted(arrays)) or 'nothing'}."
            )
    return spelling


def _positions(
    path: Path, arrays: dict[str, Tensor], spelling: Spelling, stated: int | tuple[int, int] | None
) -> tuple[int | tuple[int, int], Tensor]:
    """The picture size that the positions are for, and their table with one row for every token.

    Takes the table out of `arrays`. Google's class token has a row in some files and none in others.
    """
    cls = int("cls" in arrays)
    patch, width = arrays["embedding/kernel"].shape[0], arrays["embedding/kernel"].shape[3]
    name = next((name for name in (TABLE, *OTHER_TABLES) if name in arrays), None)
    if name is None and (spelling == "stored" or not _has_sincos(width)):
        raise ValueError(f"{path} lacks its position table, {TABLE}; it is damaged: get the file again.")
    if name is None:
        size = stated or ViTConfig.image_size
        table, class_row = sincos_table(_grid(size, patch), width), 0
    else:
        table = arrays.pop(name)
        if table.ndim != 3:
            raise ValueError(f"{path}: {name} has shape {tuple(table.shape)}; a table is (1, tokens, {width}).")
        size, class_row = _infer_size(path, table.shape[1], cls, patch, stated)
    return size, table if class_row == cls else torch.cat([torch.zeros_like(table[:, :1]), table], dim=1)


def _infer_size(
    path: Path, rows: int, cls: int, patch: int, stated: int | tuple[int, int] | None
) -> tuple[int | tuple[int, int], int]:
    """Picture size from the rows of a table, and whether one of them is the class token's."""
    for class_row in (cls, 0):
        side = math.isqrt(max(rows - class_row, 0))
        if side and side * side == rows - class_row:
            return side * patch, class_row
    if stated is None:
        raise ValueError(
            f"{path} has a position table of {rows} rows, which form no square; say which picture size they "
            f"are for: image_size=(height, width)."
        )
    class_row = rows - math.prod(_grid(stated, patch))
    if class_row not in (0, cls):
        raise ValueError(
            f"{path} has a position table of {rows} rows, which form no square, and image_size={stated} "
            f"needs {rows - class_row} in patches of {patch}x{patch}; say which picture size they are for."
        )
    return stated, class_row


def _grid(image_size: int | tuple[int, int], patch: int) -> tuple[int, int]:
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    check_divisible((height, width), patch)
    return height // patch, width // patch


def _infer_config(path: Path, arrays: dict[str, Tensor], spelling: Spelling, size: int | tuple[int, int]) -> ViTConfig:
    """Every size from the shapes."""
    first, (_, msa, _, mlp) = "Transformer/encoderblock_0", BLOCK_PARTS[spelling]
    blocks = {name.split("/")[1] for name in arrays if name.startswith("Transformer/encoderblock_")}
    last = {name: arrays[name].shape[-1] for name in ("head/kernel", "pre_logits/kernel") if name in arrays}
    try:
        return ViTConfig(
            image_size=size,
            patch_size=arrays["embedding/kernel"].shape[0],
            width=arrays["embedding/kernel"].shape[3],
            depth=len(blocks),
            heads=arrays[f"{first}/{msa}/query/kernel"].shape[1],
            mlp_dim=arrays[f"{first}/{mlp}/Dense_0/kernel"].shape[1],
            num_classes=last.get("head/kernel", 0),
            pool="token" if "cls" in arrays else "gap",
            representation_size=last.get("pre_logits/kernel"),
        )
    except ValueError as error:
        raise ValueError(f"{path} holds no model that can be built: {error}") from error
