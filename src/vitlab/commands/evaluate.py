"""The commands that judge a checkpoint as it is: a test set, few shots, probes, single images."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from vitlab.commands.output import Checkpoint, EvaluationSize, PositionInterpolation, answer, begin, say
from vitlab.evaluate.options import EvalOptions, FewShotProtocol, ModelOptions, SplitOptions

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
    partial: Partial = False
    precision: Precision = "float32"
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        begin(f"loading {self.checkpoint}")
        from vitlab.evaluate.accuracy import evaluate_checkpoint
        from vitlab.train.distributed import init_distributed

        with init_distributed() as world:
            options = EvalOptions(
                image_size=self.image_size, interpolation=self.interpolation, precision=self.precision,
                device=self.device, batch_size=self.batch_size, workers=self.workers, on_error=self.on_error,
            )  # fmt: skip
            found = evaluate_checkpoint(
                self.checkpoint, self.dataset, self.split, options, root=self.root, resize=self.resize,
                partial=self.partial, log=say if world.is_rank_0 else lambda _: None, world=world,
            )  # fmt: skip
        if world.is_rank_0:
            answer(found.record(), self.json, found.as_table())
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
        begin(f"loading {self.checkpoint}")
        from vitlab.evaluate.fewshot import fewshot_checkpoint
        from vitlab.train.distributed import init_distributed

        with init_distributed() as world:
            options = EvalOptions(
                image_size=self.image_size, interpolation=self.interpolation, precision=self.precision,
                device=self.device, batch_size=self.batch_size, workers=self.workers, on_error=self.on_error,
            )  # fmt: skip
            protocol = FewShotProtocol(
                self.shots, self.l2, self.seeds, self.original, self.leave_self_out, self.test_images
            )
            splits = SplitOptions(self.root, self.train_split, self.test_split, self.partial)
            report = fewshot_checkpoint(
                self.checkpoint, self.dataset, protocol, splits, options, cache=self.cache, out=self.out,
                log=say if world.is_rank_0 else lambda _: None, world=world,
            )  # fmt: skip
        if world.is_rank_0:
            answer(report.record(), self.json, report.as_table())
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
        begin(f"loading {self.checkpoint}")
        from vitlab.evaluate.probe import probe_checkpoint
        from vitlab.train.distributed import init_distributed

        with init_distributed() as world:
            options = EvalOptions(
                image_size=self.image_size, interpolation=self.interpolation, precision=self.precision,
                device=self.device, batch_size=self.batch_size, workers=self.workers, on_error=self.on_error,
            )  # fmt: skip
            splits = SplitOptions(self.root, self.train_split, self.test_split, self.partial)
            found = probe_checkpoint(
                self.checkpoint, self.dataset, self.kind, splits, options, ks=self.k, l2=self.l2, cache=self.cache,
                log=say if world.is_rank_0 else lambda _: None, world=world,
            )  # fmt: skip
        if world.is_rank_0:
            answer(found.record(), self.json, found.as_table())
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
    precision: Precision = "float32"
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        begin(f"loading {self.checkpoint}")
        from vitlab.evaluate.predict import predict

        failed = 0
        options = ModelOptions(self.image_size, self.interpolation, self.precision, self.device)
        for said in predict(self.checkpoint, self.sources, options, top=self.top, log=say):
            failed += said.error is not None
            answer(dataclasses.asdict(said), self.json, said.as_line(), lines=True)
        if failed:
            say(f"{failed} images could not be read (named above).")
        return 1 if failed else 0
