"""Few-shot accuracy (Sec. 4.1) of a model: a few images of each class, and `ridge.py` on their features."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn

from vitlab.config import TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.registry import check_source, load_dataset, require_disjoint
from vitlab.errors import UserError, quoted
from vitlab.evaluate.accuracy import choose_device
from vitlab.evaluate.features import Features, cache_folder, check_options, features, frozen_preprocessing
from vitlab.evaluate.precision import load_for_judging, recorded
from vitlab.evaluate.ridge import L2_GRID, Ridge, choose_l2
from vitlab.models.config import Interpolation
from vitlab.models.vit import Model
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import SINGLE, World
from vitlab.train.workdir import write_json

SHOTS = (1, 5, 10, 25)
SEEDS = 3
L2 = 2.0**10  # big_vision's, the same for all


# --------------------------------------------------------------------------------------------------- choosing images


def draw(labels: Int[np.ndarray, " n"], num_classes: int, shots: int, seed: int | None) -> Int[np.ndarray, " m"]:
    """The first `shots` images of each class, class by class, after a shuffle by `seed`; None: in the set's order.

    A class with fewer gives what it has. The draws are big_vision's to the index, and with more shots come the same
    images and further ones.
    """
    order = np.argsort(labels, kind="stable")
    classes = np.split(order, np.searchsorted(labels[order], np.arange(1, num_classes)))
    if seed is not None:
        rng = np.random.default_rng(seed)
        classes = [rng.permutation(members) for members in classes]
    return np.concatenate([members[:shots] for members in classes])


# ----------------------------------------------------------------------------------------------- a model on a data set


@dataclass(frozen=True)
class FewShot:
    """Accuracies of one data set with one number of shots."""

    dataset: str
    shots: int
    l2: float
    accuracies: tuple[float, ...]
    """One for each seed; one alone where the first images of each class are taken."""
    train_images: int
    """With the first seed."""
    test_images: int
    skipped: int
    """Images that could not be read."""
    short_classes: int
    """Classes with fewer images than shots: they give what they have."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def deviation(self) -> float | None:
        """Standard deviation over seeds (n - 1), where there are several."""
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else None

    def record(self) -> dict[str, Any]:
        return asdict(self) | {"mean": self.mean, "deviation": self.deviation}


@dataclass(frozen=True)
class Split:
    """The few examples that any draw takes, and the test images, of one data set."""

    train: Dataset
    test: Dataset
    num_classes: int
    draws: dict[tuple[int, int], np.ndarray]
    """(shots, number of the draw) -> places in `train`."""
    short_classes: dict[int, int]


def few_examples(
    train: Dataset, test: Dataset, shots: Sequence[int], seeds: Sequence[int | None], test_images: int | None = None
) -> Split:
    """Draws once and for all, so that no other image of `train` need be looked at.

    Raises ValueError for sets of other classes, or with several labels a image.
    """
    for dataset in (train, test):
        if dataset.label_sets is not None:
            raise UserError(f"{dataset.name} has several labels a image; few-shot accuracy is of data with one.")
    if train.classes != test.classes:
        raise UserError(f"{train.name} has other classes in {train.split} than in {test.split}.")
    classes, labels = len(train.classes), train.labels
    if not len(labels) or not len(test):
        empty = test if len(labels) else train
        raise UserError(f"{empty.name} has no images in its split {empty.split!r}.")
    places = {(k, turn): draw(labels, classes, k, seed) for k in shots for turn, seed in enumerate(seeds)}
    needed = np.unique(np.concatenate(list(places.values())))
    draws = {key: np.searchsorted(needed, each) for key, each in places.items()}
    counts = np.bincount(labels, minlength=classes)
    short = {k: int((counts < k).sum()) for k in shots}
    if test_images is not None and test_images < len(test):
        test = test.take(np.arange(test_images) * len(test) // test_images)
    return Split(train.take(needed), test, classes, draws, short)


def accuracies(
    split: Split, train: Features, test: Features, l2s: Sequence[float]
) -> dict[int, Float[np.ndarray, "S L"]]:
    """For each number of shots the test accuracy of every draw and l2."""
    place = np.full(len(split.train), -1)
    place[train.indices] = np.arange(len(train.indices))
    found: dict[int, list[np.ndarray]] = {}
    for (shots, _), drawn in split.draws.items():
        rows = place[drawn]
        rows = rows[rows >= 0]  # images that could not be read are missing from their draw
        if not len(rows):
            raise UserError(f"none of the {len(drawn)} images drawn from {split.train.name} could be read.")
        ridge = Ridge(train.x[rows], train.labels[rows], split.num_classes)
        found.setdefault(shots, []).append(ridge.correct(test.x, test.labels, l2s).mean(axis=1))
    return {shots: np.stack(rows) for shots, rows in found.items()}


def during_training(
    config: TrainConfig, device: torch.device, world: World = SINGLE
) -> Callable[[nn.Module], dict[str, float]]:
    """What adds `fewshot_10shot` and its like to the figures of a run; nothing without `config.fewshot`.

    The images are drawn here, once; nothing random is touched later.
    """
    if config.fewshot is None:
        return lambda model: {}
    own, data = config.fewshot, config.data
    joined = {"trainval": {"train", "val"}, "all": {"train", "val", "test"}}
    learned, asked = (joined.get(split, {split}) for split in (data.train_split, own.test_split))
    if own.dataset is None and learned & asked:
        raise UserError(
            f"the few-shot test would be on {own.test_split}, which is part of what the run learns from "
            f"({data.train_split}); give --fewshot.test-split test, --data.train-split train or --fewshot.dataset."
        )
    name, root, classes = (own.dataset, own.root, None) if own.dataset else (data.name, data.root, data.classes)
    classes = classes if own.classes is None else own.classes
    # `data.part` does not count here: the few examples judge what a run has learned and teach it nothing, so they are
    # the same whatever part it learns from, and as many as the shots ask for.
    with world.rank_0_first():
        train, test = (
            load_dataset(name, split, root=root, classes=classes, on_error=data.on_error, exclude=exclude)
            for split, exclude in ((own.train_split, None if own.dataset else data.exclude), (own.test_split, None))
        )
    split = few_examples(train, test, own.shots, range(own.seeds), own.test_images)

    def judge(model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Model)
        prepared = data.preprocessing(model.config.image_size)
        train, test = _frozen(
            model, prepared, split, workers=data.workers, on_error=data.on_error, device=device, world=world
        )
        found = accuracies(split, train, test, [own.l2])
        return {f"fewshot_{shots}shot": float(values.mean()) for shots, values in found.items()}

    return judge


def _frozen(
    model: Model, preprocessing: Preprocessing, split: Split, label: str | None = None, **options: Any
) -> tuple[Features, Features]:
    """Features of the few examples and of the test images, prepared by `frozen_preprocessing`: no augmentation."""
    options["preprocessing"] = frozen_preprocessing(preprocessing, model.config.image_hw)
    train, test = (
        features(model, part, label=label and f"{label} {part.split}", **options) for part in (split.train, split.test)
    )
    return train, test


@dataclass(frozen=True)
class Report:
    """All that `fewshot_checkpoint` found: a row for every data set and number of shots."""

    checkpoint: str
    settings: dict[str, Any]
    rows: tuple[FewShot, ...]

    def record(self) -> dict[str, Any]:
        return {"checkpoint": self.checkpoint, "settings": self.settings, "rows": [row.record() for row in self.rows]}

    def as_table(self) -> str:
        """To be read by a person: mean +- standard deviation over seeds, and what there is to know beside."""
        names = [quoted(row.dataset) for row in self.rows]
        width = max(len("data set"), *map(len, names))
        lines = [f"{'data set':{width}}  shots         l2  accuracy"]
        for name, row in zip(names, self.rows, strict=True):
            spread = "" if row.deviation is None else f" ± {row.deviation:.2%}"
            notes = [f"{row.short_classes} classes have fewer images than shots"] if row.short_classes else []
            notes += [f"{row.skipped} images could not be read"] if row.skipped else []
            note = f"  ({'; '.join(notes)})" if notes else ""
            lines.append(f"{name:{width}}  {row.shots:5}  {row.l2:9g}  {row.mean:.2%}{spread}{note}")
        computed_in = self.settings.get("computed_in")
        return "\n".join([*lines, *([f"computed in {computed_in}"] if computed_in else [])])


def fewshot_checkpoint(
    checkpoint: str | Path,
    datasets: Sequence[str],
    *,
    root: str | None = None,
    shots: Sequence[int] = SHOTS,
    l2: Sequence[float] | None = None,
    seeds: int | None = None,
    original: bool = False,
    leave_self_out: bool = False,
    train_split: str | None = None,
    test_split: str = "test",
    partial: bool = False,
    test_images: int | None = None,
    image_size: int | None = None,
    interpolation: Interpolation | None = None,
    batch_size: int = 64,
    workers: int = 0,
    on_error: str = "raise",
    precision: str = "float32",
    device: str = "auto",
    say: Callable[[str], None] | None = None,
    cache: Path | None = None,
    out: Path | None = None,
    world: World = SINGLE,
) -> Report:
    """Few-shot accuracy of a checkpoint on one or several data sets.

    As in big_vision unless told otherwise: `l2` is 2^10, `seeds` 3 random draws. `original` is the form of the paper's
    time: the first images of each class, and of 30 l2 the one that ranks best over all data sets. Of several `l2`,
    too, the best by rank is taken for each number of shots: by the test images, as it was then, unless
    `leave_self_out`. Images are prepared by `frozen_preprocessing`, which `say` hears of. Features are kept
    in `cache` (the user's cache folder unless given), so that a second call, or one after an interruption, only
    computes what is missing. `out` receives the record as JSON. With several processes each computes a share of the
    features. train_split, partial: as in `probe_checkpoint`. Raises ValueError for bad settings, data or weights.
    """
    l2s, draws = _protocol(datasets, shots, l2, seeds, original, leave_self_out)
    place = choose_device(world.device(device))
    check_options(batch_size, out)
    for name in datasets:
        check_source(name, root)
    loaded = load_for_judging(
        checkpoint, place, precision, image_size=image_size, interpolation=interpolation, world=world
    )
    model, prepared = loaded.model, frozen_preprocessing(loaded.preprocessing, loaded.model.config.image_hw)
    if say:
        say(f"images: {prepared.describe()}")
    splits = []
    for name in datasets:
        with world.rank_0_first():
            train = load_dataset(
                name, train_split or "train", root=root, on_error=on_error, whole_train=train_split is None
            )
            test = load_dataset(name, test_split, root=root, on_error=on_error, partial=partial)
        if train_split is not None:
            require_disjoint(train, test)
        splits.append(few_examples(train, test, shots, draws, test_images))
    found, skipped = [], []
    for name, split in zip(datasets, splits, strict=True):
        train, test = _frozen(
            model, prepared, split, name, batch_size=batch_size, workers=workers, on_error=on_error, device=place,
            cache=cache or cache_folder(), world=world,
        )  # fmt: skip
        found.append(accuracies(split, train, test, l2s))
        skipped.append(train.skipped + test.skipped)
    rows = []
    for k in shots:
        chosen = choose_l2(np.stack([each[k].mean(axis=0) for each in found]), leave_self_out).tolist()
        rows += [
            FewShot(name, k, l2s[best], tuple(own[k][:, best].tolist()), len(split.draws[k, 0]), len(split.test), lost,
                    split.short_classes[k])
            for name, split, own, best, lost in zip(datasets, splits, found, chosen, skipped, strict=True)
        ]  # fmt: skip
    settings = {
        "shots": list(shots), "l2": list(l2s), "seeds": None if original else len(draws),
        "leave_self_out": leave_self_out, "train_split": train_split or "train", "test_split": test_split,
        "image_size": list(model.config.image_hw), "preprocessing": prepared.to_card(),
        **recorded(precision),
    }  # fmt: skip
    report = Report(str(checkpoint), settings, tuple(rows))
    if out is not None and world.is_rank_0:
        write_json(out, report.record())
    return report


def _protocol(
    datasets: Sequence[str],
    shots: Sequence[int],
    l2: Sequence[float] | None,
    seeds: int | None,
    original: bool,
    leave_self_out: bool,
) -> tuple[Sequence[float], list[int | None]]:
    """The l2 to try, and the seeds of the draws; raises ValueError for what makes no protocol."""
    if original and (l2 is not None or seeds is not None):
        raise UserError(
            "the original form takes the first images of each class and its own 30 l2; leave out l2 and seeds."
        )
    l2s = L2_GRID if original else (L2,) if l2 is None else l2
    draws: list[int | None] = [None] if original else list(range(SEEDS if seeds is None else seeds))
    if not (shots and min(shots) > 0 and draws and l2s and all(0 < each < np.inf for each in l2s)):
        raise UserError(
            f"shots {tuple(shots)}, seeds {len(draws)}, l2 {tuple(l2s)}: give at least one of each, and all positive."
        )
    if not datasets or len(set(datasets)) < len(datasets):
        raise UserError(f"data sets {tuple(datasets)}: name at least one, and each of them once.")
    if leave_self_out and (len(datasets) < 2 or len(l2s) < 2):
        raise UserError(
            f"leave_self_out chooses between several l2 by the other data sets; {len(l2s)} l2 and {len(datasets)} data "
            f"sets were given."
        )
    return l2s, draws
