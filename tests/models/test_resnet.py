import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.models import MODELS, ResNetBody, ResNetConfig, create_model
from vitlab.models.resnet import Body, ResNet, StdConv


@pytest.fixture
def kind(resnet_kind: ResNetConfig) -> ResNetConfig:
    return resnet_kind


# --- the same network written out in NumPy -----------------------------------------------------------------------

Weights = dict[str, np.ndarray]


def sides(n: int, size: int, stride: int, version: str) -> tuple[int, int]:
    """Padding before and after: TensorFlow's SAME, or symmetric."""
    if version == "v2" or size == 1:
        return size // 2, size // 2
    total = max((math.ceil(n / stride) - 1) * stride + size - n, 0)
    return total // 2, total - total // 2


def windows(maps: np.ndarray, size: int, stride: int, version: str, fill: float = 0.0) -> np.ndarray:
    """The input of a kernel at every position: [C, h, w, size * size]."""
    pads = [sides(n, size, stride, version) for n in maps.shape[1:]]
    padded = np.pad(maps, [(0, 0), *pads], constant_values=fill)
    return np.stack(
        [
            padded[:, i : padded.shape[1] - size + 1 + i : stride, j : padded.shape[2] - size + 1 + j : stride]
            for i in range(size)
            for j in range(size)
        ],
        axis=-1,
    )


def convolution(maps: np.ndarray, weight: np.ndarray, stride: int, b: ResNetBody) -> np.ndarray:
    standard = np.zeros_like(weight)
    for o, kernel in enumerate(weight):
        mean, variance = kernel.mean(), ((kernel - kernel.mean()) ** 2).mean()
        on_variance = b.weight_eps_on == "variance"
        scale = math.sqrt(variance + b.weight_eps) if on_variance else math.sqrt(variance) + b.weight_eps
        standard[o] = (kernel - mean) / scale
    inputs = windows(maps, weight.shape[-1], stride, b.version)
    return np.einsum("chwk,ock->ohw", inputs, standard.reshape(*weight.shape[:2], -1))


def group_norm(maps: np.ndarray, w: Weights, name: str, b: ResNetBody) -> np.ndarray:
    groups = maps.reshape(32, -1)
    mean, variance = groups.mean(1, keepdims=True), groups.var(1, keepdims=True)
    normal = ((groups - mean) / np.sqrt(variance + b.group_norm_eps)).reshape(maps.shape)
    return normal * w[f"{name}.weight"][:, None, None] + w[f"{name}.bias"][:, None, None]


def relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0)


def along(line: np.ndarray, w: Weights, name: str, offsets: np.ndarray) -> np.ndarray:
    """Attention with 8 heads among the positions of a line [s, C], with relative encodings."""
    q, k, v = np.split(line @ w[f"{name}.qkv.weight"].T + w[f"{name}.qkv.bias"], 3, axis=1)
    size, d, outputs = len(line), line.shape[1] // 8, []
    for head in range(8):
        part, logits = slice(head * d, (head + 1) * d), np.zeros((size, size))
        for i in range(size):
            for j in range(size):
                logits[i, j] = q[i, part] @ (k[j, part] + offsets[size - 1 + j - i]) / math.sqrt(d)
        a = np.exp(logits)
        outputs.append(a / a.sum(1, keepdims=True) @ v[:, part])
    return np.concatenate(outputs, 1) @ w[f"{name}.out.weight"].T + w[f"{name}.out.bias"]


def axial(maps: np.ndarray, w: Weights, name: str, stride: int) -> np.ndarray:
    lines, (_, h, wide) = np.moveaxis(maps, 0, -1), maps.shape
    lines = np.stack([along(lines[i], w, f"{name}.rows", w[f"{name}.row_offsets"]) for i in range(h)])
    columns = [along(lines[:, j], w, f"{name}.columns", w[f"{name}.column_offsets"]) for j in range(wide)]
    maps = np.moveaxis(np.stack(columns, axis=1), -1, 0)
    out = np.zeros((maps.shape[0], math.ceil(h / stride), math.ceil(wide / stride)))
    for i in range(out.shape[1]):
        for j in range(out.shape[2]):
            block = maps[:, i * stride : (i + 1) * stride, j * stride : (j + 1) * stride]
            out[:, i, j] = block.mean(axis=(1, 2))
    return out


def feature_map(w: Weights, b: ResNetBody, image: np.ndarray) -> np.ndarray:
    """[C, h, w] of one image [3, H, W], from the weights under `body.` or `stem.`."""
    maps = convolution(image, w["root.weight"], 2, b)
    if b.version == "v1":
        maps = relu(group_norm(maps, w, "root_norm", b))
    maps = windows(maps, 3, 2, b.version, -np.inf if b.pool_padding == "-inf" else 0.0).max(axis=-1)
    for stage, units in enumerate(b.layers):
        for unit in range(units):
            at, stride = f"stages.{stage}.{unit}", 2 if stage and not unit else 1

            def conv(x: np.ndarray, name: str, stride: int = 1, at: str = at) -> np.ndarray:
                return convolution(x, w[f"{at}.{name}.weight"], stride, b)

            def mix(x: np.ndarray, at: str = at, stride: int = stride) -> np.ndarray:
                return axial(x, w, f"{at}.conv2", stride) if b.mixing == "axial" else conv(x, "conv2", stride, at)

            def norm(x: np.ndarray, name: str, at: str = at) -> np.ndarray:
                return group_norm(x, w, f"{at}.{name}", b)

            if b.version == "v1":
                out = relu(norm(conv(maps, "conv1"), "norm1"))
                out = norm(conv(relu(norm(mix(out), "norm2")), "conv3"), "norm3")
                if f"{at}.shortcut.weight" in w:
                    maps = norm(conv(maps, "shortcut", stride), "shortcut_norm")
                maps = relu(maps + out)
            else:
                before = relu(norm(maps, "norm1"))
                out = conv(relu(norm(mix(relu(norm(conv(before, "conv1"), "norm2"))), "norm3")), "conv3")
                maps = out + (conv(before, "shortcut", stride) if f"{at}.shortcut.weight" in w else maps)
    return maps


def weights(module: nn.Module) -> Weights:
    return {name: tensor.detach().double().numpy() for name, tensor in module.state_dict().items()}


def test_forward_is_that_of_the_formulas(kind: ResNetConfig, model: ResNet, images: Tensor) -> None:
    model.double()
    tokens, logits = model.forward_features(images.double()), model(images)
    for i in range(2):
        maps = feature_map(weights(model.body), kind.body, images[i].double().numpy())
        if kind.body.version == "v2":
            maps = relu(group_norm(maps, weights(model), "norm", kind.body))
        expected = maps.reshape(len(maps), -1).T
        np.testing.assert_allclose(tokens[i].detach().numpy(), expected, rtol=1e-9, atol=1e-9)
        output = expected.mean(0)
        if kind.num_classes:
            output = weights(model)["head.weight"] @ output + weights(model)["head.bias"]
        np.testing.assert_allclose(logits[i].detach().numpy(), output, rtol=1e-9, atol=1e-9)


# --- its parts ---------------------------------------------------------------------------------------------------

EPSILONS: list[dict[str, Any]] = [
    {"weight_eps": 1e-5, "weight_eps_on": "std"},  # the hybrids and big_vision's ResNet
    {"weight_eps": 1e-10, "weight_eps_on": "variance"},  # BiT
    {"weight_eps": 1e-5, "weight_eps_on": "variance"},  # the paper's ResNets
]


@pytest.mark.parametrize("settings", EPSILONS)
def test_standardized_weights_have_no_mean_and_one_deviation(settings: dict[str, Any]) -> None:
    conv = StdConv(6, 4, 3, 1, ResNetBody(**settings)).double()
    spread = torch.tensor([1.0, 1e-2, 1e-4, 1e-6], dtype=torch.float64)[:, None, None, None]
    with torch.no_grad():
        conv.weight.copy_(3 + spread * torch.randn(4, 6, 3, 3))
    for kernel, found in zip(conv.weight.detach().numpy(), conv.standardized().detach().numpy(), strict=True):
        mean, variance = kernel.mean(), kernel.var()
        eps = settings["weight_eps"]
        scale = np.sqrt(variance + eps) if settings["weight_eps_on"] == "variance" else np.sqrt(variance) + eps
        np.testing.assert_allclose(found, (kernel - mean) / scale, rtol=1e-9, atol=1e-12)
    assert conv.standardized()[0].std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_weights_are_standardized_in_full_precision() -> None:
    """The deviations of half-precision weights would drown beside their mean."""
    conv = StdConv(64, 8, 3, 1, ResNetBody())
    nn.init.normal_(conv.weight, mean=1.0, std=0.1)
    conv.bfloat16()
    assert conv.standardized().dtype == torch.float32
    assert conv.standardized().mean().abs() < 1e-6
    assert conv(torch.randn(1, 64, 4, 4).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("size", "side", "before", "after"),
    [
        *((7, side, 2, 3) for side in (224, 56, 28)),
        *((3, side, 0, 1) for side in (384, 28)),
        (7, 225, 3, 3),
        (3, 113, 1, 1),
    ],
)
def test_halving_convolutions_pad_as_tensorflow_does(size: int, side: int, before: int, after: int) -> None:
    conv = StdConv(1, 1, size, 2, ResNetBody())
    nn.init.normal_(conv.weight)
    maps, across = torch.randn(1, 1, side, 8), {7: (2, 3), 3: (0, 1)}[size]
    expected = F.conv2d(F.pad(maps, (*across, before, after)), conv.standardized(), stride=2)
    assert conv(maps).shape[-2:] == (-(-side // 2), 4)
    torch.testing.assert_close(conv(maps), expected)
    assert conv(maps.transpose(2, 3).contiguous()).shape[-2:] == (4, -(-side // 2))


@pytest.mark.parametrize("side", [8, 9])
def test_bit_pads_alike_on_both_sides(side: int) -> None:
    for size in (1, 3, 7):
        conv = StdConv(2, 3, size, 2, ResNetBody(version="v2"))
        nn.init.normal_(conv.weight)
        maps = torch.randn(1, 2, side, side)
        torch.testing.assert_close(conv(maps), F.conv2d(maps, conv.standardized(), stride=2, padding=size // 2))


def root(image_size: tuple[int, int], **settings: Any) -> Body:
    body = Body(ResNetBody(layers=(), width=32, **settings), image_size)
    nn.init.normal_(body.root.weight)
    if body.root_norm is not None:
        nn.init.normal_(body.root_norm.weight)
        nn.init.normal_(body.root_norm.bias)
    return body


@torch.no_grad()
@pytest.mark.parametrize("image_size", [(24, 32), (37, 45)])
def test_the_padding_of_the_pooling_affects_the_border_of_bit_alone(image_size: tuple[int, int]) -> None:
    """Zeros hide negative values there, of which there are none after the activation of `v1`."""
    images = torch.randn(2, 3, *image_size)
    for version in ("v1", "v2"):
        zero, infinite = root(image_size, version=version), root(image_size, version=version, pool_padding="-inf")
        infinite.load_state_dict(zero.state_dict())
        one, other = zero(images), infinite(images)
        assert one.isfinite().all()
        assert other.isfinite().all()
        assert torch.equal(one, other) == (version == "v1")
        assert torch.equal(one[:, :, 1:-1, 1:-1], other[:, :, 1:-1, 1:-1])
    assert (one >= other).all()
    hidden = one != other
    assert (one[hidden] == 0).all()
    assert (other[hidden] < 0).all()


def test_names_of_its_weights_and_its_epsilons() -> None:
    with torch.device("meta"):
        states = {name: create_model(name).state_dict() for name in ("R50x1", "R50+ViT-B/16")}
    assert len(states["R50x1"]) == 153  # arrays in BiT's file
    assert {"norm.weight", "body.stages.3.2.norm3.bias"} <= states["R50x1"].keys()
    assert {"stem.root_norm.weight", "stem.stages.0.0.shortcut_norm.bias"} <= states["R50+ViT-B/16"].keys()
    for name, config in MODELS.items():
        body = config.body if isinstance(config, ResNetConfig) else config.stem
        if body is not None:
            epsilons = (body.weight_eps, body.weight_eps_on, body.group_norm_eps)
            assert epsilons == ((1e-5, "std", 1e-6) if "ViT" in name else (1e-10, "variance", 1e-5)), name


def test_a_resnet_takes_images_of_any_size(small_resnet: Callable[..., ResNet]) -> None:
    for version in ("v1", "v2"):
        model = small_resnet(version=version)
        for height, width in ((24, 32), (25, 31), (64, 9)):
            features = model.forward_features(torch.randn(1, 3, height, width))
            assert features.shape == (1, -(-height // 8) * -(-width // 8), 256)


def test_maps_are_planes(small_resnet: Callable[..., ResNet]) -> None:
    """GroupNorm is many times slower on channels last on a CPU, where the pooling in front of it wants them."""
    body, images = small_resnet().body, torch.randn(2, 3, 24, 32).contiguous(memory_format=torch.channels_last)
    planes = list[bool]()
    for norm in (module for module in body.modules() if isinstance(module, nn.GroupNorm)):
        norm.register_forward_pre_hook(lambda _, inputs: planes.append(inputs[0].is_contiguous()))
    assert body(images).is_contiguous()
    assert len(planes) > 3
    assert all(planes)


@pytest.mark.parametrize("side", [4, 7])
def test_a_halving_1x1_is_a_convolution_with_that_stride(side: int) -> None:
    convolution, maps = StdConv(32, 64, 1, 2, ResNetBody()), torch.randn(2, 32, side, side, requires_grad=True)
    nn.init.normal_(convolution.weight)
    outputs = (convolution(maps), F.conv2d(maps, convolution.standardized(), stride=2))
    ours, theirs = ((out, *torch.autograd.grad(out.square().sum(), (maps, convolution.weight))) for out in outputs)
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
