"""The commands: each is arguments -> one library call -> print. Nothing here needs torch until it runs."""

import contextlib
import dataclasses
import json
import sys
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from vitlab.models.config import ImageSize
from vitlab.settings import nearest, to_dict
from vitlab.train.config import FinetuneConfig, TrainConfig
from vitlab.train.devices import DEVICES

CHECKPOINTS = "A Google .npz, a folder (saved model, run, timm, Hugging Face), hub:OWNER/NAME or timm:NAME.TAG."
Checkpoint = Annotated[Positional[str], tyro.conf.arg(metavar="CHECKPOINT", help=CHECKPOINTS)]
# `--optim.lr`, not `--config.optim.lr`
RunConfig = Annotated[TrainConfig, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]
FinetuneRunConfig = Annotated[FinetuneConfig, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands]


@dataclass(frozen=True)
class Demo:
    """Pre-train, carry to a higher resolution, test and look: the paper in two minutes, on handwritten digits."""

    out: Path = Path("vitlab-demo")
    """Folder for the runs and the page."""
    seed: int = 0
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        from vitlab.studies.demo import demo

        result = demo(self.out, seed=self.seed)
        _answer(result, self.json, f"pre-trained: {result['pretrain_accuracy']:.1%} of the test digits right · "
                f"carried to twice the resolution: {result['finetune_accuracy']:.1%}\n{result['page']}")  # fmt: skip
        return 0


@dataclass(frozen=True)
class List:
    """What there is by name: models, data sets, recipes, studies, or the tasks of VTAB-1k and how their data is had."""

    what: Positional[Literal["models", "datasets", "recipes", "studies", "vtab"]]
    """What to list."""
    pattern: Annotated[Positional[str], tyro.conf.arg(metavar="PATTERN")] = "*"
    """Shell pattern for the names, e.g. `ViT-B*`."""
    root: Path | None = None
    """With `vtab`: a folder to look into for the tasks' data."""
    json: bool = False

    def run(self) -> int:
        from vitlab import catalogue

        if self.root and self.what != "vtab":
            raise ValueError(
                f"--root has no effect on a list of {self.what}: only `vitlab list vtab` looks into a folder."
            )
        rows = getattr(catalogue, self.what)(self.pattern, **({"root": self.root} if self.root else {}))
        _answer(rows, self.json, catalogue.as_table(rows))
        return 0


@dataclass(frozen=True)
class Pretrain:
    """Train a model from scratch by a recipe (Table 3, or a small twin), then test it. Continues where it stopped."""

    recipe: Annotated[Positional[str], tyro.conf.arg(metavar="RECIPE")]
    """One of `vitlab list recipes`."""
    config: RunConfig
    model_name: Annotated[str | None, tyro.conf.arg(name="model")] = None
    """Name of the model for this recipe (`vitlab list models`)."""
    workdir: Path | None = None
    """The run's folder; `runs/RECIPE` unless given."""
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        from vitlab.train.distributed import together
        from vitlab.transfer.run import pretrain

        workdir = self.workdir or Path("runs") / self.recipe
        with together() as ranks:
            outcome = pretrain(
                self.config, workdir, device=self.device, on_settings=_settings(workdir) if ranks.first else None,
                ranks=ranks,
            )  # fmt: skip
        if ranks.first:
            _answer(outcome.result, self.json, outcome.summary(workdir))
        return 0


@dataclass(frozen=True)
class Finetune:
    """Carry a checkpoint to another data set: seek the learning rate, train on all of train, test (Table 4)."""

    checkpoint: Checkpoint
    config: FinetuneRunConfig
    recipe: str = "own"
    """One of `vitlab list recipes`; `own` suits any pictures, and needs --dataset."""
    dataset: str | None = None
    """Data set, `folder:PATH` or `shards:PATH`; the recipe's unless given. Of a folder, files that cannot be read are
    left out and listed (`--data.on-error raise` stops at them)."""
    root: str | None = None
    """Folder that holds a named data set."""
    image_size: int | None = None
    """Side of the pictures in pixels; the recipe's unless given."""
    workdir: Path | None = None
    """The folder of the search and the runs; `runs/finetune-RECIPE` unless given (for `own`, the data set's name)."""
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        from vitlab.train.distributed import together
        from vitlab.transfer.finetune import sweep_and_finetune

        name = self.config.data.name
        if not name:
            raise ValueError("name the pictures with --dataset folder:PATH (or a data set), or a --recipe that does.")
        called = Path(name.partition(":")[2] or name).name if self.recipe == "own" else self.recipe
        workdir = self.workdir or Path("runs") / f"finetune-{called}"
        with together() as ranks:
            done = sweep_and_finetune(
                self.checkpoint, self.config, workdir, image_size=self.image_size, device=self.device,
                on_settings=_settings(workdir) if ranks.first else None, say=_say if ranks.first else None, ranks=ranks,
            )  # fmt: skip
        if ranks.first:
            _answer(done.result, self.json, done.summary(workdir))
        return 0


@dataclass(frozen=True)
class Vtab:
    """Judge a checkpoint by VTAB-1k: 19 tasks, each learnt from 1,000 pictures by one setting and tested whole."""

    checkpoint: Checkpoint
    config: RunConfig
    root: str | None = None
    """Folder of the tasks' data; the cache folder unless given. `vitlab list vtab` says how the data is had."""
    out: Path = Path("runs/vtab")
    """Folder for the result and for a run of each task."""
    tasks: tuple[str, ...] = ()
    """The tasks to do, whose data must be there; all that can be had unless given."""
    select: bool = False
    """Train on 800 and score on the 200 of the validation part, to choose settings; the test parts stay unseen."""
    download: bool = True
    """Download data that may be had so."""
    image_size: int | None = None
    """Side of the pictures in pixels; 384 unless given."""
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        from vitlab.train.distributed import together
        from vitlab.transfer.vtab import as_table, vtab

        with together() as ranks:
            result = vtab(
                self.checkpoint, self.config, self.root, self.out, tasks=self.tasks or "available", select=self.select,
                download=self.download, image_size=self.image_size, device=self.device, on_task=_scored, ranks=ranks,
            )  # fmt: skip
        if ranks.first:
            _answer(result, self.json, f"{as_table(result)}\nresult: {self.out / 'result.json'}")
        return 0 if result["tasks"] else 1  # nothing could be had


@dataclass(frozen=True)
class Evaluate:
    """Test a checkpoint on a data set: accuracy, loss, and each class by itself; with torchrun by several processes."""

    checkpoint: Checkpoint
    dataset: str | None = None
    """Data set, `folder:PATH` or `shards:PATH`; the one that the model was trained on unless given."""
    split: Literal["train", "val", "test", "trainval"] = "test"
    root: str | None = None
    """Folder that holds a named data set."""
    image_size: int | None = None
    """Test at another size, with interpolated position embeddings."""
    resize: int | None = None
    """Bring the shorter side of each picture to so many pixels and test the centre; as the data set or the checkpoint
    says unless given, else the whole picture is squashed to size."""
    batch_size: int = 256
    """Pictures at once, in each process."""
    workers: int = 0
    on_error: Literal["raise", "skip"] = "raise"
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        from vitlab.train.distributed import together
        from vitlab.transfer.evaluate import evaluate_checkpoint

        with together() as ranks:
            found = evaluate_checkpoint(
                self.checkpoint, self.dataset, self.split, root=self.root, image_size=self.image_size,
                resize=self.resize, batch_size=self.batch_size, workers=self.workers, on_error=self.on_error,
                device=self.device, ranks=ranks,
            )  # fmt: skip
        if ranks.first:
            _answer(found.record(), self.json, found.as_table())
        return 0


@dataclass(frozen=True)
class Fewshot:
    """Few-shot accuracy of a checkpoint (Sec. 4.1): least squares on the frozen features of a few pictures a class."""

    checkpoint: Checkpoint
    dataset: tuple[str, ...]
    """One data set or several: names, `folder:PATH` or `shards:PATH`."""
    root: str | None = None
    """Folder that holds the named data sets."""
    shots: tuple[int, ...] = (1, 5, 10, 25)
    """Pictures of each class to learn from."""
    l2: tuple[float, ...] | None = None
    """Strength of the penalty, 2^10 unless given; of several the one that ranks best over the data sets is taken."""
    seeds: int | None = None
    """Random draws of those pictures, 3 unless given."""
    original: bool = False
    """The form of the paper's time: the first pictures of each class, l2 chosen from 2^-10 to 2^19 by rank."""
    leave_self_out: bool = False
    """Choose a data set's l2 by the other data sets only."""
    train_split: Literal["train", "val", "test", "trainval"] = "train"
    test_split: Literal["train", "val", "test", "trainval"] = "test"
    test_pictures: int | None = None
    """Test on no more pictures than these, taken evenly from the split."""
    image_size: int | None = None
    """Test at another size, with interpolated position embeddings."""
    batch_size: int = 64
    workers: int = 0
    on_error: Literal["raise", "skip"] = "raise"
    device: str = "auto"
    cache: Path | None = None
    """Folder for the features; the user's cache folder unless given."""
    out: Path | None = None
    """JSON file for the result."""
    json: bool = False

    def run(self) -> int:
        from vitlab.train.distributed import together
        from vitlab.transfer.fewshot import fewshot_checkpoint

        with together() as ranks:
            report = fewshot_checkpoint(
                self.checkpoint, self.dataset, root=self.root, shots=self.shots, l2=self.l2, seeds=self.seeds,
                original=self.original, leave_self_out=self.leave_self_out, train_split=self.train_split,
                test_split=self.test_split, test_pictures=self.test_pictures, image_size=self.image_size,
                batch_size=self.batch_size, workers=self.workers, on_error=self.on_error, device=self.device,
                cache=self.cache, out=self.out, ranks=ranks,
            )  # fmt: skip
        if ranks.first:
            _answer(report.record(), self.json, report.as_table())
        return 0


@dataclass(frozen=True)
class Probe:
    """Probe a checkpoint's frozen features on a data set: nearest neighbours, or a linear (logistic) classifier."""

    checkpoint: Checkpoint
    dataset: str
    """Data set, `folder:PATH` or `shards:PATH`."""
    kind: Literal["knn", "linear"] = "knn"
    root: str | None = None
    """Folder that holds a named data set."""
    k: tuple[int, ...] | None = None
    """Numbers of neighbours; 1 to 200 unless given."""
    l2: tuple[float, ...] | None = None
    """Strengths of the linear probe's penalty; the best on a held-out part of train is taken."""
    train_split: Literal["train", "val", "test", "trainval"] = "train"
    test_split: Literal["train", "val", "test", "trainval"] = "test"
    image_size: int | None = None
    """Test at another size, with interpolated position embeddings."""
    batch_size: int = 64
    workers: int = 0
    on_error: Literal["raise", "skip"] = "raise"
    device: str = "auto"
    cache: Path | None = None
    """Folder for the features; the user's cache folder unless given."""
    json: bool = False

    def run(self) -> int:
        from vitlab.train.distributed import together
        from vitlab.transfer.probes import probe_checkpoint

        with together() as ranks:
            found = probe_checkpoint(
                self.checkpoint, self.dataset, self.kind, root=self.root, train_split=self.train_split,
                test_split=self.test_split, ks=self.k, l2=self.l2, image_size=self.image_size,
                batch_size=self.batch_size, workers=self.workers, on_error=self.on_error, device=self.device,
                cache=self.cache, ranks=ranks,
            )  # fmt: skip
        if ranks.first:
            _answer(found.record(), self.json, found.as_table())
        return 0


@dataclass(frozen=True)
class Predict:
    """Name what is in pictures: the most probable classes of files, folders, or the standard input (-)."""

    checkpoint: Checkpoint
    sources: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="PICTURE ...")]
    """Pictures, folders of pictures, or - for the standard input (one picture, or paths, one a line)."""
    top: int = 5
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        from vitlab.transfer.predict import predict

        failed = 0
        for answer in predict(self.checkpoint, self.sources, top=self.top, device=self.device):
            failed += answer.error is not None
            _answer(dataclasses.asdict(answer), self.json, answer.as_line(), lines=True)
        if failed:
            print(f"vitlab: {failed} pictures could not be read (named above).", file=sys.stderr)
        return 1 if failed else 0


@dataclass(frozen=True)
class Inspect:
    """Look inside a checkpoint: where it looks, what its embeddings have learned, how its training went. One page."""

    checkpoint: Checkpoint
    sources: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="PICTURE ...")] = ()
    """Pictures, folders of pictures, or -; of a finished run its own test pictures unless given."""
    out: Path = Path("inspect")
    """Folder for index.html, figures/ (PNG, SVG and the arrays behind them) and result.json."""
    shown: int = 16
    """Pictures on the page; the attention distances are over all."""
    top: int = 5
    batch_size: int = 16
    image_size: int | None = None
    """Look at another size, with interpolated position embeddings."""
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        from vitlab.studies.inspect import as_text, inspect_checkpoint

        found = inspect_checkpoint(
            self.checkpoint, self.sources, self.out, shown=self.shown, top=self.top, batch_size=self.batch_size,
            image_size=self.image_size, device=self.device,
        )  # fmt: skip
        _answer(found, self.json, as_text(found))
        return 1 if found["unreadable"] else 0


@dataclass(frozen=True)
class App:
    """A web page on this machine: drop a picture, see the answers and where they look. Needs `vitlab[app]`."""

    checkpoint: Annotated[
        Positional[str],
        tyro.conf.arg(metavar="CHECKPOINT", help=f"{CHECKPOINTS} Or a folder of them, to choose among."),
    ]
    port: int | None = None
    """Port on 127.0.0.1; the first free from 7860 unless given."""
    max_megapixels: float = 50.0
    """Largest picture, in millions of pixels."""
    max_upload_mb: float = 20.0
    """Largest file, in megabytes."""
    open_browser: bool = False
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        from vitlab.app import launch

        launch(
            self.checkpoint, port=self.port, max_megapixels=self.max_megapixels, max_upload_mb=self.max_upload_mb,
            open_browser=self.open_browser, device=self.device,
            announce=lambda url: _answer({"url": url}, self.json, f"{url} (Ctrl-C ends it)", lines=True),
        )  # fmt: skip
        return 0


@dataclass(frozen=True)
class Study:
    """One of the paper's studies: many runs, then a table, a figure and what they say of its claims. Continues."""

    name: Annotated[Positional[str], tyro.conf.arg(metavar="NAME")] = ""
    """One of `vitlab study --list`."""
    list: bool = False
    """Name the studies, and end."""
    scale: Literal["tiny", "gpu", "paper"] = "tiny"
    """tiny: minutes on two cores; gpu: minutes on one large GPU; paper: the original."""
    dry_run: bool = False
    """Tell what each run costs, and end."""
    out: Path | None = None
    """Folder of the runs and the report; `runs/study-NAME-SCALE` unless given."""
    dataset: str | None = None
    """Data set in place of the study's own, where it has one alone."""
    root: str | None = None
    """Folder that holds the data set."""
    processes: int | None = None
    """Runs at the same time: one a core (tiny), 4 (gpu) or 1 (paper) unless given."""
    tflops: float | None = None
    """For --dry-run: the device's useful TFLOP/s."""
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        from vitlab import catalogue
        from vitlab.studies import STUDIES

        if self.list or not self.name:
            if self != Study(list=True, json=self.json):
                raise ValueError("give the NAME of a study, or --list alone to see which there are.")
            return List("studies", json=self.json).run()
        if self.name not in STUDIES:
            raise ValueError(f"unknown study {self.name!r}; {nearest(self.name, STUDIES)}. `vitlab study --list`")
        if self.tflops is not None and not self.dry_run:
            raise ValueError("--tflops has no effect without --dry-run.")
        if self.dry_run and (self.processes is not None or self.device != "auto"):
            raise ValueError("--processes and --device have no effect with --dry-run.")
        from vitlab.studies import cost, engine
        from vitlab.studies.report import as_text

        out = self.out or Path("runs") / f"study-{self.name}-{self.scale}"
        plan = engine.plan(STUDIES[self.name], self.scale, out, dataset=self.dataset, root=self.root)
        if self.dry_run:
            found = cost.cost(plan, self.tflops)
            _answer(found, self.json, f"{catalogue.as_table(cost.rows(found))}\n{cost.summary(found)}")
            return 0
        found = engine.run_study(plan, processes=self.processes, device=self.device)
        _answer(found, self.json, f"{as_text(found)}\nreport: {out / 'report.md'} · figure: {out / 'figure.png'}")
        if left := plan.leftovers():
            print(f"vitlab: {len(left)} folders in {left[0].parent} are of runs with other settings or data, and no "
                  f"part of this report.", file=sys.stderr)  # fmt: skip
        return 0


@dataclass(frozen=True)
class Bench:
    """Measure speed, memory and the largest batch of models over picture sizes, beside peers (Fig. 12). Continues."""

    models: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL ...")] = ()
    """Names or shell patterns (`vitlab list models`); the eight of Fig. 12 unless given."""
    mode: Literal["infer", "train", "both"] = "infer"
    sizes: str = "64,128,224,384,512"
    """Sides of the pictures in pixels, with commas between them. A size that a model cannot take is left out, with a
    line that says so."""
    batch: str = "auto"
    """Pictures in a batch; auto takes the number at which ours is fastest, of powers of two that fit."""
    against: str = ""
    """Peers to time in the same rounds, with commas between them: timm, huggingface, openvino (inference alone)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto is bfloat16 where the device multiplies it in hardware."""
    compile: bool = False
    """Compile all contenders, or none."""
    seconds: float = 1.0
    """Length of a round of one contender."""
    rounds: int = 7
    memory: float | None = None
    """GiB that a step may take; 4 on a CPU, all that a GPU has, unless given."""
    largest: bool = True
    """Seek the largest batch that fits into that memory."""
    profile: bool = False
    """Tell which part of a training step takes which share of its time."""
    out: Path = Path("bench")
    """Folder for bench.json and bench.png."""
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        from vitlab import catalogue
        from vitlab.studies.bench import FIGURE_12, Settings, bench, table

        batch = None if self.batch == "auto" else _whole_numbers("batch", self.batch)[0]
        settings = Settings(
            self.models or FIGURE_12, _whole_numbers("sizes", self.sizes), self.mode, batch,
            tuple(filter(None, self.against.split(","))), self.dtype, self.compile, self.seconds, self.rounds,
            self.memory, self.largest, self.profile, self.device,
        )  # fmt: skip
        found = bench(settings, self.out)
        told = catalogue.as_table(rows) if (rows := table(found)) else "nothing could be measured; see above"
        _answer(found, self.json, f"{told}\nresult: {self.out / 'bench.json'} · figure: {self.out / 'bench.png'}")
        return 0 if rows else 1


@dataclass(frozen=True)
class Plan:
    """What a run would cost, told before it is begun: compute, hours, memory of a process, data rate (Table 6)."""

    recipe: Annotated[Positional[str], tyro.conf.arg(metavar="RECIPE")]
    """One of `vitlab list recipes`; its settings are flags, as those of the command that runs it."""
    config: RunConfig
    finetune: bool = False
    """RECIPE is one of `vitlab finetune`: the search and all of its runs are counted."""
    model_name: Annotated[str | None, tyro.conf.arg(name="model")] = None
    """Name of the model (`vitlab list models`); for a fine-tuning ViT-B/16 unless given."""
    device: Annotated[str, tyro.conf.arg(help=f"One of {', '.join(DEVICES)}; or cpu, which is this machine.")] = "h100"
    count: int = 1
    """Processes, each with one device."""
    mfu: str = "0.4"
    """Share of the device's peak that is reached; or `measured`, which trains here for some seconds; or the bench.json
    of a `vitlab bench MODEL --mode train` on such a device."""
    examples: int | None = None
    """Pictures of the training split; needed where `vitlab list datasets` does not say."""
    picture_kb: float = 110.0
    """Size of a stored picture in kB: 110 is a photograph of 500 x 375 pixels as JPEG."""
    json: bool = False

    def run(self) -> int:
        from vitlab.studies.plan import as_text, tell

        found = tell(
            self.config, device=self.device, count=self.count, mfu=self.mfu, model_name=self.model_name,
            examples=self.examples, picture_kb=self.picture_kb, say=_say,
        )  # fmt: skip
        _answer(found, self.json, as_text(found))
        return 0


@dataclass(frozen=True)
class Duplicates:
    """Find near-duplicates of test pictures in a training set: a list to leave out, and a page to look at."""

    train: Annotated[Positional[str], tyro.conf.arg(metavar="TRAIN")]
    """Training set: a name of `vitlab list datasets`, `folder:PATH` or `shards:PATH`."""
    test: Annotated[Positional[str], tyro.conf.arg(metavar="TEST")]
    """Test set, likewise."""
    out: Path = Path("duplicates")
    """Folder for duplicates.jsonl, exclude.txt, report.html, result.json and the thumbnails."""
    train_split: Literal["train", "val", "test", "trainval"] = "trainval"
    test_split: Literal["train", "val", "test", "trainval"] = "test"
    train_root: str | None = None
    """Folder that holds a named training set."""
    test_root: str | None = None
    """Folder that holds a named test set."""
    threshold: float = 0.25
    """Largest distance of a pair: 0 is the same, 1.41 unrelated; at most 0.5."""
    workers: int = 0
    """Threads that read pictures."""
    json: bool = False

    def run(self) -> int:
        from vitlab.studies.duplicates import as_text, duplicates

        found = duplicates(
            self.train, self.test, self.out, train_split=self.train_split, test_split=self.test_split,
            train_root=self.train_root, test_root=self.test_root, threshold=self.threshold, workers=self.workers,
        )  # fmt: skip
        _answer(found, self.json, as_text(found, self.out))
        return 1 if found["unreadable"] else 0


@dataclass(frozen=True)
class Shard:
    """Write any data set as WebDataset tars (`shards:FOLDER`): shuffled, balanced, checksummed, at training's size."""

    source: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """A name of `vitlab list datasets`, `folder:PATH`, `shards:PATH` or `hub:OWNER/NAME`."""
    destination: Annotated[Positional[Path | None], tyro.conf.arg(metavar="DESTINATION")] = None
    """A new folder. With --check there is none."""
    split: Literal["train", "val", "test", "all"] = "all"
    """The splits to write; `all` are three, cut from train where the source lacks one."""
    size: int | None = None
    """Shorter side in pixels to which larger pictures are brought, as JPEG; every byte stays as it is unless given."""
    quality: int = 90
    """Of these JPEGs."""
    records: int | None = None
    """Most pictures in a tar."""
    megabytes: float | None = None
    """About so much in a tar; 100 unless given."""
    seed: int = 0
    """Of the shuffling."""
    root: str | None = None
    """Folder that holds a named data set."""
    on_error: Literal["raise", "skip"] = "raise"
    """What an unreadable picture does: end the command, or be left out, named and counted."""
    check: bool = False
    """Write nothing, but compare the files of SOURCE, `shards:PATH`, with the checksums in its index.json."""
    json: bool = False

    def run(self) -> int:
        from vitlab.data import shard_index
        from vitlab.data.write_shards import ShardSettings, write_shards

        if self.check:
            kind, _, path = self.source.partition(":")
            if self != Shard(self.source, root=self.root, check=True, json=self.json) or kind != "shards":
                raise ValueError("--check takes SOURCE alone, as shards:PATH; leave out all else.")
            with _bar("bytes checked") as report:
                found = shard_index.check_shards(Path(self.root or "", Path(path).expanduser()), report)
            _answer(found, self.json, shard_index.check_as_text(found))
            return 1 if found["wrong"] else 0
        if self.destination is None:
            raise ValueError("give a DESTINATION, a new folder for the shards.")
        splits = ("train", "val", "test") if self.split == "all" else (self.split,)
        settings = ShardSettings(self.size, self.quality, self.records, self.megabytes, self.seed)
        with _bar("pictures written") as report:
            made = write_shards(
                self.source, self.destination, settings, splits=splits, root=self.root, on_error=self.on_error,
                report=report,
            )  # fmt: skip
        _answer(made, self.json, shard_index.summary_as_text(made))
        return 1 if any(each["unreadable"] for each in made["splits"].values()) else 0


@dataclass(frozen=True)
class Convert:
    """Write a checkpoint as Google's, timm's or Hugging Face's code reads it, or as ours; read it back and compare."""

    checkpoint: Checkpoint
    destination: Annotated[Positional[Path], tyro.conf.arg(metavar="DESTINATION")]
    """An .npz file for `google`, else a folder."""
    to: Literal["google", "timm", "huggingface", "vitlab"]
    """Whose format."""
    image_size: ImageSize | None = None
    """Side in pixels, or height and width: converts at another size, with interpolated position embeddings."""
    json: bool = False

    def run(self) -> int:
        from vitlab.weights import convert

        done = convert(self.checkpoint, self.destination, to=self.to, image_size=self.image_size)
        _answer(done, self.json, f"{done['path']}: {done['parameters']:,} parameters in {self.to}'s format; read back, "
                f"the answers differ by {done['difference']:.1e}.")  # fmt: skip
        return 0


@dataclass(frozen=True)
class Export:
    """Write a checkpoint as a program that runs without vitlab: ONNX or torch.export, any batch size, checked."""

    checkpoint: Checkpoint
    to: Literal["onnx", "torch-export"]
    """Format of the program."""
    out: Path | None = None
    """File to write; `model.onnx` or `model.pt2` unless given."""
    image_size: ImageSize | None = None
    """Export at another size, with interpolated position embeddings."""
    json: bool = False

    def run(self) -> int:
        from vitlab.weights.export import export_checkpoint

        out = self.out or Path("model.onnx" if self.to == "onnx" else "model.pt2")
        report = export_checkpoint(self.checkpoint, out, to=self.to, image_size=self.image_size)
        _answer(report, self.json, "\n".join(f"{name}: {value}" for name, value in report.items()))
        return 0


@dataclass(frozen=True)
class Doctor:
    """What this machine offers to vitlab: versions, devices, the attention in use, speeds, disk; and what is amiss."""

    path: Path = Path()
    """Folder whose disk is measured."""
    json: bool = False

    def run(self) -> int:
        from vitlab.doctor import diagnose, format_diagnosis

        found = diagnose(self.path)
        _answer(found, self.json, format_diagnosis(found))
        return 0


Command = (
    Demo
    | List
    | Pretrain
    | Finetune
    | Vtab
    | Evaluate
    | Fewshot
    | Probe
    | Predict
    | Inspect
    | App
    | Study
    | Bench
    | Plan
    | Duplicates
    | Shard
    | Convert
    | Export
    | Doctor
)
COMMANDS: dict[str, type[Command]] = {kind.__name__.lower(): kind for kind in typing.get_args(Command)}


def _settings(workdir: Path) -> Callable[[TrainConfig], None]:
    """Shows the resolved settings, on the standard error so that `--json` stays readable by a program."""

    def show(config: TrainConfig) -> None:
        print(f"settings (kept in {workdir / 'config.json'}):", file=sys.stderr)
        for name, value in _flat(to_dict(config)):
            print(f"  {name} = {value}", file=sys.stderr)

    return show


def _say(text: str) -> None:
    print(f"vitlab: {text}", file=sys.stderr)


def _whole_numbers(name: str, given: str) -> tuple[int, ...]:
    """`64,128` as numbers."""
    try:
        return tuple(int(each) for each in given.split(","))
    except ValueError as error:
        raise ValueError(f"--{name} is {given!r}; give whole numbers, with commas between several.") from error


@contextlib.contextmanager
def _bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """A function that hears how much is done, and of how much: a bar on a terminal, elsewhere a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console, told = Console(stderr=True), time.monotonic()
    columns = (TextColumn(label), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(label)

        def report(done: int, of: int) -> None:
            nonlocal told
            bar.update(task, completed=done, total=of)
            if not console.is_terminal and time.monotonic() - told > 30:
                told = time.monotonic()
                print(f"{label}: {done:,} of {of:,}", file=sys.stderr, flush=True)

        yield report


def _scored(task: str, record: dict[str, Any]) -> None:
    print(f"{task}: {record['accuracy']:.2%} of {record['pictures']:,}", file=sys.stderr, flush=True)


def _flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    return [
        row
        for name, value in settings.items()
        for row in (_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)])
    ]


def _answer(data: Any, as_json: bool, text: str, lines: bool = False) -> None:
    print(json.dumps(data, indent=None if lines else 1, default=str) if as_json else text, flush=True)
