import math
from collections.abc import Callable
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.models import ViTConfig, create_model
from vitlab.models.vit import Block, MatmulAttention, ViT, attention, attention_path, init_weights

SMALL: dict[str, Any] = {
    "image_size": 12, "patch_size": 4, "width": 8, "depth": 2, "heads": 2, "mlp_dim": 12, "num_classes": 5,
}  # fmt: skip


def small(**settings: Any) -> ViT:
    """A small ViT whose every parameter is random, so that every one matters."""
    model = ViT(ViTConfig(**{**SMALL, **settings}))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.eval()


# --- Eq. 1-4 against the same formulas written out in NumPy -------------------------------------------------------


def layer_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * scale + bias


def gelu(x: np.ndarray, form: str) -> np.ndarray:
    if form == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def paper(model: ViT, image: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [T, D], representation and logits of one picture [3, H, W], loop by loop."""
    c = model.config
    w = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
    patches = []
    for i in range(c.grid[0]):
        for j in range(c.grid[1]):
            patch = image[:, i * c.patch_size : (i + 1) * c.patch_size, j * c.patch_size : (j + 1) * c.patch_size]
            patches.append((w["embedding.weight"] * patch).sum((1, 2, 3)) + w["embedding.bias"])
    z = np.stack(patches)
    if c.pool == "token":
        z = np.concatenate([w["cls"][0], z])
    if c.position == "1d":
        z = z + w["position.table"][0]  # Eq. 1
    for i in range(c.depth):
        b = {name.removeprefix(f"blocks.{i}."): each for name, each in w.items() if name.startswith(f"blocks.{i}.")}
        x = layer_norm(z, b["norm1.weight"], b["norm1.bias"], c.layer_norm_eps)
        qkv = x @ b["attention.qkv.weight"].T + b["attention.qkv.bias"]
        d = c.width // c.heads
        heads = []
        for h in range(c.heads):
            q, k, v = (qkv[:, part * c.width + h * d : part * c.width + (h + 1) * d] for part in range(3))
            a = np.exp(q @ k.T / math.sqrt(d))
            heads.append(a / a.sum(1, keepdims=True) @ v)
        z = z + np.concatenate(heads, 1) @ b["attention.out.weight"].T + b["attention.out.bias"]  # Eq. 2
        x = layer_norm(z, b["norm2.weight"], b["norm2.bias"], c.layer_norm_eps)
        x = gelu(x @ b["mlp.fc1.weight"].T + b["mlp.fc1.bias"], c.gelu)
        z = z + x @ b["mlp.fc2.weight"].T + b["mlp.fc2.bias"]  # Eq. 3
    z = layer_norm(z, w["norm.weight"], w["norm.bias"], c.layer_norm_eps)
    y = z[0] if c.pool == "token" else z.mean(0)  # Eq. 4
    if c.representation_size:
        y = np.tanh(y @ w["pre_logits.weight"].T + w["pre_logits.bias"])
    return z, y, y @ w["head.weight"].T + w["head.bias"] if c.num_classes else y


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pool": "gap"},
        {"pool": "gap", "position": "none"},
        {"representation_size": 7, "gelu": "erf"},
        {"image_size": (8, 20), "heads": 4, "layer_norm_eps": 0.1},
        {"num_classes": 0, "dropout": 0.5},
        {"num_classes": 0, "representation_size": 7, "heads": 1, "image_size": 4},
    ],
)
@pytest.mark.parametrize("grad", [True, False])
def test_forward_is_the_paper_s(settings: dict[str, Any], grad: bool) -> None:
    model = small(**settings).double()
    images = torch.randn(2, 3, *model.config.image_hw, dtype=torch.float64)
    with torch.set_grad_enabled(grad):
        tokens = model.forward_features(images)
        rep, logits = model.forward_head(tokens, pre_logits=True), model(images)
    for i in range(2):
        for ours, theirs in zip((tokens[i], rep[i], logits[i]), paper(model, images[i].numpy()), strict=True):
            np.testing.assert_allclose(ours.detach().numpy(), theirs, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("settings", "tokens", "rep", "out"),
    [
        ({}, (2, 10, 8), (2, 8), (2, 5)),
        ({"pool": "gap"}, (2, 9, 8), (2, 8), (2, 5)),
        ({"representation_size": 7}, (2, 10, 8), (2, 7), (2, 5)),
        ({"num_classes": 0}, (2, 10, 8), (2, 8), (2, 8)),
        ({"num_classes": 0, "representation_size": 7}, (2, 10, 8), (2, 7), (2, 7)),
        ({"image_size": (4, 16), "pool": "gap"}, (2, 4, 8), (2, 8), (2, 5)),
    ],
)
def test_shapes(settings: dict[str, Any], tokens: tuple[int, ...], rep: tuple[int, ...], out: tuple[int, ...]) -> None:
    model = small(**settings)
    features = model.forward_features(torch.randn(2, 3, *model.config.image_hw))
    assert features.shape == tokens
    assert model.forward_head(features, pre_logits=True).shape == rep
    assert model.forward_head(features).shape == out


def test_parts_that_are_not_asked_for_are_not_there() -> None:
    model = small(pool="gap", position="none", num_classes=0)
    assert model.cls is None
    assert model.position.table is None
    assert model.pre_logits is None
    assert model.head is None
    missing = {"cls", "position.table", "pre_logits.weight", "head.weight"}
    assert not missing & set(model.state_dict())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((16, 16), r"built for 12x12 pixels and the images have 16x16.*image_size=16,"),
        ((8, 12), r"built for 12x12 pixels and the images have 8x12.*image_size=\(8, 12\)"),
        ((13, 13), r"13x13 cannot be cut into patches of 4x4.*the nearest: 12, 16\."),
    ],
)
def test_images_of_another_size_are_refused(given: tuple[int, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small()(torch.randn(1, 3, *given))


# --- attention ---------------------------------------------------------------------------------------------------


def qkv(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(*shape, dtype=dtype, requires_grad=True) for _ in range(3))
    return q, k, v


def test_matmul_attention_has_the_right_derivative() -> None:
    assert torch.autograd.gradcheck(MatmulAttention.apply, qkv(2, 3, 5, 4))


def test_both_paths_are_equal_forward_and_backward() -> None:
    inputs, weight = qkv(2, 3, 7, 4), torch.randn(2, 3, 7, 4, dtype=torch.float64)
    answers = []
    for path in (MatmulAttention.apply, F.scaled_dot_product_attention):
        out = path(*inputs)
        answers.append((out, *torch.autograd.grad((out * weight).sum(), inputs)))
    for ours, theirs in zip(*answers, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_the_path_follows_device_and_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    assert attention_path("cpu", True) == "matmul"
    assert attention_path("cpu", False) == attention_path("cuda", True) == attention_path("cuda", False) == "fused"
    calls: list[str] = []
    fused, inputs = F.scaled_dot_product_attention, qkv(1, 1, 2, 2)

    def spy(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        calls.append("fused")
        return fused(q, k, v)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    attention(*inputs)
    assert calls == []
    with torch.no_grad():
        attention(*inputs)
    assert calls == ["fused"]
    attention(*(each.detach() for each in inputs))
    assert calls == ["fused", "fused"]


def test_both_paths_train_under_autocast() -> None:
    """Half precision forward, and a backward outside of the autocast, as in training."""
    inputs, weight = qkv(2, 3, 7, 4, dtype=torch.float32), torch.randn(2, 3, 7, 4)
    exact = torch.autograd.grad((attention(*inputs) * weight).sum(), inputs)
    for path in (MatmulAttention.apply, F.scaled_dot_product_attention):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            q, k, v = (each.bfloat16() for each in inputs)
            out = path(q, k, v)
        assert out.dtype == torch.bfloat16
        for ours, theirs in zip(torch.autograd.grad((out.float() * weight).sum(), inputs), exact, strict=True):
            assert (ours - theirs).norm() < 0.03 * theirs.norm()


@torch.no_grad()
def test_without_positions_the_order_of_patches_does_not_matter() -> None:
    images = torch.randn(2, 3, 12, 12)
    order = torch.randperm(9)
    patches = images.unfold(2, 4, 4).unfold(3, 4, 4).flatten(2, 3)[:, :, order]
    shuffled = patches.unflatten(2, (3, 3)).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 12, 12)
    for pool in ("token", "gap"):
        model = small(position="none", pool=pool).double()
        tokens, moved = (model.forward_features(each.double()) for each in (images, shuffled))
        prefix = model.config.num_prefix_tokens
        torch.testing.assert_close(moved[:, prefix:], tokens[:, prefix:][:, order], rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(model(shuffled.double()), model(images.double()), rtol=1e-9, atol=1e-9)
        placed = small(pool=pool).double()
        assert (placed(shuffled.double()) - placed(images.double())).abs().max() > 1e-3


# --- dropout -----------------------------------------------------------------------------------------------------


def test_dropout_stands_where_google_s_code_has_it() -> None:
    model = small(dropout=0.5).train()
    seen: list[tuple[str, Tensor, Tensor]] = []

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        return lambda _, given, out: seen.append((name, given[0], out))

    for name, module in model.named_modules():
        watched = isinstance(module, nn.Dropout) or name in ("position",) or name.endswith(("out", "fc2", "norm2"))
        if watched:
            module.register_forward_hook(note(name))
    model(torch.randn(3, 3, 12, 12))
    block = ["attention.out", "dropout", "norm2", "mlp.dropout", "mlp.fc2", "dropout"]
    names = ["position", "dropout", *(f"blocks.{i}.{name}" for i in range(2) for name in block)]
    assert [name for name, _, _ in seen] == names
    drops = [i for i, name in enumerate(names) if name.endswith("dropout")]
    for i in drops:
        name, given, out = seen[i]
        before = seen[i - 1][2]
        if name.endswith("mlp.dropout"):  # after the GELU
            assert given.shape == (3, 10, 12)
            fc1 = model.get_submodule(name.replace("dropout", "fc1"))
            torch.testing.assert_close(given, F.gelu(fc1(before), approximate="tanh"))
        else:
            assert torch.equal(given, before)
        kept = out != 0
        assert 0.3 < kept.float().mean() < 0.7
        torch.testing.assert_close(out[kept], 2 * given[kept])


def test_dropout_rests_in_evaluation_and_at_rate_zero() -> None:
    images = torch.randn(2, 3, 12, 12)
    model = small(dropout=0.5)
    assert torch.equal(model(images), model(images))
    assert not torch.equal(model.train()(images), model(images))
    still = small().train()
    assert torch.equal(still(images), still(images))


# --- initial values ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fresh() -> ViT:
    torch.manual_seed(0)
    return create_model("ViT-S/16", image_size=112, depth=2, num_classes=10, representation_size=300, head_bias=-10.0)


def spread(tensor: Tensor, sd: float, error: float) -> None:
    assert abs(tensor.std().item() / sd - 1) < error
    assert abs(tensor.mean().item()) < 5 * sd / math.sqrt(tensor.numel())


def truncated(tensor: Tensor, fan_in: int) -> None:
    sd = math.sqrt(1 / fan_in)
    spread(tensor, sd, 0.01)
    bound = 2 * sd / 0.87962566
    assert 0.99 * bound < tensor.abs().max().item() <= bound * (1 + 1e-6)


def uniform(tensor: Tensor, bound: float) -> None:
    spread(tensor, bound / math.sqrt(3), 0.01)
    assert 0.999 * bound < tensor.abs().max().item() <= bound * (1 + 1e-6)


def test_first_positions_as_wide_as_asked() -> None:
    table = create_model("ViT-Ti/16", depth=1, position_std=0.5).position.table
    assert table is not None
    assert table.std().item() == pytest.approx(0.5, rel=0.05)


def test_initial_values_are_google_s(fresh: ViT) -> None:
    assert fresh.cls is not None
    assert fresh.position.table is not None
    assert fresh.pre_logits is not None
    assert fresh.head is not None
    truncated(fresh.embedding.weight, 16 * 16 * 3)
    truncated(fresh.pre_logits.weight, 384)
    spread(fresh.position.table, 0.02, 0.02)
    assert fresh.position.table.abs().max() > 0.04 / 0.88  # not truncated
    for block in fresh.blocks:
        assert isinstance(block, Block)
        for matrix in (*block.attention.qkv.weight.split(384), block.attention.out.weight):
            uniform(matrix, math.sqrt(6 / (2 * 384)))
        for dense in (block.mlp.fc1, block.mlp.fc2):
            uniform(dense.weight, math.sqrt(6 / (5 * 384)))
            spread(dense.bias, 1e-6, 0.15)
        for norm in (block.norm1, block.norm2, fresh.norm):
            assert torch.equal(norm.weight, torch.ones(384))
            assert not norm.bias.any()
            assert norm.eps == 1e-6
    zeros = [fresh.embedding.bias, fresh.cls, fresh.head.weight, fresh.pre_logits.bias]
    zeros += [getattr(block.attention, part).bias for block in fresh.blocks for part in ("qkv", "out")]  # pyright: ignore
    assert not any(each.any() for each in zeros)
    assert torch.equal(fresh.head.bias, torch.full((10,), -10.0))


def test_q_k_and_v_are_drawn_apart(fresh: ViT) -> None:
    block = fresh.blocks[0]
    assert isinstance(block, Block)
    q, k, v = block.attention.qkv.weight.flatten().chunk(3)
    assert torch.stack([q, k, v]).corrcoef().fill_diagonal_(0).abs().max() < 0.02


def test_the_generator_alone_decides() -> None:
    def state(seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return create_model("ViT-Ti/16", image_size=32, depth=1, generator=generator).state_dict()

    one, again, other = state(7), state(7), state(8)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])
    model = create_model("ViT-Ti/16", image_size=32, depth=1)
    assert not torch.equal(model.embedding.weight, one["embedding.weight"])
    init_weights(model, torch.Generator().manual_seed(7))
    assert all(torch.equal(one[name], tensor) for name, tensor in model.state_dict().items())


def test_a_fresh_model_knows_nothing() -> None:
    model = create_model("ViT-Ti/16", image_size=32, depth=1, num_classes=3, head_bias=0.5)
    assert torch.equal(model(torch.randn(2, 3, 32, 32)), torch.full((2, 3), 0.5))


# --- as a part of larger programs --------------------------------------------------------------------------------


@pytest.mark.parametrize("pool", ["token", "gap"])
def test_it_compiles_as_one_graph_forward_and_backward(monkeypatch: pytest.MonkeyPatch, pool: str) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the tests' own checks cannot be compiled
    model = small(pool=pool, representation_size=7, dropout=0.0).train()
    images = torch.randn(2, 3, 12, 12)

    def gradients(forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        logits = forward(images)
        return [logits, *torch.autograd.grad(logits.square().sum(), list(model.parameters()))]

    plain = gradients(model)
    compiled = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    for ours, theirs in zip(compiled, plain, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_float64_and_bfloat16_weights_run() -> None:
    images = torch.randn(2, 3, 12, 12)
    for dtype in (torch.float64, torch.bfloat16):
        assert small().to(dtype)(images).dtype == dtype
