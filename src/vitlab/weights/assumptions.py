"""Settings that a bare .safetensors file does not record, and the warnings about what is assumed for them.

`--assume` of `vitlab convert` and `assume` of `load_model` set `Assumptions`; `timm.py`, which reads bare files, calls
the functions. Importing this does not import torch.
"""

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Gt

from vitlab.errors import warn_once
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.variant import all_settings
from vitlab.preprocessing import Preprocessing, pair
from vitlab.settings import Checked, PositiveInt

if TYPE_CHECKING:
    from vitlab.weights.original_names import Origin


@dataclass(frozen=True)
class Assumptions(Checked):
    """Settings of a bare .safetensors; None keeps what is assumed."""

    prefix: str | None = None
    """What the names of the model's tensors begin with, where a file has several models."""
    heads: PositiveInt | None = None
    """Attention heads; the usual number for the width is assumed."""
    gelu: Literal["tanh", "erf", "quick"] | None = None
    """Form of GELU; OpenAI's CLIP has `quick`."""
    layer_norm_eps: Annotated[float, Gt(0)] | None = None
    """Epsilon of every LayerNorm."""
    pool: Literal["token", "gap", "map"] | None = None
    """What the head reads: the class token, the mean over patches, or attention pooling."""
    mean: tuple[float, ...] | None = None
    """Mean of the images in [0, 1], of each channel."""
    std: tuple[float, ...] | None = None
    """Standard deviation of the images in [0, 1], of each channel."""

    def given(self) -> dict[str, Any]:
        """The settings that are not None."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def assumed_preprocessing(origin: "Origin", config: ModelConfig, mean: Any, std: Any) -> Preprocessing:
    """How the code base of the tensors' names prepares images; they are squashed to size where it crops nothing."""
    images, size = origin.images, config.image_size
    if images.size is not None and isinstance(config, ViTConfig) and images.size % config.patch_size == 0:
        size = images.size
    resize = None if images.crop is None else round(max(pair(size)) / images.crop)
    return Preprocessing(size, resize, interpolation=images.interpolation, mean=tuple(mean), std=tuple(std))


def warn_assumptions(
    name: str, origin: "Origin", config: ModelConfig, prepared: Preprocessing, given: Assumptions
) -> None:
    """Logs what a bare file is read as, in one line, and how to change it."""
    assumed: list[str] = []
    if isinstance(config, ViTConfig):
        settings = [setting for setting in ("heads", "gelu", "layer_norm_eps", "pool") if setting not in given.given()]
        assumed += [f"{setting} {all_settings(config)[setting]}" for setting in settings]
        height, width = config.image_hw
        rows, columns = config.grid
        assumed.append(f"image_size {height}x{width} ({rows}x{columns} patches of {config.patch_size})")
    assumed.append(f"images: {prepared.describe()}")
    behind = f" behind {origin.prefix!r}" if origin.prefix else ""
    left_out = f" ({origin.describe_left_out()})" if origin.left_out else ""
    warn_once(
        f"{name} has {origin.code_base}'s names{behind}{left_out} and no config.json, so these are assumed: "
        f"{', '.join(assumed)}. Change one by `vitlab convert {name} OUT --to vitlab --assume.heads N` "
        f"(.gelu, .layer-norm-eps, .pool, .mean, .std; --image-size), or load_model(..., assume={{'heads': N}})."
    )
