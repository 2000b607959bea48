"""The commands that judge a checkpoint as it is: a test set, few shots, probes, single images."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from vitlab.commands.output import (
    Checkpoint,
    EvaluationSize,
    PositionInterpolation,
    print_note,
    print_result,
    print_start,
)

Mirror = Annotated[
    bool,
    tyro.conf.arg(help="Judge each image by the mean of the answers to it and to its mirror image: twice the time."),
]
Precision = Annotated[
    Literal["float32", "bfloat16"],
    tyro.conf.arg(help="Numbers to compute in; bfloat16 is faster on a GPU and some CPUs, and rounds."),
]
TrainSplit = Annotated[
    Literal["train", "val", "test", "trainval"] | None,
    tyro.conf.arg(
        help="Part to learn from. Unless given, train; of your own set without a val split all that the test leaves."
    ),
]
Partial = Annotated[
    bool, tyro.conf.arg(help="Accept a val folder of imagenet or imagenet_real that lacks images; the result says so.")
]


@dataclass(frozen=True)
class Evaluate:
    """Test a checkpoint on a data set: accuracy, loss, and each class by itself; with torchrun by several processes."""

    checkpoint: Checkpoint
    dataset: str | None = None
    """Data set, `folder:PATH` or `shards:PATH`; the one that the model was trained on unless given."""
    split: Literal["train", "val", "test", "trainval", "all"] = "test"
    """Part to test on; `all` is every image of the data set once."""
    root: str | None = None
    """Folder that holds a named data set."""
    image_size: EvaluationSize = None
    interpolation: PositionInterpolation = None
    resize: int | None = None
    """Bring the shorter side of each image to so many pixels and test the center; as the data set or the checkpoint
    says unless given, else the whole image is squashed to size."""
    batch_size: int = 256
    """Images at once, in each process."""
    workers: int = 0
    on_error: Literal["raise", "skip"] = "raise"
    mirror: Mirror = False
    partial: Partial = False
    precision: Precision = "float32"
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        print_start(f"loading {self.checkpoint}")
        from vitlab.evaluate.accuracy import evaluate_checkpoint
        from vitlab.train.distributed import init_distributed

        with init_distributed() as world:
            found = evaluate_checkpoint(
                self.checkpoint, self.dataset, self.split, root=self.root, image_size=self.image_size,
                interpolation=self.interpolation,
                say=print_note if world.is_rank_0 else None,
                resize=self.resize, batch_size=self.batch_size, workers=self.workers, on_error=self.on_error,
                mirror=self.mirror, partial=self.partial, precision=self.precision, device=self.device, world=world,
            )  # fmt: skip
        if world.is_rank_0:
            print_result(found.record(), self.json, found.as_table())
        return 0


@dataclass(frozen=True)
class Fewshot:
    """Few-shot accuracy of a checkpoint (Sec. 4.1): least squares on the frozen features of a few images a class."""

    checkpoint: Checkpoint
    dataset: tuple[str, ...]
    """One data set or several: names, `folder:PATH` or `shards:PATH`."""
    root: str | None = None
    """Folder that holds the named data sets."""
    shots: tuple[int, ...] = (1, 5, 10, 25)
    """Images of each class to learn from."""
    l2: tuple[float, ...] | None = None
    """Strength of the penalty, 2^10 unless given; of several the one that ranks best over the data sets is taken."""
    seeds: int | None = None
    """Random draws of those images, 3 unless given."""
    original: bool = False
    """The form of the paper's time: the first images of each class, l2 chosen from 2^-10 to 2^19 by rank."""
    leave_self_out: bool = False
    """Choose a data set's l2 by the other data sets only."""
    train_split: TrainSplit = None
    test_split: Literal["train", "val", "test", "trainval"] = "test"
    partial: Partial = False
    test_images: int | None = None
    """Test on no more images than these, taken evenly from the split."""
    image_size: EvaluationSize = None
    interpolation: PositionInterpolation = None
    batch_size: int = 64
    workers: int = 0
    on_error: Literal["raise", "skip"] = "raise"
    precision: Precision = "float32"
    device: str = "auto"
    cache: Path | None = None
    """Folder for the features; the user's cache folder unless given."""
    out: Path | None = None
    """JSON file for the result."""
    json: bool = False

    def run(self) -> int:
        print_start(f"loading {self.checkpoint}")
        from vitlab.evaluate.fewshot import fewshot_checkpoint
        from vitlab.train.distributed import init_distributed

        with init_distributed() as world:
            report = fewshot_checkpoint(
                self.checkpoint, self.dataset, root=self.root, shots=self.shots, l2=self.l2, seeds=self.seeds,
                original=self.original, leave_self_out=self.leave_self_out, train_split=self.train_split,
                test_split=self.test_split, partial=self.partial, test_images=self.test_images,
                image_size=self.image_size, interpolation=self.interpolation,
                say=print_note if world.is_rank_0 else None,
                batch_size=self.batch_size, workers=self.workers, on_error=self.on_error,
                precision=self.precision, device=self.device, cache=self.cache, out=self.out, world=world,
            )  # fmt: skip
        if world.is_rank_0:
            print_result(report.record(), self.json, report.as_table())
        return 0


@dataclass(frozen=True)
class Probe:
    """Probe a checkpoint's frozen features on a data set: nearest neighbors, or a linear (logistic) classifier."""

    checkpoint: Checkpoint
    dataset: str
    """Data set, `folder:PATH` or `shards:PATH`."""
    kind: Literal["knn", "linear"] = "knn"
    root: str | None = None
    """Folder that holds a named data set."""
    k: tuple[int, ...] | None = None
    """Numbers of neighbors; 1 to 200 unless given."""
    l2: tuple[float, ...] | None = None
    """Strengths of the linear probe's penalty; the best on a held-out part of train is taken."""
    train_split: TrainSplit = None
    test_split: Literal["train", "val", "test", "trainval"] = "test"
    partial: Partial = False
    image_size: EvaluationSize = None
    interpolation: PositionInterpolation = None
    batch_size: int = 64
    workers: int = 0
    on_error: Literal["raise", "skip"] = "raise"
    precision: Precision = "float32"
    device: str = "auto"
    cache: Path | None = None
    """Folder for the features; the user's cache folder unless given."""
    json: bool = False

    def run(self) -> int:
        print_start(f"loading {self.checkpoint}")
        from vitlab.evaluate.probe import probe_checkpoint
        from vitlab.train.distributed import init_distributed

        with init_distributed() as world:
            found = probe_checkpoint(
                self.checkpoint, self.dataset, self.kind, root=self.root, train_split=self.train_split,
                test_split=self.test_split, partial=self.partial, ks=self.k, l2=self.l2, image_size=self.image_size,
                interpolation=self.interpolation,
                say=print_note if world.is_rank_0 else None,
                batch_size=self.batch_size, workers=self.workers, on_error=self.on_error,
                precision=self.precision, device=self.device, cache=self.cache, world=world,
            )  # fmt: skip
        if world.is_rank_0:
            print_result(found.record(), self.json, found.as_table())
        return 0


@dataclass(frozen=True)
class Predict:
    """Name what is in images: the most probable classes of files, folders, or the standard input (-)."""

    checkpoint: Checkpoint
    sources: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGE ...")]
    """Images, folders of images, or - for the standard input (one image, or paths, one a line)."""
    top: int = 5
    image_size: EvaluationSize = None
    interpolation: PositionInterpolation = None
    mirror: Mirror = False
    precision: Precision = "float32"
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        print_start(f"loading {self.checkpoint}")
        from vitlab.evaluate.predict import predict

        failed = 0
        for said in predict(
            self.checkpoint, self.sources, top=self.top, image_size=self.image_size,
            interpolation=self.interpolation, mirror=self.mirror, precision=self.precision, device=self.device,
            say=print_note,
        ):  # fmt: skip
            failed += said.error is not None
            print_result(dataclasses.asdict(said), self.json, said.as_line(), lines=True)
        if failed:
            print_note(f"{failed} images could not be read (named above).")
        return 1 if failed else 0
