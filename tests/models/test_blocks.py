import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig
from vitlab.models.blocks import model_blocks, parameter_depths
from vitlab.models.variant import override
from vitlab.models.vit import build_model, unwrap

SMALL = ViTConfig(image_size=32, patch_size=8, width=16, depth=3, heads=2, mlp_dim=24, num_classes=5)


def gradients(model: torch.nn.Module, images: torch.Tensor) -> tuple[dict[str, torch.Tensor], int]:
    """Of the sum of the logits; and how many numbers the forward pass kept for them."""
    torch.manual_seed(1)  # of dropout
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // 4
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(images).square().sum()
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, sum(kept.values())


def test_recomputed_blocks_have_the_same_gradients(block_kind: ModelConfig) -> None:
    plain = build_model(block_kind).train()
    images = torch.randn(4, block_kind.in_chans, *block_kind.image_hw)
    recomputed = copy.deepcopy(plain)
    recomputed.set_grad_checkpointing()
    recomputed.set_grad_checkpointing()  # a second time changes nothing
    off = copy.deepcopy(recomputed)
    off.set_grad_checkpointing(False)
    (expected, whole), (found, part), (again, whole_again) = (gradients(m, images) for m in (plain, recomputed, off))
    assert expected.keys() == found.keys() == again.keys()
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())
    assert all(torch.equal(again[name], gradient) for name, gradient in expected.items())
    if model_blocks(plain):
        assert part < whole == whole_again


def test_depths() -> None:
    configs = [
        override(SMALL, position_at="every", registers=1, pre_norm=True, pool="map"),
        dataclasses.replace(SMALL, pool="map", encoder="axial"),
        dataclasses.replace(SMALL, stem=ResNetBody(layers=(1, 2), width=32), patch_size=1),
    ]
    for config in configs:
        depths = parameter_depths(name for name, _ in build_model(config).named_parameters())
        for name, depth in depths.items():
            part, _, rest = name.partition(".")
            expected = int(rest.split(".")[0]) + 1 if part == "blocks" else 4 if part in ("map", "norm", "head") else 0
            assert depth == expected, name
    resnet = build_model(ResNetConfig(body=ResNetBody(layers=(1, 2), width=32, version="v2")))
    depths = parameter_depths(f"base_model.model.{name}" for name, _ in resnet.named_parameters())  # in an adapter
    names = ("body.root", *(f"body.stages.{unit}.conv1" for unit in ("0.0", "1.0", "1.1")), "norm", "head")
    assert [depths[f"base_model.model.{name}.weight"] for name in names] == [0, 1, 2, 3, 4, 4]
    assert len(model_blocks(resnet)) == 3


@pytest.mark.filterwarnings("ignore:.*torch.jit.script. is deprecated")
def test_torchscript_is_refused_with_what_replaces_it() -> None:
    resnet = ResNetConfig(body=ResNetBody(layers=(1, 2), width=32))
    for model in (build_model(SMALL), nn.Sequential(build_model(SMALL)), build_model(resnet)):
        with pytest.raises(ValueError, match="vitlab export"):
            torch.jit.script(model)


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, torch.optim.swa_utils.AveragedModel])
def test_the_model_in_a_wrapper(wrap: Callable[..., nn.Module]) -> None:
    model = build_model(SMALL)
    inner = unwrap(nn.DataParallel(wrap(model)))
    assert inner.state_dict().keys() == model.state_dict().keys()
    assert inner.config == SMALL
    with pytest.raises(ValueError, match="a Linear"):
        unwrap(wrap(nn.Linear(1, 1)))
