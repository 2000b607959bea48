"""Photos as a model's input, and their features."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.errors import UserError
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing

SIZES: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 24, "depth": 3, "heads": 2, "mlp_dim": 32}


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.fixture
def model(tmp_path: Path) -> Any:
    """Loaded from a checkpoint that resizes to 40 and crops the center."""
    new = ViT(vitlab.ViTConfig(**SIZES, num_classes=5, head_std=0.5))
    own = Preprocessing(image_size=32, resize=40, interpolation="bicubic")
    vitlab.save_model(new, tmp_path / "saved", extra={"preprocessing": own.to_metadata()})
    return vitlab.load_model(tmp_path / "saved")


def test_a_photo_is_prepared_as_the_checkpoint_says(model: Any, photo: Path) -> None:
    expected = np.asarray(Image.open(photo).resize((60, 40), Image.Resampling.BICUBIC))[4:36, 14:46]
    given = vitlab.preprocess(model, photo)
    assert given.shape == (1, 3, 32, 32)
    assert (given[0].permute(1, 2, 0) - torch.from_numpy(expected) / 127.5 + 1).abs().max() < 1e-6


def test_one_photo_or_several(model: Any, photo: Path) -> None:
    whole = vitlab.preprocess(model, photo)
    assert torch.equal(vitlab.preprocess(model, photo.read_bytes()), whole)
    assert torch.equal(vitlab.preprocess(model, [photo, np.asarray(Image.open(photo))]), torch.cat([whole, whole]))


def test_features_are_the_input_of_the_head(model: Any, photo: Path) -> None:
    model.train()
    x = vitlab.features(model, [photo, photo, photo], batch_size=2)
    assert model.training
    model.eval()
    assert x.shape == (3, 24)
    assert not x.requires_grad
    with torch.no_grad():
        logits = model(vitlab.preprocess(model, photo))
        assert (model.head(x[:1]) - logits).abs().max() < 1e-5


def test_tokens_of_layers(model: Any, photo: Path) -> None:
    first, last = vitlab.features(model, photo, layers=[0, 2])
    (only_last,) = vitlab.features(model, photo, layers=1)
    assert first.shape == last.shape == (1, 16, 24)
    assert torch.equal(last, only_last)
    assert not torch.allclose(first, last, atol=0.1)
    with torch.no_grad():
        assert (model.forward_features(vitlab.preprocess(model, photo))[:, 1:] - last).abs().max() < 1e-5


def test_what_cannot_be_prepared(model: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing-here"):
        vitlab.preprocess(model, tmp_path / "nothing-here.png")
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(UserError, match="broken"):
        vitlab.features(model, tmp_path / "broken.png")
    with pytest.raises(UserError, match="3 blocks"):
        vitlab.features(model, np.zeros((40, 40, 3), np.uint8), layers=[5])
    with pytest.raises(UserError, match="no blocks"):
        vitlab.features(vitlab.create_model("R26x1", image_size=32), np.zeros((40, 40, 3), np.uint8), layers=1)
