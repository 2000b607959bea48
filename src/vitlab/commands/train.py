"""The commands that train: demo, pretrain, finetune, vtab."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional

from vitlab.commands import CHECKPOINTS, Checkpoint, Device, Json, PositionInterpolation, print_note, print_result
from vitlab.commands.check import check_inputs
from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.display import parse_duration
from vitlab.errors import UserError
from vitlab.io import check_output
from vitlab.models.config import Pool
from vitlab.recipes import FINETUNE
from vitlab.weights.recommended import DEFAULT


@dataclass(frozen=True)
class Demo:
    """See what pre-training is worth: a ViT on 50 handwritten digits, fine-tuned and from scratch; two minutes."""

    out: Path = Path("vitlab-demo")
    """Folder for the runs and the page."""
    seed: int = 0
    """Seed of all random numbers."""
    json: Json = False

    def run(self) -> int:
        print_note("training on handwritten digits ...")
        from vitlab.studies.demo import demo

        result = demo(self.out, seed=self.seed)
        print_result(result, self.json, f"{result['sentence']}\n{result['page']}")
        return 0


@dataclass(frozen=True)
class Pretrain:
    """Train a model from scratch by a recipe (Table 3, or a small one) and test it. Resumes an interrupted run."""

    recipe: Annotated[Positional[str], tyro.conf.arg(metavar="RECIPE")]
    """One of `vitlab list recipes`."""
    config: TrainConfig
    model_name: Annotated[str | None, tyro.conf.arg(name="model")] = None
    """Name of the model for this recipe (`vitlab list models`)."""
    budget: str | None = None
    """Time for training and test, such as 90s, 10m or 1h; the steps are as many as fit, at most the recipe's."""
    workdir: Path | None = None
    """Folder of the run; default: `runs/RECIPE`."""
    device: Device = "auto"
    json: Json = False

    def run(self) -> int:
        started = time.monotonic()
        print_note(f"reading {self.config.data.name} ...")
        budget = None if self.budget is None else parse_duration(self.budget)
        check_inputs(None, self.config.data.name, root=self.config.data.root)
        from vitlab.runs.pretrain import pretrain
        from vitlab.train.distributed import init_distributed

        check_output(workdir := self.workdir or Path("runs") / self.recipe)
        with init_distributed() as world:
            options: dict[str, Any] = {"budget": budget, "started": started, "log": print_note}
            run = pretrain(self.config, workdir, device=self.device, world=world, **options)
        print_result(run.result, self.json, run.summary(workdir))
        return 0


@dataclass(frozen=True)
class Finetune:
    """Make a classifier of images: a least-squares head on a checkpoint's frozen representations, then fine-tuning
    from it, each tested once; or, with --recipe, the paper's protocol (Table 4)."""

    config: FinetuneConfig
    open_settings: Annotated[frozenset[str], tyro.conf.Suppress, tyro.conf.Fixed] = frozenset()
    checkpoint: Annotated[Positional[str], tyro.conf.arg(metavar="CHECKPOINT", help=CHECKPOINTS)] = DEFAULT
    budget: str | None = None
    """Time for the whole job, such as 90s, 10m or 1h. The speed here, measured, decides image size, steps and sweep."""
    recipe: str = "staged"
    """One of `vitlab list recipes`. `staged`, `custom`, `bit` and `bit-small`, for any images, require --dataset."""
    dataset: str | None = None
    """Data set, `folder:PATH`, `csv:PATH`, `shards:PATH` or `hub:OWNER/NAME`. Default: the recipe's. Unreadable files
    of a folder or table are skipped and listed (`--data.on-error raise` stops at them)."""
    root: str | None = None
    """Folder that holds a named data set."""
    image_size: int | None = None
    """Image side in pixels. Default: the recipe's, for `custom` the checkpoint's preprocessing, for `staged` the
    best of up to three for the least-squares head."""
    layer: int | None = None
    """Keep this number of blocks. Default: all, for `staged` the best of four for the least-squares head."""
    pool: Pool | None = None
    """What represents an image: class token, mean over patches, or both. Default: the checkpoint's own, for `staged`
    without --layer the best for the least-squares head."""
    interpolation: PositionInterpolation = None
    workdir: Path | None = None
    """Folder of the stages and the runs. Default: `runs/finetune-RECIPE`, for any images with the data set's name."""
    device: Device = "auto"
    json: Json = False

    def run(self) -> int:
        started = time.monotonic()
        print_note(f"loading {self.checkpoint} ...")
        budget = None if self.budget is None else parse_duration(self.budget)
        name = self.config.data.name
        known = self.checkpoint if name or ":" not in self.checkpoint else None  # nothing is downloaded without a name
        check_inputs(known, name, root=self.config.data.root)
        if not name:
            raise UserError(
                "--dataset is missing; give --dataset folder:PATH, csv:PATH, shards:PATH, "
                "hub:OWNER/NAME or a name of `vitlab list datasets`, or a --recipe with a data set, such as cifar10."
            )
        from vitlab.finetuning.protocol import default_workdir, sweep_and_finetune
        from vitlab.train.distributed import init_distributed

        any_images = not FINETUNE[self.recipe]().data.name
        check_output(workdir := self.workdir or default_workdir(name if any_images else self.recipe))
        with init_distributed() as world:
            run = sweep_and_finetune(
                self.checkpoint,
                self.config,
                workdir,
                image_size=self.image_size,
                layer=self.layer,
                pool=self.pool,
                interpolation=self.interpolation,
                open_settings=self.open_settings,
                budget=budget,
                started=started,
                device=self.device,
                log=print_note,
                world=world,
            )
        print_result(run.result, self.json, run.summary())
        return 0


@dataclass(frozen=True)
class Vtab:
    """Evaluate a checkpoint on VTAB-1k: 19 tasks, each fine-tuned on 1,000 images with one setting and tested."""

    checkpoint: Checkpoint
    config: TrainConfig
    root: str | None = None
    """Folder of the tasks' data; default: the cache folder. `vitlab list vtab` says where the data comes from."""
    out: Path = Path("runs/vtab")
    """Folder of the result and of the runs."""
    tasks: tuple[str, ...] = ()
    """Tasks to run; default: all whose data is available."""
    select: bool = False
    """Train on 800 images and validate on 200, to choose settings; the test splits are not used."""
    download: bool = True
    """Download data sets that can be downloaded."""
    image_size: int | None = None
    """Image side in pixels; default: 384, or the next larger multiple of the patch size."""
    device: Device = "auto"
    json: Json = False

    def run(self) -> int:
        print_note(f"loading {self.checkpoint} ...")
        check_inputs(self.checkpoint)
        from vitlab.runs.vtab import vtab
        from vitlab.studies.vtab_table import as_table, draw
        from vitlab.train.distributed import init_distributed

        with init_distributed() as world:
            options: dict[str, Any] = {"select": self.select, "download": self.download, "image_size": self.image_size}
            options |= {"tasks": self.tasks or "available", "device": self.device, "world": world}
            result = vtab(self.checkpoint, self.config, self.root, self.out, **options, log=print_note)
            if world.is_rank_0:
                draw(result, Path(self.checkpoint).name, self.out / "figure.png")
        print_result(result, self.json, f"{as_table(result)}\nresult: {self.out / 'result.json'}")
        return 0 if result["tasks"] else 1  # no task had its data
