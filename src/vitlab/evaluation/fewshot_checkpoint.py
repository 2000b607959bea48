"""Few-shot accuracy of a checkpoint on data sets: what `vitlab fewshot` prints. `fewshot.py` has the algebra."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from vitlab.data.registry import check_source
from vitlab.display import format_table
from vitlab.errors import UserError, quoted
from vitlab.evaluation.features import Features
from vitlab.evaluation.fewshot import FewShotData, accuracies, choose_l2, sample_examples
from vitlab.evaluation.frozen import FrozenModel
from vitlab.evaluation.load import computed_in, load_train_and_test
from vitlab.evaluation.options import FEWSHOT_DEFAULTS, FeatureOptions, FewShotProtocol, SplitOptions
from vitlab.evaluation.readouts import Readout, candidates, compare_readouts, is_enough, readout_features
from vitlab.train.distributed import SINGLE, World
from vitlab.train.workdir import write_json


def fewshot_checkpoint(
    checkpoint: str | Path,
    datasets: Sequence[str],
    protocol: FewShotProtocol = FewShotProtocol(),
    splits: SplitOptions = SplitOptions(),
    options: FeatureOptions = FEWSHOT_DEFAULTS,
    *,
    cache: Path | None = None,
    out: Path | None = None,
    log: Callable[[str], None] = lambda _: None,
    world: World = SINGLE,
) -> dict[str, Any]:
    """Few-shot accuracies of a checkpoint, as plain data: a row for every number of shots and data set.

    A row has one accuracy for each seed, their mean and their standard deviation (n - 1); `short_classes` is the number
    of classes with fewer images than shots, which give all of them. Of several l2 one is chosen for each number of
    shots, by its rank over the data sets. Images are prepared by `frozen_preprocessing`, which is described to `log`;
    features are cached in `cache` (default: the user's cache folder). `out` receives the result as JSON. Raises
    UserError for bad settings, data or weights.
    """
    if protocol.leave_self_out and (len(datasets) < 2 or len(protocol.l2_grid) < 2):
        counts = f"{len(protocol.l2_grid)} l2 and {len(datasets)} data sets"
        raise UserError(f"leave_self_out chooses between several l2 by the other data sets; there are {counts}.")
    if options.compile and options.layer == "auto":
        raise UserError("compile=True has no effect with layer='auto' in few-shot evaluation; leave one of them out.")
    if out is not None and out.is_dir():
        raise UserError(f"{out} is a folder; give the name of a file.")
    for name in datasets:
        check_source(name, splits.root)  # before anything is loaded
    frozen = FrozenModel.load(checkpoint, options, cache, log, world)
    model, preprocessing = frozen.model, frozen.preprocessing
    samples: list[FewShotData] = []
    for name in datasets:
        train, test = load_train_and_test(name, splits, options.on_error, world, preprocessing.range, options)
        samples.append(sample_examples(train, test, protocol.shots, protocol.sample_seeds, protocol.test_images))
    evaluated = [_evaluate(frozen, examples, protocol.l2_grid) for examples in samples]
    rows = []
    for k in protocol.shots:
        means = np.stack([each.accuracies[k].mean(axis=0) for each in evaluated])
        best = choose_l2(means, protocol.leave_self_out).tolist()  # for each data set, a position in l2_grid
        for name, examples, results, l2_index in zip(datasets, samples, evaluated, best, strict=True):
            l2, by_sample = protocol.l2_grid[l2_index], results.accuracies[k][:, l2_index].tolist()
            rows.append(_row(name, examples, k, l2, by_sample, results.skipped) | results.represented[k])
    settings = {
        "shots": list(protocol.shots),
        "l2": list(protocol.l2_grid),
        "seeds": None if protocol.original else len(protocol.sample_seeds),
        "leave_self_out": protocol.leave_self_out,
        "train_split": splits.train_split or "train",
        "test_split": splits.test_split,
        "image_size": list(model.config.image_hw),
        "preprocessing": preprocessing.to_metadata(),
        "computed_in": computed_in(model),
    }
    report = {"checkpoint": str(checkpoint), "settings": settings, "rows": rows}
    if out is not None and world.is_rank_0:
        write_json(out, report)
    return report


class _Evaluated(NamedTuple):
    """The results of a checkpoint on a data set. The keys are numbers of shots."""

    accuracies: dict[int, Float[np.ndarray, "S L"]]
    """Test accuracies of S samples with L penalties."""
    skipped: int
    """Unreadable images."""
    represented: dict[int, dict[str, Any]]
    """What represents an image, as entries of a row: one for all samples, or under `layers` one for each sample."""


def _evaluate(frozen: FrozenModel, data: FewShotData, l2s: Sequence[float]) -> _Evaluated:
    """The accuracies of all samples. With `layer="auto"` each sample chooses its representation."""
    choose = frozen.options.layer == "auto"
    readouts = candidates(frozen.model.config, frozen.options.pool, joined=True) if choose else ()
    if not readouts:
        train, test = frozen.features(data.train), frozen.features(data.test)
        shots = {k for k, _ in data.subsets}
        represented = dict.fromkeys(shots, frozen.to_record())
        return _Evaluated(accuracies(data, train, test, l2s), train.skipped + test.skipped, represented)
    settings: dict[str, Any] = {"preprocessing": frozen.preprocessing, "cache": frozen.cache, "world": frozen.world}
    trains, tests = (
        readout_features(frozen.model, part, readouts, frozen.options, **settings) for part in (data.train, data.test)
    )
    by_shots: dict[int, list[np.ndarray]] = {}
    chosen: dict[int, list[dict[str, Any]]] = {}
    for (shots, sample), indices in data.subsets.items():
        # Each sample chooses by itself: no row sees the labels of more images than its shots.
        readout = _choose(trains, data, indices)
        this_sample = dataclasses.replace(data, subsets={(shots, sample): indices})
        by_shots.setdefault(shots, []).extend(accuracies(this_sample, trains[readout], tests[readout], l2s)[shots])
        chosen.setdefault(shots, []).append(readout.to_record())
    skipped = trains[readouts[0]].skipped + tests[readouts[0]].skipped
    represented = {shots: {"layers": each} for shots, each in chosen.items()}
    return _Evaluated({shots: np.stack(rows) for shots, rows in by_shots.items()}, skipped, represented)


def _choose(trains: Mapping[Readout, Features], data: FewShotData, indices: Int[np.ndarray, " m"]) -> Readout:
    """The representation of least loss for a sample; the last block with the checkpoint's pooling (without pre_logits)
    if it is too small."""
    own = list(trains)[-1]
    rows = np.flatnonzero(np.isin(trains[own].indices, indices))
    classes, groups = len(data.train.classes), data.train.groups
    if groups is not None:
        groups = np.unique(groups[trains[own].indices[rows]], return_inverse=True)[1]
    if not is_enough(len(rows), classes, groups):
        return own
    xs = {readout: each.x[rows] for readout, each in trains.items()}
    return compare_readouts(xs, trains[own].labels[rows], classes, groups).chosen


def _row(
    name: str, data: FewShotData, shots: int, l2: float, accuracies_by_seed: list[float], skipped: int
) -> dict[str, Any]:
    """One row of the report."""
    return {
        "dataset": name,
        "shots": shots,
        "l2": l2,
        "accuracies": accuracies_by_seed,
        "mean": float(np.mean(accuracies_by_seed)),
        "deviation": float(np.std(accuracies_by_seed, ddof=1)) if len(accuracies_by_seed) > 1 else None,
        "train_images": len(data.subsets[shots, 0]),  # of the first sample
        "test_images": len(data.test),
        "skipped": skipped,
        "short_classes": data.short_classes[shots],
    }


def format_fewshot(report: Mapping[str, Any]) -> str:
    """The result of `fewshot_checkpoint` as a table: mean and standard deviation over seeds."""
    cells = []
    for row in report["rows"]:
        notes = [f"{row['short_classes']} classes have fewer images than shots"] if row["short_classes"] else []
        notes += [f"{row['skipped']} images could not be read"] if row["skipped"] else []
        std = "" if row["deviation"] is None else f" ± {row['deviation']:.2%}"
        names = {"data set": quoted(row["dataset"]), "shots": row["shots"], "l2": f"{row['l2']:g}"}
        cells.append({**names, "accuracy": f"{row['mean']:.2%}{std}", "": "; ".join(notes)})
    return f"{format_table(cells)}\ncomputed in {report['settings']['computed_in']}"
