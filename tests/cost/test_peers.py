"""Every contender does the same work: equal logits, equal updates."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitlab.config import OptimConfig, TrainConfig
from vitlab.cost import peers
from vitlab.cost.peers import OURS, PEERS, Work, build, check_installed, example_images, example_model
from vitlab.models import ViTConfig
from vitlab.train.objectives import blank_batch, create_objective
from vitlab.weights import ParityError, folder

VIT = ViTConfig(image_size=16, patch_size=8, width=16, depth=2, heads=2, mlp_dim=24, num_classes=5)


@pytest.mark.parametrize("name", PEERS)
def test_logits_are_ours(name: str) -> None:
    for work, tolerance in ((Work(VIT, "infer", 3, "float32"), 1e-4), (Work(VIT, "infer", 3, "bfloat16"), 5e-2)):
        ours, theirs = (build(contender, work)() for contender in (OURS, name))
        assert ours is not None
        assert theirs is not None
        assert ours.std() > 0.01  # a new head would return zeros
        assert ours.shape == theirs.shape == (3, 5)
        assert (ours.float() - theirs.float()).norm() < tolerance * ours.float().norm()


@pytest.mark.parametrize("name", [OURS, *PEERS])
def test_a_training_step_is_adam_with_clipping(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss after two steps is that after two steps written out here."""
    optim = OptimConfig(lr=1e-2, weight_decay=0.05, clip_norm=0.1)
    monkeypatch.setattr(peers, "OPTIM", optim)
    made: list[nn.Module] = []

    def recorded(make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        return lambda *args: made.append(make(*args)) or made[-1]

    for function in ("_timm", "_huggingface", "example_model"):  # the last one made is trained
        monkeypatch.setattr(peers, function, recorded(getattr(peers, function)))
    step = build(name, Work(VIT, "train", 4, "float32"))
    step()
    step()

    model = example_model(VIT).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
    run = TrainConfig(model=VIT, optim=optim, steps=1, batch_size=4)
    batch = blank_batch(create_objective(run), example_images(VIT, 4))
    start = F.cross_entropy(model(batch.images), batch.labels)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.images), batch.labels).backward()
        assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
        optimizer.step()
    with torch.no_grad():
        expected, loss = (F.cross_entropy(trained(batch.images), batch.labels) for trained in (model, made[-1]))
    assert abs(expected - start) > 1e-2
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)


def test_different_logits_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    write = folder.safetensors.torch.save_file

    def spoiled(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        write({name: tensor * 1.1 for name, tensor in tensors.items()}, path, metadata)

    monkeypatch.setattr(folder.safetensors.torch, "save_file", spoiled)
    with pytest.raises(ParityError, match="timm differs"):
        build("timm", Work(VIT, "infer", 2, "float32"))


def test_a_peer_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "timm", ("no_such_module", ">=1"))
    with pytest.raises(ValueError, match=r"no_such_module: pip install 'no_such_module>=1'"):
        check_installed("timm")
