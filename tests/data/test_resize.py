"""TensorFlow's method "area"; `test_transforms.py` compares whole transforms with Google's output and with Pillow's."""

import numpy as np
import pytest
import torch

from vitlab.data.resize import resize_area


@pytest.mark.parametrize("shape", [(24, 24), (37, 50), (91, 20), (8, 300), (256, 131)])
def test_a_window_of_means_is_that_of_the_whole_image(shape: tuple[int, int]) -> None:
    planes = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (1, 3, *shape)).astype(np.float32))
    np.testing.assert_allclose(resize_area(planes, (1, 1))[0, :, 0, 0], planes.mean((0, 2, 3)), rtol=1e-5)
    resized = resize_area(planes, (25, 31))
    assert torch.equal(resize_area(planes, (25, 31), (3, 5, 18, 22)), resized[:, :, 3:21, 5:27])
