"""The page of near-duplicates: pairs of test and training images side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from vitlab.inspect import overlays
from vitlab.inspect.figures import PageImage
from vitlab.inspect.page import page

HEIGHT = 192
"""Longer side of an image on the page, at most, in pixels."""


@dataclass(frozen=True, eq=False)
class ShownPair:
    """A test image and a training image near to it."""

    test: UInt8[np.ndarray, "H W 3"]
    train: UInt8[np.ndarray, "h w 3"]
    test_name: str
    train_name: str
    test_label: str
    train_label: str
    distance: float
    """Normalized distance after alignment: 0 the same, 1.41 unrelated."""
    bits: int
    """Bits of 64 in which their hashes differ."""
    flipped: bool
    conflict: bool
    """Whether their labels contradict each other."""

    @property
    def image(self) -> PageImage:
        mirrored = ", mirrored" if self.flipped else ""
        labels = self.test_label if self.test_label == self.train_label else f"{self.test_label} | {self.train_label}"
        warning = "LABELS CONFLICT\n" if self.conflict else ""
        small = [overlays.fit(image, HEIGHT) for image in (self.test, self.train)]
        both = overlays.beside(*small, gap=max(max(image.shape[1] for image in small) // 16, 1))
        return PageImage(
            overlays.encoded(both),
            f"Test image {self.test_name} ({self.test_label}) beside training image {self.train_name} "
            f"({self.train_label}), at distance {self.distance:.3f}{mirrored}.",
            280,
            f"{warning}{labels}\ndistance {self.distance:.3f}, {self.bits} bits{mirrored}\n"
            f"{self.test_name}\n{self.train_name}",
        )


def duplicates_page(
    lead: str,
    numbers: Mapping[str, str],
    pairs: Sequence[ShownPair],
    beyond: Sequence[ShownPair],
    conflicts: Sequence[ShownPair],
    *,
    total: int,
    unreadable: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as text, for `write_page`.

    pairs: those to show, nearest first, of `total`; beyond: those that follow; conflicts: pairs whose labels contradict
    each other; unreadable: path and reason of each image that could not be compared.
    """
    return page(
        "duplicates.html.j2",
        "Near-duplicates of test images",
        lead,
        results=numbers,
        pairs=[pair.image for pair in pairs],
        beyond=[pair.image for pair in beyond],
        conflicts=[pair.image for pair in conflicts],
        bands=_bands([pair.distance for pair in pairs]),
        total=total,
        unreadable_rows=unreadable,
    )


def _bands(distances: Sequence[float]) -> str:
    """How many pairs are within which distance."""
    counts = {edge: sum(distance <= edge for distance in distances) for edge in (0.05, 0.1, 0.15, 0.2)}
    bands = ", ".join(f"{count} up to {edge}" for edge, count in counts.items() if count < len(distances))
    return f"Of these {len(distances)} pairs, by distance: {bands}." if bands else ""
