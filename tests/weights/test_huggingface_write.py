"""Our models as their folders; transformers itself is the reference."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peers import check_equal, faint_images, from_pretrained, images, loaded, outputs, randomize

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights.huggingface import card_huggingface, read_huggingface, write_huggingface

CARD, IMAGES = "config.json", "preprocessor_config.json"


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "vit"),
        ({"gelu": "erf", "layer_norm_eps": 1e-3, "image_size": (8, 12)}, "vit"),
        ({"position": "2d"}, "vit"),
        ({"position": "none"}, "vit"),
        ({"position": "sincos2d", "class_position": False}, "vit"),
        ({"representation_size": 6, "num_classes": 0}, "vit"),
        ({"distilled": True, "class_position": False, "image_size": (8, 12)}, "deit"),
        ({"registers": 1, "position": "2d", "image_size": (8, 12)}, "deit"),
        ({"registers": 1, "representation_size": 6, "num_classes": 0}, "deit"),
        ({"pool": "token+gap", "mlp_dim": 16}, "dinov2"),
        ({"layer_scale": 0.5, "class_position": False, "mlp_dim": 16}, "dinov2"),
        ({"layer_scale": 0.5, "num_classes": 0, "mlp_dim": 16}, "dinov2"),
        ({"registers": 3, "pool": "token+gap", "layer_scale": 0.5, "mlp_dim": 24}, "dinov2_with_registers"),
        ({"registers": 2, "position": "2d", "mlp_dim": 24}, "dinov2_with_registers"),
    ],
)
@torch.no_grad()
def test_their_code_loads_our_vits(
    tmp_path: Path, tiny: Callable[..., ViT], settings: dict[str, Any], kind: str
) -> None:
    model = tiny(**settings)
    write_huggingface(model, tmp_path, {})
    assert json.loads((tmp_path / CARD).read_text())["model_type"] == kind
    inputs = images(model.config.image_size)
    expected = model(inputs)
    check_equal(outputs(from_pretrained(tmp_path, model.config.num_classes > 0), inputs), expected)
    check_equal(loaded(*read_huggingface(tmp_path))(inputs), expected)


@pytest.mark.parametrize(("version", "eps", "num_classes"), [("v2", 1e-10, 7), ("v2", 1e-5, 0), ("v1", 1e-10, 7)])
@torch.no_grad()
def test_their_code_loads_our_resnets(tmp_path: Path, version: Any, eps: float, num_classes: int) -> None:
    body = ResNetBody((1, 2), 32, version, weight_eps=eps, weight_eps_on="variance", group_norm_eps=1e-5)
    model = randomize(build_model(ResNetConfig(image_size=(46, 37), body=body, num_classes=num_classes)))
    write_huggingface(model, tmp_path, {})
    inputs = faint_images()
    check_equal(outputs(from_pretrained(tmp_path, num_classes > 0), inputs), model(inputs), within=1e-4)
    assert read_huggingface(tmp_path)[0].image_size == (46, 37)
    check_equal(loaded(*read_huggingface(tmp_path))(inputs), model(inputs), within=1e-4)


def test_their_processor_prepares_images_for_our_model(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    image = torch.randint(0, 256, (3, 12, 12), dtype=torch.uint8)
    write_huggingface(tiny(), tmp_path, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == [CARD, "model.safetensors", IMAGES]
    prepared = transformers.AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(prepared[0], image / 127.5 - 1, atol=1e-5, rtol=0)
    names = ["tench", "crane", "cat", "crane", "Grüße"]
    write_huggingface(tiny(), tmp_path, {"eval_resize": 14, "classes": names})
    card = card_huggingface(tmp_path)
    assert card["classes"] == names
    assert Preprocessing.read(card, "").describe().startswith("resize 14 (bilinear, antialias), center crop 12x12")
    assert from_pretrained(tmp_path, head=True).config.id2label == dict(enumerate(names))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    image = torch.randint(0, 256, (3, 28, 40), dtype=torch.uint8)
    assert processor(image, return_tensors="pt")["pixel_values"].shape == (1, 3, 12, 12)
    with pytest.raises(ValueError, match="2 names, and the model has 5 outputs"):
        write_huggingface(tiny(), tmp_path, {"classes": ["a", "b"]})


VIT: dict[str, Any] = {"image_size": 8, "patch_size": 4, "width": 8, "depth": 1, "heads": 2, "mlp_dim": 12}
V2: dict[str, Any] = {"layers": (1,), "width": 64, "version": "v2", "group_norm_eps": 1e-5}


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (ViTConfig(**VIT, pool="gap"), "pool='gap'"),
        (ViTConfig(**VIT, position="relative", position_at="every"), "position='relative'"),
        (ViTConfig(**VIT, position_at="every"), "position_at='every'"),
        (ViTConfig(**VIT, encoder="axial"), "encoder='axial'"),
        (ViTConfig(**{**VIT, "patch_size": 1}, stem=ResNetBody((1,), 32)), "stem=ResNetBody"),
        (ViTConfig(**VIT, representation_size=6), "representation_size=6"),
        (ViTConfig(**VIT, distilled=True, layer_scale=1.0), "distilled=True"),
        (ViTConfig(**VIT, distilled=True, num_classes=0), "distilled=True"),
        (ViTConfig(**VIT, layer_scale=1.0), "mlp_dim=12.*cannot represent.*--to vitlab"),
        (ViTConfig(**{**VIT, "mlp_dim": 16, "image_size": (8, 12)}, layer_scale=1.0), r"image_size=\(8, 12\)"),
        (ResNetConfig(body=ResNetBody(**V2)), "weight_eps_on='std'"),
        (ResNetConfig(body=ResNetBody(**{**V2, "group_norm_eps": 1e-6})), "group_norm_eps=1e-06"),
        (ResNetConfig(body=ResNetBody(**V2, pool_padding="-inf")), "pool_padding='-inf'"),
        (ResNetConfig(body=ResNetBody(**V2, mixing="axial"), image_size=16), "mixing='axial'"),
    ],
)
def test_unsupported_models_are_not_written(tmp_path: Path, config: ModelConfig, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        write_huggingface(build_model(config), tmp_path / "new", {})
    assert not (tmp_path / "new").exists()
