"""Option groups of the evaluations of a checkpoint, for Python and the command line; torch is not imported."""

from dataclasses import dataclass
from typing import Any, Literal

from vitlab.config.data import ReadConfig
from vitlab.errors import UserError
from vitlab.models.config import Pool
from vitlab.models.variant import Interpolation
from vitlab.settings import Checked, NonNegativeInt, PositiveFloat, PositiveInt, check_fields

Split = Literal["train", "val", "test", "trainval"]


@dataclass(frozen=True)
class ModelOptions(Checked):
    """How a checkpoint is loaded."""

    image_size: int | None = None
    """Image side in pixels, by default as in the checkpoint's preprocessing. Position embeddings are interpolated."""
    interpolation: Interpolation | None = None
    """Interpolation of position embeddings, by default as in the checkpoint's own library."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of weights and activations; auto: bfloat16 where that is faster. Float32 computes as the checkpoint does,
    up to rounding."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:1; auto is the first GPU, or the CPU."""


@dataclass(frozen=True)
class LoaderOptions(Checked):
    """How images are read."""

    batch_size: PositiveInt = 64
    """Images at once, in each process."""
    workers: NonNegativeInt | None = None
    """Processes that read images, 0: the main one. None: on a GPU one for each core, at most 16, else 0."""
    on_error: Literal["raise", "skip"] = "raise"
    """At an unreadable image: stop, or skip and count it."""


@dataclass(frozen=True)
class EvalOptions(ModelOptions, LoaderOptions, ReadConfig):
    """How a checkpoint is loaded, and how images are read for it."""

    compile: bool = False
    """Compile with torch.compile: half a minute at the start, then faster on thousands of images."""


@dataclass(frozen=True)
class FeatureOptions(EvalOptions):
    """EvalOptions, and which block and pooling represent an image."""

    layer: PositiveInt | Literal["last4", "auto"] | None = None
    """Block of the representation, from 1; auto: the best; last4: the last four. Auto takes the least leave-one-out
    loss of least squares on training images, last4 the class tokens of four blocks, as DINOv2. Default: the last."""
    pool: Pool | None = None
    """Class token, mean over patches, or both. Default: the checkpoint's own; with --layer auto the best."""

    @property
    def adaptation(self) -> dict[str, Any]:
        """The arguments of `load_model` for `layer` and `pool`, if they are given."""
        if self.layer is None and self.pool is None:
            return {}
        depth = self.layer if isinstance(self.layer, int) else None
        return {"num_classes": 0, "pre_logits": "drop", "depth": depth, "pool": self.pool}


FEWSHOT_DEFAULTS = FeatureOptions(precision="float32")
"""Few-shot accuracies are compared with the paper's."""


@dataclass(frozen=True)
class SplitOptions(Checked):
    """The data that a classifier on frozen features is trained and tested on."""

    root: str | None = None
    """Folder that holds a named data set."""
    train_split: Split | None = None
    """Split to train on, by default train, and of your own set without a val split all that the test leaves."""
    test_split: Split = "test"
    """Split to test on."""
    partial: bool = False
    """Accept a val folder of imagenet or imagenet_real with missing images; the result says so."""


@dataclass(frozen=True)
class FewShotProtocol:
    """The images that few-shot evaluation is trained on, and how the strength of its penalty is chosen."""

    shots: tuple[PositiveInt, ...] = (1, 5, 10, 25)
    """Training images of each class."""
    l2: tuple[PositiveFloat, ...] | None = None
    """Strength of the penalty, by default 2^10. Of several the one that ranks best over the data sets is taken."""
    seeds: PositiveInt | None = None
    """Random samples of those images, by default 3."""
    original: bool = False
    """The form of the paper's time: the first images of each class, l2 chosen from 2^-10 to 2^19 by rank."""
    leave_self_out: bool = False
    """Choose a data set's l2 by the other data sets only."""
    test_images: PositiveInt | None = None
    """Test on at most this many images, taken evenly from the split."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.original and (self.l2 is not None or self.seeds is not None):
            raise UserError("original takes the first images of each class and its own 30 l2; leave out l2 and seeds.")
        if not self.shots or not self.l2_grid:
            raise UserError(f"shots={self.shots}, l2={self.l2}: give at least one of each.")

    @property
    def l2_grid(self) -> tuple[float, ...]:
        """The l2 to choose from."""
        if self.original:
            return tuple(2.0**power for power in range(-10, 20))
        return (2.0**10,) if self.l2 is None else self.l2

    @property
    def sample_seeds(self) -> tuple[int | None, ...]:
        """The seeds of the samples; None takes the first images of each class."""
        return (None,) if self.original else tuple(range(3 if self.seeds is None else self.seeds))
