"""What a bare .safetensors does not say of its model: what is assumed, the setting that changes it, and the line that
says so. Importing this does not import torch."""

import collections
import contextlib
import functools
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Gt

from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.variant import all_settings
from vitlab.preprocessing import Preprocessing, pair
from vitlab.settings import PositiveInt, check_fields

if TYPE_CHECKING:
    from vitlab.weights.original_names import Origin

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Assumptions:
    """What to take in place of what is assumed for a bare .safetensors; None keeps the assumption."""

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

    def __post_init__(self) -> None:
        check_fields(self)

    def given(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def assumed_preprocessing(origin: "Origin", config: ModelConfig, mean: Any, std: Any) -> Preprocessing:
    """How the code that the names are from prepares images; squashed to size where they do not show it."""
    images, size = origin.images, config.image_size
    if images.size is not None and isinstance(config, ViTConfig) and images.size % config.patch_size == 0:
        size = images.size
    resize = None if images.crop is None else round(max(pair(size)) / images.crop)
    return Preprocessing(size, resize, interpolation=images.interpolation, mean=tuple(mean), std=tuple(std))


@functools.cache  # a command reads a checkpoint several times
def say(line: str) -> None:
    """Logs a line once."""
    logger.warning("%s", line)


@contextlib.contextmanager
def shown_as(opened: str | Path, source: str | Path) -> Iterator[None]:
    """Lines of `say` and UserErrors name `source` in place of `opened`, a temporary copy of it."""
    temporary = re.compile(re.escape(str(opened)) + r"(/model\.safetensors)?")

    def rename(record: logging.LogRecord) -> bool:
        record.msg, record.args = temporary.sub(lambda _: str(source), record.getMessage()), ()
        return True

    logger.addFilter(rename)
    try:
        yield
    except UserError as error:
        raise UserError(temporary.sub(lambda _: str(source), str(error))) from error
    finally:
        logger.removeFilter(rename)


def say_left_out(path: Path, origin: "Origin") -> None:
    """Logs which tensors of a described checkpoint are not of the model."""
    if origin.left_out:
        say(f"{path}: {_left_out(origin)}.")


def say_assumptions(
    path: Path, origin: "Origin", config: ModelConfig, prepared: Preprocessing, given: Assumptions
) -> None:
    """Logs what a bare file is read as, in one line."""
    taken, (height, width) = given.given(), config.image_hw
    names = [] if not isinstance(config, ViTConfig) else ["heads", "gelu", "layer_norm_eps", "pool"]
    parts = [f"{name} {all_settings(config)[name]}" for name in names if name not in taken]
    if isinstance(config, ViTConfig):
        rows, columns = config.grid
        parts.append(f"image_size {height}x{width} ({rows}x{columns} patches of {config.patch_size})")
    parts.append(f"images: {prepared.describe()}")
    behind = f" behind {origin.prefix!r}" if origin.prefix else ""
    left_out = f" ({_left_out(origin)})" if origin.left_out else ""
    say(
        f"{path} has {origin.code_base}'s names{behind}{left_out} and no config.json, so these are assumed: "
        f"{', '.join(parts)}. Change one by `vitlab convert {path} OUT --to vitlab --assume.heads N` "
        f"(.gelu, .layer-norm-eps, .pool, .mean, .std; --image-size), or load_model(..., assume={{'heads': N}})."
    )


def _left_out(origin: "Origin") -> str:
    counts = collections.Counter(name.split(".")[0] for name in origin.left_out)
    return "left out: " + ", ".join(f"{name} ({count})" for name, count in counts.items())
