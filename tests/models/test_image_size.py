from vitlab.models import ResNetBody
from vitlab.models.image_size import nearest_image_size


def test_nearest_image_size() -> None:
    for size, patch, nearest in ((384, 14, 392), (384, 16, 384), (512, 14, 518), (5, 14, 14)):
        assert nearest_image_size(size, patch) == nearest
    stem = ResNetBody((3, 4, 9))
    assert nearest_image_size(230, 1, stem) == 230  # any size has a feature map
    assert nearest_image_size(230, 4, stem) == 256
