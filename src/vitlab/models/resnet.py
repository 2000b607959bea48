"""Sec. 4.1: ResNet (BiT), the baseline, and the stem of the hybrids (Sec. 3.1).

BatchNorm is replaced by GroupNorm, and the weights of every convolution are standardized.
"""

import math

import torch
import torch.fx
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models import blocks
from vitlab.models.attention import Attention
from vitlab.models.blocks import RepeatedBlock
from vitlab.models.config import ResNetConfig
from vitlab.models.image_size import check_divisible
from vitlab.models.init import init_weights, linear
from vitlab.models.resnet_config import AXIAL_HEADS, ResNetBody, Unit, side_padding
from vitlab.preprocessing import Preprocessing


class StdConv(nn.Module):
    """A convolution whose weights have mean 0 and variance 1 over each output channel's inputs, without a bias."""

    def __init__(self, channels_in: int, channels_out: int, size: int, stride: int, body: ResNetBody) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels_out, channels_in, size, size))
        self.stride, self.body = stride, body

    def standardized(self) -> Float[Tensor, "O I h w"]:
        """The weights that convolve."""
        return standardize(self.weight, self.body.weight_eps, self.body.weight_eps_on)

    def forward(self, maps: Float[Tensor, "B I h w"]) -> Float[Tensor, "B O h2 w2"]:
        return convolve(maps, self.standardized(), self.stride, self.body.version)


def channels_last_is_faster(maps: Tensor) -> bool:
    """Whether a ResNet keeps its maps channels-last: in a model compiled for a CPU."""
    return torch.compiler.is_compiling() and not torch.compiler.is_exporting() and maps.device.type == "cpu"


class GroupNorm(nn.GroupNorm):
    """GroupNorm; compiled for a CPU, of channels-last maps, with which convolutions are faster."""

    def __init__(self, channels: int, body: ResNetBody) -> None:
        super().__init__(body.num_groups(channels), channels, eps=body.group_norm_eps)

    def forward(self, input: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h w"]:  # noqa: A002  (torch's name)
        if not channels_last_is_faster(input):
            return super().forward(input)
        # torch's kernel takes ten times as long on channels-last maps, and so does one compiled from a mean over a
        # group's axis of 4 or 8 channels. Sums over positions, then over groups by a product, are vectorized.
        x = input.permute(0, 2, 3, 1).flatten(1, 2).float()
        size = self.num_channels // self.num_groups
        member = torch.eye(self.num_groups).repeat_interleave(size, dim=0)  # [C, groups]
        mean, square = (sums.sum(1) @ member @ member.T / (size * x.shape[1]) for sums in (x, x * x))
        scale = (square - mean * mean).clamp_min(0).add(self.eps).rsqrt() * self.weight.float()
        x = x * scale[:, None] + (self.bias.float() - mean * scale)[:, None]
        return x.to(input.dtype).unflatten(1, input.shape[2:]).permute(0, 3, 1, 2)


# A function that reads shapes, types or devices is one node of a symbolic trace (torch.fx), which knows none of them.


@torch.fx.wrap
def check_images(
    images: Tensor,
    image_hw: tuple[int, int] | None = None,
    patch_size: int = 1,
    stem: ResNetBody | None = None,
    channels: int = 3,
) -> Tensor:
    """The `images` as they are, if a model can take them: [B, C, H, W], floating point, of `image_hw` pixels or, where
    it is None, of sides that patches divide. Raises UserError otherwise."""
    if images.ndim != 4 or images.shape[1] != channels:
        gray = "; for gray: images.expand(-1, 3, -1, -1), or load the model with in_chans=1" if channels == 3 else ""
        raise UserError(
            f"the images have the shape {list(images.shape)}; the model takes [batch, {channels}, height, width]. For "
            f"a single image: images[None]; for channels last: images.permute(0, 3, 1, 2){gray}."
        )
    if not images.is_floating_point():
        raise UserError(
            f"the images are {images.dtype}; a model takes floating-point values, normalized as in its training. "
            f"For pixels of 0 to 255 and values in [-1, 1]: images.float() / 127.5 - 1."
        )
    height, width = images.shape[-2:]
    if image_hw is None or (height, width) != image_hw:
        check_divisible((height, width), patch_size, stem)
    if image_hw is not None and (height, width) != image_hw:
        raise UserError(
            f"the model was built for {image_hw[0]}x{image_hw[1]} pixels and the images have {height}x{width}; resize "
            f"them, or load the model with image_size={(height, width) if height != width else height}, which "
            f"interpolates its position embeddings."
        )
    return images


@torch.fx.wrap
def standardize(weight: Float[Tensor, "O I h w"], eps: float, eps_on: str) -> Float[Tensor, "O I h w"]:
    """Each output channel with mean 0 and variance 1, in float32 at least: in less its deviations would be lost. Not by
    torch.var_mean, which takes 5 to 50 times as long on a CPU."""
    rows = weight.to(torch.promote_types(weight.dtype, torch.float32)).flatten(1)
    if eps_on == "variance":
        return F.layer_norm(rows, rows.shape[1:], eps=eps).view_as(weight)
    rows = rows - rows.mean(dim=1, keepdim=True)
    return (rows / (rows.square().mean(dim=1, keepdim=True).sqrt() + eps)).view_as(weight)


@torch.fx.wrap
def convolve(
    maps: Float[Tensor, "B I h w"], weight: Float[Tensor, "O I s s"], stride: int, version: str
) -> Float[Tensor, "B O h2 w2"]:
    """A convolution in the precision of `maps`, padded as by `version`."""
    weight, size = weight.to(maps.dtype), weight.shape[-1]
    if size == 1 and stride > 1 and maps.device.type == "cpu":  # faster than torch's stride
        maps, stride = maps[..., ::stride, ::stride], 1
    left, right, top, bottom = _padding(maps, size, stride, version)
    if left == right and top == bottom:  # padded by the convolution itself, without another copy
        return F.conv2d(maps, weight, stride=stride, padding=(top, left))
    return F.conv2d(F.pad(maps, (left, right, top, bottom)), weight, stride=stride)


@torch.fx.wrap
def max_pool(maps: Float[Tensor, "B C h w"], version: str, value: float) -> Float[Tensor, "B C h2 w2"]:
    """The largest of 3x3 positions, with stride 2, of the map padded with `value`."""
    maps = F.pad(maps, _padding(maps, 3, 2, version), value=value)
    if maps.device.type == "cpu":  # torch's CPU max-pooling is vectorized for channels-last only
        maps = maps.contiguous(memory_format=torch.channels_last)
    pooled = F.max_pool2d(maps, 3, stride=2)
    return pooled if channels_last_is_faster(maps) else pooled.contiguous()


def _padding(maps: Float[Tensor, "B C h w"], size: int, stride: int, version: str) -> tuple[int, int, int, int]:
    """The padding for F.pad, which begins with the last axis."""
    height, width = maps.shape[-2:]
    return *side_padding(width, size, stride, version), *side_padding(height, size, stride, version)


class AxialMixing(nn.Module):
    """Replaces a 3x3 convolution: attention along rows, then columns, with relative encodings (App. D.6). A stride of 2
    is the mean over 2x2 positions afterwards, over fewer at an odd edge."""

    def __init__(self, channels: int, grid: tuple[int, int], stride: int) -> None:
        super().__init__()
        self.grid = grid
        self.rows = Attention(channels, AXIAL_HEADS)
        self.columns = Attention(channels, AXIAL_HEADS)
        head = channels // AXIAL_HEADS
        self.row_offsets = nn.Parameter(torch.empty(2 * grid[1] - 1, head))
        self.column_offsets = nn.Parameter(torch.empty(2 * grid[0] - 1, head))
        self.pool = nn.AvgPool2d(stride, ceil_mode=True) if stride > 1 else nn.Identity()

    def forward(self, maps: Float[Tensor, "B C h w"]) -> Float[Tensor, "B C h2 w2"]:
        height, width = self.grid
        rows = self.rows(maps.permute(0, 2, 3, 1).flatten(0, 1), self.row_offsets).unflatten(0, (-1, height))
        columns = self.columns(rows.transpose(1, 2).flatten(0, 1), self.column_offsets).unflatten(0, (-1, width))
        return self.pool(columns.permute(0, 3, 2, 1))


class Bottleneck(RepeatedBlock):
    """A residual branch of three convolutions: 1x1 to fewer channels, 3x3 (or axial attention), 1x1 to more."""

    def __init__(self, unit: Unit, body: ResNetBody, grid: tuple[int, int]) -> None:
        super().__init__()
        c, m, out = unit.channels_in, unit.inner, unit.channels_out
        v1 = body.version == "v1"
        self.v1 = v1
        self.norm1 = GroupNorm(m if v1 else c, body)
        self.conv1 = StdConv(c, m, 1, 1, body)
        self.norm2 = GroupNorm(m, body)
        if body.mixing == "axial":
            self.conv2 = AxialMixing(m, grid, unit.stride)
        else:
            self.conv2 = StdConv(m, m, 3, unit.stride, body)
        self.norm3 = GroupNorm(out if v1 else m, body)
        self.conv3 = StdConv(m, out, 1, 1, body)
        self.shortcut = StdConv(c, out, 1, unit.stride, body) if unit.projects else None
        self.shortcut_norm = GroupNorm(out, body) if unit.projects and v1 else None

    def forward(self, maps: Float[Tensor, "B I h w"]) -> Float[Tensor, "B O h2 w2"]:
        if self.v1:  # normalize and activate after each convolution, and once more after the sum
            out = F.relu(self.norm1(self.conv1(maps)))
            out = F.relu(self.norm2(self.conv2(out)))
            out = self.norm3(self.conv3(out))
            if self.shortcut is not None and self.shortcut_norm is not None:
                maps = self.shortcut_norm(self.shortcut(maps))
            return F.relu(maps + out)
        out = F.relu(self.norm1(maps))  # ... before each; the input of the projection is already activated
        if self.shortcut is not None:
            maps = self.shortcut(out)
        out = F.relu(self.norm2(self.conv1(out)))
        out = F.relu(self.norm3(self.conv2(out)))
        return maps + self.conv3(out)


class Body(nn.Module):
    """Image -> feature map: the root (7x7 convolution and pooling, stride 4), then the stages."""

    def __init__(self, body: ResNetBody, image_hw: tuple[int, int]) -> None:
        super().__init__()
        self.body = body
        self.root = StdConv(3, body.width, 7, 2, body)
        self.root_norm = GroupNorm(body.width, body) if body.version == "v1" else None
        self.stages = nn.ModuleList(nn.ModuleList() for _ in body.layers)
        for unit in body.units():
            stage = self.stages[unit.stage]
            assert isinstance(stage, nn.ModuleList)
            stage.append(Bottleneck(unit, body, unit.grid(image_hw)))

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B C h w"]:
        layout = torch.channels_last if channels_last_is_faster(images) else torch.contiguous_format
        maps = self.root(images.to(self.root.weight.dtype).contiguous(memory_format=layout))
        if self.root_norm is not None:
            maps = F.relu(self.root_norm(maps))
        maps = max_pool(maps, self.body.version, -math.inf if self.body.pool_padding == "-inf" else 0.0)
        for stage in self.stages:
            assert isinstance(stage, nn.ModuleList)
            for unit in stage:
                maps = unit(maps)
        return maps


class ResNet(nn.Module):
    """A ResNet as BiT builds it, with the interface of every model here: features, then head."""

    preprocessing = Preprocessing()
    """How an evaluation image becomes the input; `load_model` sets the checkpoint's."""
    set_grad_checkpointing = blocks.set_grad_checkpointing
    __prepare_scriptable__ = blocks.refuse_script

    def __init__(self, config: ResNetConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.body = Body(config.body, config.image_hw)
        self.norm = GroupNorm(config.body.channels, config.body) if config.body.version == "v2" else None
        self.head = linear(config.num_features, config.num_classes) if config.num_classes else None
        init_weights(self, config, generator)

    def forward_features(self, images: Float[Tensor, "B 3 H W"]) -> Float[Tensor, "B N D"]:
        """The last feature map, one token for every position in row-major order; images hold values in [-1, 1]."""
        # Convolutions take any size; relative encodings are for one.
        size = self.config.image_hw if self.config.body.mixing == "axial" else None
        maps = self.body(check_images(images, size))
        if self.norm is not None:
            maps = F.relu(self.norm(maps))
        return maps.flatten(2).transpose(1, 2)

    def forward_head(
        self, tokens: Float[Tensor, "B N D"], pre_logits: bool = False
    ) -> Float[Tensor, "B K"] | Float[Tensor, "B D"]:
        """Logits from the tokens of `forward_features`; with `pre_logits`, the head's input."""
        pooled = tokens.mean(dim=1)
        return pooled if pre_logits or self.head is None else self.head(pooled)

    def forward(self, images: Tensor) -> Tensor:
        """[B, K] logits of [B, 3, H, W] images; annotated as in `ViT.forward`."""
        return self.forward_head(self.forward_features(images))
