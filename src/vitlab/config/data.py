"""Which images a run takes, and how they are prepared and augmented."""

import re
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from vitlab.errors import UserError
from vitlab.models.config import ImageSize
from vitlab.preprocessing import Preprocessing, check_range
from vitlab.settings import Fraction, NonNegativeInt, PositiveInt, Seed, check_fields


@dataclass(frozen=True, kw_only=True)
class ReadConfig:
    """How your own data is read: its labels, its folds and what belongs together."""

    label_separator: str | None = None
    """Text between several labels of an image in a table; None means |, and warns of others."""
    test_fold: int | None = None
    """The fold to test on, in a table with a column `fold`; None means the lowest."""
    group_by: str | None = None
    """Regular expression for the paths of the images, such as `patient(\\d+)`. Images with the same first capture group
    (or match) stay together wherever a split is drawn; None means the column `group` of a table, if it has one."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.label_separator == "":
            raise UserError("label_separator is empty; give the text between two labels, such as ','.")
        try:
            re.compile(self.group_by or "")
        except re.error as error:
            raise UserError(f"group_by={self.group_by!r} is not a regular expression: {error}.") from error

    @classmethod
    def from_metadata(cls, metadata: dict[str, Any]) -> "ReadConfig":
        """The settings that a model's own data set was read with."""
        return ReadConfig(**(metadata.get("read") or {}))

    @property
    def read_settings(self) -> dict[str, Any]:
        """The reading settings that are given."""
        values = {field.name: getattr(self, field.name) for field in fields(ReadConfig)}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class DataConfig(ReadConfig):
    """Which images, and what is done to them (Sec. 4.1, App. B.1)."""

    name: str = "digits"
    """A data set's name, `folder:PATH`, `csv:PATH` or `shards:PATH` (`vitlab list datasets`)."""
    root: str | None = None
    """Folder that holds, or receives, a named data set; None means the cache folder."""
    train_split: str = "train"
    """Split to train on; `trainval` adds the held-out split."""
    eval_split: str = "val"
    """Split to evaluate on while training."""
    classes: tuple[int | str, ...] | None = None
    """Keep only these classes, given by name or number, renumbered from 0; None keeps all."""
    crop: Literal["inception", "random", "pad", "none"] = "inception"
    """Training crop: `inception` (part of the area, squashed to size), `random` (resize, then crop), `pad` (shift)
    or `none` (the whole image)."""
    min_area: Fraction = 0.05
    """Smallest fraction of the area that an inception crop keeps."""
    crop_resize: PositiveInt | None = None
    """Side in pixels: `random` resizes to it before it crops."""
    pad: NonNegativeInt = 4
    """Largest shift of `pad`, in pixels at the model's size."""
    flip: bool = True
    """Mirror left and right with probability 1/2."""
    randaugment_layers: NonNegativeInt = 0
    """Operations per image of RandAugment; 0 turns it off."""
    randaugment_magnitude: Annotated[int, Ge(0), Le(30)] = 10
    """Strength of RandAugment, 0-30."""
    eval_resize: PositiveInt | None = None
    """Test images: None squashes them to size; a number resizes the shorter side to it and crops the center."""
    eval_interpolation: Literal["bilinear", "bicubic", "lanczos", "box", "hamming", "nearest"] | None = None
    """Filter for test images, antialiased as by Pillow, timm and Hugging Face; None resizes as Google's code does:
    bilinear without antialiasing (vision_transformer), or by area averaging with eval_resize (big_vision)."""
    range: tuple[int, int] | Literal["auto"] | None = None
    """Values in an image file that become black and white, as in `40 4095`: for gray of 16 bits, 32 bits or floating
    point that uses a part of its range. `auto` measures them in the training images. None takes all of 8 or 16 bits."""
    workers: NonNegativeInt | None = None
    """Processes that read images, 0: the training one. None: one for each core, at most 16, beside a GPU, else 0."""
    fast_decode: bool = False
    """Images in files, for training: resize each crop with antialiasing, to whole gray levels, from JPEGs decoded no
    larger than it needs. Off, crops are looked up in the whole image without antialiasing, as in Google's code."""
    on_error: Literal["raise", "skip"] = "raise"
    """At an unreadable image: stop the run, or skip the image, with a warning and a count."""
    partial: bool = False
    """Accept a val folder of imagenet or imagenet_real with missing images; the result says so."""
    exclude: str | None = None
    """A list of images to exclude from the training split: `exclude.txt` of `vitlab duplicates`, or a table with a
    column `image`, such as the `suspects.csv` of a job."""
    subset_fraction: Fraction | None = None
    """Fraction of each class of the training split to train on; a smaller subset is contained in every larger one."""
    subset_seed: Seed | None = None
    """Seed that chooses these images; None is 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_split in ("test", "all") or self.eval_split == "all":
            raise UserError(
                f"train_split={self.train_split!r} and eval_split={self.eval_split!r}: a model is trained without test "
                f"images, and `all` holds them; give train, trainval or val to train on, train, val or test to "
                f"evaluate on."
            )
        if isinstance(self.range, tuple):
            check_range(self.range)
        if self.subset_fraction is None and self.subset_seed is not None:
            raise UserError(f"subset_seed={self.subset_seed} has no effect without subset_fraction; give both.")
        if (self.crop == "random") != (self.crop_resize is not None):
            raise UserError(
                f"crop={self.crop!r} with crop_resize={self.crop_resize}: the crop `random` requires crop_resize, no "
                "other crop uses it."
            )

    def without_crop(self) -> "DataConfig":
        """The same with whole training images."""
        return replace(self, crop="none", crop_resize=None, min_area=DataConfig.min_area, pad=DataConfig.pad)

    def preprocessing(self, image_size: ImageSize) -> Preprocessing:
        """How test images are prepared for a model of this size; raises UserError if `eval_resize` is too small."""
        if self.eval_interpolation is None:
            how = Preprocessing.google(image_size, self.eval_resize)
        else:
            how = Preprocessing(image_size, self.eval_resize, interpolation=self.eval_interpolation)
        return replace(how, range=self.levels)

    @property
    def levels(self) -> tuple[int, int] | None:
        """`range`; None also for auto, which a run replaces by numbers before it reads images."""
        return self.range if isinstance(self.range, tuple) else None
