"""The commands about many runs and about cost: study, bench, plan."""

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from vitlab.commands import Device, Json, print_note, print_result
from vitlab.commands.info import List
from vitlab.config import TrainConfig
from vitlab.cost.options import BenchOptions
from vitlab.display import format_table, parse_duration
from vitlab.errors import UserError
from vitlab.settings import nearest
from vitlab.train.throughput import DEVICES


@dataclass(frozen=True)
class Study:
    """Run one of the paper's studies: a table, a figure and a verdict on each claim. Resumes an interrupted study."""

    name: Annotated[Positional[str], tyro.conf.arg(metavar="NAME")] = ""
    """One of `vitlab study --list`."""
    runs: Annotated[Positional[tuple[Path, ...]], tyro.conf.arg(metavar="RUN ...")] = ()
    """For `table2` and `table5`: the folders of `vitlab finetune` and `vitlab vtab` to lay out beside the paper's."""
    list: bool = False
    """List the studies and exit, as without a NAME."""
    scale: Literal["tiny", "small", "paper"] = "small"
    """small: one to four core-hours, or minutes of a GPU; tiny: a smoke test of minutes; paper: the original."""
    budget: str | None = None
    """Time for the study, such as 20m or 2h, at the scale `small`: fewer seeds, and shorter runs if two do not fit."""
    dry_run: bool = False
    """Print the cost of each run and exit."""
    out: Path | None = None
    """Folder of the runs and the report; default: `runs/study-NAME-SCALE`."""
    dataset: str | None = None
    """Data set to use instead of the study's, if it has only one."""
    root: str | None = None
    """Folder that holds the data set."""
    processes: int | None = None
    """Runs at the same time; default: one for each core, at most 4 on a GPU; 1 for paper."""
    tflops: float | None = None
    """For --dry-run: achieved TFLOP/s of the device."""
    device: Device = "auto"
    json: Json = False

    def run(self) -> int:
        from vitlab.studies import STUDIES
        from vitlab.studies.tables import TABLES

        started = time.monotonic()
        if self.list or not self.name:
            return List("studies", json=self.json).run()
        if self.name in TABLES:
            return self._print_table()
        if self.runs:
            raise UserError(f"{self.runs[0]}: only {' and '.join(TABLES)} take folders of runs.")
        if self.name not in STUDIES:
            raise UserError(
                f"unknown study {self.name!r}; {nearest(self.name, [*STUDIES, *TABLES])}. `vitlab study --list`"
            )
        if self.dry_run:
            self._refuse(("processes", "device", "budget"), "with --dry-run")
        else:
            self._refuse(("tflops",), "without --dry-run")
        print_note(f"planning the study {self.name} at scale {self.scale} ...")
        from vitlab.studies import compute, runner
        from vitlab.studies.report import as_text
        from vitlab.train.clock import Clock

        study = STUDIES[self.name]
        out = self.out or Path("runs") / f"study-{self.name}-{self.scale}"
        make_plan = partial(runner.plan, study, self.scale, out, dataset=self.dataset, root=self.root)
        plan, clock = make_plan(), None
        if self.dry_run:
            result = compute.study_compute(plan, self.tflops)
            print_result(result, self.json, compute.format_compute(result))
            return 0
        if self.budget is not None:
            if self.scale != "small":
                raise UserError(f"--budget is for --scale small, not {self.scale}; leave one of the two out.")
            clock = Clock(parse_duration(self.budget), started)
            count = runner.num_processes(self.scale, self.processes, self.device)
            print_note("measuring the speed")
            plan = compute.fit_study(study, make_plan, clock, count, self.device)
            steps = f", 1/{plan.divisor} of the steps" if plan.divisor > 1 else ""
            print_note(f"{len({run.config.seed for run in plan.runs})} of {study.seeds} seeds{steps}")
        if plan.unfinished_runs:
            print_note(f"{compute.describe_open_runs(plan)} ...")
        result = runner.run_study(study, plan, processes=self.processes, device=self.device, clock=clock)
        text = f"{as_text(result)}\nreport: {out / 'report.md'} · figure: {out / 'figure.png'}"
        print_result(result, self.json, text)
        return 0

    def _refuse(self, names: tuple[str, ...], reason: str) -> None:
        """Raises UserError for an option of these that was given."""
        for name in names:
            if getattr(self, name) != getattr(Study, name):
                raise UserError(f"--{name.replace('_', '-')} has no effect {reason}.")

    def _print_table(self) -> int:
        from vitlab.studies.tables import as_text, layout

        options = ("scale", "budget", "dry_run", "out", "dataset", "root", "processes", "tflops", "device")
        self._refuse(options, f"with {self.name}, which starts no runs")
        table = layout(self.name, self.runs)
        print_result(table, self.json, as_text(table))
        return 0


@dataclass(frozen=True)
class Bench:
    """Measure speed, memory and the largest batch of models over image sizes (Fig. 12)."""

    models: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="MODEL ...")] = ()
    """Names or shell patterns (`vitlab list models`); default: the eight models of Fig. 12."""
    options: Annotated[BenchOptions, tyro.conf.arg(name="")] = BenchOptions()
    out: Path = Path("bench")
    """Folder for bench.json and bench.png."""
    json: Json = False

    def run(self) -> int:
        print_note(f"measuring {', '.join(self.models) or 'the models of Fig. 12'} ...")
        from vitlab.cost.bench import FIGURE_12, bench, skipped_rows, table

        result = bench(self.models or FIGURE_12, self.options, self.out)
        rows = table(result)
        note = "ceiling: TFLOP/s of the products alone" if rows else "nothing could be measured"
        shown = format_table(rows, optional=("quartiles", "of ceiling"))
        files = f"figure: {self.out / 'bench.png'} · result: {self.out / 'bench.json'}"
        skipped = skipped_rows(result)
        print_result(result, self.json, "\n".join([shown, note, *skipped, files]))
        return 1 if skipped else 0


@dataclass(frozen=True)
class Plan:
    """Estimate the cost of a run before it starts: compute, hours, memory of each process, data rate (Table 6)."""

    recipe: Annotated[Positional[str], tyro.conf.arg(metavar="RECIPE")]
    """One of `vitlab list recipes`; its settings are flags, as in the command that runs it."""
    config: TrainConfig
    open_settings: Annotated[frozenset[str], tyro.conf.Suppress, tyro.conf.Fixed] = frozenset()
    finetune: bool = False
    """RECIPE is one of `vitlab finetune`; its sweep and all of its runs count."""
    model_name: Annotated[str | None, tyro.conf.arg(name="model")] = None
    """Name of the model (`vitlab list models`); default for fine-tuning: ViT-B/16."""
    device: Annotated[str, tyro.conf.arg(help=f"One of {', '.join(DEVICES)}; cpu: a machine like this.")] = "h100"
    count: int = 1
    """Processes, each with one device (cpu: one machine)."""
    mfu: str | None = None
    """Model FLOPs utilization, of the peak in bfloat16, which `vitlab bench MODEL --mode train` measures; or
    `measured`, which trains on this machine for some seconds; default: 0.4, and required in float32."""
    examples: int | None = None
    """Images of the training split; required if `vitlab list datasets` does not give it."""
    image_kb: float = 110.0
    """Size of a stored image in kB; 110 is a photo of 500 x 375 pixels as JPEG."""
    price: float | None = None
    """Price of an hour of one device, in any currency."""
    json: Json = False

    def run(self) -> int:
        print_note(f"planning {self.recipe} ...")
        from vitlab.cost.plan import estimate, format_estimate

        cost = estimate(
            self.config,
            device=self.device,
            count=self.count,
            open_settings=self.open_settings,
            mfu=self.mfu,
            model_name=self.model_name,
            examples=self.examples,
            image_kb=self.image_kb,
            price=self.price,
        )
        print_result(cost, self.json, format_estimate(cost))
        return 0
