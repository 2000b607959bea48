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
from vitlab.train.config import TrainConfig

CHECKPOINTS = "A Google .npz, a folder (saved model, run, timm, Hugging Face), hub:OWNER/NAME or timm:NAME.TAG."
Checkpoint = Annotated[Positional[str], tyro.conf.arg(metavar="CHECKPOINT", help=CHECKPOINTS)]
RunConfig = Annotated[
    TrainConfig, tyro.conf.arg(name=""), tyro.conf.AvoidSubcommands
]  # `--optim.lr`, not `--config.optim.lr`


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
    """What there is by name: models, data sets or recipes."""

    what: Positional[Literal["models", "datasets", "recipes"]]
    """What to list."""
    pattern: Annotated[Positional[str], tyro.conf.arg(metavar="PATTERN")] = "*"
    """Shell pattern for the names, e.g. `ViT-B*`."""
    json: bool = False

    def run(self) -> int:
        from vitlab import catalogue

        rows = getattr(catalogue, self.what)(self.pattern)
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
    """Carry a checkpoint to another data set by a recipe (Table 4, or a small twin), then test it."""

    checkpoint: Checkpoint
    config: RunConfig
    recipe: str = "tiny"
    """One of `vitlab list recipes`."""
    image_size: int | None = None
    """Side of the pictures in pixels; the recipe's unless given."""
    workdir: Path | None = None
    """The run's folder; `runs/finetune-RECIPE` unless given."""
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        from vitlab.transfer.finetune import finetune

        workdir = self.workdir or Path("runs") / f"finetune-{self.recipe}"
        outcome = finetune(
            self.checkpoint, self.config, workdir, image_size=self.image_size, device=self.device,
            on_settings=_settings(workdir),
        )  # fmt: skip
        _answer(outcome.result, self.json, outcome.summary(workdir))
        return 0


@dataclass(frozen=True)
class Evaluate:
    """Test a checkpoint on a data set: accuracy, loss, and each class by itself."""

    checkpoint: Checkpoint
    dataset: str | None = None
    """Data set, `folder:PATH` or `shards:PATH`; the one that the model was trained on unless given."""
    split: Literal["train", "val", "test", "trainval"] = "test"
    root: str | None = None
    """Folder that holds a named data set."""
    image_size: int | None = None
    """Test at another size, with interpolated position embeddings."""
    batch_size: int = 256
    workers: int = 0
    on_error: Literal["raise", "skip"] = "raise"
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        from vitlab.transfer.evaluate import evaluate_checkpoint

        found = evaluate_checkpoint(
            self.checkpoint, self.dataset, self.split, root=self.root, image_size=self.image_size,
            batch_size=self.batch_size, workers=self.workers, on_error=self.on_error, device=self.device,
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


Command = Demo | List | Pretrain | Finetune | Evaluate | Predict | Convert | Export | Doctor
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
    default = _recipe(_value(arguments, "--recipe") or "tiny", FINETUNE)()
    command = _parse_as(_with_default(Finetune, default, arguments), "finetune", arguments)
    given, own = to_dict(command.config.model), to_dict(default.model)
    if idle := [name for name in own if given[name] != own[name] and name not in ("image_size", "dropout")]:
        raise ValueError(
            f"--model.{idle[0].replace('_', '-')} has no effect here: the checkpoint brings its own model. What can be "
            f"set is --image-size and --model.dropout."
        )
    return command


def _with_default(kind: type[Command], config: TrainConfig, arguments: Sequence[str]) -> type[Command]:
    """`kind` with `config` as the default of its field, under the same name and documentation."""
    given = {word.partition("=")[0] for word in arguments}
    if "--steps" in given:
        config = dataclasses.replace(config, steps=1, epochs=None)
    if "--epochs" in given:
        config = dataclasses.replace(config, steps=None, epochs=1.0)
    field = dataclasses.field(default=config)
    made = dataclasses.make_dataclass(kind.__name__, [("config", RunConfig, field)], bases=(kind,), frozen=True)
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

    from vitlab.train.loop import NonFiniteError, StoppedError
    from vitlab.weights import ParityError

    if isinstance(error, torch.OutOfMemoryError):
        print(
            f"vitlab: the device's memory is full. Give a smaller --microbatch or --image-size. ({error})",
            file=sys.stderr,
        )
        return 1
    if not isinstance(error, (StoppedError, NonFiniteError, ParityError)):
        raise error
    print(f"vitlab: {error}", file=sys.stderr)
    return 143 if isinstance(error, StoppedError) else 1
