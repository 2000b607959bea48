"""Schedules, optimizers, clipping and averaging: against Google's recorded runs, and by hand."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vitlab.config import OptimConfig
from vitlab.models import ViTConfig
from vitlab.models.vit import Model, ViT
from vitlab.train.objectives import classification_loss
from vitlab.train.optim import (
    clip_by_global_norm,
    create_optimizer,
    is_decayed,
    learning_rate,
    load_optimizer_state,
    optimizer_state,
    parameter_groups,
    set_learning_rate,
    update_average,
)
from vitlab.weights import load_model
from vitlab.weights.google import write_google

SCHEDULES = [f"vit_jax/{number:02d}" for number in range(4)] + [f"big_vision/{number:02d}" for number in range(3)]
RUNS = ["sgd_testing_f32", "sgd_testing_bf16acc", "sgd_tiny_linear"]
RUNS += ["adam_paperlike_f32", "adam_paperlike_bf16mu", "adam_bigwd_f32"]
TINY = ViTConfig(image_size=16, patch_size=8, width=8, depth=1, heads=2, mlp_dim=16, num_classes=3)


@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_is_googles(shared: Path, name: str) -> None:
    golden = np.load(shared / "golden" / "schedules.npz")
    meta = json.loads(str(golden["meta"]))[name]
    kwargs = meta["kwargs"]
    config = OptimConfig(
        lr=kwargs["base"],
        schedule=kwargs["decay_type"],
        warmup_steps=meta["warmup_steps_resolved"],
        end_lr=kwargs.get("linear_end", 1e-5 if name.startswith("vit_jax") else 0.0),
    )
    steps = golden[f"{name}/steps"]
    assert steps.max() > kwargs["total_steps"]  # beyond the end as well
    rates = [learning_rate(config, int(step), kwargs["total_steps"]) for step in steps]
    # Google computes in float32: a few units in its last place, relative to the base rate.
    np.testing.assert_allclose(rates, golden[f"{name}/lr"], rtol=0, atol=3e-7 * kwargs["base"])


@pytest.mark.parametrize("case", RUNS)
def test_run_is_googles(shared: Path, tmp_path: Path, case: str) -> None:
    golden = dict(np.load(shared / "golden" / f"train_{case.partition('_')[0]}.npz"))
    meta = json.loads(str(golden["meta"]))[case]
    config, kind, total_steps = recorded_settings(meta)
    init, final = (
        {key.removeprefix(start): array for key, array in golden.items() if key.startswith(start)}
        for start in (f"{case}/init/", f"{case}/final/")
    )
    np.savez(tmp_path / "init.npz", **init)
    images = torch.from_numpy(golden[f"{case}/images"]).permute(0, 3, 1, 2)
    labels = torch.from_numpy(golden[f"{case}/labels"])
    model = load_model(tmp_path / "init.npz", image_size=images.shape[2])
    before = google_arrays(model, tmp_path)
    optimizer = create_optimizer(model.named_parameters(), config)
    losses, norms = golden[f"{case}/loss"], golden[f"{case}/grad_norm_before_clip"]
    for step, (loss_then, norm_then) in enumerate(zip(losses, norms, strict=True)):
        optimizer.zero_grad()
        loss = classification_loss(model(images), labels, kind)
        loss.backward()
        norm = clip_by_global_norm(model.parameters(), config.clip_norm)
        set_learning_rate(optimizer, learning_rate(config, step, total_steps))
        optimizer.step()
        assert loss.item() == pytest.approx(loss_then, rel=meta["tol_loss_rel"], abs=1e-3 * meta["tol_loss_rel"])
        assert norm.item() == pytest.approx(norm_then, rel=max(2e-4, meta["tol_loss_rel"]))
    after = google_arrays(model, tmp_path)
    assert set(meta["tol_delta_rel_l2"]) == set(after) - set(meta["keys_with_zero_true_gradient"])
    for key, tolerance in meta["tol_delta_rel_l2"].items():
        reference, moved = (end[key].astype(np.float64) - before[key] for end in (final, after))
        assert np.linalg.norm(moved - reference) / np.linalg.norm(reference) <= tolerance, key


def google_arrays(model: Model, folder: Path) -> dict[str, np.ndarray]:
    """The weights by the recorded runs' names, which are those of Flax's linen, and in Google's layouts."""
    write_google(model, folder / "model.npz")
    linen = {"LayerNorm_2": "LayerNorm_1", "Attention_1": "Attention_0", "MlpBlock_3": "MlpBlock_0"}
    arrays = dict(np.load(folder / "model.npz"))
    linen |= {} if "cls" in arrays else {"Transformer/posembed_input/": ""}  # big_vision's
    for old, new in linen.items():
        arrays = {name.replace(old, new): array for name, array in arrays.items()}
    return arrays


def recorded_settings(meta: dict[str, Any]) -> tuple[OptimConfig, Any, int]:
    """Optimizer settings, loss and steps of a recorded run."""
    if "lr_schedule" in meta:
        schedule = meta["lr_schedule"]
        config = OptimConfig(
            name="sgd",
            lr=schedule["base"],
            momentum=meta["momentum"],
            schedule=schedule["decay_type"],
            warmup_steps=schedule["warmup_steps"],
            end_lr=1e-5,
            clip_norm=meta["clip_by_global_norm"],
        )
        return config, "softmax", schedule["total_steps"]
    optimizer = meta["optimizer_config"]
    config = OptimConfig(
        name="adam",
        lr=optimizer["lr"],
        weight_decay=optimizer["wd"] / optimizer["lr"],  # big_vision's decay follows the schedule but not the base rate
        decay_on="kernels",
        schedule=optimizer["schedule"]["decay_type"],
        warmup_steps=optimizer["schedule"]["warmup_steps"],
        clip_norm=optimizer["grad_clip_norm"],
    )
    return config, meta["loss"].removesuffix("_xent"), meta["total_steps"]


def test_kernels_are_the_matrices_and_patch_filters() -> None:
    config = OptimConfig(weight_decay=0.1, decay_on="kernels")
    model = ViT(dataclasses.replace(TINY, representation_size=8))
    decayed = {name for name, parameter in model.named_parameters() if is_decayed(name, parameter, config)}
    dense = ["attention.qkv", "attention.out", "mlp.fc1", "mlp.fc2"]
    expected = {f"blocks.0.{name}.weight" for name in dense}
    assert decayed == expected | {"embedding.weight", "pre_logits.weight", "head.weight"}


def test_groups_by_depth() -> None:
    """0.5 of the rate below each block; a frozen parameter is in no group, and moves no other's rate."""
    model = ViT(dataclasses.replace(TINY, depth=2))
    assert model.head is not None
    model.head.bias.requires_grad_(False)
    config = OptimConfig(lr=0.8, layer_decay=0.5, weight_decay=0.1, decay_on="kernels")
    groups = parameter_groups(model.named_parameters(), config)
    of = {name: group for group in groups for name, _ in group["params"]}
    assert of.keys() == {name for name, _ in model.named_parameters()} - {"head.bias"}
    expected = {"cls": 0.1, "embedding.weight": 0.1, "blocks.0.norm1.bias": 0.2, "blocks.1.mlp.fc2.weight": 0.4}
    assert {name: of[name]["lr"] for name in expected} == pytest.approx(expected)
    assert (of["norm.weight"]["lr"], of["head.weight"]["lr"]) == (0.8, 0.8)
    assert {name for name in of if of[name]["weight_decay"]} == {
        name for name, parameter in model.named_parameters() if is_decayed(name, parameter, config)
    }
    assert len(parameter_groups(model.named_parameters(), dataclasses.replace(config, layer_decay=1.0))) == 2


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_rate_of_each_depth(name: Any) -> None:
    """A step with a rate of the schedule moves a block as one with its own rate does; a restored optimizer as well."""
    config = OptimConfig(name=name, lr=1.0, layer_decay=0.5)
    model = ViT(TINY)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = create_optimizer(model.named_parameters(), config)
    load_optimizer_state(optimizer, optimizer_state(optimizer))
    set_learning_rate(optimizer, 0.01)
    optimizer.step()
    steps = {name: (start[name] - p).mean().item() for name, p in model.named_parameters()}
    expected = {"head.weight": 0.01, "blocks.0.mlp.fc1.weight": 0.005, "position.table": 0.0025}
    assert {name: steps[name] for name in expected} == pytest.approx(expected, rel=1e-4)


def test_clip_scales_all_gradients_together() -> None:
    a, b, without = (torch.zeros(2, requires_grad=True) for _ in range(3))
    a.grad, b.grad = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    for limit, norm, after in ((10.0, 5.0, (3.0, 4.0)), (2.5, 5.0, (1.5, 2.0)), (None, 2.5, (1.5, 2.0))):
        assert clip_by_global_norm([a, b, without], limit).item() == norm
        assert (a.grad.tolist(), b.grad.tolist()) == ([after[0], 0.0], [0.0, after[1]])
    a.grad = torch.tensor([1e-5, 0.0])
    clip_by_global_norm([a], 1e-6)  # by the norm itself
    assert a.grad[0].item() == pytest.approx(1e-6, rel=1e-6)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_decay_is_decoupled_and_scaled_by_the_rate(name: Any) -> None:
    """And the Polyak average follows."""
    weight = torch.full((3, 3), 2.0, requires_grad=True)
    optimizer = create_optimizer([("w.weight", weight)], OptimConfig(name=name, lr=0.1, weight_decay=0.5))
    set_learning_rate(optimizer, 0.2)
    average = [torch.zeros(3, 3)]
    for _ in range(2):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        update_average(average, [weight], 0.75)
    torch.testing.assert_close(weight.detach(), torch.full((3, 3), 2.0 * 0.9**2))
    torch.testing.assert_close(average[0], torch.full((3, 3), 2.0 * (0.9 * 0.25 * 0.75 + 0.9**2 * 0.25)))
    assert not average[0].requires_grad
