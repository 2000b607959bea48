"""Configurations of fewer blocks and of other poolings."""

from typing import Any

import pytest

from vitlab.errors import UserError
from vitlab.models import ResNetConfig, ViTConfig, get_config
from vitlab.models.readout import change_readout
from vitlab.models.variant import override

CONFIG = ViTConfig(image_size=8, patch_size=4, width=16, depth=4, heads=2, mlp_dim=32, num_classes=0)


def test_depth_and_pool() -> None:
    """A class token that nothing reads is a register, which becomes the class token again."""
    assert change_readout(CONFIG) == CONFIG
    assert change_readout(CONFIG, 2).depth == 2
    both = change_readout(CONFIG, pool="token+gap")
    assert (both.pool, both.variant.registers) == ("token+gap", 0)
    gap = change_readout(CONFIG, pool="gap")
    assert (gap.has_class_token, gap.variant.registers, gap.num_prefix_tokens) == (False, 1, 1)
    back = change_readout(gap, pool="token")
    assert (back.has_class_token, back.variant.registers, back.variant.class_position) == (True, 0, False)


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (ResNetConfig(), {"depth": 1}, "a ResNet has neither blocks nor tokens"),
        (CONFIG, {"depth": 5}, "allowed: 1 to 4"),
        (override(CONFIG, pool="map"), {"depth": 2}, "attention pooling; leave it out"),
        (override(CONFIG, representation_size=8), {"depth": 2}, "pre_logits='drop'"),
        (override(CONFIG, pool="gap", final_norm="mean"), {"pool": "token+gap"}, "final_norm='mean' requires"),
        (override(CONFIG, pool="gap"), {"pool": "token"}, "requires a class token"),
        (override(CONFIG, position_at="every"), {"pool": "gap"}, "before the first block alone"),
    ],
)
def test_what_a_model_cannot_have(config: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        change_readout(config, **settings)
    assert message in str(error.value)


def test_of_a_model_of_the_registry() -> None:
    config: Any = get_config("ViT-B/16", num_classes=0)
    assert change_readout(config, depth=8, pool="token+gap").num_features == 2 * config.width
