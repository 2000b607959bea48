"""The commands that evaluate a checkpoint as it is: on a test set, with few shots, by probes, on single images."""

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from vitlab.commands import IMAGES, Checkpoint, Json, discard, print_note, print_result, read_names
from vitlab.commands.check import check_inputs
from vitlab.errors import UserError
from vitlab.evaluation.options import (
    FEWSHOT_DEFAULTS,
    EvalOptions,
    FeatureOptions,
    FewShotProtocol,
    ModelOptions,
    SplitOptions,
)

if TYPE_CHECKING:
    from vitlab.evaluation.predict import Prediction

Flat = tyro.conf.arg(name="")  # `--device`, not `--options.device`


@dataclass(frozen=True)
class Evaluate:
    """Test a checkpoint on a data set: accuracy, loss, and each class by itself; with torchrun by several processes."""

    checkpoint: Checkpoint
    dataset: str | None = None
    """Data set, `folder:PATH`, `csv:PATH` or `shards:PATH`, by default the one that the model was trained on."""
    split: Literal["train", "val", "test", "trainval", "all"] = "test"
    """Part to test on; `all` is every image of the data set once."""
    root: str | None = None
    """Folder that holds a named data set."""
    resize: int | None = None
    """Resize the shorter side of each image to this many pixels and crop the center, by default as the data set or the
    checkpoint says; else the whole image is squashed to size."""
    partial: bool = False
    """Accept a val folder of imagenet or imagenet_real with missing images; the result says so."""
    options: Annotated[EvalOptions, Flat] = EvalOptions(batch_size=256)
    json: Json = False

    def run(self) -> int:
        print_note(f"loading {self.checkpoint} ...")
        check_inputs(self.checkpoint, self.dataset, root=self.root)
        from vitlab.evaluation.accuracy import evaluate_checkpoint
        from vitlab.train.distributed import init_distributed

        with init_distributed() as world:
            options: dict[str, Any] = {"root": self.root, "resize": self.resize, "partial": self.partial}
            evaluation = evaluate_checkpoint(
                self.checkpoint, self.dataset, self.split, self.options, **options, log=print_note, world=world
            )
        source = {"checkpoint": self.checkpoint, "dataset": self.dataset, "split": self.split}
        print_result(source | evaluation.record(), self.json, evaluation.as_table())
        return 0


@dataclass(frozen=True)
class Fewshot:
    """Few-shot accuracy of a checkpoint (Sec. 4.1): least squares on the frozen features of a few images per class."""

    checkpoint: Checkpoint
    dataset: tuple[str, ...]
    """One data set or several: names, `folder:PATH`, `csv:PATH` or `shards:PATH`."""
    protocol: Annotated[FewShotProtocol, Flat] = FewShotProtocol()
    splits: Annotated[SplitOptions, Flat] = SplitOptions()
    options: Annotated[FeatureOptions, Flat] = FEWSHOT_DEFAULTS
    cache: Path | None = None
    """Folder for the features. Default: in the cache folder."""
    out: Path | None = None
    """JSON file for the result."""
    json: Json = False

    def run(self) -> int:
        print_note(f"loading {self.checkpoint} ...")
        check_inputs(self.checkpoint, *self.dataset, root=self.splits.root)
        from vitlab.evaluation.fewshot_checkpoint import fewshot_checkpoint, format_fewshot
        from vitlab.train.distributed import init_distributed

        with init_distributed() as world:
            options: dict[str, Any] = {"cache": self.cache, "out": self.out, "log": print_note, "world": world}
            groups = (self.protocol, self.splits, self.options)
            report = fewshot_checkpoint(self.checkpoint, self.dataset, *groups, **options)
        print_result(report, self.json, format_fewshot(report))
        return 0


@dataclass(frozen=True)
class Probe:
    """Probe a checkpoint's frozen features on a data set: nearest neighbors, or a linear (logistic) classifier."""

    checkpoint: Checkpoint
    dataset: str
    """Data set, `folder:PATH`, `csv:PATH` or `shards:PATH`."""
    kind: Literal["knn", "linear"] = "knn"
    """Nearest neighbors, or a linear (logistic) classifier."""
    k: tuple[int, ...] | None = None
    """Numbers of neighbors, by default 1 to 200."""
    l2: tuple[float, ...] | None = None
    """Strengths of the linear probe's penalty; the best on a held-out part of train is taken."""
    splits: Annotated[SplitOptions, Flat] = SplitOptions()
    options: Annotated[FeatureOptions, Flat] = FeatureOptions()
    cache: Path | None = None
    """Folder for the features. Default: in the cache folder."""
    json: Json = False

    def run(self) -> int:
        print_note(f"loading {self.checkpoint} ...")
        check_inputs(self.checkpoint, self.dataset, root=self.splits.root)
        from vitlab.evaluation.probe import format_probe, probe_checkpoint
        from vitlab.train.distributed import init_distributed

        with init_distributed() as world:
            options: dict[str, Any] = {"ks": self.k, "l2": self.l2, "cache": self.cache, "log": print_note}
            record = probe_checkpoint(
                self.checkpoint, self.dataset, self.kind, self.splits, self.options, **options, world=world
            )
        print_result(record, self.json, format_probe(record))
        return 0


@dataclass(frozen=True)
class Features:
    """Write the representations of a data set's images to a file, with their paths, for search and clustering."""

    checkpoint: Checkpoint
    dataset: str
    """Data set, `folder:PATH`, `csv:PATH` or `shards:PATH`."""
    out: Path = Path("features.npz")
    """File to write: .npz, or .parquet (requires pyarrow)."""
    split: Literal["train", "val", "test", "trainval", "all"] = "all"
    """Part of the data set; `all` is every image once."""
    root: str | None = None
    """Folder that holds a named data set."""
    options: Annotated[FeatureOptions, Flat] = FeatureOptions()
    cache: Path | None = None
    """Folder for the features. Default: in the cache folder."""
    json: Json = False

    def run(self) -> int:
        print_note(f"loading {self.checkpoint} ...")
        check_inputs(self.checkpoint, self.dataset, root=self.root)
        from vitlab.evaluation.frozen import write_features
        from vitlab.train.distributed import init_distributed

        with init_distributed() as world:
            paths: dict[str, Any] = {"root": self.root, "cache": self.cache, "log": print_note, "world": world}
            result = write_features(self.checkpoint, self.dataset, self.out, self.split, self.options, **paths)
        sizes = f"{result['images']:,} images, {result['dimensions']:,} numbers each"
        print_result(result, self.json, f"{self.out}: {sizes}; {result['skipped']} could not be read")
        return 0


@dataclass(frozen=True)
class Predict:
    """Name what is in images: the most probable classes of files and folders."""

    checkpoint: Checkpoint
    sources: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGE ...", help=IMAGES)]
    top: int = 5
    """Classes per image."""
    reject_below: float | Literal["auto"] | None = None
    """Say "not sure" of images whose highest probability is below this one; auto is the checkpoint's own threshold,
    chosen on held-out images. Not for several labels, each of which has its threshold."""
    coverage: float | None = None
    """Print a set of classes for each image, which has the right one in this fraction of images, such as 0.9."""
    csv: Path | None = None
    """CSV file for the predictions, with a row for each image as soon as it is done."""
    options: Annotated[ModelOptions, Flat] = ModelOptions()
    json: Json = False

    def run(self) -> int:
        print_note(f"loading {self.checkpoint} ...")
        check_inputs(self.checkpoint, images=(images := read_names(self.sources)))
        from vitlab.evaluation.predict import predict, writing_table

        if self.csv is not None and self.csv.is_dir():
            raise UserError(f"--csv {self.csv} is a folder; give the name of a file.")
        done = failed = 0
        options: dict[str, Any] = {"top": self.top, "reject_below": self.reject_below, "coverage": self.coverage}
        options["log"] = print_note
        with contextlib.nullcontext() if self.csv is None else writing_table(self.csv) as write_row:
            try:
                for prediction in predict(self.checkpoint, images, self.options, **options):
                    if write_row:
                        write_row(prediction)
                    done += 1
                    failed += prediction.error is not None
                    self._print(prediction)
            except KeyboardInterrupt:
                print_note(f"{done} images were done{f' and are in {self.csv}' if write_row else ''}")
                raise
        if failed:
            print_note(f"{failed} images could not be read (named above).")
        return 1 if failed else 0

    def _print(self, prediction: "Prediction") -> None:
        try:
            print_result(prediction.record(), self.json, prediction.as_line(), lines=True)
        except BrokenPipeError:  # the reader has ended (`| head`), and the file is still to be completed
            if self.csv is None:
                raise
            discard(sys.stdout)
