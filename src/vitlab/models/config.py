"""What a Vision Transformer is made of: one frozen dataclass, and the paper's sizes by name (Table 1).

Nothing here needs torch, so that the command line can list and check models in an instant.
"""

import dataclasses
import math
import typing
from dataclasses import dataclass
from typing import Literal

from vitlab.settings import check_fields, nearest


@dataclass(frozen=True)
class ViTConfig:
    """One Vision Transformer. The letters in the comments are the paper's (Sec. 3.1, Table 1)."""

    image_size: int | tuple[int, int] = 224
    """Side of the input in pixels, or (height, width); the patch side must divide both."""
    patch_size: int = 16
    """P, the side of a patch in pixels."""
    width: int = 768
    """D, the length of a token; the number of heads must divide it."""
    depth: int = 12
    """L, the number of encoder blocks."""
    heads: int = 12
    """k, the number of attention heads."""
    mlp_dim: int = 3072
    """Width of the hidden layer of each MLP (four times D in the paper)."""
    num_classes: int = 1000
    """K, the number of outputs; 0 leaves the head out."""
    pool: Literal["token", "gap"] = "token"
    """What represents the picture: the class token (Eq. 4) or the mean over patches (App. D.3)."""
    representation_size: int | None = None
    """Width of the hidden layer (Dense + tanh) before the head, used in pre-training (Sec. 3.1)."""
    position: Literal["none", "1d"] = "1d"
    """Kind of position embedding (App. D.4)."""
    position_std: float = 0.02
    """Standard deviation of a new position embedding. Google's is 0.02, big_vision's 1 / sqrt(D); a larger one lets a
    short training on small pictures tell places apart from the start."""
    dropout: float = 0.0
    """Rate after the position embedding and every dense layer except the qkv projections (App. B.1)."""
    gelu: Literal["tanh", "erf"] = "tanh"
    """Form of GELU: Google's weights were trained with the tanh approximation."""
    layer_norm_eps: float = 1e-6
    """Added to the variance inside every LayerNorm."""
    head_bias: float = 0.0
    """Initial bias of the head; Google starts sigmoid losses at -10 (ImageNet-21k and JFT)."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("patch_size", "width", "depth", "heads", "mlp_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1.")
        if self.num_classes < 0:
            raise ValueError(f"num_classes is {self.num_classes}; it must be 0 (no head) or more.")
        if self.representation_size is not None and self.representation_size < 1:
            raise ValueError(
                f"representation_size is {self.representation_size}; give a width of at least 1, or None to leave "
                f"the pre-logits layer out."
            )
        if self.width % self.heads:
            fits = [k for k in range(1, self.width + 1) if self.width % k == 0]
            near = sorted(fits, key=lambda k: abs(k - self.heads))[:3]
            raise ValueError(
                f"heads={self.heads} does not divide width={self.width}; the nearest that do: {sorted(near)}."
            )
        if not self.position_std >= 0:
            raise ValueError(f"position_std is {self.position_std}; it must be 0 or more.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}; it must lie in [0, 1).")
        check_divisible(self.image_hw, self.patch_size)

    @property
    def image_hw(self) -> tuple[int, int]:
        """(height, width) of the input in pixels."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        height, width = self.image_hw
        return height // self.patch_size, width // self.patch_size

    @property
    def num_patches(self) -> int:
        """N = HW / P^2."""
        return math.prod(self.grid)

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens in front of the patches: the class token, if there is one."""
        return 1 if self.pool == "token" else 0

    @property
    def num_tokens(self) -> int:
        """T, the length of the sequence."""
        return self.num_prefix_tokens + self.num_patches

    @property
    def num_parameters(self) -> int:
        """Trained numbers, counted without building the model."""
        d, rep = self.width, self.representation_size or 0
        stem = d * (3 * self.patch_size**2 + 1) + d * self.num_prefix_tokens
        positions = d * self.num_tokens if self.position != "none" else 0
        block = 4 * d * (d + 1) + 2 * d * self.mlp_dim + self.mlp_dim + d + 4 * d
        head = rep * (d + 1) + ((rep or d) + 1) * self.num_classes
        return stem + positions + self.depth * block + 2 * d + head


def check_divisible(image_hw: tuple[int, int], patch_size: int) -> None:
    """Raises ValueError with the nearest good sizes unless `patch_size` divides both sides."""
    height, width = image_hw
    if height >= patch_size and width >= patch_size and height % patch_size == 0 and width % patch_size == 0:
        return
    good = sorted({max(side // patch_size + up, 1) * patch_size for side in (height, width) for up in (0, 1)})
    raise ValueError(
        f"image size {height}x{width} cannot be cut into patches of {patch_size}x{patch_size}; each side must be a "
        f"multiple of {patch_size}, the nearest: {', '.join(map(str, good))}."
    )


_TI = ViTConfig(width=192, depth=12, heads=3, mlp_dim=768)
_S = ViTConfig(width=384, depth=12, heads=6, mlp_dim=1536)
_B = ViTConfig(width=768, depth=12, heads=12, mlp_dim=3072)
_L = ViTConfig(width=1024, depth=24, heads=16, mlp_dim=4096)
_H = ViTConfig(width=1280, depth=32, heads=16, mlp_dim=5120)

# Table 1 gives B, L and H; Ti and S are the later sizes of the same family.
MODELS: dict[str, ViTConfig] = {
    f"ViT-{size}/{patch}": dataclasses.replace(config, patch_size=patch)
    for size, config in (("Ti", _TI), ("S", _S), ("B", _B), ("L", _L), ("H", _H))
    for patch in (8, 14, 16, 32)
}


def get_config(name: str, **overrides: typing.Any) -> ViTConfig:
    """The configuration called `name` (`ViT-B/16`), with fields overridden by keyword.

    Raises ValueError for an unknown name or field, naming the nearest valid ones.
    """
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}; {nearest(name, MODELS)}. `vitlab list models` shows all.")
    fields = [field.name for field in dataclasses.fields(ViTConfig)]
    for key in overrides:
        if key not in fields:
            raise ValueError(f"unknown model setting {key!r}; {nearest(key, fields)}.")
    return dataclasses.replace(MODELS[name], **overrides)


def forward_macs(config: ViTConfig) -> int:
    """Multiply-accumulates of the matrix products in one forward pass of one picture.

    The paper's exaFLOPs are 6 times this (2 FLOPs each, backward twice the forward) times pictures seen.
    """
    d, t = config.width, config.num_tokens
    embed = config.num_patches * 3 * config.patch_size**2 * d
    block = t * (4 * d * d + 2 * d * config.mlp_dim) + 2 * t * t * d
    rep = config.representation_size or 0
    head = d * rep + (rep or d) * config.num_classes
    return embed + config.depth * block + head
