"""Every contender does the same work: equal answers, equal updates."""

import importlib.util
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitlab.cost import peers
from vitlab.cost.peers import (
    OPTIM,
    OURS,
    PEERS,
    Mode,
    Work,
    build,
    check_installed,
    compiled_for_inference,
    training_batch,
    training_precision,
    variants,
)
from vitlab.models import ResNetBody, ResNetConfig, ViTConfig
from vitlab.weights import ParityError, folder

VIT = ViTConfig(image_size=16, patch_size=8, width=16, depth=2, heads=2, mlp_dim=24, num_classes=5)
RESNET = ResNetConfig(
    image_size=32, body=ResNetBody(layers=(1,), width=32, version="v2", weight_eps_on="variance", group_norm_eps=1e-5),
    num_classes=5,
)  # fmt: skip
CPU = torch.device("cpu")

OPENVINO_IS_MISSING = pytest.mark.skipif(
    importlib.util.find_spec("openvino") is None, reason="openvino is not installed: it is in no extra of ours"
)
EVERY = [
    pytest.param(name, marks=OPENVINO_IS_MISSING if peer == "openvino" else ())
    for peer in PEERS
    for name in PEERS[peer]
]


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_are_ours(name: str, dtype: str) -> None:
    work = Work(VIT, "infer", 3, "float32" if dtype == "float32" else "bfloat16")
    ours, theirs = (build(each, work).step() for each in (OURS, name))
    assert ours is not None
    assert theirs is not None
    assert ours.std() > 0.01  # a fresh head would answer 0
    assert ours.shape == theirs.shape == (3, 5)
    error = (ours.float() - theirs.float()).norm() / ours.float().norm()
    assert error < (1e-4 if dtype == "float32" else 5e-2)


@pytest.mark.parametrize("name", [OURS, *PEERS["timm"], *PEERS["huggingface"]])
def test_a_training_step_is_adam_on_the_clipped_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the loss has come to after two steps of each is what it is after two steps written out."""
    monkeypatch.setattr(peers, "OPTIM", peers.OptimConfig(lr=1e-2, weight_decay=0.05, clip_norm=0.1))
    work, kept = Work(VIT, "train", 4, "float32"), []
    for function in ("_timm", "_huggingface", "_model"):  # looks at the model that is trained
        made = getattr(peers, function)
        monkeypatch.setattr(peers, function, lambda *given, made=made: kept.append(made(*given)) or kept[-1])
    contender = build(name, work)
    contender.step()
    contender.step()
    trained = kept[-1]

    model = peers._model(VIT).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.05)
    batch = training_batch(work, CPU)
    start = F.cross_entropy(model(batch.images), batch.labels)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(batch.images), batch.labels).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert norm > 0.1
        optimizer.step()
    with torch.no_grad():
        expected, found = (F.cross_entropy(each(batch.images), batch.labels) for each in (model, trained))
    assert abs(expected - start) > 1e-2
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_resnet_has_no_choice_of_attention(mode: Mode) -> None:
    work = Work(RESNET, mode, 2, "float32")
    assert [variants(peer, work) for peer in ("timm", "huggingface")] == [PEERS["timm"][:1], PEERS["huggingface"][:1]]
    assert variants("timm", Work(VIT, mode, 2, "float32")) == PEERS["timm"]
    assert variants("openvino", work) == (("openvino",) if mode == "infer" else ())
    assert "its only way" in build(PEERS["huggingface"][0], work).given


def test_attention_is_what_the_name_says(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = F.scaled_dot_product_attention
    calls = []
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or fused(*a, **k))
    for name, count in zip(PEERS["timm"], (VIT.depth, 0), strict=True):
        step = build(name, Work(VIT, "infer", 2, "float32")).step
        calls.clear()
        step()
        assert len(calls) == count


def test_another_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    write = folder.safetensors.torch.save_file

    def spoiled(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        write({name: tensor * 1.1 for name, tensor in tensors.items()}, path, metadata)

    monkeypatch.setattr(folder.safetensors.torch, "save_file", spoiled)
    with pytest.raises(ParityError, match="timm, fused attention answers otherwise than vitlab"):
        build(PEERS["timm"][0], Work(VIT, "infer", 2, "float32"))


def test_a_model_that_a_peer_cannot_be() -> None:
    config = ViTConfig(
        image_size=16, patch_size=8, width=16, depth=1, heads=2, mlp_dim=24, position="relative", position_at="every"
    )
    with pytest.raises(ValueError, match="position='relative', which timm cannot represent"):
        build(PEERS["timm"][0], Work(config, "infer", 2, "float32"))


def test_a_peer_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.MODULES, "timm", "no_such_module")
    with pytest.raises(ValueError, match=r"--against timm needs no_such_module: pip install 'timm>="):
        check_installed("timm")


def test_precision_is_that_of_pretraining() -> None:
    assert training_precision("float32", CPU) == "float32"
    assert training_precision("bfloat16", CPU) == "bfloat16"
    assert f"precision {training_precision('bfloat16', CPU)}" in build(OURS, Work(VIT, "train", 2, "bfloat16")).given
    assert OPTIM.clip_norm == 1.0


@pytest.mark.slow
def test_compiled_answers_are_the_same() -> None:
    model, images = peers._model(VIT), peers._images(VIT, 2)
    with torch.no_grad():
        torch.testing.assert_close(compiled_for_inference(model, images)(images), model(images), rtol=1e-4, atol=1e-5)
