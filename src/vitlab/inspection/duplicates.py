"""Near-duplicates of test images in a training set: a list for `DataConfig.exclude`, and a page of the pairs."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitlab.data.dataset import Dataset
from vitlab.data.dedup import MAX_THRESHOLD, THRESHOLD, Duplicates, Pair, find_duplicates
from vitlab.data.exclude import image_id, write_lines
from vitlab.data.registry import check_source, load_dataset, require_disjoint
from vitlab.errors import UserError, quoted
from vitlab.inspection.figures import PageImage, encode, fit, side_by_side
from vitlab.inspection.page import page, write_page
from vitlab.io import check_output
from vitlab.train.workdir import write_json

MAX_SHOWN = 300
"""Maximum number of pairs on the page."""
HEIGHT = 192
"""Maximum longer side of an image on the page, in pixels."""
Row = tuple[Pair, dict[str, Any]]
"""A pair and its line of duplicates.jsonl."""


class Source(NamedTuple):
    """A data set by name, its split, and the folder that holds it."""

    name: str
    split: str
    root: str | None = None


def duplicates(train: Source, test: Source, out: str | Path, *, threshold: float = THRESHOLD) -> dict[str, Any]:
    """Finds the images of `train` that are near-duplicates of images of `test`, and writes four files to `out`.

    duplicates.jsonl: every pair, the most similar first; exclude.txt: the training images of these pairs, for
    `DataConfig.exclude`; report.html: the pairs side by side; result.json: the returned counts and the images that
    could not be compared. threshold: the largest distance of a pair (`vitlab.data.dedup.distances`).
    """
    out = Path(out)
    check_output(out / "result.json")  # before the images are read, among which an empty folder would be a class
    if not 0 < threshold <= MAX_THRESHOLD:
        raise UserError(
            f"threshold is {threshold}; it must be above 0 and at most {MAX_THRESHOLD} (default: {THRESHOLD})."
        )
    if train == test:
        raise UserError(f"{test.name} ({test.split}) was given twice: give another data set or split.")
    for source in (train, test):
        check_source(source.name, source.root)
    train_set, test_set = (load_dataset(s.name, s.split, root=s.root, on_error="skip") for s in (train, test))
    if (train.name, train.root) == (test.name, test.root):
        require_disjoint(train_set, test_set)
    result, rows = find_pairs(train_set, test_set, threshold)
    records = [record for _, record in rows]
    write_lines(out / "duplicates.jsonl", map(json.dumps, records))
    write_lines(out / "exclude.txt", [image_id(train_set, i) for i in sorted({pair.train for pair, _ in rows})])
    text = page(
        "duplicates.html.j2",
        "Near-duplicates of test images",
        f"Images of {train.name} ({train.split}) that are also in {test.name} ({test.split}), except for size, "
        f"compression, brightness, a narrow crop or mirroring. A model trained on the first and tested on the second "
        f"has seen the test images.",
        results=numbers_of(result),
        total=len(records),
        unreadable_rows=[(image["path"], image["reason"]) for image in result["unreadable"]],
        pairs=page_images(one_of_each(rows), train_set, test_set),
        conflicts=page_images([row for row in rows if row[1]["conflict"]], train_set, test_set),
    )
    write_page(out / "report.html", text)
    write_json(out / "result.json", result)
    return result


def find_pairs(
    train_set: Dataset, test_set: Dataset, threshold: float, max_candidates: int | None = None
) -> tuple[dict[str, Any], list[Row]]:
    """The content of result.json, and the pairs with their lines of duplicates.jsonl, the most similar first.

    max_candidates: as in `find_duplicates`.
    """
    search = find_duplicates(train_set, test_set, limit=threshold, max_candidates=max_candidates)
    rows = [(pair, _record(pair, train_set, test_set)) for pair in search.pairs]
    return _summary(search, [record for _, record in rows], train_set, test_set, threshold), rows


def one_of_each(rows: list[Row]) -> list[Row]:
    """The most similar pair of each test image, so that copies of one do not fill a page."""
    _, first = np.unique([pair.test for pair, _ in rows], return_index=True)
    return [rows[i] for i in np.sort(first).tolist()]


def page_images(rows: list[Row], train_set: Dataset, test_set: Dataset) -> list[PageImage]:
    """The first MAX_SHOWN pairs, each side by side."""
    return [_image(train_set.image(p.train), test_set.image(p.test), record) for p, record in rows[:MAX_SHOWN]]


def as_text(result: dict[str, Any], out: Path) -> str:
    """A result in a few lines, for people."""
    lines = [f"{name}: {value}" for name, value in numbers_of(result).items()]
    lines += [f"could not be read: {quoted(image['path'])}: {image['reason']}" for image in result["unreadable"]]
    lines.append(f"leave out in training: --data.exclude {out / 'exclude.txt'} · to look at: {out / 'report.html'}")
    return "\n".join(lines)


def _record(pair: Pair, train: Dataset, test: Dataset) -> dict[str, Any]:
    """A line of duplicates.jsonl; conflict: whether two images of the same classes have no label in common."""
    train_labels, test_labels = _labels(train, pair.train), _labels(test, pair.test)
    return {
        "test": image_id(test, pair.test),
        "train": image_id(train, pair.train),
        "distance": pair.distance,
        "hash_distance": pair.bits,
        "flipped": pair.flipped,
        "test_label": ", ".join(test_labels),
        "train_label": ", ".join(train_labels),
        "conflict": train.classes == test.classes and not set(train_labels) & set(test_labels),
    }


def _labels(dataset: Dataset, index: int) -> list[str]:
    numbers = [dataset.labels[index]] if dataset.label_sets is None else dataset.label_sets.of_image(index)
    return [dataset.classes[number] for number in numbers]


def _image(train: np.ndarray, test: np.ndarray, record: dict[str, Any]) -> PageImage:
    """The test image on the left, the training image on the right."""
    small = [fit(image, HEIGHT) for image in (test, train)]
    both = side_by_side(*small, gap=max(max(image.shape[1] for image in small) // 16, 1))
    test_name, train_name = (f"{record[side]} ({record[f'{side}_label']})" for side in ("test", "train"))
    conflict, mirrored = "LABELS CONFLICT: " * record["conflict"], ", mirrored" * record["flipped"]
    distance = f"distance {record['distance']:.3f}"
    return PageImage(
        encode(both),
        f"Test image {test_name} next to training image {train_name}, at {distance}{mirrored}.",
        280,
        f"{conflict}{distance}, {record['hash_distance']} bits{mirrored}\n{test_name}\n{train_name}",
    )


def _summary(
    search: Duplicates, records: list[dict[str, Any]], train: Dataset, test: Dataset, threshold: float
) -> dict[str, Any]:
    sides = {"train": (train, search.train), "test": (test, search.test)}
    summary: dict[str, Any] = {
        side: {"name": dataset.name, "split": dataset.split, "images": len(dataset), "flat": len(omitted.blank)}
        for side, (dataset, omitted) in sides.items()
    }
    unreadable = [
        {"path": dataset.path(i), "reason": reason}
        for dataset, omitted in sides.values()
        for i, reason in sorted(omitted.unreadable.items())
    ]
    return {
        **summary,
        "threshold": threshold,
        "pairs": len(records),
        "test_images": len({pair.test for pair in search.pairs}),
        "train_images": len({pair.train for pair in search.pairs}),
        "mirrored_pairs": sum(record["flipped"] for record in records),
        "conflicting_pairs": sum(record["conflict"] for record in records),
        "unreadable": unreadable,
    }


def numbers_of(result: dict[str, Any]) -> dict[str, str]:
    """The headline numbers of a search as text."""
    blank = result["train"]["flat"] + result["test"]["flat"]
    copied, tested = result["test_images"], result["test"]["images"]
    return {
        "Test images with a duplicate": f"{copied:,} of {tested:,} ({copied / tested:.2%})",
        "Training images to leave out": f"{result['train_images']:,} of {result['train']['images']:,}",
        "Pairs": f"{result['pairs']:,}",
        "Mirrored pairs": f"{result['mirrored_pairs']:,}",
        "Pairs with conflicting labels": f"{result['conflicting_pairs']:,}",
        "Largest distance": f"{result['threshold']:g}",
        "Blank images, not compared": f"{blank:,}",
        "Unreadable images": f"{len(result['unreadable']):,}",
    }
