"""timm's and Hugging Face's models at a shrunken size, and how their outputs are compared with ours."""

import functools
import json
import tarfile
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import safetensors.torch
import timm
import torch
import transformers
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images
from timm.models import save_for_hf
from torch import Tensor, nn

from vitlab.data.transforms import EvalTransform
from vitlab.models import ModelConfig, Rotary
from vitlab.models.config import ImageSize
from vitlab.models.vit import Model, build_model
from vitlab.preprocessing import Preprocessing
from vitlab.weights.huggingface_layout import IMAGENET


def loaded(config: ModelConfig, state: dict[str, Tensor]) -> Model:
    """Our model of what was read."""
    with torch.device("meta"):
        model = build_model(config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    return model.eval()


def images(size: ImageSize = 24, channels: int = 3) -> Tensor:
    height, width = (size, size) if isinstance(size, int) else size
    return torch.rand(3, channels, height, width) * 2 - 1


def normalized(inputs: Tensor, mean: Any, std: Any) -> Tensor:
    """Images in [-1, 1] as a model trained with this mean and deviation takes them."""
    center, scale = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (mean, std))
    return (((inputs.double() + 1) / 2 - center) / scale).float()


def check_equal(mine: Tensor, other: Tensor, within: float = 1e-5) -> None:
    """The largest error is relative to the root mean square of the output."""
    assert mine.shape == other.shape, f"{mine.shape}, {other.shape}"
    error = (mine - other).abs().max() / other.square().mean().sqrt()
    assert error <= within, f"{error:.1e}"


@torch.no_grad()
def check_normalized(ours: Model, theirs: Any, mean_std: Any = IMAGENET) -> None:
    """Equal outputs, in float64, where theirs takes images of this mean and deviation."""
    inputs = images(ours.config.image_size)
    check_equal(ours.double()(inputs.double()), theirs.double()(normalized(inputs, *mean_std).double()))


# --- timm --------------------------------------------------------------------------------------------------------


def noisy(model: nn.Module) -> Any:
    """The model with noise on every parameter, so that none can be lost or swapped unnoticed."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model.eval()


VIT_ARGS: dict[str, Any] = {"patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4, "mlp_ratio": 1.5}
OBLONG = {**VIT_ARGS, "img_size": (16, 24), "num_classes": 5}
HYBRID = {"img_size": 64, "embed_dim": 32, "depth": 1, "num_heads": 4, "num_classes": 5}
TIMM_BIT: dict[str, Any] = {"channels": (128, 256, 512, 1024), "stem_chs": 32, "num_classes": 5}
TIMM_BIT |= {"pretrained_cfg_overlay": {"input_size": (3, 37, 64)}}


def create_timm(name: str, **args: Any) -> Any:
    return noisy(timm.create_model(name, **args))


def save_timm(model: Any, folder: Path, args: dict[str, Any]) -> Path:
    """The folder that timm itself writes for the hub."""
    args = {name: value for name, value in args.items() if name != "pretrained_cfg_overlay"}
    save_for_hf(model, str(folder), model_args=args, safe_serialization=True)
    return folder


def bare(model: nn.Module, path: Path, **changes: Any) -> Path:
    """The parameters alone, some changed and some (...) removed."""
    state = {**model.state_dict(), **changes}
    save_file({name: tensor.clone() for name, tensor in state.items() if tensor is not ...}, path)
    return path


def shrink_convolutions(model: Any) -> Any:
    """The model with convolutions so small that eps weighs in their standardization."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 4 and parameter.shape[-1] in (3, 7):
                parameter *= 1e-4
    return model


@torch.no_grad()
def check_timm(ours: Model, theirs: Any) -> None:
    """Equal outputs; a ResNet's many layers of noise amplify rounding."""
    inputs, cfg = images(ours.config.image_size), theirs.pretrained_cfg
    other = theirs(normalized(inputs, cfg["mean"], cfg["std"]))
    assert other.std() > 1e-3
    check_equal(ours(inputs), other, within={"vit": 2e-5, "resnet": 1e-4}[ours.config.kind])


# --- Hugging Face ------------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 24, "patch_size": 8}
OLDER = {**SMALL, "num_labels": 7, "intermediate_size": 48}
DINOV2 = {**SMALL, "num_labels": 7, "mlp_ratio": 2}
BIT = {"embedding_size": 32, "hidden_sizes": [128, 256], "depths": [1, 2], "num_labels": 7}
BOTTLENECK = {**BIT, "layer_type": "bottleneck", "global_padding": "same", "embedding_dynamic_padding": True}

Case = tuple[str, dict[str, Any], dict[str, Any]]
"""Their class, its settings, and fields of our configuration."""
CASES: dict[str, Case] = {
    "vit": ("ViTForImageClassification", OLDER, {"pool": "token", "layer_norm_eps": 1e-12, "gelu": "erf"}),
    "vit tanh": ("ViTForImageClassification", {**OLDER, "hidden_act": "gelu_new"}, {"gelu": "tanh"}),
    "vit oblong": ("ViTForImageClassification", {**OLDER, "image_size": [16, 32]}, {"image_size": (16, 32)}),
    "vit without biases": ("ViTForImageClassification", {**OLDER, "qkv_bias": False}, {}),
    "vit body": ("ViTModel", OLDER, {"num_classes": 0, "representation_size": None}),
    "vit body, pooler": ("ViTModel", {**OLDER, "pooler_output_size": 20}, {"representation_size": 20}),
    "deit, teacher": ("DeiTForImageClassificationWithTeacher", OLDER, {"distilled": True, "registers": 0}),
    "deit": ("DeiTForImageClassification", OLDER, {"distilled": False, "registers": 1}),
    "deit body, pooler": ("DeiTModel", OLDER, {"registers": 1, "representation_size": 32}),
    "dinov2": ("Dinov2ForImageClassification", DINOV2, {"pool": "token+gap", "layer_scale": 1.0}),
    "dinov2 body": ("Dinov2Model", DINOV2, {"pool": "token", "num_classes": 0, "layer_norm_eps": 1e-6}),
    "dinov2, registers": ("Dinov2WithRegistersForImageClassification", DINOV2, {"registers": 4, "pool": "token+gap"}),
    "bit": ("BitForImageClassification", BIT, {"num_classes": 7}),
    "bit bottleneck": ("BitForImageClassification", BOTTLENECK, {"num_classes": 7}),
    "bit body": ("BitModel", BIT, {"num_classes": 0}),
}


TEXT = {**dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 8), "num_hidden_layers": 1}
TOWERS: dict[str, Any] = {"vision_config": OLDER, "text_config": {**TEXT, "num_attention_heads": 1}}
RESIZED: dict[str, Case] = {  # which are read at another size as well
    "clip": ("CLIPVisionModelWithProjection", {**OLDER, "projection_dim": 5}, {"num_classes": 5, "gelu": "quick"}),
    "clip body": ("CLIPVisionModel", {**OLDER, "hidden_act": "gelu"}, {"num_classes": 0, "layer_norm_eps": 1e-5}),
    "clip whole": ("CLIPModel", {**TOWERS, "projection_dim": 6}, {"num_classes": 6, "pre_norm": True}),
    "clip classifier": ("CLIPForImageClassification", {"vision_config": OLDER}, {"pool": "gap", "final_norm": "none"}),
    "siglip": ("SiglipVisionModel", OLDER, {"pool": "map", "gelu": "tanh", "num_classes": 0}),
    "siglip whole": ("SiglipModel", TOWERS, {"pool": "map", "layer_norm_eps": 1e-6}),
    "siglip classifier": ("SiglipForImageClassification", {"vision_config": OLDER, "num_labels": 3}, {"pool": "gap"}),
    "clip of 27 pixels": ("CLIPVisionModel", {**OLDER, "image_size": 27}, {"image_size": 24}),
    "mae": ("ViTMAEModel", {**OLDER, "mask_ratio": 0.0}, {"pool": "token", "num_classes": 0}),
    "msn": ("ViTMSNForImageClassification", OLDER, {"pool": "token", "layer_norm_eps": 1e-6}),
    "ijepa": ("IJepaForImageClassification", OLDER, {"pool": "gap"}),
    "dinov3": ("DINOv3ViTModel", {**OLDER, "num_register_tokens": 2}, {"rotary": Rotary(), "registers": 2}),
    "dinov3 gated": (
        "DINOv3ViTModel",
        {**OLDER, "use_gated_mlp": True, "hidden_act": "silu", "rope_theta": 50.0, "image_size": 32},
        {"swiglu": True, "rotary": Rotary(50.0)},
    ),
    "dinov2 gated": ("Dinov2Model", {**DINOV2, "use_swiglu_ffn": True}, {"swiglu": True}),
}
CASES |= RESIZED


def randomize(model: nn.Module) -> Any:
    """Every parameter random, so that none can be lost or swapped unnoticed; convolutions so small that eps counts."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=3e-4 if parameter.ndim == 4 and parameter.shape[-1] != 8 else 0.5)
    return model.eval()


def create_huggingface(case: str) -> Any:
    name, settings, _ = CASES[case]
    cls, options = getattr(transformers, name), {"add_pooling_layer": False} if case == "vit body" else {}
    return randomize(cls(cls.config_class(**settings), **options))


def faint_images() -> Tensor:
    """Of sides that show the padding, and of values that show epsilon."""
    return images((46, 37)) * 1e-3


def outputs(model: Any, inputs: Tensor, **options: Any) -> Tensor:
    """The output of their model: logits, or features of the image."""
    if hasattr(model, "get_image_features"):
        return model.get_image_features(inputs, **options).pooler_output
    if "MAE" in type(model).__name__:  # which drops no patch, but shuffles them by this noise
        options["noise"] = torch.arange(inputs.shape[-1] ** 2 / 64).expand(len(inputs), -1)
    result = model(inputs, **options)
    for name in ("logits", "image_embeds"):
        if name in result:
            return result[name]
    pooled = result.get("pooler_output")
    if "IJepa" in type(model).__name__:
        return result.last_hidden_state.mean(1)
    return result.last_hidden_state[:, 0] if pooled is None else pooled.flatten(1)


def from_pretrained(folder: Path, head: bool) -> Any:
    """Their model; none of its parameters may be missing, left over or of another shape."""
    bare = not head and not any("pooler" in name for name in safetensors.torch.load_file(folder / "model.safetensors"))
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    options: dict[str, Any] = {"add_pooling_layer": False} if bare and kind in ("vit", "deit") else {}
    classifier = "CLIPVisionModelWithProjection" if kind == "clip_vision_model" else "AutoModelForImageClassification"
    model, info = getattr(transformers, classifier if head else "AutoModel").from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(info.values()), info
    return model.eval()


# --- images ------------------------------------------------------------------------------------------------------


@functools.cache
def photographs(shared: Path) -> list[np.ndarray]:
    """Twenty: flowers, smaller than most models' images, and two that are larger, in both orientations."""
    with tarfile.open(shared / "data" / "flowers102" / "train-00.tar") as tar:
        members = [member for member in tar.getmembers() if member.name.endswith(".jpg")][:17]
        flowers = [np.array(Image.open(cast(IO[bytes], tar.extractfile(member))).convert("RGB")) for member in members]
    large = [np.ascontiguousarray(image[:, :-1]) for image in load_sample_images()["images"]]
    return [*flowers, *large, np.ascontiguousarray(large[0].transpose(1, 0, 2))]


def check_prepared(
    card: dict[str, Any], inputs: list[np.ndarray], theirs: list[Tensor], levels: int = 1, off: float = 0.0
) -> None:
    """Their normalized images, brought back to [0, 1] by the card's mean and std, differ from ours by at most `levels`
    gray levels, a fraction `off` by more than one. Pixels that no patch covers are left out."""
    prepared = Preprocessing.read(card, "card")
    assert prepared.image_size is not None
    assert prepared.mean is not None
    assert prepared.std is not None
    mean, std = (torch.tensor(values)[:, None, None] for values in (prepared.mean, prepared.std))
    transform = EvalTransform(prepared.image_size, prepared)
    for image, other in zip(inputs, theirs, strict=True):
        ours = (transform.apply([image])[0] + 1) / 2
        error = (ours - (other * std + mean)[:, : ours.shape[1], : ours.shape[2]]).abs() * 255
        assert error.max() <= levels + 0.001, image.shape
        assert (error > 1.001).double().mean() <= off, image.shape
