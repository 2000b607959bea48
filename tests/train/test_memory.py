"""Memory counted without numbers is that of real tensors, and of a GPU's autocast, to the byte."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from vitlab.config import MaskingConfig, OptimConfig, TrainConfig
from vitlab.data.loader import Batch
from vitlab.models.config import ResNetConfig, ViTConfig
from vitlab.models.resnet_config import ResNetBody
from vitlab.models.vit import build_model
from vitlab.train.distributed import SINGLE
from vitlab.train.memory import Allocations, FusedAttention, rank_bytes, step_bytes, weight_counts
from vitlab.train.objectives import create_objective, create_training_model
from vitlab.train.parallel import Parallel
from vitlab.train.precision import Precision

VIT = ViTConfig(image_size=32, patch_size=4, width=64, depth=2, heads=4, mlp_dim=128, num_classes=10)
RESNET = ResNetConfig(image_size=64, num_classes=10, body=ResNetBody((1, 1), 32, "v2"))
change = dataclasses.replace
IMAGES = 4


def run_of(model: ViTConfig | ResNetConfig, **settings: Any) -> TrainConfig:
    return TrainConfig(model=model, steps=1, batch_size=IMAGES, **settings)


RUNS: dict[str, TrainConfig] = {
    "plain": run_of(VIT),
    "dropout": run_of(change(VIT, dropout=0.1)),
    "learned query, erf, tanh layer": run_of(change(VIT, pool="map", gelu="erf", representation_size=64)),
    "stochastic depth, LayerScale": run_of(change(VIT, stochastic_depth=0.2, layer_scale=0.1, registers=2)),
    "relative": run_of(change(VIT, position="relative", position_at="shared")),
    "axial": run_of(change(VIT, encoder="axial")),
    "hybrid": run_of(change(VIT, image_size=64, patch_size=1, stem=ResNetBody((1, 1), 32))),
    "ResNet": run_of(RESNET),
    "sigmoid, mixup": run_of(VIT, loss="sigmoid", label_smoothing=0.1, mixup=0.2),
    "masked": run_of(change(VIT, num_classes=0), masking=MaskingConfig()),
}


def batch_for(config: TrainConfig) -> Batch:
    objective, (height, width) = create_objective(config), config.model.image_hw
    draws = torch.rand(IMAGES, objective.num_uniforms, dtype=torch.float64) if objective.num_uniforms else None
    labels = torch.zeros(IMAGES, dtype=torch.int64)
    return Batch(torch.zeros(IMAGES, 3, height, width), labels, labels, uniforms=draws)


def inputs_of(batch: Batch) -> list[Tensor]:
    return [tensor for tensor in (batch.images, batch.labels, batch.uniforms) if tensor is not None]


# ------------------------------------------------------------------------------------------- against real tensors


@pytest.mark.parametrize(
    ("name", "precision", "recompute"),
    [
        ("plain", "float32", True),
        ("dropout", "float32", False),
        ("plain", "bfloat16", False),
        ("ResNet", "float32", False),
        ("masked", "float32", False),
    ],
)
def test_real_tensors_take_as_much(name: str, precision: Precision, recompute: bool) -> None:
    """The step of the training loop, on the CPU: what is saved for the backward pass, and the peak."""
    config = change(RUNS[name], activation_checkpointing=recompute)
    model, batch, objective = (
        create_training_model(config.model, config.masking),
        batch_for(config),
        create_objective(config),
    )
    parallel = Parallel(model.train(), SINGLE, torch.device("cpu"), precision=precision, recompute=recompute)
    if precision == "bfloat16":
        model.to(torch.bfloat16)
    parameters = list(model.parameters())
    with Allocations([*parameters, *inputs_of(batch)]) as memory:
        images, targets = objective.prepare_batch(batch, np.random.default_rng(0))
        loss = objective.loss(parallel.forward, images, targets)[0]
        saved = memory.in_use()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    peak = memory.peak(memory.numbers(gradient for gradient in gradients if gradient is not None))
    counted = step_bytes(config, IMAGES, precision, "cpu")
    assert counted.copies == 0
    slack = 0.01 if precision == "bfloat16" else 0  # on a CPU, LayerNorm's means are then in bfloat16 as well
    assert counted.activations == pytest.approx(saved, rel=slack, abs=0)
    assert sum(counted) == pytest.approx(peak, rel=slack, abs=0)


# --------------------------------------------------------------------------------------------- against a GPU's rules


class Fused(TorchFunctionMode):
    """Attention as a fused kernel leaves it; torch's choice of a kernel would need a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return FusedAttention.apply(*args, kwargs["attn_mask"])
        if func is Tensor.pin_memory:  # fake tensors have none
            return args[0]
        return func(*args, **(kwargs or {}))


def on_cuda(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, device="cuda")))
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda"))
    return model


@pytest.mark.parametrize("name", RUNS)
def test_autocast_on_a_gpu_saves_as_much(name: str) -> None:
    """torch's own autocast and dropout for CUDA, on fake tensors: no GPU is needed."""
    config = RUNS[name]
    objective = create_objective(config)
    with torch.device("meta"):
        model = create_training_model(config.model, config.masking).train()
    with FakeTensorMode(), torch.device("cuda"):
        batch, model = batch_for(config), on_cuda(model)
        with Allocations([*model.parameters(), *inputs_of(batch)]) as memory, Fused():
            images, targets = objective.prepare_batch(batch, np.random.default_rng(0))
            torch.set_autocast_enabled("cuda", True)  # torch.autocast would look for a GPU
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            try:
                loss = objective.loss(model, images, targets)[0]
            finally:
                torch.set_autocast_enabled("cuda", False)
                torch.clear_autocast_cache()
            saved = memory.in_use()
    counted = step_bytes(config, IMAGES, "autocast")
    assert loss.device.type == "cuda"
    assert counted.activations + counted.copies == saved
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    assert 0 < counted.copies <= 2 * matrices


# ------------------------------------------------------------------------------------------------------ as one expects


def test_recomputed_blocks_save_their_input_alone() -> None:
    deep = change(VIT, depth=12)
    whole, recomputed = (step_bytes(run_of(deep, activation_checkpointing=on), 64, "float32") for on in (False, True))
    tokens = 4 * 64 * VIT.num_tokens * VIT.width
    assert recomputed.activations < 16 * tokens < whole.activations / 5
    assert whole.work < recomputed.work < whole.activations / 6
    assert sum(recomputed) < sum(whole) / 3


def test_parts_of_a_process_that_holds_all() -> None:
    config = change(RUNS["plain"], average_decay=0.99)
    whole, counted = 4 * config.model.num_parameters, step_bytes(config, IMAGES, "autocast")
    assert rank_bytes(config, IMAGES, "autocast", "cuda") == {
        "weights": whole,
        "copies": counted.copies,
        "gathered": 0,
        "gradients": whole,
        "optimizer": 2 * whole,
        "average": whole,
        "images": 2 * IMAGES * 3 * 32 * 32 * 4,
        "activations": counted.activations,
        "work": counted.work,
    }
    lower = rank_bytes(config, IMAGES, "bfloat16", "cuda")
    assert (lower["copies"], lower["gradients"]) == (whole // 2, whole + whole // 2)
    sgd = change(config, optim=OptimConfig(name="sgd"), average_decay=None)
    parts = rank_bytes(sgd, IMAGES, "autocast", "cuda")
    assert (parts["optimizer"], parts["average"]) == (whole, 0)


def test_frozen_blocks_have_no_gradients() -> None:
    config = change(RUNS["plain"], trained_blocks=0)
    with torch.device("meta"):
        model = build_model(config.model)
    head = sum(p.numel() for name, p in model.named_parameters() if name.startswith("head"))
    parts, all_trained = (rank_bytes(run, IMAGES, "autocast", "cuda") for run in (config, RUNS["plain"]))
    assert (parts["gradients"], parts["optimizer"]) == (4 * head, 8 * head)
    assert parts["weights"] == all_trained["weights"]
    assert parts["activations"] < all_trained["activations"] / 3


def test_sharded_by_more_processes_is_less() -> None:
    config = change(RUNS["plain"], batch_size=64)
    total, block, outside, _ = weight_counts(config.model, config.masking)
    parts = [rank_bytes(config, 4, "autocast", "cuda", count, sharded=True) for count in (2, 4, 16)]
    for part in ("weights", "optimizer"):
        assert [memory[part] for memory in parts] == pytest.approx([parts[0][part] / n for n in (1, 2, 8)], abs=1)
    assert {memory["gathered"] for memory in parts} == {2 * (2 * outside + 3 * block) + 4 * block}
    assert parts[0]["copies"] == 0
    # 4 images are a sixteenth of the batch; of a larger share gradients are summed before they are sharded.
    assert [memory["gradients"] for memory in parts] == [4 * total, 4 * total, parts[2]["weights"]]
    assert sum(parts[2].values()) < sum(rank_bytes(config, 4, "autocast", "cuda", 16).values())
