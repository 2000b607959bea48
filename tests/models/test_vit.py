import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vmap
from torchvision.models.feature_extraction import create_feature_extractor

from vitlab.errors import UserError
from vitlab.models import ViTConfig, attention
from vitlab.models.position import resize_positions
from vitlab.models.variant import override
from vitlab.models.vit import ViT


@pytest.fixture
def kind(vit_kind: ViTConfig) -> ViTConfig:
    return vit_kind


# --- Eq. 1-4 against the same formulas written out in NumPy -------------------------------------------------------


def layer_norm(x: np.ndarray, scale: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    mean = x.mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + eps) * scale + bias


def gelu(x: np.ndarray, form: str) -> np.ndarray:
    if form == "quick":
        return x / (1 + np.exp(-1.702 * x))
    if form == "tanh":
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


Weights = dict[str, np.ndarray]


def under(weights: Weights, prefix: str) -> Weights:
    return {name.removeprefix(prefix): array for name, array in weights.items() if name.startswith(prefix)}


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, bias: Callable | None = None) -> np.ndarray:
    """Eq. 6-7, head by head; `bias` turns a head's queries into the bias of its logits."""
    d, outputs = q.shape[1] // heads, []
    for h in range(heads):
        part = slice(h * d, (h + 1) * d)
        logits = q[:, part] @ k[:, part].T / math.sqrt(d)
        a = np.exp(logits if bias is None else logits + bias(q[:, part]))
        outputs.append(a / a.sum(1, keepdims=True) @ v[:, part])
    return np.concatenate(outputs, 1)


def dense(x: np.ndarray, w: Weights, name: str) -> np.ndarray:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def mlp(x: np.ndarray, w: Weights, c: ViTConfig) -> np.ndarray:
    if c.variant.swiglu:
        gate, hidden = np.split(dense(x, w, "mlp.fc1"), 2, axis=1)
        hidden *= gate / (1 + np.exp(-gate))
    else:
        hidden = gelu(dense(x, w, "mlp.fc1"), c.variant.gelu)
    if c.variant.mlp_norm:
        hidden = layer_norm(hidden, w["mlp.norm.weight"], w["mlp.norm.bias"], c.variant.layer_norm_eps)
    return dense(hidden, w, "mlp.fc2")


def turn(x: np.ndarray, c: ViTConfig) -> np.ndarray:
    """Rotary positions, number by number."""
    turned, d, rotary = x.copy(), c.width // c.heads, c.variant.rotary
    assert rotary
    for patch in range(c.num_patches):
        row, column = divmod(patch, c.grid[1])
        coordinates = [2 * math.pi * (2 * (i + 0.5) / side - 1) for i, side in zip((row, column), c.grid, strict=True)]
        if rotary.coordinates == "index":
            scales = [old / new for old, new in zip(rotary.reference or c.grid, c.grid, strict=True)]
            coordinates = [(row + rotary.offset) * scales[0], (column + rotary.offset) * scales[1]]
        for head in range(c.heads):
            for axis in range(2):
                for number in range(d // 4):
                    angle = coordinates[axis] * rotary.base ** (-number / (d // 4))
                    cos, sin = np.float32(math.cos(angle)), np.float32(math.sin(angle))  # as they are stored
                    t, a = c.num_prefix_tokens + patch, head * d + axis * (d // 4) + number
                    b = a + d // 2
                    turned[t, a] = x[t, a] * cos - x[t, b] * sin
                    turned[t, b] = x[t, b] * cos + x[t, a] * sin
    return turned


def block(z: np.ndarray, w: Weights, c: ViTConfig, offsets: np.ndarray | None = None) -> np.ndarray:
    """Eq. 2-3, with the later parts."""

    def bias(q: np.ndarray) -> np.ndarray:
        assert offsets is not None
        positions, added = range(c.num_prefix_tokens, len(q)), np.zeros((len(q), len(q)))
        for i in positions:
            for j in positions:
                added[i, j] = q[i] @ offsets[c.num_patches - 1 + j - i] / math.sqrt(c.width // c.heads)
        return added

    x = layer_norm(z, w["norm1.weight"], w["norm1.bias"], c.variant.layer_norm_eps)
    q, k, v = np.split(dense(x, w, "attention.qkv"), 3, axis=1)
    if c.variant.rotary:
        q, k = turn(q, c), turn(k, c)
    x = attend(q, k, v, c.heads, None if offsets is None else bias)
    if c.variant.attention_norm:
        x = layer_norm(x, w["attention.norm.weight"], w["attention.norm.bias"], c.variant.layer_norm_eps)
    x = dense(x, w, "attention.out")
    z = z + x * w.get("branch1.scale", 1)
    x = layer_norm(z, w["norm2.weight"], w["norm2.bias"], c.variant.layer_norm_eps)
    return z + mlp(x, w, c) * w.get("branch2.scale", 1)


def axial_block(z: np.ndarray, w: Weights, c: ViTConfig) -> np.ndarray:
    """App. D.6, row by row and column by column, with the prefix in front; then the prefix's mean."""
    p, (height, width) = c.num_prefix_tokens, c.grid
    grid = np.arange(height * width).reshape(height, width)
    for half, lines in (("rows.", grid), ("columns.", grid.T)):
        mixed, prefix = z.copy(), np.zeros_like(z[:p])
        for line in lines:
            out = block(np.concatenate([z[:p], z[p + line]]), under(w, half), c)
            prefix, mixed[p + line] = prefix + out[:p] / len(lines), out[p:]
        mixed[:p] = prefix
        z = mixed
    return z


def add_positions(z: np.ndarray, w: Weights, c: ViTConfig, layer: int) -> np.ndarray:
    """Tokens with their position embeddings (App. D.4)."""
    z, layer = z.copy(), layer if c.position_at == "every" else 0
    in_front, of_those = c.num_prefix_tokens, c.num_position_prefix
    if c.position == "1d":
        z[:of_those] += w["position.table"][layer, :of_those]
        z[in_front:] += w["position.table"][layer, of_those:]
    elif c.position == "2d":
        if of_those:
            z[:of_those] += w["position.prefix"][layer]
        for i in range(c.grid[0]):
            for j in range(c.grid[1]):
                halves = [w["position.columns"][layer, j], w["position.rows"][layer, i]]
                z[in_front + i * c.grid[1] + j] += np.concatenate(halves)
    elif c.position == "sincos2d":
        omega = 10_000 ** (-np.arange(c.width // 4) / (c.width // 4 - 1))
        for i in range(c.grid[0]):
            for j in range(c.grid[1]):
                parts = [np.sin(j * omega), np.cos(j * omega), np.sin(i * omega), np.cos(i * omega)]
                z[in_front + i * c.grid[1] + j] += np.concatenate(parts).astype(np.float32)  # as it is stored
    return z


def paper(model: ViT, image: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [T, D], representation and logits of one image [3, H, W] (or a stem's map), loop by loop."""
    c = model.config
    w = {name: tensor.detach().double().numpy() for name, tensor in model.state_dict().items()}
    patches = []
    for i in range(c.grid[0]):
        for j in range(c.grid[1]):
            patch = image[:, i * c.patch_size : (i + 1) * c.patch_size, j * c.patch_size : (j + 1) * c.patch_size]
            patches.append((w["embedding.weight"] * patch).sum((1, 2, 3)) + w["embedding.bias"])
    z = np.stack(patches)
    z = np.concatenate([*(w[name][0] for name in ("cls", "distillation", "registers") if name in w), z])
    z = add_positions(z, w, c, 0) if c.position_at == "stem" else z  # Eq. 1
    if c.variant.pre_norm:
        z = layer_norm(z, w["pre_norm.weight"], w["pre_norm.bias"], c.variant.layer_norm_eps)
    for i in range(c.depth):
        z = add_positions(z, w, c, i) if c.position_at != "stem" else z
        if c.encoder == "axial":
            z = axial_block(z, under(w, f"blocks.{i}."), c)
        else:
            relative, layer = c.position == "relative", i if c.position_at == "every" else 0
            z = block(z, under(w, f"blocks.{i}."), c, w["position.table"][layer] if relative else None)
    if c.variant.final_norm == "tokens":
        z = layer_norm(z, w["norm.weight"], w["norm.bias"], c.variant.layer_norm_eps)
    mean = z[c.num_prefix_tokens :].mean(0)
    if c.variant.final_norm == "mean":
        mean = layer_norm(mean, w["norm.weight"], w["norm.bias"], c.variant.layer_norm_eps)
    if c.pool == "map":
        m = under(w, "map.")
        weights, biases = np.split(m["attention.qkv.weight"], 3), np.split(m["attention.qkv.bias"], 3)
        inputs = (m["probe"][0], z, z)
        q, k, v = (x @ weight.T + bias for x, weight, bias in zip(inputs, weights, biases, strict=True))
        y = dense(attend(q, k, v, c.heads), m, "attention.out")
        y = (y + mlp(layer_norm(y, m["norm.weight"], m["norm.bias"], c.variant.layer_norm_eps), m, c))[0]
    else:
        y = {"token": z[0], "gap": mean, "token+gap": np.concatenate([z[0], mean])}[c.pool]  # Eq. 4
    if c.representation_size:
        y = np.tanh(dense(y, w, "pre_logits"))
    logits = dense(y, w, "head") if c.num_classes else y
    if c.variant.distilled:
        second = dense(z[1], w, "head_distilled") if c.num_classes else z[1]
        y, logits = (y + z[1]) / 2, (logits + second) / 2
    return z, y, logits


def test_forward_is_the_papers(kind: ViTConfig, model: ViT, images: Tensor) -> None:
    model, images = model.double(), images.double()
    maps = images if model.stem is None else model.stem(images)
    expected = zip(*(paper(model, map_of_image.detach().numpy()) for map_of_image in maps), strict=True)
    tokens_rep_logits = [np.stack(arrays) for arrays in expected]
    for with_grad in (True, False):  # attention by matrix products, and fused
        with torch.set_grad_enabled(with_grad):
            tokens = model.forward_features(images)
            outputs = tokens, model.forward_head(tokens, pre_logits=True), model(images)
        for ours, exact in zip(outputs, tokens_rep_logits, strict=True):
            np.testing.assert_allclose(ours.detach().numpy(), exact, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_intermediate_layers_end_with_the_features(model: ViT, images: Tensor) -> None:
    model.eval()
    depth, prefix, raw = model.config.depth, model.config.num_prefix_tokens, model.config.variant.final_norm == "mean"
    tokens = model.forward_features(images)
    first, (patches, front) = model.get_intermediate_layers(images, [0, -1], norm=not raw, return_prefix_tokens=True)
    assert torch.equal(torch.cat([front, patches], dim=1), tokens)
    assert first[0].shape == patches.shape
    assert not torch.equal(first[0], patches)
    (last,) = model.get_intermediate_layers(images, reshape=True, norm=not raw)
    assert torch.equal(last, tokens[:, prefix:].transpose(1, 2).unflatten(2, model.config.grid))
    assert len(model.get_intermediate_layers(images, depth)) == depth
    for n in (0, depth + 1, [depth], []):
        with pytest.raises(UserError, match=f"{depth} blocks"):
            model.get_intermediate_layers(images, n)


# --- dropout -----------------------------------------------------------------------------------------------------


def test_dropout_is_where_googles_code_has_it(small: Callable[..., ViT]) -> None:
    model = small(dropout=0.5).train()
    seen: list[tuple[str, Tensor, Tensor]] = []

    def note(name: str) -> Callable[[nn.Module, tuple[Tensor], Tensor], None]:
        return lambda _, inputs, out: seen.append((name, inputs[0], out))

    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) or name == "position" or name.endswith(("out", "fc2", "norm2")):
            module.register_forward_hook(note(name))
    model(torch.randn(3, 3, 24, 32))
    parts = ["attention.out", "branch1.dropout", "norm2", "mlp.dropout", "mlp.fc2", "branch2.dropout"]
    names = ["position", "dropout", *(f"blocks.{i}.{name}" for i in range(2) for name in parts)]
    assert [name for name, _, _ in seen] == names
    for i, name in enumerate(names):
        if not name.endswith("dropout"):
            continue
        _, inputs, out = seen[i]
        before = seen[i - 1][2]
        if name.endswith("mlp.dropout"):  # after the GELU
            fc1 = model.get_submodule(name.replace("dropout", "fc1"))
            torch.testing.assert_close(inputs, F.gelu(fc1(before), approximate="tanh"))
        else:
            assert torch.equal(inputs, before)
        assert 0.3 < (out != 0).float().mean() < 0.7
        torch.testing.assert_close(out[out != 0], 2 * inputs[out != 0])
    model.eval()
    assert torch.equal(model(torch.ones(1, 3, 24, 32)), model(torch.ones(1, 3, 24, 32)))


def test_a_dynamic_model_computes_as_one_of_the_images_size(vit_kind: ViTConfig) -> None:
    """To the bit: positions are resampled as for a model that is loaded at that size."""
    if vit_kind.encoder == "axial":
        with pytest.raises(UserError, match="dynamic_image_size"):
            dataclasses.replace(vit_kind, dynamic_image_size=True)
        return
    method = "bicubic_antialias" if vit_kind.position_at == "every" else "corners"
    config = override(vit_kind, position_interpolation=method, dynamic_image_size=True)
    model, (h, w) = ViT(config).eval(), vit_kind.grid
    state = {name: tensor.add_(0.1 * torch.randn_like(tensor)) for name, tensor in model.state_dict().items()}
    for rows, columns in ((h + 2, w - 1), (1, 1)):
        size = rows * config.stride, columns * config.stride
        fixed = ViT(dataclasses.replace(config, image_size=size, dynamic_image_size=False)).eval()
        fixed.load_state_dict({**state, **resize_positions(state, config, fixed.config.grid)})
        images = torch.rand(2, config.in_chans, *size) * 2 - 1
        torch.testing.assert_close(model(images), fixed(images), rtol=0, atol=0)
        maps = [each.get_intermediate_layers(images, 2, reshape=True) for each in (model, fixed)]
        torch.testing.assert_close(*maps, rtol=0, atol=0)
    model(torch.rand(2, config.in_chans, size[0] * 2, size[1] * 3)).sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "position" in name)
    if vit_kind.stem is None:  # whose map may have a patch for any size
        with pytest.raises(UserError, match="7x8"):
            model(torch.rand(2, config.in_chans, 7, 8))


# --- derivatives and traces --------------------------------------------------------------------------------------


def differentiable(monkeypatch: pytest.MonkeyPatch, compute: Callable[[], Any]) -> Any:
    """The same with attention written in operations that torch differentiates by itself."""

    def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None) -> Tensor:
        return attention.attention_weights(q * q.shape[-1] ** -0.5, k, bias) @ v

    with monkeypatch.context() as patched:
        patched.setattr(attention, "attention", attend)
        return compute()


@pytest.mark.usefixtures("unchecked")  # shapes inside a transform are others
@pytest.mark.parametrize("path", ["matmul", "fused", "chosen"])
def test_derivatives_of_every_sort_are_right(
    path: str, small: Callable[..., ViT], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`chosen` is the path that a CPU takes by itself."""
    if path != "chosen":
        monkeypatch.setattr(attention, "attention_backend", lambda *_: path)
    model, labels = small(pool="map").double(), torch.tensor([1, 3])
    images = torch.randn(2, 3, 24, 32, dtype=torch.float64)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    factor = torch.ones(1, 3, 1, 1, dtype=torch.float64)

    def loss(weights: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, weights, (image[None],)), label[None])

    def scaled(factor: Tensor) -> Tensor:
        return functional_call(model, weights, (images * factor,)).logsumexp(1).sum()

    def transforms() -> list[Any]:
        return [
            vmap(grad(loss), (None, 0, 0))(weights, images, labels),
            jvp(model, (images,), (torch.ones_like(images),)),
            jacfwd(scaled)(factor),
            hessian(scaled)(factor),
        ]

    def gradient_penalty() -> list[Tensor]:
        inputs = images.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(inputs).logsumexp(1).sum(), inputs, create_graph=True)
        return list(torch.autograd.grad(slope.square().sum(), list(model.blocks.parameters())))

    torch.testing.assert_close(transforms(), differentiable(monkeypatch, transforms), rtol=1e-9, atol=1e-12)
    if path == "fused":  # as in any model on torch's fused attention: an error, and no wrong number
        with pytest.raises(RuntimeError, match="not implemented"):
            gradient_penalty()
    else:
        expected = differentiable(monkeypatch, gradient_penalty)
        torch.testing.assert_close(gradient_penalty(), expected, rtol=1e-9, atol=1e-12)
    torch.jit.save(torch.jit.trace(model, images), tmp_path / "model.pt")  # pyright: ignore[reportPrivateImportUsage]
    traced = torch.jit.load(tmp_path / "model.pt")  # pyright: ignore[reportPrivateImportUsage]
    others = torch.randn(3, 3, 24, 32).double().requires_grad_()
    slopes = [torch.autograd.grad(forward(others).square().sum(), others)[0] for forward in (traced, model)]
    torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-9)


@pytest.mark.usefixtures("unchecked")
def test_torch_fx_traces_every_model(kind: ViTConfig, model: ViT, images: Tensor) -> None:
    extractor = create_feature_extractor(model, {"norm": "tokens"})
    tokens = model.forward_features(images)
    if kind.variant.final_norm == "mean":  # the node is that of the mean
        tokens = model.norm(tokens[:, kind.num_prefix_tokens :].mean(dim=1))
    torch.testing.assert_close(extractor(images)["tokens"], tokens)
    with pytest.raises(UserError, match="uint8"):
        extractor(images.to(torch.uint8))


# --- patch dropout ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"pre_norm": True}, {"pool": "map", "registers": 2}])
def test_patch_dropout(small: Callable[..., ViT], settings: dict[str, Any]) -> None:
    """In training each image keeps its own random 4 of 16 patches and all tokens in front; nothing else changes."""
    model = small(image_size=32, patch_dropout=0.75, position_std=1.0, head_std=1.0, **settings)
    images = torch.randn(64, 3, 32, 32)
    seen = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.eval()(images)
    model.train()(images)
    whole, part = seen
    front = model.config.num_prefix_tokens
    assert part.shape == (64, front + 4, 16)
    assert torch.equal(part[:, :front], whole[:, :front])
    same = (part[:, front:, None] == whole[:, None, front:]).all(-1)  # [B, kept, patches]
    assert (same.sum(2) == 1).all()
    assert (same.sum(1) <= 1).all()
    counts = same.sum((0, 1)).float()  # of each patch, binomial(64, 1 / 4)
    assert ((counts - 16).abs() < 5 * (64 * 3 / 16) ** 0.5).all()
