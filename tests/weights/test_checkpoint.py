import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.errors import UserError
from vitlab.models.variant import override
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights import convert, load_checkpoint, load_metadata, load_model, save_model
from vitlab.weights.google import write_google


def test_options_reach_the_model(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    save_model(tiny(representation_size=6), tmp_path / "saved")
    options: dict[str, Any] = {"image_size": 20, "head_bias": -2.0, "dropout": 0.25, "patch_dropout": 0.5}
    model = load_model(tmp_path / "saved", reset_head=True, pre_logits="drop", **options)
    assert model.config == tiny(**options).config
    assert isinstance(model, ViT)
    assert model.dropout.p == 0.25
    assert torch.equal(model(torch.randn(2, 3, 20, 20)), torch.full((2, 5), -2.0))


def test_loaded_weights_are_trainable_and_separate(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    write_google(tiny(), tmp_path / "vit.npz")
    random_state = torch.get_rng_state()
    model = load_model(tmp_path / "vit.npz")
    assert torch.equal(torch.get_rng_state(), random_state)  # draws no random numbers
    model(torch.randn(2, 3, 12, 12)).sum().backward()
    assert len({parameter.data_ptr() for parameter in model.parameters()}) == len(list(model.parameters()))
    assert all(parameter.grad is not None and parameter.is_contiguous() for parameter in model.parameters())


def test_positions_are_resampled_once(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """A model of any size does so from the checkpoint's own; at another size it has that one alone."""
    extra = {"preprocessing": Preprocessing(8).to_metadata()}
    save_model(tiny(dynamic_image_size=True), tmp_path / "any", extra=extra)
    save_model(tiny(), tmp_path / "one", extra=extra)
    images = torch.rand(2, 3, 16, 8)
    expected = load_model(tmp_path / "one", image_size=(16, 8))(images)
    loaded = load_checkpoint(tmp_path / "one", dynamic_image_size=True)
    assert torch.equal(loaded.model(images), expected)
    assert loaded.preprocessing.image_size == 8
    assert load_checkpoint(tmp_path / "any").model.config.image_size == 8
    for path in ("any", "one"):
        with pytest.raises(ValueError, match="leave out one of the two"):
            load_model(tmp_path / path, image_size=8, dynamic_image_size=True)
        assert load_model(tmp_path / path, image_size=12, dynamic_image_size=True)(images).shape == (2, 5)
        with pytest.raises(ValueError, match=r"load the model with image_size=\(16, 8\)"):
            load_model(tmp_path / path, image_size=8)(images)
    convert(tmp_path / "any", tmp_path / "copy", to="vitlab", image_size=8)
    assert load_model(tmp_path / "copy").config == load_model(tmp_path / "one", image_size=8).config


def test_a_checkpoint_is_loaded_at_its_evaluation_size(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model, prepared = tiny(image_size=20, position_interpolation="bicubic"), Preprocessing(12, 16)
    save_model(model, tmp_path / "saved", extra={"preprocessing": prepared.to_metadata(), "source": "here"})
    checkpoint = load_checkpoint(tmp_path / "saved")
    assert (checkpoint.model.config.image_size, checkpoint.preprocessing) == (12, prepared)
    assert checkpoint.metadata["source"] == "here"
    images = torch.randn(2, 3, 12, 12)
    expected = load_model(tmp_path / "saved", image_size=12, interpolation="bicubic")
    assert torch.equal(checkpoint.model(images), expected(images))
    larger = load_checkpoint(tmp_path / "saved", image_size=24, interpolation="corners")
    assert larger.preprocessing == Preprocessing(24, 32)
    assert larger.model.config == override(model.config, image_size=24, position_interpolation="corners")
    assert load_model(tmp_path / "saved").config == model.config
    (tmp_path / "saved" / "model.safetensors").write_bytes(b"corrupt")  # which the metadata do not need
    assert load_metadata(tmp_path / "saved", image_size=24)["preprocessing"] == prepared.at(24).to_metadata()


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_weights_that_are_not_finite(value: float, tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """In any format; a number that float32 cannot hold as well. A sum that overflows is fine."""
    model = tiny()
    with torch.no_grad():
        model.cls.fill_(3e38)  # pyright: ignore[reportOptionalMemberAccess]
    save_model(model, tmp_path / "large")
    load_model(tmp_path / "large")
    name = next(name for name in model.state_dict() if name.startswith("blocks.1.") and name.endswith("qkv.bias"))
    with torch.no_grad():
        model.double().get_parameter(name)[3] = value
    write_google(model, tmp_path / "saved")
    with pytest.raises(UserError, match=r"saved holds weights that are NaN .* in 1 of .*: blocks\.1\.\S*qkv\.bias"):
        load_model(tmp_path / "saved")
    load_model(tmp_path / "large", num_classes=0)
