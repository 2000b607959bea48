"""The command line: a command is arguments -> one library call -> print. Nothing here needs torch until it runs."""

import dataclasses
import json
import os
import sys
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import tyro
from tyro.conf import Positional

from vitlab.models.config import ImageSize
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.settings import nearest, to_dict
from vitlab.train.config import DataConfig, FewShotConfig, FinetuneConfig, TrainConfig

CHECKPOINTS = "A Google .npz, a folder (saved model, run, timm, Hugging Face), hub:OWNER/NAME or timm:NAME.TAG."
Checkpoint = Annotated[Positional[str], tyro.conf.arg(metavar="CHECKPOINT", help=CHECKPOINTS)]
RunConfig = Annotated[
    TrainConfig, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands
]  # `--optim.lr`, not `--config.optim.lr`
AUTOMATIC = {
    "steps": {"--steps", "--epochs"},
    "warmup_steps": {"--optim.warmup-steps"},
    "mixup": {"--mixup"},
    "batch_size": {"--batch-size"},
    "image_size": {"--model.image-size"},
}
"""The flags by which a user sets what a recipe leaves to the data."""
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
    """What there is by name: models, data sets, recipes, or the tasks of VTAB-1k and how their data is had."""

    what: Positional[Literal["models", "datasets", "recipes", "vtab"]]
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
        from vitlab.transfer.run import pretrain

        workdir = self.workdir or Path("runs") / self.recipe
        outcome = pretrain(self.config, workdir, device=self.device, on_settings=_settings(workdir))
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
        from vitlab.transfer.finetune import sweep_and_finetune

        name = self.config.data.name
        if not name:
            raise ValueError("name the pictures with --dataset folder:PATH (or a data set), or a --recipe that does.")
        called = Path(name.partition(":")[2] or name).name if self.recipe == "own" else self.recipe
        workdir = self.workdir or Path("runs") / f"finetune-{called}"
        done = sweep_and_finetune(
            self.checkpoint, self.config, workdir, image_size=self.image_size, device=self.device,
            on_settings=_settings(workdir), say=lambda text: print(f"vitlab: {text}", file=sys.stderr),
        )  # fmt: skip
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
        from vitlab.transfer.vtab import as_table, vtab

        result = vtab(
            self.checkpoint, self.config, self.root, self.out, tasks=self.tasks or "available", select=self.select,
            download=self.download, image_size=self.image_size, device=self.device, on_task=_scored,
        )  # fmt: skip
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
        if ranks.rank == 0:
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
        from vitlab.transfer.fewshot import fewshot_checkpoint

        report = fewshot_checkpoint(
            self.checkpoint, self.dataset, root=self.root, shots=self.shots, l2=self.l2, seeds=self.seeds,
            original=self.original, leave_self_out=self.leave_self_out, train_split=self.train_split,
            test_split=self.test_split, test_pictures=self.test_pictures, image_size=self.image_size,
            batch_size=self.batch_size, workers=self.workers, on_error=self.on_error, device=self.device,
            cache=self.cache, out=self.out,
        )  # fmt: skip
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
        from vitlab.transfer.probes import probe_checkpoint

        found = probe_checkpoint(
            self.checkpoint, self.dataset, self.kind, root=self.root, train_split=self.train_split,
            test_split=self.test_split, ks=self.k, l2=self.l2, image_size=self.image_size,
            batch_size=self.batch_size, workers=self.workers, on_error=self.on_error, device=self.device,
            cache=self.cache,
        )  # fmt: skip
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
    | Duplicates
    | Convert
    | Export
    | Doctor
)
COMMANDS: dict[str, type[Command]] = {kind.__name__.lower(): kind for kind in typing.get_args(Command)}


def parse(argv: Sequence[str]) -> Command:
    """The command in `argv`. Raises ValueError for a setting out of range, SystemExit(2) for words it does not know.

    Only the command that is asked for is built, so that an error speaks of nothing else.
    """
    if not argv or argv[0] not in COMMANDS:
        _overview(argv)
    name, *arguments = argv
    if name == "pretrain":
        return _parse_pretrain(arguments)
    if name == "finetune":
        return _parse_finetune(arguments)
    if name == "vtab":
        return _parse_vtab(arguments)
    return _parse_as(COMMANDS[name], name, arguments)


def _overview(argv: Sequence[str]) -> NoReturn:
    """All commands with their purpose, for `--help`; the nearest, for a word that is none of them."""
    if argv and not argv[0].startswith("-"):
        print(f"vitlab: unknown command {argv[0]!r}; {nearest(argv[0], COMMANDS)}.", file=sys.stderr)
        raise SystemExit(2)
    union: Any = None
    for name, kind in COMMANDS.items():
        purpose: Any = dataclasses.make_dataclass(kind.__name__, [])
        purpose.__doc__ = kind.__doc__
        member = Annotated[purpose, tyro.conf.subcommand(name=name)]
        union = member if union is None else union | member
    about = 'The Vision Transformer paper ("An Image is Worth 16x16 Words") as software.'
    tyro.cli(union, args=argv[:1], prog="vitlab", description=about)
    raise SystemExit(2)


def _parse_as(kind: type[Command], name: str, arguments: Sequence[str]) -> Any:
    return tyro.cli(kind, args=arguments, prog=f"vitlab {name}", description=kind.__doc__)


def _parse_pretrain(arguments: Sequence[str]) -> Pretrain:
    """The recipe comes first, for its values are the defaults of all further settings."""
    recipe = arguments[0] if arguments and not arguments[0].startswith("-") else "tiny-digits"
    name = _value(arguments, "--model")
    default = _recipe(recipe, PRETRAIN)(*([name] if name else []))
    command = _parse_as(_with_default(Pretrain, default, arguments), "pretrain", arguments)
    if (command.recipe, command.model_name) != (recipe, name):
        raise ValueError(f"write the recipe first and --model once: `vitlab pretrain {command.recipe} --...`.")
    if command.config.model.num_classes != default.model.num_classes:
        raise ValueError("--model.num-classes has no effect here: the data set's classes decide. Leave it out.")
    return command


def _parse_finetune(arguments: Sequence[str]) -> Finetune:
    recipe = _value(arguments, "--recipe") or "own"
    if recipe == "vtab":
        raise ValueError("the recipe vtab is that of 19 tasks: `vitlab vtab CHECKPOINT --tasks ...` runs one or all.")
    default = _recipe(recipe, FINETUNE)()
    given = {word.partition("=")[0].replace("_", "-") for word in arguments}
    if "--optim.lr" in given:
        default = dataclasses.replace(default, learning_rates=())  # this one, and no search
    command = _parse_as(_with_default(Finetune, default, arguments), "finetune", arguments)
    config = command.config
    _refuse_model(config, default)
    if {"--optim.lr", "--learning-rates"} <= given:
        raise ValueError("--optim.lr is one learning rate and --learning-rates are those to try; give one of the two.")
    if "--held-out" in given and len(config.learning_rates) < 2:
        raise ValueError(
            "--held-out has no effect with one learning rate; add rates to try, --learning-rates 0.003 0.01."
        )
    automatic = tuple(name for name in config.automatic if not AUTOMATIC[name] & given)
    config = dataclasses.replace(config, automatic=automatic, data=_data(command, given))
    return dataclasses.replace(command, config=config)


def _data(command: Finetune, given: set[str]) -> DataConfig:
    """The data of `command`, with what --dataset and --root say."""
    data = command.config.data
    for short, long in (("--dataset", "--data.name"), ("--root", "--data.root")):
        if {short, long} <= given:
            raise ValueError(f"{short} and {long} say the same; give one of the two.")
    if command.dataset is not None:
        skips = command.dataset.startswith("folder:") and "--data.on-error" not in given
        data = dataclasses.replace(data, name=command.dataset, on_error="skip" if skips else data.on_error)
    return data if command.root is None else dataclasses.replace(data, root=command.root)


def _refuse_model(config: TrainConfig, default: TrainConfig) -> None:
    """Says so where settings of a model are given, and a checkpoint brings its own."""
    told, ours = to_dict(config.model), to_dict(default.model)
    if idle := [name for name in ours if told[name] != ours[name] and name not in ("image_size", "dropout")]:
        raise ValueError(
            f"--model.{idle[0].replace('_', '-')} has no effect here: the checkpoint brings its own model. What can be "
            f"set is --image-size and --model.dropout."
        )


def _parse_vtab(arguments: Sequence[str]) -> Vtab:
    default = FINETUNE["vtab"]().single()
    command = _parse_as(_with_default(Vtab, default, arguments), "vtab", arguments)
    _refuse_model(command.config, default)
    if command.config.model.image_size != default.model.image_size:
        raise ValueError("--model.image-size has no effect here; give --image-size.")
    for name in ("name", "root", "train_split", "eval_split", "classes"):
        if getattr(command.config.data, name) != getattr(default.data, name):
            raise ValueError(
                f"--data.{name.replace('_', '-')} has no effect here: the tasks bring their own data. What can be set "
                f"is --root and --tasks."
            )
    return command


def _with_default(kind: type[Command], config: TrainConfig, arguments: Sequence[str]) -> type[Command]:
    """`kind` with `config` as the default of its field, under the same name and documentation."""
    given = {word.partition("=")[0] for word in arguments}
    if "--steps" in given:
        config = dataclasses.replace(config, steps=1, epochs=None)
    if "--epochs" in given:
        config = dataclasses.replace(config, steps=None, epochs=1.0)
    if any(word.startswith("--fewshot.") for word in given):
        config = dataclasses.replace(config, fewshot=FewShotConfig())
    field = dataclasses.field(default=config)
    hint = FinetuneRunConfig if kind is Finetune else RunConfig
    made = dataclasses.make_dataclass(kind.__name__, [("config", hint, field)], bases=(kind,), frozen=True)
    made.__doc__ = kind.__doc__
    return made


def _recipe(name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        raise ValueError(f"unknown recipe {name!r}; {nearest(name, table)}. `vitlab list recipes` shows all.")
    return table[name]


def _value(arguments: Sequence[str], flag: str) -> str | None:
    """What follows `flag`, or its `flag=value`."""
    for place, word in enumerate(arguments):
        if word == flag and place + 1 < len(arguments):
            return arguments[place + 1]
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None


def _settings(workdir: Path) -> Callable[[TrainConfig], None]:
    """Shows the resolved settings, on the standard error so that `--json` stays readable by a program."""

    def show(config: TrainConfig) -> None:
        print(f"settings (kept in {workdir / 'config.json'}):", file=sys.stderr)
        for name, value in _flat(to_dict(config)):
            print(f"  {name} = {value}", file=sys.stderr)

    return show


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


def main(argv: Sequence[str] | None = None) -> None:
    """The `vitlab` program.

    Exit codes: 0 done, 1 in part or not at all, 2 bad input, 130 interrupted, 143 stopped and saved.
    """
    # Before torch is loaded: threads that spin for long while they wait bring a training to a crawl beside other work,
    # and threads that do not spin at all halve the speed of small models. (GNU's OpenMP, which torch uses on Linux.)
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    try:
        code = parse(sys.argv[1:] if argv is None else argv).run()
    except BrokenPipeError:
        sys.stderr.close()  # the reader has enough (`| head`)
        code = 0
    except (ValueError, OSError) as error:
        print(f"vitlab: {error}", file=sys.stderr)
        code = 2
    except RuntimeError as error:
        code = _failure(error)
    except KeyboardInterrupt:
        print("vitlab: interrupted.", file=sys.stderr)
        code = 130
    raise SystemExit(code)


def _failure(error: RuntimeError) -> int:
    import torch

    from vitlab.train.distributed import RankError
    from vitlab.train.loop import NonFiniteError, StoppedError
    from vitlab.weights import ParityError

    if isinstance(error, torch.OutOfMemoryError):
        print(
            f"vitlab: the device's memory is full. Give a smaller --microbatch or --image-size. ({error})",
            file=sys.stderr,
        )
        return 1
    if not isinstance(error, (StoppedError, NonFiniteError, ParityError, RankError)):
        raise error
    print(f"vitlab: {error}", file=sys.stderr)
    return 143 if isinstance(error, StoppedError) else 1
