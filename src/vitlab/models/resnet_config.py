"""The convolutional stages of a ResNet (Sec. 4.1, Sec. 3.1): configuration, parameters, MACs. Imports no torch."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Gt

from vitlab.errors import UserError
from vitlab.settings import PositiveInt, check_fields

AXIAL_HEADS = 8
"""Heads of the attentions that replace a 3x3 convolution in AxialResNet."""


@dataclass(frozen=True)
class ResNetBody:
    """The convolutional stages of BiT (GroupNorm, standardized weights): a ResNet's body, or a hybrid's stem."""

    layers: tuple[int, ...] = (3, 4, 6, 3)
    """Units in each stage; none leaves the root alone (`R+ViT-Ti/16`)."""
    width: int = 64
    """Channels of the root: 64 times BiT's width factor."""
    version: Literal["v1", "v2"] = "v1"
    """`v1` activates after each convolution and pads as TensorFlow's SAME (the hybrids, big_vision's ResNet); `v2`
    before, and pads equally on both sides (BiT)."""
    mixing: Literal["conv", "axial"] = "conv"
    """What mixes positions in a unit: a 3x3 convolution, or attention along rows and then columns (App. D.6)."""
    pool_padding: Literal["zero", "-inf"] = "zero"
    """Padding of the root's max-pooling in `v2`: zero, as published BiT weights expect, or -inf, as big_vision's."""
    weight_eps: Annotated[float, Gt(0)] = 1e-5
    """Keeps the standardization of weights from dividing by zero."""
    weight_eps_on: Literal["std", "variance"] = "std"
    """What it is added to: the standard deviation of the weights, or their variance."""
    group_norm_eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the variance inside every GroupNorm."""
    min_group_size: PositiveInt = 1
    """Fewest channels in a group of GroupNorm: 64 channels have 32 groups, the most, with BiT's 1, and 4 with 16."""

    def __post_init__(self) -> None:
        check_fields(self)
        for channels in (self.width * 2**doublings for doublings in range(len(self.layers) + 2)):
            if (groups := self.num_groups(channels)) < 1 or channels % groups:
                raise UserError(
                    f"a ResNet's width of {self.width} leaves {channels} channels for {groups} groups of "
                    f"min_group_size={self.min_group_size}; give a multiple of 32 (64 is R50x1's)."
                )
        if any(units < 1 for units in self.layers) or len(self.layers) > 16 or sum(self.layers) > 1000:
            raise UserError(
                f"layers are {str(self.layers)[:50]}; allowed: 16 stages, of 1 unit or more, 1,000 units in all."
            )
        if self.mixing == "axial" and self.version == "v1":
            raise UserError("mixing='axial' is defined for version='v2' alone, the paper's AxialResNet50.")

    def num_groups(self, channels: int) -> int:
        """Groups of the GroupNorm of so many channels."""
        return min(32, channels // self.min_group_size)

    @property
    def stride(self) -> int:
        """Pixels from one position of the feature map to the next."""
        return 4 * 2 ** max(len(self.layers) - 1, 0)

    @property
    def channels(self) -> int:
        """Channels of the feature map."""
        return 4 * self.width * 2 ** (len(self.layers) - 1) if self.layers else self.width

    def grid(self, image_hw: tuple[int, int]) -> tuple[int, int]:
        """Positions down and across: every halving rounds up."""
        return _downsampled(image_hw, self.stride)

    def units(self) -> list["Unit"]:
        """Every unit, in order."""
        units, channels, input_stride = [], self.width, 4
        for stage, count in enumerate(self.layers):
            for number in range(count):
                stride = 2 if stage and number == 0 else 1
                units.append(Unit(stage, channels, self.width * 2**stage, stride, input_stride))
                channels = units[-1].channels_out
                input_stride = input_stride * stride
        return units

    def num_parameters(self, image_hw: tuple[int, int]) -> int:
        """Trained numbers; only with axial mixing do they depend on the size of the image."""
        total = 3 * 7 * 7 * self.width + (2 * self.width if self.version == "v1" else 0)
        for unit in self.units():
            c, m, out = unit.channels_in, unit.inner, unit.channels_out
            if self.mixing == "conv":
                mixing = 9 * m * m
            else:
                h, w = unit.grid(image_hw)
                mixing = 2 * 4 * m * (m + 1) + (2 * h - 1 + 2 * w - 1) * m // AXIAL_HEADS
            shortcut = c * out if unit.projects else 0
            normalized = c + m + m  # channels of the norms before the convolutions
            if self.version == "v1":  # ... after them
                normalized = m + m + out + (out if unit.projects else 0)
            total += c * m + mixing + m * out + shortcut + 2 * normalized
        return total

    def padding_macs(self, image_hw: tuple[int, int]) -> int:
        """The part of `forward_macs` that multiplies a map's padding, which Table 6 does not count."""
        total = 3 * self.width * _padding_products(image_hw, 7, 2, self.version)
        if self.mixing == "conv":
            for unit in self.units():
                total += unit.inner**2 * _padding_products(unit.grid(image_hw), 3, unit.stride, self.version)
        return total

    def forward_macs(self, image_hw: tuple[int, int]) -> int:
        """Multiply-accumulates of the products in one forward pass of one image."""
        total = 3 * 7 * 7 * self.width * math.prod(_downsampled(image_hw, 2))
        for unit in self.units():
            h, w = unit.grid(image_hw)
            c, m, out = unit.channels_in, unit.inner, unit.channels_out
            before = h * w
            after = math.prod(_downsampled(image_hw, unit.input_stride * unit.stride))
            shortcut = c * out * after if unit.projects else 0
            if self.mixing == "conv":
                mixing = 9 * m * m * after
            else:  # along w and h: projections, products with keys and values, and with the relative encodings
                mixing = before * (2 * 4 * m * m + 2 * (w + h) * m + (2 * w - 1 + 2 * h - 1) * m)
            total += c * m * before + mixing + m * out * after + shortcut
        return total


@dataclass(frozen=True)
class Unit:
    """One bottleneck of a ResNet: from `channels_in` to `inner` channels, and to four times as many."""

    stage: int
    channels_in: int
    inner: int
    stride: int
    input_stride: int
    """Pixels from one position of its input to the next."""

    @property
    def channels_out(self) -> int:
        return 4 * self.inner

    def grid(self, image_hw: tuple[int, int]) -> tuple[int, int]:
        """Positions down and across of its input, for an image of this size."""
        return _downsampled(image_hw, self.input_stride)

    @property
    def projects(self) -> bool:
        """Whether its shortcut is a convolution, for the input has another shape than the output."""
        return self.stride != 1 or self.channels_in != self.channels_out


def side_padding(side: int, size: int, stride: int, version: str) -> tuple[int, int]:
    """Zeros before and after a side of a map: as TensorFlow's SAME (`v1`), with more of them after, or equal (`v2`)."""
    if version == "v2":
        return size // 2, size // 2
    total = max((-(-side // stride) - 1) * stride + size - side, 0)
    return total // 2, total - total // 2


def _padding_products(grid: tuple[int, int], size: int, stride: int, version: str) -> int:
    """How often a filter of `size` x `size`, at all its positions over one map, meets a zero of the padding."""
    positions, inside = 1, 1
    for side in grid:
        before, after = side_padding(side, size, stride, version)
        starts = range(-before, side + after - size + 1, stride)
        positions *= len(starts)
        inside *= sum(min(start + size, side) - max(start, 0) for start in starts)
    return positions * size**2 - inside


def _downsampled(image_hw: tuple[int, int], stride: int) -> tuple[int, int]:
    """(height, width) over `stride`, rounded up."""
    return -(-image_hw[0] // stride), -(-image_hw[1] // stride)
