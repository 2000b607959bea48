from collections.abc import Callable
from typing import Any

import pytest
import torch

from vitlab.models import ViTConfig
from vitlab.models.encoder import ResidualBranch
from vitlab.models.vit import ViT

CONFIG = ViTConfig(image_size=16, patch_size=4, width=8, depth=1, heads=2, mlp_dim=12)


def test_stochastic_depth_drops_whole_images_and_preserves_the_mean() -> None:
    branch, tokens = ResidualBranch(CONFIG, 0.3), torch.randn(4000, 3, 8)
    assert torch.equal(branch.eval()(tokens), tokens)
    out = branch.train()(tokens)
    present = (out != 0).flatten(1)
    assert torch.equal(present.any(1), present.all(1))
    assert present.all(1).float().mean().item() == pytest.approx(0.7, abs=0.03)
    torch.testing.assert_close(out[present.all(1)], tokens[present.all(1)] / 0.7)
    assert branch(tokens.bfloat16()).dtype == torch.bfloat16


def test_stochastic_depth_grows_from_none_at_the_first_block(small: Callable[..., ViT]) -> None:
    model = small(depth=5, stochastic_depth=0.4)
    rates = [branch.drop_prob for branch in model.modules() if isinstance(branch, ResidualBranch)]
    assert rates == pytest.approx([0.0, 0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3, 0.4, 0.4])
    images = torch.randn(16, 3, 24, 32)
    assert torch.equal(model(images), model(images))
    assert not torch.equal(model.train()(images), model(images))


@pytest.mark.parametrize("settings", [{}, {"pool": "map", "swiglu": True, "encoder": "axial"}])
def test_lora_adapts_every_dense_layer(small: Callable[..., ViT], settings: dict[str, Any]) -> None:
    import peft  # slow to import

    model, images = small(**settings), torch.randn(2, 3, 24, 32)
    before, names = model(images), ["qkv", "out", "fc1", "fc2"]
    config = peft.LoraConfig(r=2, target_modules=names, modules_to_save=["head"], init_lora_weights=False)
    adapted: Any = peft.get_peft_model(model, config)
    adapted(images).square().sum().backward()
    grads = {name: parameter.grad for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    layers = [name for name, _ in small(**settings).named_modules() if name.split(".")[-1] in names]
    assert len(grads) == 2 * len(layers) + 2
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads.values())
    with torch.no_grad():
        logits = adapted.eval()(images)
        assert not torch.allclose(logits, before, atol=1e-2)
        torch.testing.assert_close(adapted.merge_and_unload()(images), logits, rtol=1e-4, atol=1e-5)
