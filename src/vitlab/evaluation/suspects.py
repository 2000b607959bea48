"""Training images whose label is probably wrong, by probabilities from a head that has not seen them.

The most suspect are those whose label is least probable; the margin to the best other class finds fewer
(`benchmarks/suspects.py`). Confident learning (Northcutt et al. 2021) estimates how many labels are wrong: an image is
confidently of a class if its probability reaches the mean over the images that are labeled so, and the images that are
confidently of another class than their label are counted. Before all suspects come images that look the same and have
different labels: one of the two is wrong.

    find_suspects(fit.logits.softmax(dim=1).numpy(), labels)[:10]  # the most suspect first
"""

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

from vitlab.data.dedup import MIN_STD, thumbnail
from vitlab.errors import UserError
from vitlab.io import as_cells, from_cell, write_bytes

COLUMNS = ("image", "label", "looks_like", "label_probability", "looks_like_probability", "same_as")
"""Columns of `suspects.csv`: the fields of `Suspect`, with names for rows and classes; same_as is its `copy`."""
SAME = 0.97
"""Smallest cosine of the centered representations of two images that may be copies, and of their thumbnails."""
MAX_COMPARED = 50_000
"""Most images that are compared with each other."""
ROWS = 2048
"""Images that are compared with all others at a time."""


class Suspect(NamedTuple):
    """A training image whose label is probably wrong."""

    row: int
    """Its row in `probabilities`."""
    label: int
    """The class it is labeled as."""
    suggested: int
    """The class that it is taken for."""
    label_probability: float
    suggested_probability: float
    copy: int | None = None
    """Row of an image that looks the same and has another label."""


def rank_suspects(
    probabilities: Float[np.ndarray, "n K"], labels: Int[np.ndarray, " n"]
) -> tuple[Int[np.ndarray, " n"], int]:
    """All images, the most suspect first, and the estimated number of suspects among them.

    An image whose label is its most probable class comes after all others, and is never a suspect.
    """
    images, classes = probabilities.shape
    own, counts = probabilities[np.arange(images), labels], np.bincount(labels, minlength=classes)
    sums = np.bincount(labels, weights=own, minlength=classes)
    thresholds = np.divide(sums, counts, out=np.full(classes, np.inf), where=counts > 0)
    confident = np.where(probabilities >= thresholds, probabilities, -np.inf)
    known = np.flatnonzero(confident.max(axis=1) > -np.inf)
    is_other = confident.max(axis=1) > confident[np.arange(images), labels]
    # Images that are confidently of no class are assumed to be wrong as often as the others of their label.
    of_class, wrong = (np.bincount(labels[rows], minlength=classes) for rows in (known, known[is_other[known]]))
    estimate = np.divide(wrong * counts, of_class, out=np.zeros(classes), where=of_class > 0).sum()
    could_be = own < probabilities.max(axis=1)
    return np.lexsort((own, ~could_be)), min(round(estimate), int(could_be.sum()))


def find_suspects(
    probabilities: Float[np.ndarray, "n K"],
    labels: Int[np.ndarray, " n"],
    x: Float[np.ndarray, "n D"] | None = None,
    read: Callable[[int], UInt8[np.ndarray, "H W 3"]] | None = None,
) -> list[Suspect]:
    """The suspects, the most suspect first. With the representations `x`, and `read` for the image of a row, first the
    copies with different labels."""
    order, count = rank_suspects(probabilities, labels)
    copies = {} if x is None or read is None or len(x) > MAX_COMPARED else _copies_with_other_labels(x, labels, read)
    first = sorted(copies, key=lambda row: probabilities[row, labels[row]])
    rows = [*first, *(row for row in order[:count].tolist() if row not in copies)]
    others = probabilities.copy()
    others[np.arange(len(labels)), labels] = -1.0

    def suspect(row: int) -> Suspect:
        copy = copies.get(row)
        suggested = int(others[row].argmax() if copy is None else labels[copy])
        chances = (float(probabilities[row, labels[row]]), float(probabilities[row, suggested]))
        return Suspect(row, int(labels[row]), suggested, *chances, copy)

    return [suspect(row) for row in rows]


def _copies_with_other_labels(
    x: Float[np.ndarray, "n D"], labels: Int[np.ndarray, " n"], read: Callable[[int], UInt8[np.ndarray, "H W 3"]]
) -> dict[int, int]:
    """Row -> the most similar row with another label, if the two look the same.

    Representations propose the pairs and pixels decide: a weak model may represent many images alike.
    """
    centered = x - x.mean(axis=0)
    directions = centered / np.maximum(np.linalg.norm(centered, axis=1, keepdims=True), 1e-12)
    candidates: dict[int, int] = {}
    for start in range(0, len(x), ROWS):
        cosines = directions[start : start + ROWS] @ directions.T
        cosines[labels[start : start + ROWS, None] == labels] = -1.0
        nearest = cosines.argmax(axis=1)
        for row in np.flatnonzero(cosines[np.arange(len(nearest)), nearest] >= SAME).tolist():
            candidates[start + row] = int(nearest[row])
    rows = {row for pair in candidates.items() for row in pair}
    thumbs = {row: np.float64(thumbnail(read(row))) for row in sorted(rows)}
    patterns = {row: thumb - thumb.mean() for row, thumb in thumbs.items() if thumb.std() >= MIN_STD}  # not blank

    def looks_same(row: int, other: int) -> bool:
        if row not in patterns or other not in patterns:
            return False
        a, b = patterns[row], patterns[other]
        return bool((a * b).sum() >= SAME * np.linalg.norm(a) * np.linalg.norm(b))

    return {row: other for row, other in candidates.items() if looks_same(row, other)}


def write_suspects(path: Path, suspects: Sequence[Suspect], names: Sequence[str], classes: Sequence[str]) -> None:
    """Writes a table of suspects, the most suspect first. names: of the images by row."""
    text = io.StringIO(newline="")
    table = csv.writer(text, lineterminator="\n")
    table.writerow(COLUMNS)
    for suspect in suspects:
        chances = (f"{suspect.label_probability:.4f}", f"{suspect.suggested_probability:.4f}")
        copy = "" if suspect.copy is None else names[suspect.copy]
        cells = [names[suspect.row], classes[suspect.label], classes[suspect.suggested], *chances, copy]
        table.writerow(as_cells(cells))
    write_bytes(path, text.getvalue().encode(errors="surrogateescape"))


def read_suspects(path: Path) -> list[dict[str, str]]:
    """The rows of `write_suspects`. Raises UserError for another file."""
    text = path.read_bytes().decode(errors="surrogateescape")
    header, *rows = [*csv.reader(io.StringIO(text.removeprefix("\ufeff"), newline=""))] or [[]]
    if tuple(header) != COLUMNS or any(len(row) != len(COLUMNS) for row in rows):
        raise UserError(f"{path} is not a table of suspects; its columns must be {', '.join(COLUMNS)}.")
    return [dict(zip(COLUMNS, map(from_cell, row), strict=True)) for row in rows]
