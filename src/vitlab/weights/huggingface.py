"""Hugging Face's folders: read and written, without their code.

    config.json                the kind of model, `model_type`, and its settings
    model.safetensors          the parameters; where they fill several files, `model.safetensors.index.json` lists those
    preprocessor_config.json   how pictures are brought to size and range

| `model_type` | becomes |
|---|---|
| `vit` | a ViT; a pooler, which only a model without a head has, is its pre-logits layer |
| `deit` with a teacher's head | a ViT with a distillation token |
| `deit` without | a ViT with a register: the distillation token plus its position, which no head sees |
| `dinov2`, `dinov2_with_registers` | a ViT with LayerScale and registers, which pools `token+gap` for its head |
| `bit` | a ResNet |

Rates of dropout and stochastic depth are left behind: theirs act in other places than ours.
"""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from vitlab.files import replacing_folder
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.models.config import ImageSize
from vitlab.models.vit import Model, ViT
from vitlab.weights.adapt import fold_normalisation
from vitlab.weights.folder import CARD, WEIGHTS, check_classes, check_replaceable
from vitlab.weights.shapes import check_shapes, some

PICTURES = "preprocessor_config.json"
INDEX = f"{WEIGHTS}.index.json"

_VIT = {
    "cls": "embeddings.cls_token",
    "distillation": "embeddings.distillation_token",
    "registers": "embeddings.register_tokens",
    "position.table": "embeddings.position_embeddings",
    "embedding": "embeddings.patch_embeddings.projection",
    "norm1": "layernorm_before",
    "attention.out": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "norm": "layernorm",
    "pre_logits": "pooler.dense",
    "head": "classifier",
    "head_distilled": "distillation_classifier",
}
_DINOV2 = {
    **{ours: theirs for ours, theirs in _VIT.items() if ours not in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")},
    "branch1.scale": "layer_scale1.lambda1",
    "branch2.scale": "layer_scale2.lambda1",
}
NAMES: dict[str, dict[str, str]] = {
    "vit": _VIT,
    "deit": {**_VIT, "registers": "embeddings.distillation_token"},
    "dinov2": _DINOV2,
    "dinov2_with_registers": _DINOV2,
    "bit": {
        "body.root": "embedder.convolution",
        "body.root_norm": "embedder.norm",
        "shortcut": "downsample.conv",
        "shortcut_norm": "downsample.norm",
        "head": "classifier.1",
    },
}
"""Every kind: our name of a part, without block, `.weight` and `.bias`, -> theirs, where it is another."""

PARAMETER = re.compile(
    r"(blocks\.(?P<block>\d+)\.|body\.stages\.(?P<stage>\d+)\.(?P<unit>\d+)\.)?(?P<part>.+?)(?P<leaf>\.weight|\.bias)?"
)
HEADS = ("classifier", "cls_classifier", "distillation_classifier")
"""What stands beside the model proper, whose names begin with its kind wherever there is a head."""

RENAMED = (
    (r"^layers\.(\d+)\.mlp\.fc1", r"encoder.layer.\1.intermediate.dense"),
    (r"^layers\.(\d+)\.mlp\.fc2", r"encoder.layer.\1.output.dense"),
    (r"^layers\.", "encoder.layer."),
    (r"attention\.q_proj", "attention.attention.query"),
    (r"attention\.k_proj", "attention.attention.key"),
    (r"attention\.v_proj", "attention.attention.value"),
    (r"attention\.o_proj", "attention.output.dense"),
)
"""What their classes of today call otherwise than their files, and whoever stores a state dict by hand with them."""

GELU: dict[str, Literal["erf", "tanh"]] = {"gelu": "erf", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
IMAGENET = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
BIT_WEIGHT_EPS, BIT_NORM_EPS = 1e-8, 1e-5  # in their code; no setting


def read_huggingface(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the parameters, by our names and in the stored precision.

    Sizes are the arrays' own; the settings that no array tells are the card's. Mean and standard deviation of the
    pictures' preparation are folded into the patch embedding, so that the model takes pictures in [-1, 1]. A folder
    without a word on them is taken to use those of its family's papers: ImageNet's for DeiT and DINOv2, 0.5 for others.

    Raises ValueError for other kinds of models, for settings that would be computed otherwise here, and for arrays
    that do not fit, naming every one.
    """
    card = _read_json(folder / CARD)
    kind = card.get("model_type")
    if kind not in NAMES:
        raise ValueError(f"{folder} holds a Hugging Face model of type {kind!r}; supported: {', '.join(NAMES)}.")
    arrays = {_as_stored(name.removeprefix(f"{kind}.")): array for name, array in _read_arrays(folder).items()}
    arrays.pop("embeddings.mask_token", None)  # of no use after pre-training
    try:
        pictures = _preparation(folder)
        mean, std = _normalisation(pictures, kind)
        config = _resnet_config(card, arrays, pictures) if kind == "bit" else _vit_config(kind, card, arrays)
        classes = _classes(card)
        if config.num_classes and classes and len(classes) != config.num_classes:
            raise ValueError(f"id2label names {len(classes)} classes and the head has {config.num_classes} outputs")
    except ValueError as error:
        raise ValueError(f"{folder} holds no model that can be read: {error}") from error
    layout = _layout(kind, config)
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
    return config, fold_normalisation(state, mean, std)


def card_huggingface(folder: Path) -> dict[str, Any]:
    """What the folder tells users of the model: `classes`, where they have names, and `eval_resize`, where test
    pictures are brought to that smaller side before their centre is cut out."""
    card = _read_json(folder / CARD)
    pictures, classes = _preparation(folder), _classes(card)
    found: dict[str, Any] = {}
    if classes and classes != [f"LABEL_{i}" for i in range(len(classes))]:
        found["classes"] = classes
    size, side = pictures.get("size"), _size(pictures)
    shorter = size.get("shortest_edge") if isinstance(size, dict) else None
    model_size = side if card.get("model_type") == "bit" else _collapse(card.get("image_size"))
    if shorter and pictures.get("do_center_crop") and side is not None and side == model_size:
        found["eval_resize"] = shorter
    return found


def write_huggingface(model: Model, folder: Path | str, extra: dict[str, Any]) -> None:
    """Writes what `AutoModelForImageClassification.from_pretrained(folder)` turns into a model of equal answers, or
    `AutoModel` where there is no head: all of the folder or nothing. Pictures are prepared for [-1, 1].

    `extra` may hold `classes` and `eval_resize` (see `vitlab.weights.folder`); other entries have no place there.
    Raises ValueError for a model that Hugging Face's code would compute otherwise.
    """
    folder, classes = Path(folder), extra.get("classes")
    check_classes(extra, model.config)
    check_replaceable(folder, (CARD, WEIGHTS, PICTURES))
    kind, config, state = _resnet_as_theirs(model) if isinstance(model.config, ResNetConfig) else _vit_as_theirs(model)
    prefix = f"{kind}." if config.num_classes else ""
    arrays = {}
    for ours, (names, _) in _layout(kind, config).items():
        for name, part in zip(names, state.pop(ours).chunk(len(names)), strict=True):
            arrays[name if name.split(".")[0] in HEADS else prefix + name] = part.clone()
    assert not state
    if kind.startswith("dinov2"):  # their classes look for it
        arrays[f"{prefix}embeddings.mask_token"] = torch.zeros_like(arrays[f"{prefix}embeddings.cls_token"][0])
    card = _resnet_card(config) if isinstance(config, ResNetConfig) else _vit_card(kind, config)
    if config.num_classes:
        labels = list(classes) if classes else [f"LABEL_{i}" for i in range(config.num_classes)]
        card["id2label"] = {str(i): label for i, label in enumerate(labels)}
        card["label2id"] = {label: i for i, label in enumerate(labels)}
    with replacing_folder(folder) as aside:
        safetensors.torch.save_file(arrays, aside / WEIGHTS, metadata={"format": "pt"})
        (aside / WEIGHTS).chmod(aside.stat().st_mode & 0o666)  # safetensors lets only the owner read
        for name, content in ((CARD, card), (PICTURES, _pictures(config.image_hw, extra.get("eval_resize")))):
            (aside / name).write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


# ----------------------------------------------------------------------------------------------------- names


def _layout(kind: str, config: ModelConfig) -> dict[str, tuple[list[str], tuple[int, ...]]]:
    """Every parameter of ours: the arrays of theirs that make it, one below the other, and the shape of each."""
    with torch.device("meta"):
        state = build_model(config).state_dict()
    found = {}
    for ours, tensor in state.items():
        match = PARAMETER.fullmatch(ours)
        assert match
        place = ""
        if match["block"]:
            place = f"encoder.layer.{match['block']}."
        elif match["stage"]:
            place = f"encoder.stages.{match['stage']}.layers.{match['unit']}."
        part, leaf = match["part"], match["leaf"] or ""
        theirs = [NAMES[kind].get(part, part)]
        if part == "attention.qkv":
            theirs = [f"attention.attention.{each}" for each in ("query", "key", "value")]
        if part == "head" and isinstance(config, ViTConfig) and config.distilled:
            theirs = ["cls_classifier"]
        rows, *rest = tensor.shape
        found[ours] = [f"{place}{each}{leaf}" for each in theirs], (rows // len(theirs), *rest)
    return found


def _as_stored(name: str) -> str:
    for theirs, stored in RENAMED:
        name = re.sub(theirs, stored, name)
    return name


# --------------------------------------------------------------------------------------------------- reading


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); get the file again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no settings by name; get the file again.")
    return found


def _preparation(folder: Path) -> dict[str, Any]:
    return _read_json(folder / PICTURES) if (folder / PICTURES).is_file() else {}


def _read_arrays(folder: Path) -> dict[str, Tensor]:
    """Of one file, or of all that an index lists."""
    files = [WEIGHTS]
    if not (folder / WEIGHTS).is_file():
        if not (folder / INDEX).is_file():
            pickled = sorted(path.name for path in folder.glob("*.bin"))
            held = f" {some(pickled)} is a pickle, which can run any code and is never loaded." if pickled else ""
            raise ValueError(
                f"{folder} holds no {WEIGHTS}.{held} Get the model's safetensors, or write them with Hugging Face's "
                f"save_pretrained where you trust the file."
            )
        listed = _read_json(folder / INDEX).get("weight_map")
        files = sorted(set(listed.values())) if isinstance(listed, dict) and listed else [""]
        for name in files:
            if Path(name).name != name or not (folder / name).is_file():
                raise ValueError(f"{folder / INDEX} lists {name!r}, which is no file of the folder; get it again.")
    arrays: dict[str, Tensor] = {}
    for name in files:
        try:
            arrays |= safetensors.torch.load_file(folder / name)
        except (OSError, safetensors.SafetensorError) as error:
            raise ValueError(f"{folder / name} cannot be read ({error}); get the file again.") from error
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
    distilled = kind == "deit" and head in HEADS[1:]
    registers = "embeddings.distillation_token" if kind == "deit" and not distilled else "embeddings.register_tokens"
    size = _collapse(card.get("image_size", ViTConfig.image_size))
    if dinov2 and isinstance(size, tuple):
        raise ValueError(f"{CARD} says image_size={size}, and DINOv2's positions are for square pictures.")
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
        gelu=GELU[_allowed(card, "hidden_act", "gelu", tuple(GELU))],
        layer_norm_eps=card.get("layer_norm_eps", 1e-6 if dinov2 else 1e-12),
        layer_scale=card.get("layerscale_value", 1.0) if dinov2 else None,
        registers=_shape(arrays, registers, 3)[1] if registers in arrays else 0,
        distilled=distilled,
    )


def _resnet_config(card: dict[str, Any], arrays: dict[str, Tensor], pictures: dict[str, Any]) -> ResNetConfig:
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
    _allowed(card, "output_stride", 32, tuple(2**i for i in range(16) if 2**i >= body.stride))
    head = "classifier.1.weight"
    num_classes = _shape(arrays, head, 2)[0] if head in arrays else 0
    return ResNetConfig(image_size=_size(pictures) or ResNetConfig.image_size, body=body, num_classes=num_classes)


def _allowed(card: dict[str, Any], name: str, default: Any, allowed: tuple[Any, ...]) -> Any:
    """The setting `name`; raises ValueError where it is none that can be computed here."""
    given = card.get(name, default)
    if given not in allowed:
        raise ValueError(f"{CARD} says {name}={given!r}; supported: {', '.join(map(repr, allowed))}.")
    return given


def _shape(arrays: dict[str, Tensor], name: str, ndim: int) -> tuple[int, ...]:
    if name not in arrays or arrays[name].ndim != ndim:
        what = f"of shape {tuple(arrays[name].shape)}" if name in arrays else "missing"
        raise ValueError(f"{name} is {what}, where an array of {ndim} axes is needed.")
    return tuple(arrays[name].shape)


def _normalisation(pictures: dict[str, Any], kind: str) -> tuple[list[float], list[float]]:
    """Mean and standard deviation, of pictures in [0, 1]."""
    if not pictures:
        return IMAGENET if kind.startswith("d") else ([0.5] * 3, [0.5] * 3)
    factor = pictures.get("rescale_factor", 1 / 255) if pictures.get("do_rescale", True) else 1.0
    if not isinstance(factor, float) or not math.isclose(factor, 1 / 255, rel_tol=1e-3):
        raise ValueError(f"{PICTURES} does not bring pictures to [0, 1] (rescale_factor 1/255) before it normalises.")
    if not pictures.get("do_normalize", True):
        return [0.0] * 3, [1.0] * 3
    mean, std = pictures.get("image_mean"), pictures.get("image_std")
    if not isinstance(mean, list) or not isinstance(std, list):
        raise ValueError(f"{PICTURES} lacks image_mean and image_std; add those that the model was trained with.")
    return mean, std


def _size(pictures: dict[str, Any]) -> ImageSize | None:
    """The size in which pictures come to the model, as far as it is said."""
    said = pictures.get("crop_size" if pictures.get("do_center_crop") else "size")
    return _collapse([said.get("height"), said.get("width")] if isinstance(said, dict) else said)


def _collapse(size: Any) -> Any:
    """A picture's size as our configurations spell it; None for what is none."""
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
        raise ValueError(f"{CARD} says id2label={labels!r}; it names the outputs '0', '1' and so on.") from error


# --------------------------------------------------------------------------------------------------- writing


def _check(config: Any, checks: tuple[tuple[str, Any, str], ...]) -> None:
    """Raises ValueError for the first of (setting, whether they can say it, what they do instead) that they cannot."""
    for name, fits, theirs in checks:
        if not fits:
            raise ValueError(
                f"the model has {name}={getattr(config, name)!r}, which Hugging Face's code cannot compute: {theirs}. "
                f"`--to vitlab` keeps every setting, `--to timm` more of them."
            )


def _vit_as_theirs(model: Model) -> tuple[str, ViTConfig, dict[str, Tensor]]:
    """The kind, and a model that it can be, with the parameters that make its answers those of `model`.

    Fixed and composed positions become a table. Where LayerScale or registers ask for DINOv2, a head that sees the
    class token alone also sees the mean over patches, with weights of zero; a missing LayerScale is one of 1.
    """
    assert isinstance(model, ViT)
    config, head = model.config, model.config.num_classes > 0
    modern = config.pool == "token+gap" or config.layer_scale is not None
    lone = config.registers == 1 and not modern and not config.distilled  # DeiT's, without the teacher's head
    modern = modern or config.registers > int(lone)
    kind = "deit" if config.distilled or lone else "dinov2" if modern else "vit"
    _check(
        config,
        (
            ("stem", config.stem is None, "its ViTs cut patches from pictures"),
            ("encoder", config.encoder == "full", "its ViTs attend among all tokens"),
            ("pool", config.pool in ("token", "token+gap"), "its ViTs have a class token, which the head sees"),
            ("position", config.position != "relative", "its ViTs add positions to the tokens"),
            ("position_at", config.position_at == "stem", "its ViTs add positions once, before the encoder"),
            ("distilled", not config.distilled or not modern, "its DeiT has neither LayerScale nor registers"),
            ("num_classes", head or not config.distilled, "without heads its DeiT looks at the class token alone"),
            (
                "representation_size",
                not (config.representation_size and (head or modern)),
                "it has no such layer there",
            ),
            ("mlp_dim", not modern or config.mlp_dim % config.width == 0, "its DINOv2's is a multiple of the width"),
            ("image_size", not modern or len(set(config.image_hw)) == 1, "its DINOv2's positions are for squares"),
        ),
    )
    state = {name: tensor for name, tensor in _state(model).items() if not name.startswith("position.")}
    state["position.table"] = _position_table(model, config.num_prefix_tokens - (0 if lone else config.registers))
    config = dataclasses.replace(config, position="1d", class_position=True)
    if modern:
        kind = "dinov2_with_registers" if config.registers else kind
        if head and config.pool == "token":
            state["head.weight"] = F.pad(state["head.weight"], (0, config.width))
        if config.layer_scale is None:
            ones = torch.ones_like(state["norm.weight"])
            state |= {f"blocks.{i}.branch{each}.scale": ones for i in range(config.depth) for each in (1, 2)}
        scale = 1.0 if config.layer_scale is None else config.layer_scale
        config = dataclasses.replace(config, layer_scale=scale, pool="token+gap" if head else "token")
    return kind, config, state


@torch.no_grad()
def _position_table(model: ViT, prefix: int) -> Float[Tensor, "1 T D"]:
    """Rows of the first `prefix` tokens and of the patches."""
    rows = model.position.absolute()
    if rows is None:
        rows = model.norm.weight.new_zeros(model.config.num_tokens, model.config.width)
    return torch.cat([rows[:prefix], rows[model.config.num_prefix_tokens :]]).cpu()[None]


def _resnet_as_theirs(model: Model) -> tuple[str, ResNetConfig, dict[str, Tensor]]:
    """As `_vit_as_theirs`. Their standardisation has another epsilon, which all weights k times as large undo: both
    (k w - k mean) / sqrt(k^2 variance + k^2 eps) are the same."""
    config = model.config
    assert isinstance(config, ResNetConfig)
    body = config.body
    _check(
        body,
        (
            ("layers", len(body.layers) > 0, "its BiT has stages"),
            ("mixing", body.mixing == "conv", "its BiT has convolutions"),
            ("pool_padding", body.pool_padding == "zero", "its BiT pads with zeros"),
            ("group_norm_eps", body.group_norm_eps == BIT_NORM_EPS, f"its BiT has {BIT_NORM_EPS}"),
            ("weight_eps_on", body.weight_eps_on == "variance", "its BiT adds epsilon to the variance"),
            ("weight_eps", body.weight_eps > 0, f"its BiT has {BIT_WEIGHT_EPS}"),
        ),
    )
    factor = math.sqrt(BIT_WEIGHT_EPS / body.weight_eps)
    state = {name: tensor * factor if tensor.ndim == 4 else tensor for name, tensor in _state(model).items()}
    return "bit", config, state


def _state(model: Model) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def _vit_card(kind: str, config: ViTConfig) -> dict[str, Any]:
    proper = {"vit": "ViT", "deit": "DeiT", "dinov2": "Dinov2", "dinov2_with_registers": "Dinov2WithRegisters"}[kind]
    suffix = "ForImageClassification" + ("WithTeacher" if config.distilled else "") if config.num_classes else "Model"
    card: dict[str, Any] = {
        "architectures": [proper + suffix],
        "model_type": kind,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": {"erf": "gelu", "tanh": "gelu_pytorch_tanh"}[config.gelu],
        "layer_norm_eps": config.layer_norm_eps,
        "image_size": config.image_size if isinstance(config.image_size, int) else list(config.image_size),
        "patch_size": config.patch_size,
        "num_channels": 3,
        "qkv_bias": True,
    }
    if kind.startswith("dinov2"):
        card |= {"mlp_ratio": config.mlp_dim // config.width, "layerscale_value": config.layer_scale}
        card |= {"num_register_tokens": config.registers} if config.registers else {}
    else:
        card["intermediate_size"] = config.mlp_dim
        card |= {"pooler_output_size": config.representation_size} if config.representation_size else {}
    return card


def _resnet_card(config: ResNetConfig) -> dict[str, Any]:
    body, v2 = config.body, config.body.version == "v2"
    return {
        "architectures": ["BitForImageClassification" if config.num_classes else "BitModel"],
        "model_type": "bit",
        "num_channels": 3,
        "embedding_size": body.width,
        "hidden_sizes": [4 * body.width * 2**stage for stage in range(len(body.layers))],
        "depths": list(body.layers),
        "layer_type": "preactivation" if v2 else "bottleneck",
        "hidden_act": "relu",
        "global_padding": None if v2 else "SAME",
        "embedding_dynamic_padding": not v2,
        "num_groups": 32,
        "width_factor": 1,
        "output_stride": max(32, body.stride),
    }


def _pictures(image_hw: tuple[int, int], eval_resize: int | None) -> dict[str, Any]:
    """Squashed to size, or brought to a smaller side of `eval_resize` and cut."""
    size = dict(zip(("height", "width"), image_hw, strict=True))
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": size if eval_resize is None else {"shortest_edge": eval_resize},
        "resample": 2,  # bilinear
        "do_center_crop": eval_resize is not None,
        "crop_size": size,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
