"""The model and the weights that fine-tuning takes from a checkpoint."""

import pytest
import torch

from vitlab.config import FinetuneConfig
from vitlab.errors import UserError
from vitlab.models import ViTConfig, build_model, get_config
from vitlab.pipelines.init_from_checkpoint import adapt_config, fingerprint


def test_a_recipes_size_is_the_nearest_that_patches_divide(caplog: pytest.LogCaptureFixture) -> None:
    """The recipes' 384 pixels for patches of 14; a requested size stays, or is refused."""
    table = FinetuneConfig(model=ViTConfig(image_size=384), steps=500, batch_size=8)
    source = get_config("ViT-H/14")
    for _ in range(2):
        assert adapt_config(source, table, 10).model.image_size == 392
    assert len(caplog.messages) == 1
    assert "384 pixels cannot be cut into patches of 14: taking the nearest larger size, 392" in caplog.text
    assert adapt_config(get_config("ViT-B/16"), table, 10).model.image_size == 384
    with pytest.raises(UserError, match="384x384 cannot be cut into patches of 14x14"):
        adapt_config(source, table, 10, 384)


def test_fingerprint_is_of_every_number() -> None:
    config = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, num_classes=3)
    one, same = (build_model(config, generator=torch.Generator().manual_seed(0)) for _ in range(2))
    assert fingerprint(one) == fingerprint(same)
    with torch.no_grad():
        next(same.parameters()).view(-1)[3] += 1e-6
    assert fingerprint(same) != fingerprint(one)
