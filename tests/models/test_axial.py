from collections.abc import Callable

import pytest
import torch
from torch import nn

from vitlab.models import ViTConfig
from vitlab.models.axial import AxialBlock, AxialMixing
from vitlab.models.encoder import Block
from vitlab.models.resnet import ResNet
from vitlab.models.vit import ViT


def config(grid: tuple[int, int], prefix: int = 1) -> ViTConfig:
    return ViTConfig(
        image_size=(4 * grid[0], 4 * grid[1]),
        patch_size=4,
        width=8,
        depth=1,
        heads=2,
        mlp_dim=12,
        pool="token" if prefix else "gap",
        registers=max(prefix - 1, 0),
        encoder="axial",
    )


def stir(module: nn.Module) -> None:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)


def silent(block: Block) -> None:
    """A block that gives back its input, for both branches add nothing."""
    for last in (block.attention.out, block.mlp.fc2):
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_every_row_then_every_column_is_a_sequence_with_the_prefix_in_front(prefix: int) -> None:
    axial = AxialBlock(config((3, 4), prefix))
    stir(axial)
    tokens = torch.randn(2, prefix + 12, 8)
    front, places = tokens[:, :prefix], tokens[:, prefix:].unflatten(1, (3, 4))
    rows = [axial.rows(torch.cat([front, places[:, i]], dim=1)) for i in range(3)]
    front = torch.stack([row[:, :prefix] for row in rows]).mean(dim=0)
    places = torch.stack([row[:, prefix:] for row in rows], dim=1)
    columns = [axial.columns(torch.cat([front, places[:, :, j]], dim=1)) for j in range(4)]
    front = torch.stack([column[:, :prefix] for column in columns]).mean(dim=0)
    places = torch.stack([column[:, prefix:] for column in columns], dim=2)
    torch.testing.assert_close(axial(tokens), torch.cat([front, places.flatten(1, 2)], dim=1))


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize(("grid", "along", "across"), [((1, 5), "rows", "columns"), ((5, 1), "columns", "rows")])
def test_in_one_line_of_places_it_is_full_attention(
    grid: tuple[int, int], along: str, across: str, prefix: int
) -> None:
    axial, full = AxialBlock(config(grid, prefix)), Block(config(grid, prefix))
    stir(axial)
    silent(axial.get_submodule(across))  # pyright: ignore[reportArgumentType]
    full.load_state_dict(axial.get_submodule(along).state_dict())
    tokens = torch.randn(2, prefix + 5, 8)
    torch.testing.assert_close(axial(tokens), full(tokens), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("pool", ["token", "gap", "map"])
@pytest.mark.parametrize(
    ("image_size", "along", "across"), [((8, 40), "rows", "columns"), ((40, 8), "columns", "rows")]
)
def test_a_whole_model_in_one_line_of_places_is_the_full_model(
    small: Callable[..., ViT], image_size: tuple[int, int], along: str, across: str, pool: str
) -> None:
    axial = small(image_size=image_size, encoder="axial", pool=pool, registers=1)
    full = small(image_size=image_size, pool=pool, registers=1)
    for block in axial.blocks:
        silent(block.get_submodule(across))  # pyright: ignore[reportArgumentType]
    shared = {name.replace(f"{along}.", ""): each for name, each in axial.state_dict().items() if across not in name}
    full.load_state_dict(shared)
    images = torch.randn(2, 3, *image_size)
    torch.testing.assert_close(axial.forward_features(images), full.forward_features(images), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(axial(images), full(images), rtol=1e-5, atol=1e-5)


def test_a_place_sees_its_row_and_column_at_once_and_all_places_in_two_steps() -> None:
    """Without a prefix, the rows' half mixes rows only; rows, then columns reach every place."""
    axial = AxialBlock(config((3, 4), prefix=0))
    stir(axial)
    tokens = torch.randn(1, 12, 8, requires_grad=True)
    place = axial(tokens)[0, 6]  # second row, third column
    (reach,) = torch.autograd.grad(place.sum(), tokens)
    assert reach[0].any(dim=1).all()
    silent(axial.columns)
    (reach,) = torch.autograd.grad(axial(tokens)[0, 6].sum(), tokens)
    assert reach[0].any(dim=1).tolist() == [False] * 4 + [True] * 4 + [False] * 4


@torch.no_grad()
@pytest.mark.parametrize("pool", ["token", "gap"])
def test_without_positions_rows_and_columns_may_change_places(small: Callable[..., ViT], pool: str) -> None:
    """As wholes: a patch that leaves its row and column changes the answer."""
    model = small(encoder="axial", position="none", pool=pool).double()
    images = torch.randn(2, 3, 24, 32).double()
    prefix, patches = model.config.num_prefix_tokens, images.unflatten(2, (3, 8)).unflatten(4, (4, 8))
    rows, columns = torch.tensor([2, 0, 1]), torch.tensor([3, 1, 0, 2])
    moved = patches[:, :, rows][:, :, :, :, columns].flatten(4).flatten(2, 3)
    tokens = model.forward_features(images)
    expected = tokens[:, prefix:].unflatten(1, (3, 4))[:, rows][:, :, columns].flatten(1, 2)
    torch.testing.assert_close(model.forward_features(moved)[:, prefix:], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model(moved), model(images), rtol=1e-9, atol=1e-9)
    swapped = patches.clone()
    swapped[:, :, 0, :, 0], swapped[:, :, 1, :, 1] = patches[:, :, 1, :, 1], patches[:, :, 0, :, 0]
    assert (model(swapped.flatten(4).flatten(2, 3)) - model(images)).abs().max() > 1e-4


# --- in place of a convolution -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("grid", [(3, 4), (4, 5), (1, 6)])
def test_mixing_is_attention_of_every_row_then_of_every_column(grid: tuple[int, int], stride: int) -> None:
    mixing = AxialMixing(16, grid, stride)
    stir(mixing)
    maps = torch.randn(2, 16, *grid)
    rows = [mixing.rows(maps[:, :, i].transpose(1, 2), mixing.row_offsets) for i in range(grid[0])]
    out = torch.stack(rows, dim=1)
    columns = [mixing.columns(out[:, :, j], mixing.column_offsets) for j in range(grid[1])]
    out = torch.stack(columns, dim=2).permute(0, 3, 1, 2)
    found = mixing(maps)
    assert found.shape == (2, 16, -(-grid[0] // stride), -(-grid[1] // stride))
    for i in range(found.shape[2]):
        for j in range(found.shape[3]):
            places = out[:, :, i * stride : (i + 1) * stride, j * stride : (j + 1) * stride]
            torch.testing.assert_close(found[:, :, i, j], places.mean(dim=(2, 3)), rtol=1e-4, atol=1e-5)


def test_offsets_run_from_the_far_left_to_the_far_right() -> None:
    mixing = AxialMixing(16, (2, 3), 1)
    stir(mixing)
    assert (mixing.row_offsets.shape, mixing.column_offsets.shape) == ((5, 2), (3, 2))
    row, before = torch.randn(1, 3, 16), mixing.row_offsets.detach()

    def changed(offset: int) -> list[bool]:
        """The places of a row that the embedding of what stands `offset` to the right of them concerns."""
        other = before.clone()
        other[2 + offset] += 1
        return ((mixing.rows(row, other) - mixing.rows(row, before)).abs().amax(-1) > 1e-6)[0].tolist()

    assert changed(2) == [True, False, False]
    assert changed(1) == [True, True, False]
    assert changed(0) == [True, True, True]
    assert changed(-1) == [False, True, True]
    assert changed(-2) == [False, False, True]


def test_maps_of_another_size_are_refused(small_resnet: Callable[..., ResNet]) -> None:
    model = small_resnet(mixing="axial", version="v2")
    with pytest.raises(ValueError, match=r"built for a feature map of 6x8 and got one of 7x8; .* model's image_size"):
        model(torch.randn(1, 3, 28, 32))
    assert small_resnet(version="v2")(torch.randn(1, 3, 28, 32)).shape == (1, 5)
