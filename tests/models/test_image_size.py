from typing import Any

import pytest

from vitlab.models import ResNetBody, ViTConfig
from vitlab.models.image_size import check_divisible, nearest_image_size


@pytest.mark.parametrize(
    ("image_size", "patch", "stem", "nearest"),
    [
        (225, 16, None, "224, 240"),
        ((224, 100), 16, None, "96, 112, 224, 240"),
        (5, 16, None, "16"),
        (200, 8, ResNetBody(()), "192, 224"),
        (1, 2, ResNetBody((2, 2)), "16"),
    ],
)
def test_a_size_that_the_patch_does_not_divide_names_the_nearest(
    image_size: Any, patch: int, stem: ResNetBody | None, nearest: str
) -> None:
    with pytest.raises(ValueError, match=rf"cannot be cut into patches of {patch}x{patch}.*the nearest: {nearest}\."):
        ViTConfig(image_size=image_size, patch_size=patch, stem=stem)
    ViTConfig(image_size=int(nearest.split(", ")[0]), patch_size=patch, stem=stem)


def test_nearest_image_size() -> None:
    for size, patch, nearest in ((384, 14, 392), (384, 16, 384), (512, 14, 518), (5, 14, 14)):
        assert nearest_image_size(size, patch) == nearest
        check_divisible((nearest, nearest), patch)
    stem = ResNetBody((3, 4, 9))
    assert nearest_image_size(230, 1, stem) == 230  # any size has a feature map
    assert nearest_image_size(230, 4, stem) == 256
    check_divisible((256, 256), 4, stem)
