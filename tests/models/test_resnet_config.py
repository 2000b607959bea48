from typing import Any

import pytest

from vitlab.models import ResNetBody


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"width": 40}, "width of 40 leaves 40 channels for 32 groups of min_group_size=1; give a multiple of 32"),
        ({"width": 0}, "width of 0 leaves 0 channels for 0 groups"),
        ({"width": 8, "min_group_size": 16}, "width of 8 leaves 8 channels for 0 groups"),
        ({"width": 36, "min_group_size": 4}, "width of 36 leaves 144 channels for 32 groups"),
        ({"layers": (3, 0, 6)}, r"layers are \(3, 0, 6\); .* 1 unit or more"),
        ({"layers": (1,) * 17}, "16 stages"),
        ({"weight_eps": -1.0}, "weight_eps is -1"),
        ({"mixing": "axial"}, "mixing='axial' is defined for version='v2' alone"),
    ],
)
def test_invalid_settings_name_the_allowed_ones(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ResNetBody(**settings)


def test_groups_have_at_least_so_many_channels() -> None:
    """BiT's 32 groups, unless that leaves fewer channels in each."""
    channels = (32, 64, 128, 512, 1024)
    assert [ResNetBody(width=32).num_groups(count) for count in channels] == [32] * 5
    assert [ResNetBody(width=32, min_group_size=16).num_groups(count) for count in channels] == [2, 4, 8, 32, 32]
