"""How an evaluation image becomes a model's input: a frozen description, stored in a checkpoint's metadata.

Nothing here needs torch; `vitlab.data.transforms.EvalTransform` does what a `Preprocessing` says.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from vitlab.errors import UserError
from vitlab.settings import check_fields, from_dict, to_dict

Pixels = Annotated[int, Ge(1), Le(2**16)]
"""The side of an image."""
Size = Pixels | tuple[Pixels, Pixels]
"""The side of a square, or (height, width)."""
MAX_ZOOM = 48
"""The largest `resize`, in sides of the image that is cut from it; timm's rounding of small sizes gives 43."""
MAX_RESIZE = 4096
"""The largest `resize` in pixels, 200 MB in float32; a larger one is at most twice the image that is cut from it."""
Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos", "box", "hamming", "area"]


@dataclass(frozen=True)
class Preprocessing:
    """Resize, crop the center, and nothing random. The defaults are for models that say nothing of their own.

    | `resize` | `keep_aspect` | what is done |
    |---|---|---|
    | None | | the whole image is squashed to `image_size` |
    | a number | True | the shorter side is brought to it, and the center of `image_size` cropped |
    | a number | False | both sides are brought to it, and the center of `image_size` cropped |

    With `antialias` an image is resized as by Pillow, timm and Hugging Face, to whole gray levels. Google's code does
    not: see `google`. Every model takes values in [-1, 1]; `mean` and `std` are those that the checkpoint was trained
    with, kept for information, because they are folded into its patch embedding.

    Raises UserError for values that no image can be prepared by.
    """

    image_size: Size | None = None
    """Side of the model's input in pixels, or (height, width); None is the size of the model's position embeddings."""
    resize: Pixels | None = None
    keep_aspect: bool = True
    interpolation: Interpolation = "bilinear"
    antialias: bool = True
    crop_offset: Literal["round", "floor"] = "round"
    """Where the center begins if an odd number of pixels is left over: rounded to even (torchvision, timm), or half a
    pixel to the top left (Hugging Face, Google)."""
    crop_size: Size | None = None
    """Size of the squash or crop, if larger than `image_size`, which is its top left: patches leave out the rest."""
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    range: tuple[int, int] | None = None
    """The values of black and white in an image file, where they differ from its type's; applied when it is decoded."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.range is not None:
            check_range(self.range)
        self._check_sizes()
        self._check_interpolation()

    def _check_sizes(self) -> None:
        sides = () if self.image_size is None else pair(self.image_size)
        cropped = sides if self.crop_size is None else pair(self.crop_size)
        if self.resize is not None and cropped:
            given = f"image_size={self.crop_size or self.image_size}"
            if self.resize < max(cropped):
                raise UserError(f"resize={self.resize} must be at least {given}, which is cut from it")
            largest = min(MAX_ZOOM * min(cropped), max(MAX_RESIZE, 2 * max(cropped)))
            if self.resize > largest:
                raise UserError(
                    f"resize={self.resize} is more than {largest} for {given}: nearly nothing of an image would be "
                    f"left. Give a smaller one."
                )
        if self.crop_size is not None and (not sides or self.is_google or any(map(int.__lt__, cropped, sides))):
            raise UserError(
                f"crop_size={self.crop_size} with image_size={self.image_size}, antialias={self.antialias} and "
                f"interpolation={self.interpolation!r}; allowed: at least image_size, and not with Google's resizing."
            )

    def _check_interpolation(self) -> None:
        crops_center = self.resize is not None and self.keep_aspect
        if not self.antialias and (self.interpolation != "bilinear" or crops_center):
            raise UserError(
                f"antialias=False with interpolation={self.interpolation!r}, resize={self.resize} and keep_aspect="
                f"{self.keep_aspect}: without antialiasing an image is squashed, bilinearly. Give antialias=True, or "
                f"interpolation='area' for Google's center crop."
            )
        if self.interpolation == "area" and not crops_center:
            raise UserError("interpolation='area' is Google's for a center crop; give resize and keep_aspect=True.")

    @classmethod
    def google(cls, image_size: Size | None = None, resize: int | None = None) -> "Preprocessing":
        """Google's evaluation: squashed, bilinear and without antialiasing (vision_transformer's fine-tuning); or with
        `resize`, area averaging and a center crop (big_vision's `resize_small|central_crop`)."""
        if resize is None:
            return cls(image_size, antialias=False, crop_offset="floor")
        return cls(image_size, resize, interpolation="area", crop_offset="floor")

    @classmethod
    def read(cls, metadata: Mapping[str, Any], where: str, image_size: Size | None = None) -> "Preprocessing":
        """The `preprocessing` in a checkpoint's metadata, or the default; without a size it has `image_size`. Raises
        UserError, which names `where`."""
        entry = metadata.get("preprocessing", {})
        try:
            if not isinstance(entry, dict):
                raise UserError(f"it is {str(entry)[:100]!r}; allowed: settings by name.")
            read = from_dict(cls, entry)
            return read.at(image_size) if read.image_size is None and image_size is not None else read
        except UserError as error:
            raise UserError(f"{where}: its preprocessing cannot be used: {error}") from error

    @property
    def is_google(self) -> bool:
        """Whether images are resized by Google's code's rules."""
        return not self.antialias or self.interpolation == "area"

    def at(self, image_size: Size) -> "Preprocessing":
        """The same for another image size: `resize` keeps its proportion to it, and no pixels are left out."""
        resize, old = self.resize, self.image_size
        if old is not None and pair(old) == pair(image_size):
            return self
        if resize is not None and old is not None:
            resize = round(resize * max(pair(image_size)) / max(pair(self.crop_size or old)))
        return dataclasses.replace(self, image_size=image_size, resize=resize, crop_size=None)

    def for_patches(self, patch_size: int) -> "Preprocessing":
        """The same for patches of so many pixels, which leave out the last rows and columns of `image_size`."""
        height, width = (side // patch_size * patch_size for side in pair(self.image_size or patch_size))
        if self.image_size is None or (height, width) == pair(self.image_size):
            return self
        covered = height if height == width else (height, width)
        return dataclasses.replace(self, image_size=covered, crop_size=self.image_size)

    def with_resize(self, resize: int) -> "Preprocessing":
        """The same with the shorter side brought to `resize` and the center cropped."""
        if self.is_google:
            google = self.google(self.image_size, resize)
            return dataclasses.replace(google, mean=self.mean, std=self.std, range=self.range)
        return dataclasses.replace(self, resize=resize, keep_aspect=True, crop_size=None)

    def to_metadata(self) -> dict[str, Any]:
        """Plain data for JSON; `read` is the inverse."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in to_dict(self).items()}

    def describe(self) -> str:
        """One line for people."""
        how = self.interpolation
        if self.interpolation != "area":
            how += ", antialias" if self.antialias else ", no antialias"
        image_size = self.crop_size or self.image_size
        size = "the model's size" if image_size is None else "{}x{}".format(*pair(image_size))
        if self.resize is None:
            done = f"squash to {size} ({how})"
        else:
            sides = "" if self.keep_aspect else f"x{self.resize}"
            done = f"resize {self.resize}{sides} ({how}), center crop {size}"
        if self.crop_size is not None and self.image_size is not None:
            done += ", of which the top left {}x{}".format(*pair(self.image_size))
        if self.range is not None:
            done += ", black at {} and white at {} of a file's values".format(*self.range)
        if self.mean is None or self.std is None:
            return done
        mean, std = (", ".join(f"{value:.3g}" for value in values) for values in (self.mean, self.std))
        return f"{done}, mean ({mean}) and std ({std}) folded into the patch embedding"


def check_range(levels: tuple[int, int]) -> None:
    """Raises UserError unless black is below white."""
    if not -(2**31) <= levels[0] < levels[1] < 2**31:
        raise UserError(f"range is {levels[0]} {levels[1]}; give the value of black, then a higher one of white.")


def pair(size: Size) -> tuple[int, int]:
    """(height, width) of a size."""
    return (size, size) if isinstance(size, int) else size
