"""Configurations of models: frozen dataclasses, which check their values. Importing this does not import torch."""

import math
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from vitlab.errors import UserError
from vitlab.models.count import count_macs, count_parameters
from vitlab.models.image_size import MAX_PIXELS, ImageSize, check_divisible
from vitlab.models.resnet_config import ResNetBody
from vitlab.models.variant import Variant
from vitlab.preprocessing import pair
from vitlab.settings import FractionBelow1, NonNegativeFloat, NonNegativeInt, PositiveInt, check_fields

LEARNED_POSITIONS = ("1d", "2d", "relative")
"""The kinds of position embedding that are drawn and trained."""
# Larger values are a typo or an attack; they are rejected before anything is allocated.
MAX_PARAMETERS = 2**40  # the largest ViT described so far has 2**34.4
MAX_SINCOS_ELEMENTS = 2**25  # of the position table `sincos2d`, which is computed


Pool = Literal["token", "gap", "token+gap"]
"""How tokens become one representation, without parameters; see `ViTConfig.pool`."""


@dataclass(frozen=True)
class ViTConfig:
    """One Vision Transformer. The letters in the comments are the paper's (Sec. 3.1, Table 1)."""

    kind: Literal["vit"] = "vit"
    image_size: ImageSize = 224
    """Side of the input in pixels, or (height, width); the patch side must divide both."""
    dynamic_image_size: bool = False
    """Takes images of any size that patches divide, and resamples the position embeddings for them in each forward
    pass; `image_size` is the parameters'."""
    in_chans: PositiveInt = 3
    """C, the channels of the images. Data sets and image files are read as RGB; other models are for use in Python."""
    patch_size: PositiveInt = 16
    """P, the side of a patch in pixels; in a hybrid, in positions of the stem's feature map."""
    width: PositiveInt = 768
    """D, the length of a token; the number of heads must divide it."""
    depth: Annotated[int, Ge(1), Le(1_000)] = 12
    """L, the number of encoder blocks."""
    heads: PositiveInt = 12
    """k, the number of attention heads."""
    mlp_dim: PositiveInt = 3072
    """Width of the hidden layer of each MLP (four times D in the paper)."""
    num_classes: NonNegativeInt = 1000
    """K, the number of outputs; 0 leaves the head out."""
    pool: Literal["token", "gap", "map", "token+gap"] = "token"
    """Representation of the image: the class token (Eq. 4), the mean over patches (App. D.3), a learned query's
    attention over all tokens (big_vision), or class token and mean one after the other (DINOv2's classifiers)."""
    representation_size: PositiveInt | None = None
    """Width of the hidden layer (Dense + tanh) before the head, used in pre-training (Sec. 3.1)."""
    position: Literal["none", "1d", "2d", "relative", "sincos2d"] = "1d"
    """Kind of position embedding (App. D.4); `sincos2d` is big_vision's fixed one."""
    position_at: Literal["stem", "every", "shared"] = "stem"
    """Where it enters (Table 8): before the encoder, or in every block, with one embedding per block or one for all.
    `relative` acts inside attention and takes `every` or `shared`."""
    position_std: NonNegativeFloat = 0.02
    """Standard deviation of a new position embedding. Google's is 0.02, big_vision's 1 / sqrt(D); a larger one lets a
    short training on small images distinguish positions from the start."""
    patch_dropout: FractionBelow1 = 0.0
    """Fraction of each image's patches dropped in training, but one (as timm's `patch_drop_rate`)."""
    dropout: FractionBelow1 = 0.0
    """Rate after the position embedding and every dense layer except the qkv projections (App. B.1)."""
    stochastic_depth: FractionBelow1 = 0.0
    """Fraction of images that skip the last block in training; rises linearly from 0 at the first."""
    head_bias: float = 0.0
    """Initial bias of the head; Google starts sigmoid losses at -10 (ImageNet-21k and JFT) or -6.9 (ImageNet)."""
    head_std: NonNegativeFloat = 0.0
    """Standard deviation of a new head's weights. Google starts at 0, which costs a short training from scratch its
    first hundreds of steps: until the head has grown, nothing below it learns."""
    encoder: Literal["full", "axial"] = "full"
    """Attention among all tokens, or along rows and then along columns (App. D.6)."""
    stem: ResNetBody | None = None
    """A hybrid cuts its patches from this ResNet's feature map (Sec. 3.1); None takes them from the image."""
    variant: Variant = field(default_factory=Variant)
    """What only models of other code have; the default is the paper's model."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_size(self)
        check_divisible(self.image_hw, self.patch_size, self.stem)
        variant, sincos, axial = self.variant, self.position == "sincos2d", self.encoder == "axial"
        multiple = {"2d": 2, "sincos2d": 4}.get(self.position, 1)
        for invalid, problem in (
            (self.width % self.heads, f"heads={self.heads} does not divide width={self.width}."),
            (
                self.position == "relative" and (self.position_at == "stem" or axial),
                "position='relative' acts inside attention: give position_at='every' or 'shared', and encoder='full'.",
            ),
            (
                self.position in ("none", "sincos2d") and self.position_at == "every",
                f"position='{self.position}' has nothing to learn in every block; give position_at='stem' or 'shared'.",
            ),
            (
                self.width % multiple or (sincos and self.width < 8),
                f"position='{self.position}' requires a width that {multiple} divides, not {self.width}.",
            ),
            (
                sincos and self.num_patches * self.width > MAX_SINCOS_ELEMENTS,
                f"image_size={self.image_size} is too large for position='sincos2d'.",
            ),
            (
                self.dynamic_image_size and (axial or (self.stem and self.stem.mixing == "axial")),
                "dynamic_image_size requires encoder='full' and no axial mixing, which is built for one grid; load the "
                "model with image_size instead.",
            ),
            (
                self.patch_dropout and (axial or variant.rotary or self.position_at != "stem"),
                "patch_dropout requires encoder='full', position_at='stem' and no rotary positions.",
            ),
            (self.stem and self.in_chans != 3, f"a stem takes images of 3 channels, not in_chans={self.in_chans}."),
            (axial and self.stochastic_depth, "stochastic_depth requires encoder='full'."),
            (
                variant.map_heads and (self.pool != "map" or self.width % variant.map_heads),
                f"map_heads={variant.map_heads} requires pool='map', and must divide width={self.width}.",
            ),
            (
                variant.rotary and (self.position == "relative" or axial or self.width // self.heads % 4),
                "rotary positions require encoder='full', a position other than 'relative', and heads whose width is a "
                "multiple of 4.",
            ),
            (
                variant.final_norm == "mean" and self.pool != "gap",
                f"final_norm='mean' requires pool='gap', not {self.pool!r}.",
            ),
            (
                variant.distilled and (self.pool != "token" or self.representation_size),
                "distilled=True requires pool='token' and no representation_size, as in DeiT.",
            ),
        ):
            if invalid:
                raise UserError(problem)

    @property
    def image_hw(self) -> tuple[int, int]:
        """(height, width) of the input in pixels."""
        return pair(self.image_size)

    @property
    def stride(self) -> int:
        """Pixels from one patch's center to the next's."""
        return self.patch_size * (self.stem.stride if self.stem else 1)

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of the patch grid."""
        return self.grid_of(self.image_hw)

    def grid_of(self, image_hw: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of the patch grid of an image of another size."""
        height, width = self.stem.grid(image_hw) if self.stem else image_hw
        return height // self.patch_size, width // self.patch_size

    @property
    def num_patches(self) -> int:
        """N = HW / P^2."""
        return math.prod(self.grid)

    def kept_patches(self, patches: int) -> int:
        """How many of `patches` remain with `patch_dropout` in training."""
        return max(int(patches * (1 - self.patch_dropout)), 1)

    @property
    def has_class_token(self) -> bool:
        return self.pool in ("token", "token+gap")

    @property
    def num_prefix_tokens(self) -> int:
        """Prefix tokens: class token, distillation token, registers, in this order, before the patches."""
        return int(self.has_class_token) + int(self.variant.distilled) + self.variant.registers

    @property
    def num_position_prefix(self) -> int:
        """The first of them, which have a row in the position embedding."""
        return int(self.has_class_token) + int(self.variant.distilled) if self.variant.class_position else 0

    @property
    def num_tokens(self) -> int:
        """T, the length of the sequence."""
        return self.num_prefix_tokens + self.num_patches

    @property
    def pooled_dim(self) -> int:
        """Width of the image's representation before `representation_size`."""
        return self.width * (2 if self.pool == "token+gap" else 1)

    @property
    def num_features(self) -> int:
        """Dr, the width of the head's input."""
        return self.representation_size or self.pooled_dim

    @property
    def num_parameters(self) -> int:
        """Trained numbers, counted without building the model."""
        return count_parameters(self)

    @property
    def forward_macs(self) -> int:
        """Multiply-accumulates of the matrix products in one forward pass of one image."""
        return count_macs(self)

    @property
    def training_macs(self) -> int:
        """`forward_macs` in training, with `patch_dropout`."""
        return count_macs(self, self.kept_patches(self.num_patches))

    @property
    def macs_without_padding(self) -> int:
        """The same without a stem's products with the padding of its maps: what Table 6 counts.

        The paper's exaFLOPs are 6 times this (2 FLOPs each, backward twice the forward) times images seen.
        """
        return self.training_macs - (self.stem.padding_macs(self.image_hw) if self.stem else 0)


@dataclass(frozen=True)
class ResNetConfig:
    """One ResNet: BiT's, the paper's baseline (Sec. 4.1), big_vision's, or the axial one (App. D.6)."""

    in_chans: ClassVar[int] = 3
    kind: Literal["resnet"] = "resnet"
    image_size: ImageSize = 224
    """Side of the input in pixels, or (height, width). Convolutions take any size; axial mixing was built for one."""
    body: ResNetBody = field(default_factory=ResNetBody)
    num_classes: NonNegativeInt = 1000
    """K, the number of outputs; 0 leaves the head out."""
    head_bias: float = 0.0
    """Initial bias of the head."""

    def __post_init__(self) -> None:
        check_fields(self)
        check_size(self)

    @property
    def image_hw(self) -> tuple[int, int]:
        """(height, width) of the input in pixels."""
        return pair(self.image_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Positions of the last feature map, down and across."""
        return self.body.grid(self.image_hw)

    @property
    def num_features(self) -> int:
        """Length of the head's input."""
        return self.body.channels

    @property
    def num_parameters(self) -> int:
        """Trained numbers, counted without building the model."""
        norm = 2 * self.body.channels if self.body.version == "v2" else 0
        return self.body.num_parameters(self.image_hw) + norm + (self.body.channels + 1) * self.num_classes

    @property
    def forward_macs(self) -> int:
        """Multiply-accumulates of the products in one forward pass of one image."""
        return self.body.forward_macs(self.image_hw) + self.body.channels * self.num_classes

    training_macs = forward_macs

    @property
    def macs_without_padding(self) -> int:
        """The same without products with the padding of maps: what Table 6 counts."""
        return self.forward_macs - self.body.padding_macs(self.image_hw)


ModelConfig = ViTConfig | ResNetConfig


def check_size(config: ModelConfig) -> None:
    """Raises UserError for a model, or an input, too large to be meant; nothing is built to find out."""
    if min(config.image_hw) < 1 or math.prod(config.image_hw) > MAX_PIXELS:
        raise UserError(
            f"image_size is {config.image_size}; allowed: sides of 1 and more, {MAX_PIXELS:,} pixels at most."
        )
    if config.num_parameters > MAX_PARAMETERS:
        raise UserError(
            "the model would have more than 2**40 parameters (4 TiB in float32); make its widths, depth or number of "
            "classes smaller."
        )


def check_rgb(config: ModelConfig) -> None:
    """Raises UserError for a model whose images are not what data sets and image files give."""
    if config.in_chans != 3:
        raise UserError(
            f"the model takes images of {config.in_chans} channels (in_chans), and data sets and image files are read "
            f"as RGB; train and evaluate it in Python, on tensors [batch, {config.in_chans}, height, width]."
        )
