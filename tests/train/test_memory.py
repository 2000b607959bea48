"""Memory by the formula, beside peaks of a GPU and counts of every tensor of a step; what its parts depend on."""

import dataclasses
from typing import Any

import pytest
import torch

from vitlab.config import MaskingConfig, OptimConfig, TrainConfig
from vitlab.models.config import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.registry import get_config
from vitlab.models.resnet_config import ResNetBody
from vitlab.models.variant import Rotary, override
from vitlab.train.memory import activation_bytes, inference_bytes, rank_bytes, weight_counts
from vitlab.train.precision import Precision

VIT = ViTConfig(image_size=32, patch_size=4, width=64, depth=2, heads=4, mlp_dim=128, num_classes=10)
PLAIN = TrainConfig(model=VIT, steps=1, batch_size=4)
change = dataclasses.replace
IMAGES = 4
AXIAL_RESNET = ResNetConfig(body=ResNetBody(version="v2", mixing="axial"))
SWIGLU = {"swiglu": True, "mlp_dim": 2048}
RELATIVE = {"position": "relative", "position_at": "shared"}
RECOMPUTED = {"activation_checkpointing": True}


@pytest.mark.parametrize(
    ("name", "batch", "peak"),
    [("ViT-B/16", 256, 18_849_863_680), ("ViT-L/16", 128, 27_296_709_120), ("ViT-H/14", 64, 33_749_328_384)],
)
def test_peaks_of_a_gpu(name: str, batch: int, peak: int) -> None:
    """Of an eager step on an H200 (`benchmarks/results/gpu_eager.json`)."""
    config = TrainConfig(model=get_config(name), steps=1, batch_size=batch)
    assert sum(rank_bytes(config, batch, "autocast", "cuda").values()) == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(
    ("model", "settings", "images", "precision", "device", "megabytes"),
    [
        ("ViT-L/16", {}, 64, "float32", "cuda", 25_098),
        ("ViT-B/16", {}, 64, "float32", "cpu", 10_564),
        ("ViT-B/16", {}, 64, "bfloat16", "cpu", 6_361),
        ("ViT-B/16", {"dropout": 0.1}, 32, "autocast", "cuda", 4_121),
        ("ViT-B/16", SWIGLU, 64, "float32", "cuda", 10_432),
        ("ViT-B/16", {"rotary": Rotary()}, 64, "autocast", "cuda", 6_658),
        ("ViT-B/16", {"attention_norm": True, "mlp_norm": True}, 64, "autocast", "cuda", 8_734),
        ("ViT-B/16", RELATIVE, 64, "autocast", "cuda", 6_905),
        ("ViT-B/16", {"encoder": "axial"}, 64, "autocast", "cuda", 12_264),
        ("ViT-B/16", {"patch_dropout": 0.5}, 64, "autocast", "cuda", 3_836),
        ("ViT-B/16", {"num_classes": 0, "masking": MaskingConfig("downsized")}, 64, "autocast", "cuda", 6_654),
        ("ViT-B/16", {"trained_blocks": 0}, 64, "autocast", "cuda", 665),
        ("ViT-H/14", RECOMPUTED, 64, "autocast", "cuda", 13_266),
        ("R50x1", {}, 16, "autocast", "cuda", 2_035),
        ("R50x1", {}, 16, "float32", "cpu", 1_767),
        ("R50x1", RECOMPUTED, 16, "autocast", "cuda", 839),
        ("R50+ViT-B/16", {}, 32, "autocast", "cuda", 7_609),
        (AXIAL_RESNET, {}, 16, "autocast", "cuda", 3_186),
    ],
)
def test_counts_of_every_tensor(
    model: str | ModelConfig, settings: dict[str, Any], images: int, precision: Precision, device: str, megabytes: int
) -> None:
    """Of a step on the meta device, where every allocation was recorded; to the byte that of a step on a CPU."""
    config = get_config(model) if isinstance(model, str) else model
    of_run = {name: value for name, value in settings.items() if name in TrainConfig.__dataclass_fields__}
    config = override(config, **{name: value for name, value in settings.items() if name not in of_run})
    run = TrainConfig(model=config, steps=1, batch_size=images, **of_run)
    counted = sum(rank_bytes(run, images, precision, device).values()) / 1e6
    assert counted == pytest.approx(megabytes, rel=0.08)


@pytest.mark.parametrize(
    ("name", "images", "dtype", "megabytes"),
    [
        ("ViT-B/16", 256, torch.float32, 2_205),
        ("ViT-B/16", 1, torch.bfloat16, 177),
        ("R50x1", 32, torch.float32, 462),
        ("R50+ViT-B/16", 32, torch.bfloat16, 425),
    ],
)
def test_counts_of_inference(name: str, images: int, dtype: torch.dtype, megabytes: int) -> None:
    counted = inference_bytes(get_config(name), images, dtype, "cuda") / 1e6
    assert counted == pytest.approx(megabytes, rel=0.08)


def test_parts_of_a_process_that_holds_all() -> None:
    config = change(PLAIN, average_decay=0.99)
    whole, (saved, work) = 4 * config.model.num_parameters, activation_bytes(config, "autocast", "cuda")
    assert rank_bytes(config, IMAGES, "autocast", "cuda") == {
        "weights": whole,
        "copies": whole // 2,
        "gathered": 0,
        "gradients": whole,
        "optimizer": 2 * whole,
        "average": whole,
        "images": 2 * IMAGES * 3 * 32 * 32 * 4,
        "activations": IMAGES * saved,
        "work": IMAGES * work,
    }
    lower = rank_bytes(config, IMAGES, "bfloat16", "cuda")
    assert (lower["copies"], lower["gradients"]) == (whole // 2, whole + whole // 2)
    sgd = change(config, optim=OptimConfig(name="sgd"), average_decay=None)
    parts = rank_bytes(sgd, IMAGES, "autocast", "cuda")
    assert (parts["optimizer"], parts["average"]) == (whole, 0)


def test_sharded_by_more_processes_is_less() -> None:
    config = change(PLAIN, batch_size=64)
    total, block, outside, _ = weight_counts(config.model, config.masking)
    parts = [rank_bytes(config, 4, "autocast", "cuda", count, sharded=True) for count in (2, 4, 16)]
    for part in ("weights", "optimizer"):
        assert [memory[part] for memory in parts] == pytest.approx([parts[0][part] / n for n in (1, 2, 8)], abs=1)
    assert {memory["gathered"] for memory in parts} == {2 * (2 * outside + 3 * block) + 4 * block}
    assert parts[0]["copies"] == 0
    # 4 images are a sixteenth of the batch; of a larger share gradients are summed before they are sharded.
    assert [memory["gradients"] for memory in parts] == [4 * total, 4 * total, parts[2]["weights"]]
    assert sum(parts[2].values()) < sum(rank_bytes(config, 4, "autocast", "cuda", 16).values())
