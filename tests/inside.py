"""Random models and images, and made-up captures whose maps are smooth and all different."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from vitlab.inspection import figures
from vitlab.inspection.capture import Capture
from vitlab.models import ViTConfig
from vitlab.models.vit import ViT


def unrender(patch: pytest.MonkeyPatch) -> None:
    """Figures are not rendered, which takes most of the time of a page."""
    Image.new("RGB", (300, 200)).save(png := io.BytesIO(), "PNG")
    patch.setattr(figures, "png", lambda _: png.getvalue())
    patch.setattr(figures, "svg", lambda _: b"")


def random_model(config: ViTConfig) -> ViT:
    """A model whose attention is far from uniform."""
    model = ViT(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4)
    return model


def random_images(config: ViTConfig, n: int = 3) -> Tensor:
    return torch.rand(n, 3, *config.image_hw) * 2 - 1


def smooth(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Maps [..., h, w] that sum to one, smooth over three patches."""
    random = np.random.default_rng(seed)
    height, width = shape[-2:]
    small = random.random((int(np.prod(shape[:-2])), -(-height // 3) + 1, -(-width // 3) + 1), dtype=np.float32) ** 3
    maps = [Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC) for image in small]
    stacked = np.stack([np.asarray(image).clip(1e-4) for image in maps])
    return (stacked / stacked.sum(axis=(1, 2), keepdims=True)).reshape(shape)


def photograph(size: tuple[int, int], seed: int = 0) -> np.ndarray:
    """A smooth image with a little noise: uint8 [H, W, 3]."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    image = np.asarray(coarse.resize((size[1], size[0]), Image.Resampling.BICUBIC)).astype(int)
    return (image + random.integers(-8, 9, image.shape)).clip(0, 255).astype(np.uint8)


def random_capture(config: ViTConfig, n: int, seed: int = 0) -> Capture:
    """A made-up `Capture` of n images."""
    random = np.random.default_rng(seed)
    lines = ("rows", "columns") if config.encoder == "axial" else ("",)
    layers = tuple(f"{i} {line}".strip() for i in range(1, config.depth + 1) for line in lines)
    size = (n, len(layers), config.heads)
    far = (random.random(size) * config.image_hw[0] / 2).astype(np.float32)
    return Capture(
        count=n,
        layers=layers,
        distances=far.mean(axis=0),
        heads=smooth((*size, *config.grid), seed),
        rollout=smooth((n, *config.grid), seed + 1),
        rollout_plain=smooth((n, *config.grid), seed + 2),
        components=random.random((n, *config.grid, 3), dtype=np.float32),
        image_distances=far,
        logits=random.standard_normal((n, config.num_classes), dtype=np.float32),
    )
