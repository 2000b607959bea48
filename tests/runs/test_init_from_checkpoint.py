"""The model and the weights that fine-tuning takes from a checkpoint."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.config import FinetuneConfig
from vitlab.errors import UserError
from vitlab.models import ViTConfig, get_config
from vitlab.models.position import interpolate_positions
from vitlab.models.variant import override
from vitlab.models.vit import ViT, build_model
from vitlab.recipes.rules import adapt_config
from vitlab.runs.init_from_checkpoint import fingerprint, init_from_checkpoint
from vitlab.runs.run import RunResult
from vitlab.weights import load_model, save_model
from vitlab.weights.google import write_google

RECIPE = FinetuneConfig(model=ViTConfig(image_size=16, patch_size=4, dropout=0.1), steps=1)


def test_initial_model(pretrained: RunResult, workdir: Path, tmp_path: Path) -> None:
    """The checkpoint's, with a new zero head and interpolated positions. Dropout is the recipe's."""
    model = load_model(workdir)
    write_google(model, checkpoint := tmp_path / "vit.npz")
    source: Any = pretrained.config.model
    config = adapt_config(source, RECIPE, 4).model
    assert config == dataclasses.replace(
        source, image_size=16, num_classes=4, representation_size=None, dropout=0.1, head_bias=0.0
    )
    old, new = model.state_dict(), init_from_checkpoint(checkpoint, config).state_dict()
    assert new["head.weight"].shape == (4, 16)
    assert not new["head.weight"].any()
    assert old.keys() - new.keys() == {"pre_logits.weight", "pre_logits.bias"}
    assert torch.equal(new["position.table"], interpolate_positions(old["position.table"], (2, 2), (4, 4), 1))
    for name in new.keys() - {"head.weight", "head.bias", "position.table"}:
        assert torch.equal(new[name], old[name]), name
    config = adapt_config(source, dataclasses.replace(RECIPE, pre_logits="keep"), 4).model
    new = init_from_checkpoint(checkpoint, config).state_dict()
    assert old.keys() == new.keys()  # the last layer alone starts at zero (App. B.1.1)
    assert torch.equal(new["pre_logits.weight"], old["pre_logits.weight"])
    assert not new["head.weight"].any()


@pytest.mark.parametrize("interpolation", ["bicubic", "corners"])
def test_interpolation_of_positions(interpolation: Any, pretrained: RunResult, workdir: Path, tmp_path: Path) -> None:
    assert isinstance(pretrained.config.model, ViTConfig)
    source = ViT(override(pretrained.config.model, position_interpolation="bicubic"))
    source.load_state_dict(load_model(workdir).state_dict(), strict=False)
    save_model(source, tmp_path)
    config = override(adapt_config(source.config, RECIPE, 4).model, position_interpolation=interpolation)
    table = init_from_checkpoint(tmp_path, config).state_dict()["position.table"]
    assert source.position.table is not None
    assert torch.equal(table, interpolate_positions(source.position.table, (2, 2), (4, 4), 1, interpolation))


def test_a_recipes_size_is_the_nearest_that_patches_divide(caplog: pytest.LogCaptureFixture) -> None:
    """The recipes' 384 pixels for patches of 14; a requested size stays, or is an error."""
    table = FinetuneConfig(model=ViTConfig(image_size=384), steps=500, batch_size=8)
    source = get_config("ViT-H/14")
    assert adapt_config(source, table, 10).model.image_size == 392
    assert "taking 392" in caplog.text
    assert adapt_config(get_config("ViT-B/16"), table, 10).model.image_size == 384
    with pytest.raises(UserError, match="384x384"):
        adapt_config(source, table, 10, 384)


def test_fingerprint() -> None:
    config = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, num_classes=3)
    one, same = (build_model(config, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    assert fingerprint(one) == fingerprint(same)
    with torch.no_grad():
        next(same.parameters()).view(-1)[3] += 1e-6
    assert fingerprint(same) != fingerprint(one)
