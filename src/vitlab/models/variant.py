"""What models of other code have and the paper's do not: their checkpoints need it. Importing this imports no torch.

`ViTConfig.variant` holds it; by default every setting is the paper's. B, T, D and so on are as in `models/vit.py`.
"""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Gt

from vitlab.settings import Checked, NonNegativeInt, PositiveInt

Interpolation = Literal["corners", "bicubic", "bicubic_antialias"]
"""How a grid of position embeddings is resampled: bilinear with the corner patches' centers aligned (Google's), or
bicubic with the image's edges aligned (Hugging Face, for most of its models), or that with antialiasing (timm)."""
Config = TypeVar("Config")


@dataclass(frozen=True)
class Rotary(Checked):
    """Rotary position embedding (RoPE): channel pairs of a patch's query and key are rotated, half of the pairs by
    angles of its row and half by the angles of its column. An angle is the coordinate over one of Dh/4 periods."""

    base: Annotated[float, Gt(1)] = 100.0
    """The periods grow geometrically, from 1 to nearly this."""
    coordinates: Literal["centered", "index"] = "centered"
    """From -2 pi to 2 pi across every image (DINOv3), or the number of the row and the column."""
    reference: tuple[PositiveInt, PositiveInt] | None = None
    """Rows and columns of a grid; on another grid, numbers are scaled to span it (EVA-02). None scales nothing."""
    offset: float = 0.0
    """Number of the first row and the first column, before scaling."""


@dataclass(frozen=True)
class Variant(Checked):
    """How a model differs from the paper's in its blocks, tokens and norms."""

    gelu: Literal["tanh", "erf", "quick"] = "tanh"
    """Form of GELU: Google's weights were trained with the tanh approximation, OpenAI's CLIP with `quick`,
    x sigmoid(1.702 x)."""
    swiglu: bool = False
    """A gated MLP, W3 (SiLU(W1 x) * W2 x), in place of one with GELU (DINOv2's giant)."""
    layer_norm_eps: Annotated[float, Gt(0)] = 1e-6
    """Added to the variance inside every LayerNorm."""
    attention_norm: bool = False
    """A LayerNorm on the outputs of the attention heads, before their projection (BEiT-3, EVA-02's CLIP)."""
    mlp_norm: bool = False
    """A LayerNorm before the second layer of each MLP (BEiT-3, EVA-02)."""
    pre_norm: bool = False
    """A LayerNorm before the first block (CLIP)."""
    final_norm: Literal["tokens", "mean", "none"] = "tokens"
    """What the LayerNorm after the last block acts on: all tokens, or their mean over patches (`pool='gap'`; timm's
    `fc_norm`); `none` leaves it out (C-RADIO)."""
    layer_scale: float | None = None
    """Start of a learned factor on every branch (DINOv2, DeiT III); None leaves it out."""
    registers: NonNegativeInt = 0
    """Register tokens, without position, after the class token (DINOv2 with registers)."""
    distilled: bool = False
    """A second token with a second head, for learning from a teacher (DeiT); the output is the heads' mean."""
    class_position: bool = True
    """Whether the class token has a row in the position embedding; big_vision's and DeiT III's has none."""
    rotary: Rotary | None = None
    """RoPE in every block, besides `position` (DINOv3, EVA-02); None leaves it out."""
    position_interpolation: Interpolation | None = None
    """How position embeddings are resampled for another image size; None is `corners`, Google's."""
    map_heads: PositiveInt | None = None
    """Attention heads of `pool='map'`; None is `heads`."""

    @property
    def differences(self) -> dict[str, Any]:
        """The settings that are not the paper's."""
        return {name: value for name, value in vars(self).items() if value != getattr(Variant, name)}


def all_settings(config: Any) -> dict[str, Any]:
    """All settings of a model by name, its variant's included."""
    settings = dict(vars(config))
    return settings | (vars(settings.pop("variant")) if "variant" in settings else {})


def override(config: Config, **settings: Any) -> Config:
    """`config` with other values of these settings, its variant's among them."""
    if inner := {name: settings.pop(name) for name in vars(Variant()) if name in settings}:
        settings["variant"] = dataclasses.replace((vars(config) | settings)["variant"], **inner)
    return dataclasses.replace(config, **settings)  # pyright: ignore[reportArgumentType]
