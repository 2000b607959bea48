"""Several outputs of one program, against what the package computes elsewhere."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch

from vitlab.inspection import attention_maps
from vitlab.models import ResNetBody, ResNetConfig, Rotary
from vitlab.models.vit import ViT, build_model
from vitlab.weights import load_model, save_model
from vitlab.weights.export import SUFFIX, export_checkpoint
from vitlab.weights.export_outputs import Output, Outputs, check_outputs


def check(model: ViT, outputs: dict[str, torch.Tensor], images: torch.Tensor, **tolerance: Any) -> None:
    with torch.no_grad():
        tokens = model.forward_features(images)
        expected = {"logits": model(images), "tokens": tokens, "features": model.forward_head(tokens, pre_logits=True)}
    expected["attention"] = torch.stack(attention_maps(model, images), dim=1)
    for name, output in outputs.items():
        torch.testing.assert_close(output, expected[name], **tolerance)


@pytest.mark.parametrize(
    "settings",
    [
        {"position": "relative", "position_at": "shared", "registers": 2},
        {"rotary": Rotary(), "dynamic_image_size": True, "distilled": True},
        {"pool": "map", "representation_size": 6},
    ],
)
@torch.no_grad()
def test_outputs_are_those_of_the_package(tiny: Callable[..., ViT], settings: dict[str, Any]) -> None:
    names: tuple[Output, ...] = ("attention", "features", "logits", "tokens")
    model = tiny(**settings)
    images = torch.rand(2, 3, *((8, 16) if "dynamic_image_size" in settings else (12, 12)))
    outputs: Any = Outputs(model, names)(images)
    assert tuple(outputs) == names
    check(model, outputs, images)
    assert torch.equal(Outputs(model, ("tokens",))(images), outputs["tokens"])
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("to", "options", "settings"),
    [
        pytest.param("onnx", {"opset": 17}, {}, marks=pytest.mark.slow),
        ("onnx", {"opset": 17}, {"depth": 1, "pool": "gap", "rotary": Rotary(), "swiglu": True, "registers": 1}),
        pytest.param("torch-export", {"dynamic_image_size": True}, {}, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_module_is_exported_with_named_outputs(
    to: Any, options: dict[str, Any], settings: dict[str, Any], tiny: Callable[..., ViT], tmp_path: Path
) -> None:
    model, names, path = tiny(**settings), ("tokens", "attention", "logits"), tmp_path / f"m{SUFFIX[to]}"
    report = export_checkpoint(torch.compile(model), path, to=to, outputs=names, **options)  # pyright: ignore[reportArgumentType]
    assert (report["outputs"], report["opset"]) == (list(names), options.get("opset"))
    images = torch.rand(2, 3, *((12, 12) if to == "onnx" else (20, 8)))
    if to == "onnx":
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        assert [output.name for output in session.get_outputs()] == list(names)
        metadata = session.get_modelmeta().custom_metadata_map
        assert json.loads(metadata["outputs"]) == list(names)
        assert int(metadata["prefix_tokens"]) == model.config.num_prefix_tokens
        outputs = dict(zip(names, map(torch.from_numpy, session.run(None, {"images": images.numpy()})), strict=True))
    else:
        outputs = torch.export.load(path).module()(images)
        save_model(model, tmp_path / "model")
        model: Any = load_model(tmp_path / "model", image_size=(20, 8))
    check(model, outputs, images, rtol=1e-4, atol=1e-4)


def test_outputs_that_a_model_does_not_have_are_refused(tiny: Callable[..., ViT]) -> None:
    assert check_outputs(tiny(), ()) == ("logits",)
    assert check_outputs(tiny(num_classes=0), ()) == ("features",)
    resnet = build_model(ResNetConfig(image_size=16, num_classes=5, body=ResNetBody(layers=(1,), width=32)))
    for model, names, problem in (
        (tiny(), ("logit",), "allowed: logits, features, tokens, attention"),
        (tiny(), ("tokens", "tokens"), "each once"),
        (tiny(num_classes=0), ("logits",), "no head"),
        *((model, ("attention",), "full attention") for model in (tiny(encoder="axial"), resnet)),
    ):
        with pytest.raises(ValueError, match=problem):
            check_outputs(model, names)
