"""The commands about many runs, and about speed: the paper's studies, measuring, planning."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from vitlab.commands.info import List
from vitlab.commands.output import RunConfig, answer, begin, say, whole_number, whole_numbers
from vitlab.errors import UserError
from vitlab.settings import nearest
from vitlab.train.devices import DEVICES


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
        from vitlab import catalog
        from vitlab.studies import STUDIES

        if self.list or not self.name:
            if self != Study(list=True, json=self.json):
                raise UserError("give the NAME of a study, or --list alone to see which there are.")
            return List("studies", json=self.json).run()
        if self.name not in STUDIES:
            raise UserError(f"unknown study {self.name!r}; {nearest(self.name, STUDIES)}. `vitlab study --list`")
        if self.tflops is not None and not self.dry_run:
            raise UserError("--tflops has no effect without --dry-run.")
        if self.dry_run and (self.processes is not None or self.device != "auto"):
            raise UserError("--processes and --device have no effect with --dry-run.")
        begin(f"planning the study {self.name} at scale {self.scale}")
        from vitlab.studies import cost, engine
        from vitlab.studies.report import as_text

        out = self.out or Path("runs") / f"study-{self.name}-{self.scale}"
        plan = engine.plan(STUDIES[self.name], self.scale, out, dataset=self.dataset, root=self.root)
        if self.dry_run:
            found = cost.cost(plan, self.tflops)
            answer(found, self.json, f"{catalog.as_table(cost.rows(found))}\n{cost.summary(found)}")
            return 0
        found = engine.run_study(plan, processes=self.processes, device=self.device)
        answer(found, self.json, f"{as_text(found)}\nreport: {out / 'report.md'} · figure: {out / 'figure.png'}")
        if left := plan.leftovers():
            say(
                f"{len(left)} folders in {left[0].parent} are of runs with other settings or data, and no part of this "
                f"report."
            )
        return 0


@dataclass(frozen=True)
class Bench:
    """Measure speed, memory and the largest batch of models over image sizes, beside peers (Fig. 12). Continues."""

    models: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL ...")] = ()
    """Names or shell patterns (`vitlab list models`); the eight of Fig. 12 unless given."""
    mode: Literal["infer", "train", "both"] = "infer"
    sizes: str = "64,128,224,384,512"
    """Sides of the images in pixels, with commas between them. A size that a model cannot take is left out, with a
    line that says so."""
    batch: str = "auto"
    """Images in a batch; auto takes the number at which ours is fastest, of powers of two that fit."""
    against: str = ""
    """Peers to time in the same rounds, with commas between them: timm, huggingface."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto is bfloat16 where the device is faster in it."""
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
        begin(f"measuring {', '.join(self.models) or 'the models of Fig. 12'} at {self.sizes} pixels")
        from vitlab import catalog
        from vitlab.cost.bench import FIGURE_12, Settings, bench
        from vitlab.cost.report import table

        batch = None if self.batch == "auto" else whole_number("batch", self.batch)
        settings = Settings(
            self.models or FIGURE_12, whole_numbers("sizes", self.sizes), self.mode, batch,
            tuple(filter(None, self.against.split(","))), self.dtype, self.compile, self.seconds, self.rounds,
            self.memory, self.largest, self.profile, self.device,
        )  # fmt: skip
        found = bench(settings, self.out)
        rows = table(found)
        told = "nothing could be measured"
        if rows:
            told = f"{catalog.as_table(rows)}\ncopying: {found['copy_gb_per_s']:.3g} GB/s; ceiling: TFLOP/s of the "
            told += f"products alone\nfigure: {self.out / 'bench.png'}"
        answer(found, self.json, f"{told} · result: {self.out / 'bench.json'}")
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
    device: Annotated[str, tyro.conf.arg(help=f"One of {', '.join(DEVICES)}; cpu: a machine like this.")] = "h100"
    count: int = 1
    """Processes, each with one device (of `cpu`, each with a machine)."""
    mfu: str = "0.4"
    """Share of the device's peak that is reached; or `measured`, which trains here for some seconds; or the bench.json
    of a `vitlab bench MODEL --mode train` on such a device."""
    examples: int | None = None
    """Images of the training split; needed where `vitlab list datasets` does not say."""
    image_kb: float = 110.0
    """Size of a stored image in kB: 110 is a photograph of 500 x 375 pixels as JPEG."""
    json: bool = False

    def run(self) -> int:
        begin(f"planning {self.recipe}")
        from vitlab.cost.plan import estimate, format_estimate

        found = estimate(
            self.config, device=self.device, count=self.count, mfu=self.mfu, model_name=self.model_name,
            examples=self.examples, image_kb=self.image_kb, say=say,
        )  # fmt: skip
        answer(found, self.json, format_estimate(found))
        return 0
