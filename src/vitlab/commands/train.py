"""The commands that train: a demonstration, pre-training, fine-tuning, VTAB-1k."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional

from vitlab.commands.output import (
    Checkpoint,
    FinetuneRunConfig,
    PositionInterpolation,
    RunConfig,
    answer,
    begin,
    say,
    say_score,
    show_settings,
)
from vitlab.errors import UserError


@dataclass(frozen=True)
class Demo:
    """Pre-train, carry to a higher resolution, test and look: the paper in two minutes, on handwritten digits."""

    out: Path = Path("vitlab-demo")
    """Folder for the runs and the page."""
    seed: int = 0
    json: bool = False
    """Print the result as JSON."""

    def run(self) -> int:
        begin("training on handwritten digits")
        from vitlab.studies.demo import demo

        result = demo(self.out, seed=self.seed)
        answer(result, self.json, f"pre-trained: {result['pretrain_accuracy']:.1%} of the test digits right · "
                f"carried to twice the resolution: {result['finetune_accuracy']:.1%}\n{result['page']}")  # fmt: skip
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
        begin(f"reading {self.config.data.name}")
        from vitlab.pipelines.pretrain import pretrain
        from vitlab.train.distributed import init_distributed

        workdir = self.workdir or Path("runs") / self.recipe
        with init_distributed() as world:
            outcome = pretrain(
                self.config, workdir, device=self.device, world=world,
                on_settings=show_settings(workdir) if world.is_rank_0 else None,
            )  # fmt: skip
        if world.is_rank_0:
            answer(outcome.result, self.json, outcome.summary(workdir))
        return 0


@dataclass(frozen=True)
class Finetune:
    """Fine-tune a checkpoint: search the learning rate, train on all of train, test (Table 4)."""

    checkpoint: Checkpoint
    config: FinetuneRunConfig
    recipe: str = "own"
    """One of `vitlab list recipes`; `own` suits any images, and needs --dataset."""
    dataset: str | None = None
    """Data set, `folder:PATH` or `shards:PATH`; the recipe's unless given. Of a folder, files that cannot be read are
    left out and listed (`--data.on-error raise` stops at them)."""
    root: str | None = None
    """Folder that holds a named data set."""
    image_size: int | None = None
    """Side of the images in pixels; unless given, the recipe's, and for `own` that of the checkpoint's evaluation."""
    interpolation: PositionInterpolation = None
    workdir: Path | None = None
    """The folder of the search and the runs; `runs/finetune-RECIPE` unless given (for `own`, the data set's name)."""
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        begin(f"loading {self.checkpoint}")
        from vitlab.pipelines.finetune import sweep_and_finetune
        from vitlab.train.distributed import init_distributed

        name = self.config.data.name
        if not name:
            raise UserError("name the images with --dataset folder:PATH (or a data set), or a --recipe that does.")
        called = Path(name.partition(":")[2] or name).name if self.recipe == "own" else self.recipe
        workdir = self.workdir or Path("runs") / f"finetune-{called}"
        with init_distributed() as world:
            done = sweep_and_finetune(
                self.checkpoint, self.config, workdir, image_size=self.image_size, interpolation=self.interpolation,
                device=self.device, say=say if world.is_rank_0 else None, world=world,
            )  # fmt: skip
        if world.is_rank_0:
            answer(done.result, self.json, done.summary(workdir))
        return 0


@dataclass(frozen=True)
class Vtab:
    """Judge a checkpoint by VTAB-1k: 19 tasks, each learned from 1,000 images by one setting and tested whole."""

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
    """Side of the images in pixels; unless given 384, or the nearest larger size that the patches divide."""
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        begin(f"loading {self.checkpoint}")
        from vitlab.pipelines.vtab import as_table, vtab
        from vitlab.train.distributed import init_distributed

        with init_distributed() as world:
            result = vtab(
                self.checkpoint, self.config, self.root, self.out, tasks=self.tasks or "available", select=self.select,
                download=self.download, image_size=self.image_size, device=self.device, on_task=say_score, world=world,
            )  # fmt: skip
        if world.is_rank_0:
            answer(result, self.json, f"{as_table(result)}\nresult: {self.out / 'result.json'}")
        return 0 if result["tasks"] else 1  # nothing could be had
