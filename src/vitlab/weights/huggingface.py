"""Hugging Face's folders: read and written, without their code.

    config.json                the kind of model, `model_type`, and its settings
    model.safetensors          the parameters; where they fill several files, `model.safetensors.index.json` lists those
    preprocessor_config.json   how images are brought to size and range

| `model_type` | becomes |
|---|---|
| `vit` | a ViT; a pooler, which only a model without a head has, is its pre-logits layer |
| `deit` with a teacher's head | a ViT with a distillation token |
| `deit` without | a ViT with a register: the distillation token plus its position, which no head sees |
| `dinov2`, `dinov2_with_registers` | a ViT with LayerScale and registers, which pools `token+gap` for its head |
| `bit` | a ResNet |

Rates of dropout and stochastic depth are left behind: theirs act in other places than ours.
"""

import logging
import math
import re
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.io import check_regular, read_json
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig
from vitlab.models.config import ImageSize
from vitlab.preprocessing import Interpolation, Preprocessing
from vitlab.weights.adapt import fold_normalization
from vitlab.weights.folder import CARD, WEIGHTS
from vitlab.weights.huggingface_names import (
    BIT_NORM_EPS,
    BIT_WEIGHT_EPS,
    HEADS,
    IMAGES,
    NAMES,
    as_stored,
    huggingface_layout,
)
from vitlab.weights.huggingface_write import write_huggingface
from vitlab.weights.shapes import check_shapes, some

__all__ = ["card_huggingface", "read_huggingface", "write_huggingface"]

logger = logging.getLogger(__name__)

INDEX = f"{WEIGHTS}.index.json"
GELU: dict[str, Literal["erf", "tanh"]] = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_SHORTEST = {"resample": 3, "size": {"shortest_edge": 224}, "crop_size": 224, "do_center_crop": True}
PROCESSORS: dict[str, dict[str, Any]] = {
    "ViT": {"resample": 2, "size": 224},
    "DeiT": {"resample": 3, "size": 256, "crop_size": 224, "do_center_crop": True},
    "Bit": _SHORTEST,
    "CLIP": _SHORTEST,
}
"""What their image processors do where preprocessor_config.json leaves it out."""
PROCESSOR_OF = {"vit": "ViT", "deit": "DeiT", "dinov2": "Bit", "dinov2_with_registers": "Bit", "bit": "Bit"}
RESAMPLE: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic", 4: "box", 5: "hamming"}
"""Pillow's numbers."""


def read_huggingface(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the parameters, by our names and in the stored precision.

    Sizes are the arrays' own; the settings that no array tells are the card's. Mean and standard deviation of the
    images' preparation are folded into the patch embedding, so that the model takes images in [-1, 1]. A folder
    without a word on them is taken to use those of its family's papers: ImageNet's for DeiT and DINOv2, 0.5 for others.

    Raises ValueError for other kinds of models, for settings that would be computed otherwise here, and for arrays
    that do not fit, naming every one.
    """
    card = _read_json(folder / CARD)
    kind = card.get("model_type")
    if not isinstance(kind, str) or kind not in NAMES:
        raise UserError(f"{folder} holds a Hugging Face model of type {kind!r}; supported: {', '.join(NAMES)}.")
    arrays = {as_stored(name.removeprefix(f"{kind}.")): array for name, array in _read_arrays(folder).items()}
    arrays.pop("embeddings.mask_token", None)  # of no use after pre-training
    try:
        images = _preparation(folder)
        mean, std = _normalization(images, kind)
        config = _resnet_config(card, arrays, images) if kind == "bit" else _vit_config(kind, card, arrays)
        classes = _classes(card)
        if config.num_classes and classes and len(classes) != config.num_classes:
            raise UserError(f"id2label names {len(classes)} classes and the head has {config.num_classes} outputs")
    except ValueError as error:
        raise UserError(f"{folder} holds no model that can be read: {error}") from error
    layout = huggingface_layout(kind, config)
    expected = {name: shape for names, shape in layout.values() for name in names}
    lone = kind == "deit" and "registers" in layout  # a distillation token that no head sees
    if lone:
        assert isinstance(config, ViTConfig)
        expected["embeddings.position_embeddings"] = (1, config.num_tokens, config.width)
    found = {name: tuple(array.shape) for name, array in arrays.items()}
    check_shapes(f"{folder} looks like a {kind} of {config.num_parameters:,} parameters", expected, found)
    state = {ours: torch.cat([arrays.pop(name) for name in names]) for ours, (names, _) in layout.items()}
    if lone:
        cls, token, patches = state["position.table"].tensor_split([1, 2], dim=1)
        state["registers"], state["position.table"] = state["registers"] + token, torch.cat([cls, patches], dim=1)
    return config, fold_normalization(state, mean, std)


def card_huggingface(folder: Path) -> dict[str, Any]:
    """What the folder tells users of the model: `preprocessing`, and `classes`, where they have names."""
    card = _read_json(folder / CARD)
    said, classes = _preparation(folder), _classes(card)
    found: dict[str, Any] = {}
    if classes and classes != [f"LABEL_{i}" for i in range(len(classes))]:
        found["classes"] = classes
    kind = card.get("model_type", "")
    if said:
        found["preprocessing"] = _preprocessing(said, kind, folder).to_card()
    return found


def _preprocessing(said: dict[str, Any], kind: str, folder: Path) -> Preprocessing:
    """What their image processor does with these settings.

    Where it leaves images at sizes of their own, or fills them up with black, they are squashed to size instead, and a
    warning says so. Raises UserError for settings that are none.
    """
    name = str(said.get("image_processor_type") or said.get("feature_extractor_type") or PROCESSOR_OF.get(kind))
    name = re.sub("(ImageProcessor|FeatureExtractor)(Fast|Pil)?$", "", name)
    said = PROCESSORS.get(name, PROCESSORS["ViT"]) | said
    mean, std = _normalization(said, kind)
    size, crop = said["size"], said.get("do_center_crop")
    if name in ("Bit", "CLIP") and isinstance(size, int):
        size = {"shortest_edge": size}
    shortest = size.get("shortest_edge") if isinstance(size, dict) and "longest_edge" not in size else None
    squashed = None if shortest else _size({"size": size})
    image_size = _size(said) if crop else squashed
    if said.get("resample") not in RESAMPLE:
        raise UserError(f"{folder / IMAGES} says resample={said.get('resample')!r}; allowed: Pillow's 0 to 5.")
    resize = shortest or (squashed if isinstance(squashed, int) and squashed != image_size else None)
    fits = image_size and (resize is None or (isinstance(resize, int) and resize >= max(_pair(image_size))))
    if not said.get("do_resize", True) or not fits or not (shortest or squashed):
        logger.warning(
            "%s: images are squashed to size, because do_resize=%r, size=%r, do_center_crop=%r and crop_size=%r do not "
            "bring all of them to one size", folder / IMAGES, said.get("do_resize", True), said["size"], crop,
            said.get("crop_size"),
        )  # fmt: skip
        resize = None
    return Preprocessing(
        image_size=image_size,
        resize=resize,
        keep_aspect=bool(shortest) or resize is None,
        interpolation=RESAMPLE[said["resample"]],
        crop_offset="floor",
        mean=tuple(map(float, mean)),
        std=tuple(map(float, std)),
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, UserError) as error:
        raise UserError(f"{path} cannot be read ({error}); get the file again.") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} holds no settings by name; get the file again.")
    return found


def _preparation(folder: Path) -> dict[str, Any]:
    return _read_json(folder / IMAGES) if (folder / IMAGES).is_file() else {}


def _read_arrays(folder: Path) -> dict[str, Tensor]:
    """Of one file, or of all that an index lists."""
    files = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            pickled = sorted(path.name for path in folder.glob("*.bin"))
            held = f" {some(pickled)} is a pickle, which can run any code and is never loaded." if pickled else ""
            raise UserError(
                f"{folder} holds no {WEIGHTS}.{held} Get the model's safetensors, or write them with Hugging Face's "
                f"save_pretrained where you trust the file."
            )
        listed = _read_json(folder / INDEX).get("weight_map")
        files = list(listed.values()) if isinstance(listed, dict) and listed else [""]
        for name in files:
            if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
                raise UserError(f"{folder / INDEX} lists {name!r}, which is no file of the folder; get it again.")
    arrays: dict[str, Tensor] = {}
    for name in sorted(set(files)):
        try:
            check_regular(folder / name)
            arrays |= safetensors.torch.load_file(folder / name)
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{folder / name} cannot be read ({error}); get the file again.") from error
    return arrays


def _vit_config(kind: str, card: dict[str, Any], arrays: dict[str, Tensor]) -> ViTConfig:
    """Also gives zero biases of q, k and v to `arrays` where the model has none."""
    dinov2 = kind.startswith("dinov2")
    if dinov2:
        _allowed(card, "use_swiglu_ffn", False, (False,))
    head = next((name for name in HEADS if f"{name}.weight" in arrays), None)
    pooler = "pooler.dense.weight" in arrays and not head
    if pooler:
        _allowed(card, "pooler_act", "tanh", ("tanh",))
    width, _, patch_size, _ = _shape(arrays, "embeddings.patch_embeddings.projection.weight", 4)
    depth = len({name.split(".")[2] for name in arrays if name.startswith("encoder.layer.")})
    if not _allowed(card, "qkv_bias", True, (True, False)):
        for i, each in ((i, each) for i in range(depth) for each in ("query", "key", "value")):
            arrays.setdefault(f"encoder.layer.{i}.attention.attention.{each}.bias", torch.zeros(width))
    _check_said(card, {"num_hidden_layers": depth, "hidden_size": width, "patch_size": patch_size})
    distilled = kind == "deit" and head in HEADS[1:]
    registers = "embeddings.distillation_token" if kind == "deit" and not distilled else "embeddings.register_tokens"
    size = _collapse(card.get("image_size", ViTConfig.image_size))
    if dinov2 and isinstance(size, tuple):
        raise UserError(f"{CARD} says image_size={size}, and DINOv2's positions are for square images.")
    return ViTConfig(
        image_size=size,
        patch_size=patch_size,
        width=width,
        depth=depth,
        heads=card.get("num_attention_heads", 12),
        mlp_dim=_shape(arrays, f"encoder.layer.0.{NAMES[kind].get('mlp.fc1', 'mlp.fc1')}.weight", 2)[0],
        num_classes=_shape(arrays, f"{head}.weight", 2)[0] if head else 0,
        pool="token+gap" if dinov2 and head else "token",
        representation_size=_shape(arrays, "pooler.dense.weight", 2)[0] if pooler else None,
        position_interpolation="bicubic_antialias" if kind == "dinov2_with_registers" else "bicubic",
        gelu=GELU[_allowed(card, "hidden_act", "gelu", tuple(GELU))],
        layer_norm_eps=card.get("layer_norm_eps", 1e-6 if dinov2 else 1e-12),
        layer_scale=card.get("layerscale_value", 1.0) if dinov2 else None,
        registers=_shape(arrays, registers, 3)[1] if registers in arrays else 0,
        distilled=distilled,
    )


def _resnet_config(card: dict[str, Any], arrays: dict[str, Tensor], images: dict[str, Any]) -> ResNetConfig:
    v2 = _allowed(card, "layer_type", "preactivation", ("preactivation", "bottleneck")) == "preactivation"
    _allowed(card, "global_padding", None, (None,) if v2 else ("SAME", "same"))
    _allowed(card, "embedding_dynamic_padding", False, (not v2,))
    for name, theirs in {"hidden_act": "relu", "num_groups": 32, "width_factor": 1}.items():
        _allowed(card, name, theirs, (theirs,))
    units = {tuple(name.split(".")[2:5:2]) for name in arrays if name.startswith("encoder.stages.")}
    stages = sorted({int(stage) for stage, _ in units})
    body = ResNetBody(
        layers=tuple(sum(stage == str(each) for stage, _ in units) for each in stages),
        width=_shape(arrays, "embedder.convolution.weight", 4)[0],
        version="v2" if v2 else "v1",
        weight_eps=BIT_WEIGHT_EPS,
        weight_eps_on="variance",
        group_norm_eps=BIT_NORM_EPS,
    )
    _check_said(card, {"depths": list(body.layers)})
    _allowed(card, "output_stride", 32, tuple(2**i for i in range(16) if 2**i >= body.stride))
    head = "classifier.1.weight"
    num_classes = _shape(arrays, head, 2)[0] if head in arrays else 0
    return ResNetConfig(image_size=_size(images) or ResNetConfig.image_size, body=body, num_classes=num_classes)


def _check_said(card: dict[str, Any], found: dict[str, Any]) -> None:
    """Raises ValueError where the card speaks of other sizes than the arrays have, as when some are missing."""
    for name, size in found.items():
        if card.get(name, size) != size:
            raise UserError(f"{CARD} says {name}={card[name]!r} and the arrays are for {size!r}; get the files again")


def _allowed(card: dict[str, Any], name: str, default: Any, allowed: tuple[Any, ...]) -> Any:
    """The setting `name`; raises ValueError where it is none that can be computed here."""
    given = card.get(name, default)
    if given not in allowed:
        raise UserError(f"{CARD} says {name}={given!r}; supported: {', '.join(map(repr, allowed))}.")
    return given


def _shape(arrays: dict[str, Tensor], name: str, ndim: int) -> tuple[int, ...]:
    if name not in arrays or arrays[name].ndim != ndim:
        what = f"of shape {tuple(arrays[name].shape)}" if name in arrays else "missing"
        raise UserError(f"{name} is {what}, where an array of {ndim} axes is needed.")
    return tuple(arrays[name].shape)


def _normalization(images: dict[str, Any], kind: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation, of images in [0, 1]."""
    if not images:
        return IMAGENET if kind.startswith("d") else ([0.5] * 3, [0.5] * 3)
    factor = images.get("rescale_factor", 1 / 255) if images.get("do_rescale", True) else 1.0
    if not isinstance(factor, float) or not math.isclose(factor, 1 / 255, rel_tol=1e-3):
        raise UserError(f"{IMAGES} does not bring images to [0, 1] (rescale_factor 1/255) before it normalizes.")
    if not images.get("do_normalize", True):
        return [0.0] * 3, [1.0] * 3
    mean, std = images.get("image_mean"), images.get("image_std")
    if (
        not isinstance(mean, list)
        or not isinstance(std, list)
        or not all(isinstance(x, float | int) for x in mean + std)
    ):
        raise UserError(f"{IMAGES} lacks image_mean and image_std; add those that the model was trained with.")
    return mean, std


def _size(images: dict[str, Any]) -> ImageSize | None:
    """The size in which images come to the model, as far as it is said."""
    said = images.get("crop_size" if images.get("do_center_crop") else "size")
    return _collapse([said.get("height"), said.get("width")] if isinstance(said, dict) else said)


def _pair(size: ImageSize) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else size


def _collapse(size: Any) -> Any:
    """A image's size as our configurations spell it; None for what is none."""
    if isinstance(size, list) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0] if size[0] == size[1] else tuple(size)
    return size if isinstance(size, int) else None


def _classes(card: dict[str, Any]) -> list[str] | None:
    """The names of the outputs in order, where there are any."""
    labels = card.get("id2label")
    if labels is None:
        return None
    try:
        return [str(labels[str(i)]) for i in range(len(labels))]
    except (KeyError, TypeError) as error:
        raise UserError(f"{CARD} says id2label={labels!r}; it names the outputs '0', '1' and so on.") from error
