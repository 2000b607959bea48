"""Memory counted without numbers is that of real tensors, and of a GPU's autocast, to the byte."""

import dataclasses
import functools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from vitlab.config import MaskingConfig, OptimConfig, TrainConfig
from vitlab.cost.memory import FusedAttention, Memory, Sizes, largest, process_bytes, step_bytes
from vitlab.data.loader import Batch
from vitlab.models.config import ResNetConfig, ViTConfig
from vitlab.models.resnet_config import ResNetBody
from vitlab.train.distributed import SINGLE
from vitlab.train.objectives import create_objective, create_training_model
from vitlab.train.optim import state_per_weight
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
    "sines, mean": run_of(change(VIT, position="sincos2d", pool="gap")),
    "axial": run_of(change(VIT, encoder="axial")),
    "hybrid": run_of(change(VIT, image_size=64, patch_size=1, stem=ResNetBody((1, 1), 32))),
    "ResNet": run_of(RESNET),
    "axial ResNet": run_of(change(RESNET, body=ResNetBody((1, 1), 64, "v2", mixing="axial"))),
    "sigmoid, mixup": run_of(VIT, loss="sigmoid", label_smoothing=0.1, mixup=0.2),
    "masked": run_of(change(VIT, num_classes=0), masking=MaskingConfig()),
    "masked, pixels": run_of(change(VIT, num_classes=0), masking=MaskingConfig(target="regression")),
}


def batch_for(config: TrainConfig) -> Batch:
    objective, (height, width) = create_objective(config), config.model.image_hw
    draws = torch.rand(IMAGES, objective.draws, dtype=torch.float64) if objective.draws else None
    labels = torch.zeros(IMAGES, dtype=torch.int64)
    return Batch(torch.zeros(IMAGES, 3, height, width), labels, labels, draws=draws)


# ------------------------------------------------------------------------------------------- against real tensors


@pytest.mark.parametrize(
    ("name", "precision", "again"),
    [
        ("plain", "float32", False),
        ("plain", "float32", True),
        ("dropout", "float32", False),
        ("plain", "bfloat16", False),
        ("ResNet", "float32", False),
        ("masked", "float32", False),
    ],
)
def test_real_tensors_take_as_much(name: str, precision: Precision, again: bool) -> None:
    """The step of the training loop, on the CPU: what is kept for the backward pass, and the fullest moment."""
    config = change(RUNS[name], activation_checkpointing=again)
    model, batch, objective = create_training_model(config), batch_for(config), create_objective(config)
    parallel = Parallel(model.train(), SINGLE, torch.device("cpu"), precision=precision, recompute=again)
    if precision == "bfloat16":
        model.to(torch.bfloat16)
    parameters = list(model.parameters())
    with Memory([*parameters, batch.images, batch.labels, *([] if batch.draws is None else [batch.draws])]) as memory:
        images, targets = objective.corrupt(batch, np.random.default_rng(0))
        loss = objective.loss(parallel.forward, images, targets)[0]
        kept = memory.held()
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
    peak = memory.peak(without=memory.numbers(each for each in found if each is not None))
    counted = step_bytes(config, IMAGES, precision, "cpu")
    assert counted.copies == 0
    slack = 0.01 if precision == "bfloat16" else 0  # on a CPU, LayerNorm's means are then in bfloat16 as well
    assert counted.activations == pytest.approx(kept, rel=slack, abs=0)
    assert counted.total == pytest.approx(peak, rel=slack, abs=0)


def test_activations_are_what_is_saved_for_the_backward_pass() -> None:
    """Counted in another way: by the hooks through which autograd saves tensors."""
    config = RUNS["plain"]
    model, batch, objective = create_training_model(config), batch_for(config), create_objective(config)
    parameters = {each.untyped_storage().data_ptr() for each in model.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    images, targets = objective.corrupt(batch, np.random.default_rng(0))
    saved[images.untyped_storage().data_ptr()] = saved[targets.untyped_storage().data_ptr()] = 0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, _ = objective.loss(model.train(), images, targets)
    saved[images.untyped_storage().data_ptr()] = saved[targets.untyped_storage().data_ptr()] = 0
    assert step_bytes(config, IMAGES, "float32", "cpu").activations == sum(saved.values()) + loss.nbytes


# --------------------------------------------------------------------------------------------- against a GPU's rules


class Kept(TorchFunctionMode):
    """Attention as a fused kernel leaves it; its choice of a kernel would ask a GPU that may not be there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return FusedAttention.apply(*args, kwargs["attn_mask"])
        return func(*args, **(kwargs or {}))


def on_cuda(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, each in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty(each.shape, device="cuda")))
        for name, each in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(each.shape, dtype=each.dtype, device="cuda"))
    return model


@pytest.mark.parametrize("name", RUNS)
def test_a_gpus_autocast_keeps_as_much(name: str) -> None:
    """torch's own autocast and dropout for CUDA, on tensors that are said to lie there: no GPU is needed."""
    config = RUNS[name]
    objective = create_objective(config)
    with torch.device("meta"):
        model = create_training_model(config).train()
    with FakeTensorMode(), torch.device("cuda"):
        batch, model = batch_for(config), on_cuda(model)
        given = [*model.parameters(), batch.images, batch.labels, *([] if batch.draws is None else [batch.draws])]
        with Memory(given) as memory, Kept():
            images, targets = objective.corrupt(batch, np.random.default_rng(0))
            torch.set_autocast_enabled("cuda", True)  # torch.autocast would look for a GPU
            torch.set_autocast_dtype("cuda", torch.bfloat16)
            try:
                loss = objective.loss(model, images, targets)[0]
            finally:
                torch.set_autocast_enabled("cuda", False)
                torch.clear_autocast_cache()
            kept = memory.held()
    counted = step_bytes(config, IMAGES, "autocast")
    assert loss.device.type == "cuda"
    assert counted.activations + counted.copies == kept
    matrices = sum(each.numel() for each in model.parameters() if each.ndim > 1)
    assert 0 < counted.copies <= 2 * matrices


# ------------------------------------------------------------------------------------------------------ as one expects


def test_activations_grow_in_proportion() -> None:
    """And a batch that no machine could hold costs no more to count."""
    one, two, many = (step_bytes(RUNS["sigmoid, mixup"], count, "autocast") for count in (1, 2, 2**20))
    slope = two.activations - one.activations
    assert many.activations == one.activations + (2**20 - 1) * slope
    assert one.copies == two.copies == many.copies
    assert many.activations > 1e11


def test_what_is_computed_again_is_not_kept() -> None:
    """Each block leaves its input alone, and one at a time is there in full."""
    deep = change(VIT, depth=12)
    whole, again = (step_bytes(run_of(deep, activation_checkpointing=on), 64, "float32") for on in (False, True))
    tokens = 4 * 64 * VIT.num_tokens * VIT.width
    assert again.activations < 16 * tokens < whole.activations / 5
    assert whole.work < again.work < whole.activations / 6
    assert again.total < whole.total / 3


def test_fused_attention_keeps_no_map() -> None:
    fused, matmul = (step_bytes(RUNS["plain"], IMAGES, "float32", kind).activations for kind in ("cuda", "cpu"))
    maps = 4 * IMAGES * VIT.depth * VIT.heads * VIT.num_tokens**2
    assert matmul - fused > 0.9 * maps


# ------------------------------------------------------------------------------------------------------ of a process


def parts(config: TrainConfig, images: int = IMAGES, **how: Any) -> dict[str, int]:
    options: dict[str, Any] = {"precision": "autocast", "device_type": "cuda", "count": 1, "sharded": False} | how
    return process_bytes(config, Sizes.of(config), images, **options)


@pytest.mark.parametrize("name", ["plain", "axial", "hybrid", "ResNet"])
def test_sizes(name: str) -> None:
    sizes, config = Sizes.of(RUNS[name]), RUNS[name]
    assert sizes.whole == config.model.num_parameters
    assert 0 < sizes.block < sizes.whole
    assert 0 < sizes.rest < sizes.whole
    if name == "plain":
        assert sizes.whole == sizes.rest + 2 * sizes.block
    if name == "axial":
        assert sizes.whole == sizes.rest + 4 * sizes.block


def test_parts_of_a_process_that_holds_all() -> None:
    config = change(RUNS["plain"], average_decay=0.99)
    whole, counted = 4 * config.model.num_parameters, step_bytes(config, IMAGES, "autocast")
    assert parts(config) == {
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
    lower = parts(config, precision="bfloat16")
    assert (lower["copies"], lower["gradients"]) == (whole // 2, whole + whole // 2)
    sgd = change(config, optim=OptimConfig(name="sgd"), average_decay=None)
    assert (parts(sgd)["optimizer"], parts(sgd)["average"]) == (whole, 0)
    assert [state_per_weight(each) for each in (OptimConfig(), sgd.optim, OptimConfig(name="sgd", momentum=0.0))] == [
        2,
        1,
        0,
    ]


def test_shared_by_more_each_holds_less() -> None:
    config = change(RUNS["plain"], batch_size=64)
    sizes = Sizes.of(config)
    found = [parts(config, 4, count=count, sharded=True) for count in (2, 4, 16)]
    for part in ("weights", "optimizer"):
        assert [each[part] for each in found] == pytest.approx(
            [found[0][part] * 2 / count for count in (2, 4, 16)], abs=1
        )
    assert len({each["gathered"] for each in found}) == 1
    assert found[0]["gathered"] == 2 * (2 * sizes.rest + 3 * sizes.block) + 4 * sizes.block
    assert found[0]["copies"] == 0
    own = found[2]["weights"]
    # 4 images are all of a sixteenth of the batch; of more the gradients are gathered before they are shared.
    assert [each["gradients"] for each in found] == [4 * sizes.whole, 4 * sizes.whole, own]
    assert sum(found[2].values()) < sum(parts(config, 4, count=16).values())


@pytest.mark.parametrize(("slope", "start", "jump"), [(10, 5, 0), (3, 100, 0), (7, 0, -50), (7, 0, 50)])
def test_largest(slope: int, start: int, jump: int) -> None:
    """Found in few tries, also where the total bends."""
    tries = []

    def total(count: int) -> int:
        tries.append(count)
        return start + slope * count + jump * (count > 40)

    for room in (start, start + slope, start + 57 * slope, start + 998 * slope + slope // 2):
        fits = [count for count in range(1, 1000) if start + slope * count + jump * (count > 40) <= room]
        tries.clear()
        found = largest(functools.cache(total), room, 1000)
        assert found == max(fits, default=0) or (jump < 0 and found in fits)
        assert len(set(tries)) < 12
