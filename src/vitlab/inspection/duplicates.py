"""Near-duplicates of test images in a training set: a list for `DataConfig.exclude`, and pages that show the pairs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitlab.data.dataset import Dataset
from vitlab.data.dedup import MAX_THRESHOLD, THRESHOLD, Duplicates, Pair, find_duplicates
from vitlab.data.exclude import image_id, write_lines
from vitlab.data.registry import check_source, load_dataset, require_disjoint
from vitlab.errors import UserError, quoted
from vitlab.inspection.figures import PageImage, encode, fit, side_by_side
from vitlab.inspection.page import page
from vitlab.io import check_output, write_bytes
from vitlab.train.workdir import write_json

MAX_SHOWN = 300
"""Maximum number of pairs on the page."""
SIDE = 192
"""Maximum longer side of an image on the page, in pixels."""
FoundPair = tuple[Pair, dict[str, Any]]
"""A pair of near-duplicates, and its line of duplicates.jsonl."""


class SplitSpec(NamedTuple):
    """A split of a data set, by name; `root` is the folder that holds a named data set."""

    name: str
    split: str
    root: str | None = None


def duplicates(train: SplitSpec, test: SplitSpec, out: str | Path, *, threshold: float = THRESHOLD) -> dict[str, Any]:
    """Finds the images of `train` that are near-duplicates of images of `test`, and writes four files to `out`.

    duplicates.jsonl: every pair, the most similar first; exclude.txt: the training images of these pairs, for
    `DataConfig.exclude`; report.html: the pairs side by side; result.json: the returned counts and the images that
    could not be compared. threshold: the largest distance of a pair (`vitlab.data.dedup.distances`).
    """
    out = Path(out)
    check_output(out / "result.json")  # creates nothing: among class folders an empty `out` would be read as a class
    _check_request(train, test, threshold)
    train_set, test_set = (load_dataset(s.name, s.split, root=s.root, on_error="skip") for s in (train, test))
    if (train.name, train.root) == (test.name, test.root):
        require_disjoint(train_set, test_set)
    result, found = find_pairs(train_set, test_set, threshold)
    conflicts = [(pair, record) for pair, record in found if record["conflict"]]
    write_lines(out / "duplicates.jsonl", [json.dumps(record) for _, record in found])
    write_lines(out / "exclude.txt", [image_id(train_set, i) for i in sorted({pair.train for pair, _ in found})])
    text = page(
        "duplicates.html.j2",
        "Near-duplicates of test images",
        f"Images of {train.name} ({train.split}) that are also in {test.name} ({test.split}), except for size, "
        f"compression, brightness, a narrow crop or mirroring. A model trained on the first and tested on the second "
        f"has seen the test images.",
        results=format_counts(result),
        total=len(found),
        unreadable_rows=[(image["path"], image["reason"]) for image in result["unreadable"]],
        pairs=page_images(one_per_test_image(found), train_set, test_set),
        conflicts=page_images(conflicts, train_set, test_set),
    )
    write_bytes(out / "report.html", text.encode())
    write_json(out / "result.json", result)
    return result


def _check_request(train: SplitSpec, test: SplitSpec, threshold: float) -> None:
    """Raises UserError for a threshold out of range, for a split given twice, and for unknown data sets."""
    if not 0 < threshold <= MAX_THRESHOLD:
        raise UserError(
            f"threshold is {threshold}; it must be above 0 and at most {MAX_THRESHOLD} (default: {THRESHOLD})."
        )
    if train == test:
        raise UserError(f"{test.name} ({test.split}) was given twice: give another data set or split.")
    for source in (train, test):
        check_source(source.name, source.root)


def find_pairs(
    train_set: Dataset, test_set: Dataset, threshold: float, max_candidates: int | None = None
) -> tuple[dict[str, Any], list[FoundPair]]:
    """The content of result.json, and all pairs, the most similar first. max_candidates: as in `find_duplicates`."""
    search = find_duplicates(train_set, test_set, limit=threshold, max_candidates=max_candidates)
    records = _records(search.pairs, train_set, test_set)
    result = _summary(search, records, train_set, test_set, threshold)
    return result, list(zip(search.pairs, records, strict=True))


def _records(pairs: Sequence[Pair], train: Dataset, test: Dataset) -> list[dict[str, Any]]:
    """The lines of duplicates.jsonl; conflict: whether two images of the same classes have no label in common."""
    train_labels, test_labels = train.all_labels, test.all_labels
    records = []
    for pair in pairs:
        train_names = [train.classes[label] for label in train_labels.of_image(pair.train)]
        test_names = [test.classes[label] for label in test_labels.of_image(pair.test)]
        record = {
            "test": image_id(test, pair.test),
            "train": image_id(train, pair.train),
            "distance": pair.distance,
            "hash_distance": pair.bits,
            "flipped": pair.flipped,
            "test_label": ", ".join(test_names),
            "train_label": ", ".join(train_names),
            "conflict": train.classes == test.classes and not set(train_names) & set(test_names),
        }
        records.append(record)
    return records


def _summary(
    search: Duplicates, records: Sequence[dict[str, Any]], train: Dataset, test: Dataset, threshold: float
) -> dict[str, Any]:
    """The content of result.json."""
    sides = {"train": (train, search.train), "test": (test, search.test)}
    return {
        **{
            side: {"name": dataset.name, "split": dataset.split, "images": len(dataset), "flat": len(omitted.blank)}
            for side, (dataset, omitted) in sides.items()
        },
        "threshold": threshold,
        "pairs": len(records),
        "test_images": len({pair.test for pair in search.pairs}),
        "train_images": len({pair.train for pair in search.pairs}),
        "mirrored_pairs": sum(record["flipped"] for record in records),
        "conflicting_pairs": sum(record["conflict"] for record in records),
        "unreadable": [
            {"path": dataset.path(i), "reason": reason}
            for dataset, omitted in sides.values()
            for i, reason in sorted(omitted.unreadable.items())
        ],
    }


def one_per_test_image(found: Sequence[FoundPair]) -> list[FoundPair]:
    """The most similar pair of each test image, so that copies of one do not fill a page."""
    _, first = np.unique([pair.test for pair, _ in found], return_index=True)
    return [found[i] for i in np.sort(first).tolist()]


def page_images(found: Sequence[FoundPair], train: Dataset, test: Dataset) -> list[PageImage]:
    """The first MAX_SHOWN pairs, each side by side."""
    return [_side_by_side(train.image(p.train), test.image(p.test), record) for p, record in found[:MAX_SHOWN]]


def _side_by_side(train: np.ndarray, test: np.ndarray, record: dict[str, Any]) -> PageImage:
    """The test image on the left, the training image on the right."""
    left, right = fit(test, SIDE), fit(train, SIDE)
    gap = max(max(left.shape[1], right.shape[1]) // 16, 1)
    test_name = f"{record['test']} ({record['test_label']})"
    train_name = f"{record['train']} ({record['train_label']})"
    distance = f"distance {record['distance']:.3f}"
    mirrored = ", mirrored" if record["flipped"] else ""
    conflict = "LABELS CONFLICT: " if record["conflict"] else ""
    return PageImage(
        data=encode(side_by_side(left, right, gap)),
        alt=f"Test image {test_name} next to training image {train_name}, at {distance}{mirrored}.",
        width=280,
        caption=f"{conflict}{distance}, {record['hash_distance']} bits{mirrored}\n{test_name}\n{train_name}",
    )


def as_text(result: dict[str, Any], out: Path) -> str:
    """A result in a few lines, for people."""
    lines = [f"{name}: {value}" for name, value in format_counts(result).items()]
    lines += [f"could not be read: {quoted(image['path'])}: {image['reason']}" for image in result["unreadable"]]
    lines.append(f"leave out in training: --data.exclude {out / 'exclude.txt'} · to look at: {out / 'report.html'}")
    return "\n".join(lines)


def format_counts(result: dict[str, Any]) -> dict[str, str]:
    """The headline numbers of a result: title -> text."""
    blank = result["train"]["flat"] + result["test"]["flat"]
    copied, tested = result["test_images"], result["test"]["images"]
    return {
        "Test images with a duplicate": f"{copied:,} of {tested:,} ({copied / tested:.1%})",
        "Training images to leave out": f"{result['train_images']:,} of {result['train']['images']:,}",
        "Pairs": f"{result['pairs']:,}",
        "Mirrored pairs": f"{result['mirrored_pairs']:,}",
        "Pairs with conflicting labels": f"{result['conflicting_pairs']:,}",
        "Threshold of the distance": f"{result['threshold']:g}",
        "Blank images, not compared": f"{blank:,}",
        "Unreadable images": f"{len(result['unreadable']):,}",
    }
