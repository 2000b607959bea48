from typing import Any

import pytest

from vitlab.models import ResNetBody


@pytest.mark.parametrize(
    ("layers", "stride", "channels", "grid"),
    [((), 4, 64, (16, 13)), ((2,), 4, 256, (16, 13)), ((3, 4, 9), 16, 1024, (4, 4)), ((3, 4, 6, 3), 32, 2048, (2, 2))],
)
def test_the_feature_map_after_the_stages(
    layers: tuple[int, ...], stride: int, channels: int, grid: tuple[int, int]
) -> None:
    body = ResNetBody(layers)
    assert (body.stride, body.channels, body.grid((64, 50))) == (stride, channels, grid)
    assert len(body.units()) == sum(layers)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"width": 40}, "width of 40 channels cannot be normalized in 32 groups; give a multiple of 32"),
        ({"width": 0}, "width of 0 channels"),
        ({"width": 36, "num_groups": 8}, "36 channels cannot be normalized in 8 groups; give a multiple of 8"),
        ({"layers": (3, 0, 6)}, r"layers are \(3, 0, 6\); .* 1 unit or more"),
        ({"layers": (1,) * 17}, "16 stages"),
        ({"weight_eps": -1.0}, "weight_eps is -1"),
        ({"mixing": "axial"}, "mixing='axial' is defined for version='v2' alone"),
    ],
)
def test_invalid_settings_name_the_allowed_ones(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ResNetBody(**settings)
