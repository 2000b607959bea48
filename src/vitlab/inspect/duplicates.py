"""The page of near-duplicates: pairs side by side, with how far they are from each other and whose they are."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from vitlab.inspect import overlays
from vitlab.inspect.page import PageImage, Section, Table, page

HEIGHT = 192
"""Most pixels of a image's longer side on the page."""


@dataclass(frozen=True, eq=False)
class ShownPair:
    """A test image and the training image that is near to it."""

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


def duplicates_page(
    lead: str,
    numbers: Mapping[str, str],
    found: Sequence[ShownPair],
    beyond: Sequence[ShownPair],
    conflicts: Sequence[ShownPair],
    *,
    total: int,
    unreadable: Sequence[tuple[str, str]] = (),
) -> str:
    """The page as text, for `write_page`. found: pairs to show, nearest first, of `total`; beyond: those that follow;
    conflicts: pairs whose labels contradict each other, which stand first.

    unreadable: path and reason of each image that could not be compared.
    """
    sections = [Section("What was found", numbers=numbers)]
    if conflicts:
        text = "Pairs whose labels contradict each other: one of the labels is wrong, or the images only look alike."
        sections.append(Section("Conflicting labels", text, images=[_shown(pair) for pair in conflicts]))
    text = f"On the left the test image, on the right the training image, the nearest first. {_bands(found)}"
    if len(found) < total:
        text += f" The {len(found)} nearest test images are shown, each with its nearest; all {total} pairs are listed."
    sections.append(
        Section("Near-duplicates", text if found else "There are none.", images=[_shown(pair) for pair in found])
    )
    if beyond:
        text = (
            "The next ones, which are further apart than the threshold and do not count. If these are duplicates to "
            "you, raise the threshold; if the last ones above are not, lower it."
        )
        sections.append(Section("Just beyond the threshold", text, images=[_shown(pair) for pair in beyond]))
    if unreadable:
        name = "Images that could not be read, and were compared with nothing"
        table = Table(name, ("image", "reason"), unreadable)
        sections.append(Section("Unreadable images", table=table))
    return page("Near-duplicates of test images", lead, sections)


def _bands(pairs: Sequence[ShownPair]) -> str:
    """How many of the pairs lie how near."""
    if not pairs:
        return ""
    edges = (0.05, 0.1, 0.15, 0.2)
    counts = [sum(pair.distance <= edge for pair in pairs) for edge in edges]
    said = ", ".join(f"{count} up to {edge}" for count, edge in zip(counts, edges, strict=True) if count < len(pairs))
    return f"Of these {len(pairs)} pairs, by distance: {said}." if said else ""


def _shown(pair: ShownPair) -> PageImage:
    mirrored = ", mirrored" if pair.flipped else ""
    labels = pair.test_label if pair.test_label == pair.train_label else f"{pair.test_label} | {pair.train_label}"
    contradiction = "LABELS CONFLICT\n" if pair.conflict else ""
    caption = (
        f"{contradiction}{labels}\ndistance {pair.distance:.3f}, {pair.bits} bits{mirrored}\n"
        f"{pair.test_name}\n{pair.train_name}"
    )
    alt = (
        f"Test image {pair.test_name} ({pair.test_label}) beside training image {pair.train_name} "
        f"({pair.train_label}), at distance {pair.distance:.3f}{mirrored}."
    )
    return PageImage(overlays.encoded(_beside(pair.test, pair.train)), alt, 280, caption)


def _beside(left: UInt8[np.ndarray, "H W 3"], right: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "S T 4"]:
    """Both images on one, centerd, with a transparent gap; small ones pixel for pixel."""
    both = [overlays.fit(image, HEIGHT) for image in (left, right)]
    height, width = (max(image.shape[axis] for image in both) for axis in (0, 1))
    canvas = np.zeros((height, 2 * width + max(width // 16, 1), 4), np.uint8)
    for image, start in zip(both, (0, canvas.shape[1] - width), strict=True):
        top, left_edge = (height - image.shape[0]) // 2, start + (width - image.shape[1]) // 2
        canvas[top : top + image.shape[0], left_edge : left_edge + image.shape[1], :3] = image
        canvas[top : top + image.shape[0], left_edge : left_edge + image.shape[1], 3] = 255
    return canvas
