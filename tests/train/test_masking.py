"""Masked patch prediction: what is hidden and how often, labels by hand, and a model that sees through it."""

import dataclasses
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from vitlab.config import MaskingConfig
from vitlab.data.dataset import Dataset
from vitlab.data.loader import eval_batches, train_batches
from vitlab.data.transforms import EvalTransform, TrainTransform
from vitlab.models import ViTConfig
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


def plans(count: int, patches: int, masking: MaskingConfig, seed: int = 0) -> Tensor:
    draws = np.random.default_rng(seed).random((count, masking.draws(patches)))
    return draw_corruption(masking, torch.from_numpy(draws), patches)


def within(found: Tensor | float, share: float, trials: int) -> bool:
    """Whether shares of so many trials lie within five standard deviations of the binomial distribution."""
    away = (torch.as_tensor(found) - share).abs().max()
    return float(away) <= 5 * (share * (1 - share) / trials) ** 0.5


# -------------------------------------------------------------------------------------------------- what is hidden


@pytest.mark.parametrize(("share", "patches", "hidden"), [(0.5, 196, 98), (0.15, 196, 29), (0.5, 9, 4), (0.01, 16, 1)])
def test_share_of_a_image(share: float, patches: int, hidden: int) -> None:
    plan = plans(50, patches, MaskingConfig(share=share))
    assert plan.shape == (50, hidden, 2)
    for places in plan[..., 0].tolist():
        assert len(set(places)) == hidden
        assert set(places) <= set(range(patches))


@pytest.mark.parametrize("share", [0.5, 0.15])
def test_every_place_is_hidden_as_often(share: float) -> None:
    count, patches = 20_000, 20
    places = plans(count, patches, MaskingConfig(share=share))[..., 0]
    each = torch.bincount(places.flatten(), minlength=patches) / count
    assert within(each, share, count)
    assert not within(each, share + 0.02, count)
    # Two places are hidden together as often as in a draw without putting back: there is no pattern.
    hidden = torch.zeros(count, patches).scatter(1, places, 1.0)
    k = round(share * patches)
    pairs = (hidden.T @ hidden / count)[~torch.eye(patches, dtype=torch.bool)]
    assert within(pairs, k * (k - 1) / (patches * (patches - 1)), count)


@pytest.mark.parametrize(("masked", "replaced"), [(0.8, 0.1), (1.0, 0.0), (0.2, 0.5)])
def test_kinds(masked: float, replaced: float) -> None:
    masking = MaskingConfig(masked=masked, replaced=replaced)
    place, source = plans(4_000, 16, masking).unbind(2)
    trials = place.numel()
    kinds = (source == MASK), (source != MASK) & (source != place), source == place
    for kind, share in zip(kinds, (masked, replaced, 1 - masked - replaced), strict=True):
        assert within(float(kind.double().mean()), max(share, 0.0), trials)
        for column in kind.double().mean(dim=0):  # and of each corrupted patch by itself
            assert within(float(column), max(share, 0.0), 4_000)


def test_the_other_patch_is_any_other() -> None:
    place, source = plans(40_000, 5, MaskingConfig(masked=0.0, replaced=1.0)).unbind(2)
    assert (place != source).all()
    for own in range(5):
        others = torch.bincount(source[place == own], minlength=5).double()
        assert others[own] == 0
        shares = others[torch.arange(5) != own] / others.sum()
        assert within(shares, 0.25, int(others.sum()))


def noise(n: int = 37) -> Dataset:
    rng = np.random.default_rng(3)
    pixels = rng.integers(0, 256, (n, 16, 16, 3)).astype(np.uint8)
    return Dataset("noise", "train", ("a", "b"), np.arange(n) % 2, pixels)


def hidden_by_image(batch_size: int, steps: int, start: int = 0, **options: Any) -> list[tuple[int, list]]:
    """(index, plan) of the examples of a training, in order."""
    masking, transform = MaskingConfig(), TrainTransform(16)
    batches = train_batches(
        noise(), transform, batch_size=batch_size, seed=5, start=start, draws=masking.draws(N), **options
    )
    found = []
    for _, batch in zip(range(steps), batches, strict=False):
        images, plan = MaskedPatch(masking, MODEL).corrupt(batch, np.random.default_rng(0))
        assert images is batch.images
        found += list(zip(batch.indices.tolist(), plan.tolist(), strict=True))
    return found


def test_hidden_are_the_same_patches_whatever_the_batch_and_the_process() -> None:
    """They depend on (seed, epoch, index) alone; so a run may stop anywhere, and have any number of processes."""
    whole = hidden_by_image(74, 1)  # two epochs
    assert hidden_by_image(10, 7) == whole[:70]
    assert hidden_by_image(9, 4, start=30) == whole[30:66]
    world = [hidden_by_image(10, 7, rank=rank, world_size=2) for rank in (0, 1)]
    halves = [part[5 * step : 5 * step + 5] for step in range(7) for part in world]
    assert [each for half in halves for each in half] == whole[:70]
    first, second = dict(whole[:37]), dict(whole[37:])
    assert first.keys() == second.keys()
    assert all(first[index] != second[index] for index in first), "each epoch hides other patches"
    assert len({str(plan) for plan in first.values()}) == 37, "each image hides patches of its own"


# ---------------------------------------------------------------------------------------------- what is to be told


@pytest.mark.parametrize(
    ("color", "expected"),
    [
        ((200.5, 96, 31.9), 408),  # the worked example: levels 6, 3, 0
        ((0, 0, 0), 0),
        ((255, 255, 255), 511),
        ((255, 0, 0), 7 * 64),
        ((0, 255, 0), 7 * 8),
        ((0, 0, 255), 7),
        ((31.99, 32, 63), 9),  # 0, 1, 1
        ((127.5, 127.5, 127.5), 3 * 73),
        ((128, 128, 128), 4 * 73),
    ],
)
def test_class_of_a_color(color: tuple[float, ...], expected: int) -> None:
    assert int(color_classes(torch.tensor(color, dtype=torch.float32))) == expected


def test_class_of_every_whole_color_through_the_range_of_the_images() -> None:
    """A flat patch of value v has level v // 32, also where another device has made the images an ulp off."""
    values = torch.arange(256, dtype=torch.float32)
    for side, p in ((1, 4), (4, 4), (4, 14), (1, 7)):
        exact = ((values - 127.5) / 127.5)[:, None, None, None].expand(-1, 3, p, p)
        levels = torch.arange(256) // 32
        for images in (exact, exact.nextafter(torch.tensor(-9.0)), exact.nextafter(torch.tensor(9.0))):
            classes = color_classes(patch_colors(images, p, side))
            assert torch.equal(classes, (73 * levels)[:, None, None].expand_as(classes))


def test_the_middle_of_a_class() -> None:
    classes = torch.arange(512)
    middles = class_colors(classes)
    assert torch.equal(color_classes(middles), classes)
    assert torch.equal(color_classes(middles + 15.9), classes)
    assert torch.equal(color_classes(middles - 16), classes)
    assert middles[408].tolist() == [208, 112, 16]


def image(values: list) -> Tensor:
    """An image [1, 3, H, W] in [-1, 1] of values in [0, 255]."""
    return (torch.tensor(values, dtype=torch.float32)[None] - 127.5) / 127.5


def all_kept(patches: int) -> Tensor:
    places = torch.arange(patches)
    return torch.stack([places, places], dim=1)[None]


def test_mean_color_by_hand() -> None:
    """Two patches of 2 x 2. Left: means 100, 10, 255 -> levels 3, 0, 7. Right: 31.75, 32, 159.75 -> 0, 1, 4."""
    red = [[40, 160, 31, 32], [120, 80, 32, 32]]
    green = [[0, 20, 64, 0], [10, 10, 0, 64]]
    blue = [[255, 255, 160, 160], [255, 255, 160, 159]]
    found = patch_targets(MaskingConfig("mean-color"), 2, image([red, green, blue]), all_kept(2))
    assert found.tolist() == [[[3 * 64 + 7], [8 + 4]]]


def test_downsized_by_hand() -> None:
    """A patch of 8 pixels: each cell is the mean of 2 x 2; the image's columns run 0, 8, 16, ... in red."""
    red = [[8 * x for x in range(16)] for _ in range(8)]
    zero = [[0] * 16 for _ in range(8)]
    green = [[255 if y >= 6 else 0] * 16 for y in range(8)]
    found = patch_targets(MaskingConfig("downsized"), 8, image([red, green, zero]), all_kept(2))
    # Means of two columns: 4, 20, 36, 52 and 68, 84, 100, 116: levels 0, 0, 1, 1 and 2, 2, 3, 3.
    left, right = [0, 0, 64, 64], [128, 128, 192, 192]
    below = [each + 7 * 8 for each in left], [each + 7 * 8 for each in right]
    assert found.tolist() == [[3 * left + below[0], 3 * right + below[1]]]


def test_downsized_patches_that_four_does_not_divide() -> None:
    """6 pixels to 4 cells of 1.5: the second is half of pixel 1 and the whole of pixel 2."""
    row = [0, 240, 30, 96, 96, 0]
    # (0 + 120) / 1.5 = 80, (120 + 30) / 1.5 = 100, (96 + 48) / 1.5 = 96, 48 / 1.5 = 32
    colors = patch_colors(image([[row] * 6] * 3), 6, 4)
    torch.testing.assert_close(colors[0, 0, :4, 0], torch.tensor([80.0, 100.0, 96.0, 32.0]), atol=1e-4, rtol=0)
    found = patch_targets(MaskingConfig("downsized"), 6, image([[row] * 6] * 3), all_kept(1))
    assert found.tolist() == [[4 * [73 * 2, 73 * 3, 73 * 3, 73]]]


def test_regression_by_hand() -> None:
    """The pixels of a patch in reading order, each with its three channels, in the images' range."""
    values = torch.arange(3 * 4 * 4, dtype=torch.float32).reshape(3, 4, 4)
    images = image(values.tolist())
    found = patch_targets(MaskingConfig("regression"), 2, images, torch.tensor([[[3, 3], [1, -1]]]))
    assert found.shape == (1, 2, 4, 3)
    back = (found * 127.5 + 127.5).round()
    assert back[0, 0].tolist() == [[c * 16 + at for c in range(3)] for at in (10, 11, 14, 15)]
    assert back[0, 1].tolist() == [[c * 16 + at for c in range(3)] for at in (2, 3, 6, 7)]


# ----------------------------------------------------------------------------------------------------------- the loss


def test_cross_entropy_of_every_cell() -> None:
    answers = torch.tensor([[[5, 7], [511, 0]]])
    predictions = torch.randn(1, 2, 2 * 512)
    predictions[0, 0, 512 + 7] = 50.0
    losses, right = patch_losses(MaskingConfig("downsized"), predictions, answers)
    logs = predictions.view(1, 2, 2, 512).log_softmax(dim=3)
    torch.testing.assert_close(losses, -logs.gather(3, answers[..., None])[..., 0])
    assert right.tolist()[0][0][1] == 1
    assert right.sum() == 1


def test_square_error_of_every_pixel() -> None:
    answers = torch.zeros(1, 1, 2, 3)
    losses, right = patch_losses(
        MaskingConfig("regression"), torch.tensor([[[1.0, 2.0, 3.0, 0.0, 0.0, -3.0]]]), answers
    )
    torch.testing.assert_close(losses, torch.tensor([[[14 / 3, 3.0]]]))
    assert right.isnan().all()


@pytest.mark.parametrize("target", TARGETS)
def test_all_three_kinds_of_corrupted_patches_count_and_no_other(target: Any) -> None:
    masking = MaskingConfig(target, share=0.25)
    objective, model = MaskedPatch(masking, MODEL), MaskedViT(MODEL, masking)
    plan = torch.tensor([[[0, MASK], [5, 2], [9, 9], [15, MASK]]])
    images = 2 * torch.rand(1, 3, 16, 16) - 1
    loss, _ = objective.loss(model, images, plan)
    predictions = model(images, plan)
    each = patch_losses(masking, predictions, patch_targets(masking, 4, images, plan))[0].mean(dim=2)[0]
    assert len(set(each.tolist())) == 4
    torch.testing.assert_close(loss, each.mean())


# ---------------------------------------------------------------------------------------------------------- the model


VARIANTS = [
    {},
    {"pool": "gap"},
    {"pool": "token+gap", "registers": 2},
    {"distilled": True, "class_position": False},
    {"pool": "gap", "position": "relative", "position_at": "every"},
    {"position": "2d", "position_at": "every"},
    {"encoder": "axial", "pool": "gap", "position": "none"},
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_corrupting_nothing_is_the_plain_vit(variant: dict[str, Any]) -> None:
    """Where every patch keeps its embedding, the tokens are those of `forward_features`, whatever stands in front."""
    config = dataclasses.replace(MODEL, **variant)
    model = MaskedViT(config, MaskingConfig())
    images = torch.randn(2, 3, 16, 16)
    tokens = model.vit.forward_features(images)[:, config.num_prefix_tokens :]
    plan = all_kept(N).expand(2, -1, -1)
    torch.testing.assert_close(model(images, plan), model.predictor(tokens))
    places = torch.tensor([[3, 0], [7, 15]])
    some = model(images, torch.stack([places, places], dim=2))
    torch.testing.assert_close(some, model.predictor(tokens)[torch.arange(2)[:, None], places])


def test_what_stands_at_a_corrupted_patch() -> None:
    """The blocks see the mask, another patch's embedding or the own one; checked at the first block's door."""
    config = dataclasses.replace(MODEL, position="none")
    model = MaskedViT(config, MaskingConfig())
    images, seen = torch.randn(1, 3, 16, 16), []
    handle = model.vit.blocks[0].register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(images, torch.tensor([[[0, MASK], [5, 2], [9, 9], [2, 11]]]))
    handle.remove()
    patches = model.vit.embed(images)[0]
    expected = patches.clone()
    expected[0], expected[5], expected[2] = model.mask[0, 0], patches[2], patches[11]  # of the clean image
    torch.testing.assert_close(seen[0][0, 1:], expected)


def test_a_patch_is_told_from_the_token_at_its_own_place() -> None:
    """Not from where its embedding came from."""
    model, tokens = MaskedViT(dataclasses.replace(MODEL, registers=1), MaskingConfig()), []
    handle = model.vit.norm.register_forward_hook(lambda *given: tokens.append(given[2]))
    said = model(torch.randn(1, 3, 16, 16), torch.tensor([[[7, MASK], [5, 2], [9, 9], [2, 11]]]))
    handle.remove()
    torch.testing.assert_close(said[0], model.predictor(tokens[0][0, [9, 7, 11, 4]]))


def test_a_hidden_patch_is_hidden() -> None:
    """Its pixels reach nothing that is told."""
    model = MaskedViT(MODEL, MaskingConfig())
    images = torch.randn(1, 3, 16, 16, requires_grad=True)
    model(images, torch.tensor([[[0, MASK], [6, MASK]]])).square().sum().backward()
    assert images.grad is not None
    reached = images.grad[0].abs().sum(dim=0).unflatten(0, (4, 4)).unflatten(2, (4, 4)).sum(dim=(1, 3)).flatten() > 0
    assert [place for place in range(N) if not reached[place]] == [0, 6]


@pytest.mark.parametrize(("target", "numbers"), [("mean-color", 512), ("downsized", 8192), ("regression", 768)])
def test_outputs_for_a_patch_of_16(target: Literal["mean-color", "downsized", "regression"], numbers: int) -> None:
    """One class of 512; 16 of them; 256 regressions of 3 channels (App. B.1.2)."""
    masking = MaskingConfig(target)
    assert num_outputs(masking, 16) == numbers
    with torch.device("meta"):
        assert MaskedViT(ViTConfig(num_classes=0), masking).predictor.weight.shape == (numbers, 768)


@pytest.mark.parametrize("target", TARGETS)
def test_every_parameter_learns(target: Any) -> None:
    masking = MaskingConfig(target, masked=0.4, replaced=0.3)
    model, objective = MaskedViT(MODEL, masking), MaskedPatch(masking, MODEL)
    (batch,) = eval_batches(noise(8), EvalTransform(16), batch_size=8, draws=objective.draws)
    loss, right = objective.loss(model, *objective.corrupt(batch, np.random.default_rng(0)))
    assert bool(right.isnan()) == (target == "regression")
    loss.backward()
    still = [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()]
    assert still == []
