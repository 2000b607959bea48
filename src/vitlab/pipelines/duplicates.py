"""Near-duplicates of test images in a training set: a list for `DataConfig.exclude`, and a page of the pairs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.data.dataset import Dataset
from vitlab.data.dedup import Duplicates, Pair, find_duplicates
from vitlab.data.exclude import image_id, write_lines
from vitlab.data.registry import check_source, load_dataset, require_disjoint
from vitlab.data.similarity import LARGEST, THRESHOLD
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError, quoted
from vitlab.inspect import overlays
from vitlab.inspect.figures import PageImage
from vitlab.inspect.page import page, write_page
from vitlab.train.workdir import write_json

SHOWN = 300
"""Maximum number of pairs on the page."""
HEIGHT = 192
"""Maximum longer side of an image on the page, in pixels."""


@dataclass(frozen=True)
class Source:
    """A data set by name, its split, and the folder that holds it."""

    name: str
    split: str
    root: str | None = None


def duplicates(
    train: Source, test: Source, out: str | Path, *, threshold: float = THRESHOLD, workers: int = 0
) -> dict[str, Any]:
    """Finds the images of `train` that are near-duplicates of images of `test`, and writes four files to `out`.

    duplicates.jsonl: every pair, the nearest first; exclude.txt: the training images of these pairs, for
    `DataConfig.exclude`; report.html: the pairs side by side; result.json: the returned counts and the images that
    could not be compared. Thumbnails stay in `out`/thumbnails, from which the same call continues.
    threshold: the largest distance of a pair (`vitlab.data.similarity.distances`). workers: threads that read images.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)  # before the images are read
    if not 0 < threshold <= LARGEST:
        raise UserError(f"threshold is {threshold}; it must be above 0 and at most {LARGEST} (default: {THRESHOLD}).")
    if train == test:
        raise UserError(f"{test.name} ({test.split}) was given twice: give another data set or split.")
    for source in (train, test):
        check_source(source.name, source.root)
    sets = _Sets(*(load_dataset(s.name, s.split, root=s.root, on_error="skip") for s in (train, test)))
    if (train.name, train.root) == (test.name, test.root):
        require_disjoint(sets.train, sets.test)
    with ProgressDisplay("duplicates", len(sets.test)) as display:
        search = find_duplicates(
            sets.train,
            sets.test,
            limit=min(1.3 * threshold, LARGEST),
            cache=out / "thumbnails",
            workers=workers,
            report=lambda stage, done, total: display.update(done, f"{stage} {done:,} of {total:,}", total=total),
        )
    pairs = [pair for pair in search.pairs if pair.distance <= threshold]
    result = _summary(search, pairs, sets, threshold)
    write_lines(out / "duplicates.jsonl", [json.dumps(sets.record(pair)) for pair in pairs])
    write_lines(out / "exclude.txt", [image_id(sets.train, i) for i in sorted({pair.train for pair in pairs})])
    sections: dict[str, Any] = {
        "pairs": [sets.image(pair) for pair in _nearest(pairs)[:SHOWN]],
        "beyond": [sets.image(pair) for pair in _nearest([p for p in search.pairs if p.distance > threshold])[:24]],
        "conflicts": [sets.image(pair) for pair in [p for p in pairs if sets.conflict(p)][:SHOWN]],
    }
    text = page(
        "duplicates.html.j2",
        "Near-duplicates of test images",
        f"Images of {train.name} ({train.split}) that are, but for size, compression, brightness, a narrow crop or a "
        f"mirror, images of {test.name} ({test.split}). A model trained on the one and tested on the other has seen "
        f"the test images.",
        results=_numbers(result),
        total=len(pairs),
        unreadable_rows=[(image["path"], image["reason"]) for image in result["unreadable"]],
        **sections,
    )
    write_page(out / "report.html", text)
    write_json(out / "result.json", result)
    return result


def as_text(result: dict[str, Any], out: Path) -> str:
    """A result in a few lines, for people."""
    lines = [f"{name}: {value}" for name, value in _numbers(result).items()]
    lines += [f"could not be read: {quoted(image['path'])}: {image['reason']}" for image in result["unreadable"]]
    lines.append(f"leave out in training: --data.exclude {out / 'exclude.txt'} · to look at: {out / 'report.html'}")
    return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class _Sets:
    """Both data sets, and what they say of a pair."""

    train: Dataset
    test: Dataset

    def conflict(self, pair: Pair) -> bool:
        """Whether two images of the same classes have no label in common."""
        labels = set(_labels(self.train, pair.train)) & set(_labels(self.test, pair.test))
        return self.train.classes == self.test.classes and not labels

    def record(self, pair: Pair) -> dict[str, Any]:
        return {
            "test": image_id(self.test, pair.test),
            "train": image_id(self.train, pair.train),
            "distance": pair.distance,
            "hash_distance": pair.bits,
            "flipped": pair.flipped,
            "test_label": ", ".join(_labels(self.test, pair.test)),
            "train_label": ", ".join(_labels(self.train, pair.train)),
            "conflict": self.conflict(pair),
        }

    def image(self, pair: Pair) -> PageImage:
        """The test image on the left, the training image on the right."""
        record = self.record(pair)
        small = [overlays.fit(image, HEIGHT) for image in (self.test.image(pair.test), self.train.image(pair.train))]
        both = overlays.beside(*small, gap=max(max(image.shape[1] for image in small) // 16, 1))
        mirrored = ", mirrored" if pair.flipped else ""
        names = [f"{record[f'{side}']} ({record[f'{side}_label']})" for side in ("test", "train")]
        return PageImage(
            overlays.encoded(both),
            f"Test image {names[0]} beside training image {names[1]}, at distance {pair.distance:.3f}{mirrored}.",
            280,
            f"{'LABELS CONFLICT: ' if record['conflict'] else ''}distance {pair.distance:.3f}, {pair.bits} bits"
            f"{mirrored}\n{names[0]}\n{names[1]}",
        )


def _labels(dataset: Dataset, index: int) -> list[str]:
    numbers = [dataset.labels[index]] if dataset.label_sets is None else dataset.label_sets.of(index)
    return [dataset.classes[number] for number in numbers]


def _summary(search: Duplicates, pairs: Sequence[Pair], sets: _Sets, threshold: float) -> dict[str, Any]:
    sides = {"train": (sets.train, search.train), "test": (sets.test, search.test)}
    unreadable = [
        {"path": dataset.path(i), "reason": reason}
        for dataset, omitted in sides.values()
        for i, reason in omitted.unreadable.items()
    ]
    return {
        **{
            side: {"name": dataset.name, "split": dataset.split, "images": len(dataset), "flat": len(omitted.flat)}
            for side, (dataset, omitted) in sides.items()
        },
        "threshold": threshold,
        "pairs": len(pairs),
        "test_images": len({pair.test for pair in pairs}),
        "train_images": len({pair.train for pair in pairs}),
        "mirrored_pairs": sum(pair.flipped for pair in pairs),
        "conflicting_pairs": sum(map(sets.conflict, pairs)),
        "unreadable": unreadable,
    }


def _numbers(result: dict[str, Any]) -> dict[str, str]:
    flat = result["train"]["flat"] + result["test"]["flat"]
    seen, tested = result["test_images"], result["test"]["images"]
    return {
        "Test images with a duplicate": f"{seen:,} of {tested:,} ({seen / tested:.2%})",
        "Training images to leave out": f"{result['train_images']:,} of {result['train']['images']:,}",
        "Pairs": f"{result['pairs']:,}",
        "Mirrored pairs": f"{result['mirrored_pairs']:,}",
        "Pairs with conflicting labels": f"{result['conflicting_pairs']:,}",
        "Largest distance": f"{result['threshold']:g}",
        "Blank images, not compared": f"{flat:,}",
        "Unreadable images": f"{len(result['unreadable']):,}",
    }


def _nearest(pairs: Sequence[Pair]) -> list[Pair]:
    """The nearest pair of each test image: copies of one do not fill the page."""
    first: dict[int, Pair] = {}
    for pair in pairs:
        first.setdefault(pair.test, pair)
    return list(first.values())
