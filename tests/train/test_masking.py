"""Masked patch prediction: the corruption's statistics, targets and losses by hand, and the model."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlab.config import MaskingConfig
from vitlab.data.dataset import Dataset
from vitlab.data.loader import train_batches
from vitlab.data.transforms import TrainTransform
from vitlab.models import ViTConfig
from vitlab.models.variant import override
from vitlab.train.masking import (
    MASK,
    MaskedPatch,
    MaskedViT,
    class_colors,
    color_classes,
    draw_corruption,
    num_outputs,
    patch_colors,
    patch_losses,
    patch_targets,
)

MODEL = ViTConfig(image_size=16, patch_size=4, width=16, depth=2, heads=2, mlp_dim=32, num_classes=0)
N = MODEL.num_patches
TARGETS: tuple[Any, ...] = ("mean-color", "downsized", "regression")


def corruptions(count: int, patches: int, masking: MaskingConfig) -> Tensor:
    draws = np.random.default_rng(0).random((count, masking.num_uniforms(patches)))
    return draw_corruption(masking, torch.from_numpy(draws), patches)


def is_close(shares: Tensor | float, expected: float, trials: int) -> bool:
    """Whether the shares of `trials` are within five standard deviations of the binomial distribution."""
    difference = (torch.as_tensor(shares) - expected).abs().max()
    return float(difference) <= 5 * (expected * (1 - expected) / trials) ** 0.5


@pytest.mark.parametrize(("share", "patches", "count"), [(0.15, 196, 29), (0.5, 9, 4), (0.01, 16, 1)])
def test_number_of_corrupted_patches(share: float, patches: int, count: int) -> None:
    corruption = corruptions(50, patches, MaskingConfig(share=share))
    assert corruption.shape == (50, count, 2)
    for positions in corruption[..., 0].tolist():
        assert len(set(positions)) == count
        assert set(positions) <= set(range(patches))


def test_every_position_is_equally_likely() -> None:
    images, patches, share = 20_000, 20, 0.15
    positions = corruptions(images, patches, MaskingConfig(share=share))[..., 0]
    shares = torch.bincount(positions.flatten(), minlength=patches) / images
    assert is_close(shares, share, images)
    assert not is_close(shares, share + 0.02, images)
    # Pairs are as frequent as in a draw without replacement: there is no pattern.
    corrupted = torch.zeros(images, patches).scatter(1, positions, 1.0)
    k = round(share * patches)
    pairs = (corrupted.T @ corrupted / images)[~torch.eye(patches, dtype=torch.bool)]
    assert is_close(pairs, k * (k - 1) / (patches * (patches - 1)), images)


def test_kinds() -> None:
    position, source = corruptions(4_000, 16, MaskingConfig(masked=0.8, replaced=0.1)).unbind(2)
    kinds = (source == MASK), (source != MASK) & (source != position), source == position
    for kind, share in zip(kinds, (0.8, 0.1, 0.1), strict=True):
        assert is_close(float(kind.double().mean()), share, position.numel())
        assert is_close(kind.double().mean(dim=0), share, 4_000)  # also of every corrupted patch


def test_the_other_patch_is_any_other() -> None:
    position, source = corruptions(40_000, 5, MaskingConfig(masked=0.0, replaced=1.0)).unbind(2)
    for patch in range(5):
        others = torch.bincount(source[position == patch], minlength=5).double()
        assert others[patch] == 0
        shares = others[torch.arange(5) != patch] / others.sum()
        assert is_close(shares, 0.25, int(others.sum()))


def corruption_by_image(batch_size: int, steps: int, start: int = 0, **options: Any) -> list[tuple[int, list]]:
    """(index, corruption) of the examples of a training, in order."""
    masking, transform = MaskingConfig(), TrainTransform(16)
    options |= {"seed": 5, "first_example": start, "num_uniforms": masking.num_uniforms(N)}
    rows = []
    noise = np.random.default_rng(3).integers(0, 256, (37, 16, 16, 3)).astype(np.uint8)
    dataset = Dataset("noise", "train", ("a", "b"), np.arange(37) % 2, noise)
    batches = train_batches(dataset, transform, batch_size=batch_size, **options)
    for batch in itertools.islice(batches, steps):
        _, corruption = MaskedPatch(masking, MODEL).prepare_batch(batch, np.random.default_rng(0))
        rows += list(zip(batch.indices.tolist(), corruption.tolist(), strict=True))
    return rows


def test_corruption_depends_on_neither_batch_nor_rank() -> None:
    """Only on (seed, epoch, index), so that a run may stop anywhere and have any number of processes."""
    whole = corruption_by_image(74, 1)  # two epochs
    assert corruption_by_image(10, 7) == whole[:70]
    assert corruption_by_image(9, 4, start=30) == whole[30:66]
    ranks = [corruption_by_image(10, 7, rank=rank, world_size=2) for rank in (0, 1)]
    shards = [rows[5 * step : 5 * step + 5] for step in range(7) for rows in ranks]
    assert [row for shard in shards for row in shard] == whole[:70]
    first, second = dict(whole[:37]), dict(whole[37:])
    assert first.keys() == second.keys()
    assert all(first[index] != second[index] for index in first)
    assert len({str(corruption) for corruption in first.values()}) == 37


def test_class_of_a_color() -> None:
    """A flat patch of value v has level v // 32, also where another device has made the images an ulp off; and each
    class is that of its central color."""
    worked, edges = color_classes(torch.tensor([[200.5, 96, 31.9], [31.99, 32, 63]]))
    assert (int(worked), int(edges)) == (408, 9)  # levels 6, 3, 0, the docstring's example, and 0, 1, 1
    for shift in (0, 15.9, -16):
        assert torch.equal(color_classes(class_colors(torch.arange(512)) + shift), torch.arange(512))
    values = torch.arange(256, dtype=torch.float32)
    for side, p in ((1, 4), (4, 4), (4, 14)):
        exact = ((values - 127.5) / 127.5)[:, None, None, None].expand(-1, 3, p, p)
        levels = torch.arange(256) // 32
        for images in (exact, exact.nextafter(torch.tensor(-9.0)), exact.nextafter(torch.tensor(9.0))):
            classes = color_classes(patch_colors(images, p, side))
            assert torch.equal(classes, (73 * levels)[:, None, None].expand_as(classes))


def image(values: list) -> Tensor:
    """An image [1, 3, H, W] in [-1, 1] of values in [0, 255]."""
    return (torch.tensor(values, dtype=torch.float32)[None] - 127.5) / 127.5


def unchanged(patches: int) -> Tensor:
    positions = torch.arange(patches)
    return torch.stack([positions, positions], dim=1)[None]


def test_mean_color_by_hand() -> None:
    """Two patches of 2 x 2. Left: means 100, 10, 255 -> levels 3, 0, 7. Right: 31.75, 32, 159.75 -> 0, 1, 4."""
    red = [[40, 160, 31, 32], [120, 80, 32, 32]]
    green = [[0, 20, 64, 0], [10, 10, 0, 64]]
    blue = [[255, 255, 160, 160], [255, 255, 160, 159]]
    targets = patch_targets(MaskingConfig("mean-color"), 2, image([red, green, blue]), unchanged(2))
    assert targets.tolist() == [[[3 * 64 + 7], [8 + 4]]]


def test_downsized_by_hand() -> None:
    """Cells of 2 x 2 in patches of 8; then 4 cells of 1.5 across 6 pixels, which share pixels."""
    red = [[8 * x for x in range(16)] for _ in range(8)]
    zero = [[0] * 16 for _ in range(8)]
    green = [[255 if y >= 6 else 0] * 16 for y in range(8)]
    targets = patch_targets(MaskingConfig("downsized"), 8, image([red, green, zero]), unchanged(2))
    # Means of two columns: 4, 20, 36, 52 and 68, 84, 100, 116: levels 0, 0, 1, 1 and 2, 2, 3, 3.
    left, right = [0, 0, 64, 64], [128, 128, 192, 192]
    below = [level + 7 * 8 for level in left], [level + 7 * 8 for level in right]
    assert targets.tolist() == [[3 * left + below[0], 3 * right + below[1]]]
    row = [0, 240, 30, 96, 96, 0]
    # (0 + 120) / 1.5 = 80, (120 + 30) / 1.5 = 100, (96 + 48) / 1.5 = 96, 48 / 1.5 = 32
    colors = patch_colors(image([[row] * 6] * 3), 6, 4)
    torch.testing.assert_close(colors[0, 0, :4, 0], torch.tensor([80.0, 100.0, 96.0, 32.0]), atol=1e-4, rtol=0)
    targets = patch_targets(MaskingConfig("downsized"), 6, image([[row] * 6] * 3), unchanged(1))
    assert targets.tolist() == [[4 * [73 * 2, 73 * 3, 73 * 3, 73]]]


def test_regression_by_hand() -> None:
    """The pixels of a patch in reading order, with three channels, in the images' range; the source is irrelevant."""
    values = torch.arange(3 * 4 * 4, dtype=torch.float32).reshape(3, 4, 4)
    corruption = torch.tensor([[[3, 3], [1, MASK]]])
    targets = patch_targets(MaskingConfig("regression"), 2, image(values.tolist()), corruption)
    pixels = (targets * 127.5 + 127.5).round()
    assert pixels[0, 0].tolist() == [[c * 16 + index for c in range(3)] for index in (10, 11, 14, 15)]
    assert pixels[0, 1].tolist() == [[c * 16 + index for c in range(3)] for index in (2, 3, 6, 7)]


def test_losses_by_hand() -> None:
    """Cross-entropy of every cell, and the square error of every pixel."""
    labels, outputs = torch.tensor([[[5, 7], [511, 0]]]), torch.randn(1, 2, 2 * 512)
    outputs[0, 0, 512 + 7] = 50.0
    losses, correct = patch_losses(MaskingConfig("downsized"), outputs, labels)
    log_p = outputs.view(1, 2, 2, 512).log_softmax(dim=3)
    torch.testing.assert_close(losses, -log_p.gather(3, labels[..., None])[..., 0])
    assert correct.tolist() == [[[0, 1], [0, 0]]]
    outputs = torch.tensor([[[1.0, 2.0, 3.0, 0.0, 0.0, -3.0]]])
    losses, correct = patch_losses(MaskingConfig("regression"), outputs, torch.zeros(1, 1, 2, 3))
    torch.testing.assert_close(losses, torch.tensor([[[14 / 3, 3.0]]]))
    assert correct.isnan().all()


@pytest.mark.parametrize("target", TARGETS)
def test_the_loss_is_the_mean_over_corrupted_patches(target: Any) -> None:
    """Of all three kinds, and no other patch."""
    masking = MaskingConfig(target, share=0.25)
    objective, model = MaskedPatch(masking, MODEL), MaskedViT(MODEL, masking)
    corruption = torch.tensor([[[0, MASK], [5, 2], [9, 9], [15, MASK]]])
    images = 2 * torch.rand(1, 3, 16, 16) - 1
    loss, _ = objective.loss(model, images, corruption)
    targets = patch_targets(masking, 4, images, corruption)
    losses = patch_losses(masking, model(images, corruption), targets)[0].mean(dim=2)[0]
    assert len(set(losses.tolist())) == 4
    torch.testing.assert_close(loss, losses.mean())


@pytest.mark.parametrize("changes", [{"registers": 2}, {"encoder": "axial", "pool": "gap", "position": "none"}])
def test_no_corruption_is_the_plain_vit(changes: dict[str, Any]) -> None:
    config = override(MODEL, **changes)
    model = MaskedViT(config, MaskingConfig())
    images = torch.randn(2, 3, 16, 16)
    tokens = model.vit.forward_features(images)[:, config.num_prefix_tokens :]
    torch.testing.assert_close(model(images, unchanged(N).expand(2, -1, -1)), model.predictor(tokens))
    positions = torch.tensor([[3, 0], [7, 15]])
    some = model(images, torch.stack([positions, positions], dim=2))
    torch.testing.assert_close(some, model.predictor(tokens)[torch.arange(2)[:, None], positions])


def test_input_of_the_blocks_and_position_of_the_predictions() -> None:
    """The blocks see the mask, another patch's clean embedding or the same; predictions are from the same position."""
    model = MaskedViT(override(MODEL, position="none", registers=1), MaskingConfig())
    images, inputs, tokens = torch.randn(1, 3, 16, 16), [], []
    model.vit.blocks[0].register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    model.vit.norm.register_forward_hook(lambda *given: tokens.append(given[2]))
    outputs = model(images, torch.tensor([[[0, MASK], [5, 2], [9, 9], [2, 11]]]))
    patches = model.vit.embed(images)[0]
    expected = patches.clone()
    expected[0], expected[5], expected[2] = model.mask[0, 0], patches[2], patches[11]
    torch.testing.assert_close(inputs[0][0, 2:], expected)
    torch.testing.assert_close(outputs[0], model.predictor(tokens[0][0, [2, 7, 11, 4]]))


@pytest.mark.parametrize(("target", "outputs"), [("mean-color", 512), ("downsized", 8192), ("regression", 768)])
def test_outputs_per_patch_of_16(target: Any, outputs: int) -> None:
    """One class of 512; 16 of them; 256 regressions of 3 channels (App. B.1.2)."""
    masking = MaskingConfig(target)
    assert num_outputs(masking, 16) == outputs
    with torch.device("meta"):
        assert MaskedViT(ViTConfig(num_classes=0), masking).predictor.weight.shape == (outputs, 768)
