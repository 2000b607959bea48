"""The command line: a command is arguments -> one library call -> print. Nothing here needs torch until it runs."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.settings import nearest, to_dict
from vitlab.train.config import TrainConfig

RunConfig = Annotated[TrainConfig, tyro.conf.arg(name="")]  # `--optim.lr`, not `--config.optim.lr`


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
    pattern: Positional[str] = "*"
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

    recipe: Positional[str]
    """One of `vitlab list recipes`."""
    config: RunConfig
    model_name: Annotated[str | None, tyro.conf.arg(name="model")] = None
    """Name of the model for this recipe (`vitlab list models`)."""
    workdir: Path | None = None
    """The run's folder; `runs/RECIPE` unless given."""
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        from vitlab.transfer.run import fitted, pretrain

        config = fitted(self.config)
        workdir = self.workdir or Path("runs") / self.recipe
        _settings(config, workdir)
        outcome = pretrain(config, workdir, device=self.device)
        _answer(outcome.result, self.json, outcome.summary(workdir))
        return 0


@dataclass(frozen=True)
class Finetune:
    """Carry a checkpoint to another data set by a recipe (Table 4, or a small twin), then test it."""

    checkpoint: Positional[str]
    """A Google .npz, a saved model, or a finished run's folder."""
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
        from vitlab.transfer.finetune import adapted, finetune

        config = adapted(self.checkpoint, self.config, self.image_size)
        workdir = self.workdir or Path("runs") / f"finetune-{self.recipe}"
        _settings(config, workdir)
        outcome = finetune(self.checkpoint, config, workdir, device=self.device)
        _answer(outcome.result, self.json, outcome.summary(workdir))
        return 0


@dataclass(frozen=True)
class Evaluate:
    """Test a checkpoint on a data set: accuracy, loss, and each class by itself."""

    checkpoint: Positional[str]
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

    checkpoint: Positional[str]
    sources: Positional[tuple[str, ...]]
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


Command = Demo | List | Pretrain | Finetune | Evaluate | Predict | Doctor


def parse(argv: Sequence[str]) -> Command:
    """The command in `argv`. Raises ValueError for a setting out of range, SystemExit(2) for words it does not know.

    `pretrain` and `finetune` begin with a recipe, whose values are the defaults of all further settings.
    """
    arguments = list(argv)
    defaults: dict[str, TrainConfig] = {}
    if arguments[:1] == ["pretrain"]:
        recipe = arguments[1] if len(arguments) > 1 and not arguments[1].startswith("-") else "tiny-digits"
        model = _value(arguments, "--model")
        defaults["pretrain"] = _recipe(recipe, PRETRAIN)(*([model] if model else []))
    if arguments[:1] == ["finetune"]:
        defaults["finetune"] = _recipe(_value(arguments, "--recipe") or "tiny", FINETUNE)()
    if any(word == "--steps" or word.startswith("--steps=") for word in arguments):
        defaults = {key: dataclasses.replace(each, steps=1, epochs=None) for key, each in defaults.items()}
    if any(word == "--epochs" or word.startswith("--epochs=") for word in arguments):
        defaults = {key: dataclasses.replace(each, steps=None, epochs=1) for key, each in defaults.items()}
    return tyro.cli(
        _commands(defaults),
        args=arguments,
        prog="vitlab",
        description='The Vision Transformer paper ("An Image is Worth 16x16 Words") as software.',
    )


def _commands(defaults: dict[str, TrainConfig]) -> Any:
    """All commands as tyro understands them; a recipe's values stand in as defaults."""
    union: Any = None
    for kind in (Demo, List, Pretrain, Finetune, Evaluate, Predict, Doctor):
        name = kind.__name__.lower()
        config = defaults.get(name)
        shown: Any = _with_default(kind, config) if kind in (Pretrain, Finetune) else kind
        member = Annotated[shown, tyro.conf.subcommand(name=name)]
        union = member if union is None else union | member
    return union


def _with_default(kind: type, config: TrainConfig | None) -> type:
    """`kind` with `config` as the default of its field, under the same name and documentation."""
    default = config or TrainConfig(steps=1)
    made = dataclasses.make_dataclass(
        kind.__name__,
        [("config", RunConfig, field(default=default))],
        bases=(kind,),
        frozen=True,
    )
    made.__doc__ = kind.__doc__
    return made


def _recipe(name: str, table: dict[str, Any]) -> Any:
    if name not in table:
        raise ValueError(f"unknown recipe {name!r}; {nearest(name, table)}. `vitlab list recipes` shows all.")
    return table[name]


def _value(arguments: list[str], flag: str) -> str | None:
    """What follows `flag`, or its `flag=value`."""
    for place, word in enumerate(arguments):
        if word == flag and place + 1 < len(arguments):
            return arguments[place + 1]
        if word.startswith(flag + "="):
            return word.partition("=")[2]
    return None


def _settings(config: TrainConfig, workdir: Path) -> None:
    """The resolved settings, on the standard error so that `--json` stays readable by a program."""
    print(f"settings (kept in {workdir / 'config.json'}):", file=sys.stderr)
    for name, value in _flat(to_dict(config)):
        print(f"  {name} = {value}", file=sys.stderr)


def _flat(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    return [
        row
        for name, value in settings.items()
        for row in (_flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)])
    ]


def _answer(data: Any, as_json: bool, text: str, lines: bool = False) -> None:
    print(json.dumps(data, indent=None if lines else 1, default=str) if as_json else text, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """The `vitlab` program. Exit codes: 0 done, 1 in part or not at all, 2 bad input, 143 stopped and saved."""
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
    raise SystemExit(code)


def _failure(error: RuntimeError) -> int:
    from vitlab.train.loop import NonFiniteError, StoppedError

    if not isinstance(error, (StoppedError, NonFiniteError)):
        raise error
    print(f"vitlab: {error}", file=sys.stderr)
    return 143 if isinstance(error, StoppedError) else 1
