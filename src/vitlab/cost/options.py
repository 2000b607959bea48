"""The options of `vitlab bench`, for Python and the command line; torch is not imported."""

from dataclasses import dataclass
from typing import Literal

from vitlab.settings import Checked, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class BenchOptions(Checked):
    """What `vitlab bench` measures, and how."""

    mode: Literal["infer", "train", "both"] = "infer"
    """Inference, training steps, or both."""
    sizes: tuple[PositiveInt, ...] = (64, 128, 224, 384, 512)
    """Image sides in pixels; the nearest that the model's patches divide is taken."""
    batch: PositiveInt | None = None
    """Batch size; default: the power of two at which the model is fastest."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto is bfloat16 where the device is faster in it."""
    compile: bool = False
    """Compile all models with torch.compile."""
    seconds: PositiveFloat = 1.0
    """Length of a round of the model, and of the ceiling."""
    rounds: PositiveInt = 7
    """Timed rounds."""
    memory: PositiveFloat | None = None
    """GiB that a step may take; default: 4 on a CPU, all of a GPU."""
    largest: bool = True
    """Search the largest batch that fits into that memory."""
    device: str = "auto"
    """auto (the first GPU, else the CPU), cpu, cuda or cuda:1."""
