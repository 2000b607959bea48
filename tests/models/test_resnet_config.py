from typing import Any

import pytest

from vitlab.models import ResNetBody


@pytest.mark.parametrize(
    ("layers", "stride", "channels", "grid"),
    [((), 4, 64, (16, 13)), ((2,), 4, 256, (16, 13)), ((3, 4, 9), 16, 1024, (4, 4)), ((3, 4, 6, 3), 32, 2048, (2, 2))],
)
def test_the_map_that_stages_leave(layers: tuple[int, ...], stride: int, channels: int, grid: tuple[int, int]) -> None:
    body = ResNetBody(layers)
    assert (body.stride, body.channels, body.grid((64, 50))) == (stride, channels, grid)
    assert len(body.units()) == sum(layers)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"width": 40}, "width of 40 channels cannot be normalized in 32 groups; give a multiple of 32"),
        ({"width": 0}, "width of 0 channels"),
        ({"layers": (3, 0, 6)}, r"layers are \(3, 0, 6\); each stage needs at least 1 unit"),
        ({"mixing": "axial"}, "mixing='axial' is defined for version='v2' alone"),
    ],
)
def test_a_body_that_cannot_be_built_says_what_is_allowed(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ResNetBody(**settings)
