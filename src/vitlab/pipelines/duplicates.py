"""Near-duplicates of test images in a training set: a list for `DataConfig.exclude`, and a page."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vitlab.data.dataset import Dataset
from vitlab.data.dedup import Duplicates, Pair, find_duplicates
from vitlab.data.exclude import image_id, write_lines
from vitlab.data.registry import check_source, load_dataset, require_disjoint
from vitlab.data.similarity import LARGEST, THRESHOLD
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError, quoted
from vitlab.inspect.duplicates import ShownPair, duplicates_page
from vitlab.inspect.page import write_page
from vitlab.train.workdir import write_json

SHOWN = 300
"""Maximum number of pairs on the page."""


def duplicates(
    train: str,
    test: str,
    out: str | Path,
    *,
    train_split: str = "trainval",
    test_split: str = "test",
    train_root: str | None = None,
    test_root: str | None = None,
    threshold: float = THRESHOLD,
    workers: int = 0,
) -> dict[str, Any]:
    """Finds the images of `train` that are near-duplicates of images of `test`, and writes four files to `out`.

    duplicates.jsonl: every pair, the nearest first; exclude.txt: the training images of these pairs, for
    `DataConfig.exclude`; report.html: the pairs side by side; result.json: the returned counts and the images that
    could not be compared. Thumbnails stay in `out`/thumbnails, from which the same call continues.
    threshold: the largest distance of a pair (`vitlab.data.similarity.distances`). workers: threads that read images.
    """
    out = Path(out)
    if not 0 < threshold <= LARGEST:
        raise UserError(f"threshold is {threshold}; it must be above 0 and at most {LARGEST} (default: {THRESHOLD}).")
    if workers < 0:
        raise UserError(f"workers is {workers}; it must not be negative.")
    if (train, train_root, train_split) == (test, test_root, test_split):
        raise UserError(
            f"{test} ({test_split}) was given twice: every image is its own duplicate. Give another data set or split."
        )
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} is a file; give a folder.")
    for name, root in ((train, train_root), (test, test_root)):
        check_source(name, root)
    here = load_dataset(train, train_split, root=train_root, on_error="skip")
    there = load_dataset(test, test_split, root=test_root, on_error="skip")
    if (train, train_root) == (test, test_root):
        require_disjoint(here, there)
    with _progress() as report:
        search = find_duplicates(
            here, there, limit=min(1.3 * threshold, LARGEST), cache=out / "thumbnails", workers=workers, report=report
        )
    pairs = [pair for pair in search.pairs if pair.distance <= threshold]
    result = _summary(search, pairs, here, there, threshold)
    write_lines(out / "duplicates.jsonl", [json.dumps(_record(pair, here, there)) for pair in pairs])
    write_lines(out / "exclude.txt", [image_id(here, i) for i in sorted({pair.train for pair in pairs})])
    shown = _nearest(pairs, SHOWN)
    beyond = _nearest([pair for pair in search.pairs if pair.distance > threshold], 24)
    conflicts = [pair for pair in pairs if _conflict(pair, here, there)][:SHOWN]
    lead = (
        f"Images of {train} ({train_split}) that are, but for size, compression, brightness, a narrow crop or a "
        f"mirror, images of {test} ({test_split}). A model trained on the one and tested on the other has seen "
        f"the answers."
    )
    text = duplicates_page(
        lead, _numbers(result), *([_shown(pair, here, there) for pair in part] for part in (shown, beyond, conflicts)),
        total=len(pairs), unreadable=[(image["path"], image["reason"]) for image in result["unreadable"]],
    )  # fmt: skip
    write_page(out / "report.html", text)
    write_json(out / "result.json", result)
    return result


def as_text(result: dict[str, Any], out: Path) -> str:
    """A result in a few lines, for people."""
    lines = [f"{name}: {value}" for name, value in _numbers(result).items()]
    if left := result["unreadable"]:
        lines.append(f"{len(left)} images could not be read:")
        lines += [f"  {quoted(image['path'])}: {image['reason']}" for image in left]
    lines.append(f"leave out in training: --data.exclude {out / 'exclude.txt'} · to look at: {out / 'report.html'}")
    return "\n".join(lines)


def _summary(
    search: Duplicates, pairs: Sequence[Pair], here: Dataset, there: Dataset, threshold: float
) -> dict[str, Any]:
    unreadable = [
        {"path": dataset.path(i), "reason": reason}
        for dataset, side in ((there, search.test), (here, search.train))
        for i, reason in side.unreadable.items()
    ]
    return {
        "train": {"name": here.name, "split": here.split, "images": len(here), "flat": len(search.train.flat)},
        "test": {"name": there.name, "split": there.split, "images": len(there), "flat": len(search.test.flat)},
        "threshold": threshold,
        "pairs": len(pairs),
        "test_images": len({pair.test for pair in pairs}),
        "train_images": len({pair.train for pair in pairs}),
        "mirrored_pairs": sum(pair.flipped for pair in pairs),
        "conflicting_pairs": sum(_conflict(pair, here, there) for pair in pairs),
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
        **({"Blank images, not compared": f"{flat:,}"} if flat else {}),
        **({"Unreadable images": f"{len(result['unreadable']):,}"} if result["unreadable"] else {}),
    }


def _record(pair: Pair, here: Dataset, there: Dataset) -> dict[str, Any]:
    return {
        "test": image_id(there, pair.test),
        "train": image_id(here, pair.train),
        "distance": pair.distance,
        "hash_distance": pair.bits,
        "flipped": pair.flipped,
        "test_label": _label(there, pair.test),
        "train_label": _label(here, pair.train),
        "conflict": _conflict(pair, here, there),
    }


def _labels(dataset: Dataset, index: int) -> list[str]:
    numbers = [dataset.labels[index]] if dataset.label_sets is None else dataset.label_sets.of(index)
    return [dataset.classes[number] for number in numbers]


def _label(dataset: Dataset, index: int) -> str:
    return ", ".join(_labels(dataset, index))


def _conflict(pair: Pair, here: Dataset, there: Dataset) -> bool:
    """Whether two images of the same classes have no label in common."""
    return here.classes == there.classes and not set(_labels(here, pair.train)) & set(_labels(there, pair.test))


def _nearest(pairs: Sequence[Pair], most: int) -> list[Pair]:
    """The nearest pair of each test image, of the first `most` test images: copies of one do not fill the page."""
    first: dict[int, Pair] = {}
    for pair in pairs:
        first.setdefault(pair.test, pair)
    return list(first.values())[:most]


def _shown(pair: Pair, here: Dataset, there: Dataset) -> ShownPair:
    return ShownPair(
        there.image(pair.test), here.image(pair.train), image_id(there, pair.test), image_id(here, pair.train),
        _label(there, pair.test), _label(here, pair.train), pair.distance, pair.bits, pair.flipped,
        _conflict(pair, here, there),
    )  # fmt: skip


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress display for each stage of the search, one after the other."""
    with contextlib.ExitStack() as stack:
        current: list[ProgressDisplay] = []

        def report(stage: str, done: int, total: int) -> None:
            if not current or current[0].label != stage:
                stack.close()
                current[:] = [stack.enter_context(ProgressDisplay(stage, total))]
            current[0].update(done)

        yield report
