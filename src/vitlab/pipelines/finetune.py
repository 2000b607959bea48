"""Table 4 and App. B.1.1: carry a checkpoint to another task, at another resolution.

`finetune` is one run. `sweep_and_finetune` is the paper's protocol: a search for the learning rate on a held-out part
of the training split, then one run or several on all of it, then the test.
"""

import dataclasses
import math
import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.subsets import stratified_split
from vitlab.errors import UserError, quoted
from vitlab.evaluate.accuracy import Evaluation, format_evaluation
from vitlab.evaluate.load import choose_device
from vitlab.models import build_model
from vitlab.models.config import ImageSize, Interpolation, ViTConfig
from vitlab.models.init import redraw_head
from vitlab.models.vit import Model
from vitlab.pipelines.estimate import Estimate
from vitlab.pipelines.init_from_checkpoint import (
    adapted,
    by_size,
    carried,
    check_positions,
    default_image_size,
    identity,
    saved_choices,
    with_preprocessing,
)
from vitlab.pipelines.pretrain import (
    Images,
    OnSettings,
    Outcome,
    judge_split,
    load_images,
    readable,
    run,
    run_settings,
    unreadable,
)
from vitlab.preprocessing import Preprocessing
from vitlab.rng import Stream
from vitlab.train.distributed import SINGLE, World
from vitlab.train.loop import NonFiniteError, train
from vitlab.train.microbatch import StepCost, measure_step
from vitlab.train.workdir import Workdir, check_folder
from vitlab.weights import load_card, load_model, save_model

Say = Callable[[str], None]


@dataclass(frozen=True)
class Finetuned:
    """What a whole fine-tuning leaves."""

    config: FinetuneConfig
    """The complete settings."""
    result: dict[str, Any]
    """The content of `result.json`: the same however often the work was interrupted."""

    def summary(self, workdir: Path) -> str:
        """The rates tried, the runs, each class, what could not be read, and where things lie."""
        result, lines = self.result, []
        for trial in result.get("sweep", ()):
            chosen = "  <- taken" if trial["learning_rate"] == result["learning_rate"] else ""
            lines.append(f"learning rate {trial['learning_rate']:<6g} {_score(trial)}{chosen}")
        lines.append(format_evaluation(result["test"]))
        if len(runs := result.get("runs", ())) > 1:
            each = ", ".join(f"{one['accuracy']:.2%}" for one in runs)
            spread = f"{result['accuracy_mean']:.2%} +- {result['accuracy_sd']:.2%}"
            lines.append(f"accuracy over {len(runs)} runs: {spread} ({each}; the classes above are run-0's)")
        if left_out := result.get("unreadable"):
            lines.append(f"{len(left_out)} files could not be read and were left out:")
            lines += [f"  {quoted(one['path'])}: {one['reason']}" for one in left_out]
        return "\n".join([*lines, f"model: {workdir / 'model'} · curves: {workdir / 'metrics.jsonl'}"])


def finetune(
    checkpoint: str | Path,
    config: TrainConfig,
    workdir: str | Path,
    *,
    image_size: ImageSize | None = None,
    device: str = "auto",
    tensorboard: bool = True,
    on_settings: OnSettings | None = None,
    world: World = SINGLE,
) -> Outcome:
    """One run: fine-tunes `checkpoint` at the rate `config.optim.lr`, then tests it (Sec. 3.2, App. B.1.1).

    The model is the checkpoint's with a new zero head for the data set's classes, and position embeddings
    interpolated to `image_size` (the recipe's unless given); a pre-logits layer is dropped, as the paper does.
    The same call on the same folder continues an interrupted run. `on_settings` hears the complete settings.
    Raises ValueError for a config that asks for more than one run from the checkpoint: see `sweep_and_finetune`.
    """
    if isinstance(config, FinetuneConfig) and (
        len(config.learning_rates) > 1
        or config.runs > 1
        or config.from_scratch
        or config.fresh_positions
        or config.head_std is not None
        or config.automatic
    ):
        raise UserError(
            "a search, several runs, from_scratch, fresh positions, head_std and automatic settings are for "
            "sweep_and_finetune."
        )
    source, digest = identity(load_model(checkpoint))
    images = load_images(config.data, world)
    single = config.single() if isinstance(config, FinetuneConfig) else config
    single = adapted(source, single, len(images.train.classes), image_size)
    if on_settings:
        on_settings(single)
    return run(
        single, workdir, images, lambda: carried(checkpoint, single.model), command="finetune",
        start=f"{Path(checkpoint).name} {digest}",
        device=device, tensorboard=tensorboard, world=world,
    )  # fmt: skip


def sweep_and_finetune(
    checkpoint: str | Path,
    config: FinetuneConfig,
    workdir: str | Path,
    *,
    image_size: ImageSize | None = None,
    interpolation: Interpolation | None = None,
    device: str = "auto",
    tensorboard: bool = True,
    on_settings: OnSettings | None = None,
    say: Say | None = None,
    world: World = SINGLE,
) -> Finetuned:
    """The whole protocol (App. B.1.1): tries `config.learning_rates`, trains on all of train, tests once for each run.

    The search lies in `workdir`/sweep/lr-RATE, the runs in `workdir`/run-0, run-1, ..., run-0's model also in
    `workdir`/model: none is chosen by its test. A single run without a search has `workdir` itself for its folder.
    `interpolation` is how position embeddings are resized, instead of the checkpoint's own way.
    With `config.data.on_error="skip"` every image is tried first, and those that cannot be read are left out and
    listed in the result. The same call continues what was interrupted, and repeats nothing that has ended.
    Raises ValueError for bad settings or data, and for a folder with other settings.
    """
    workdir, say = Path(workdir), say or (lambda _: None)
    place = choose_device(world.device(device))
    check_search(config)
    # What is wrong with the checkpoint, the size or the folder is said before any image is read.
    say(f"reading the checkpoint {checkpoint}")
    source, digest = identity(load_model(checkpoint))
    if len(config.learning_rates) == 1:
        config = dataclasses.replace(config, optim=dataclasses.replace(config.optim, lr=config.learning_rates[0]))
    config = saved_choices(workdir, config)
    if interpolation is not None and isinstance(source, ViTConfig):
        source = dataclasses.replace(source, position_interpolation=interpolation)
    preprocessing = Preprocessing.read(load_card(checkpoint), str(checkpoint), source.image_size)
    if "image_size" in config.automatic and image_size is None:
        image_size = default_image_size(source, preprocessing, place.type)
    config = adapted(source, config, 2, image_size)
    if "preprocessing" in config.automatic:
        prepared = preprocessing.at(config.model.image_size)
        config = dataclasses.replace(config, data=with_preprocessing(config.data, prepared))
    prepared = config.data.preprocessing(config.model.image_size)
    say(f"test images: {prepared.describe()}")
    if config.fresh_positions:
        check_positions(config.model)
    check_folder(workdir)
    say(f"reading the data set {config.data.name}")
    images = load_images(config.data, world)
    if config.data.on_error == "skip":
        images = readable(images, world, say)
        if images.unreadable:
            say(f"{len(images.unreadable)} images cannot be read and are left out; they are listed at the end")
    config = adapted(source, config, len(images.train.classes), image_size)
    shortened = config.sweep_steps
    config = by_size(config, len(images.train), place.type)
    world.check_batch_size(config.batch_size)
    if on_settings:
        on_settings(config)
    say(f"settings: {workdir / 'config.json'}")
    if shortened is not None:
        run_steps = config.total_steps(len(images.train))
        say(f"Deviation: the search takes {shortened} steps a rate; the paper's takes the run's own {run_steps}")
    start = f"{Path(checkpoint).name} from scratch" if config.from_scratch else f"{Path(checkpoint).name} {digest}"
    start += ", fresh positions" if config.fresh_positions else ""
    start += "" if config.head_std is None else f", head of sd {config.head_std:g}"
    task = _Task(checkpoint, start, images, config, device, tensorboard, say, world)
    if world.broadcast_object(lambda: not (workdir / "result.json").exists()):
        estimate = task.estimate(place)
        resumed = " in all (what has ended is not repeated)" if (workdir / "config.json").exists() else ""
        say(f"what this will take{resumed}:\n{estimate.describe()}")
        task = dataclasses.replace(task, microbatch=estimate.cost.microbatch)
    if len(config.learning_rates) < 2 and config.runs == 1:
        return Finetuned(config, task.final(config.single(), workdir))
    return Finetuned(config, _whole(task, workdir))


@dataclass(frozen=True)
class _Task:
    """What all runs of one fine-tuning share; `start` says which weights they begin with."""

    checkpoint: str | Path
    start: str
    images: Images
    config: FinetuneConfig
    device: str
    tensorboard: bool
    say: Say
    world: World
    microbatch: int | None = None
    """Images at once, measured."""

    def estimate(self, place: torch.device) -> Estimate:
        """What the whole will take, measured by the first of several processes on `place`."""
        self.say("measuring how long a micro-batch takes, and how much memory")
        config, splits = self.config, self.images

        def measure() -> dict[str, Any]:
            model = build_model(config.model, generator=torch.Generator().manual_seed(0))
            return dataclasses.asdict(measure_step(config.single(), model, place, self.world.world_size))

        cost = StepCost(**self.world.broadcast_object(measure))
        several = len(config.learning_rates) > 1
        held_out = len(hold_out(splits.train, config.held_out, config.seed)[1]) if several else 0
        return Estimate(
            config, cost, len(splits.train), len(splits.test), len(splits.train.classes), held_out, str(place)
        )

    def create(self, seed: int) -> Model:
        generator, model = torch.Generator().manual_seed(seed), self.config.model
        if self.config.from_scratch:
            made = build_model(model, generator=generator)
        else:
            made = carried(self.checkpoint, model, generator if self.config.fresh_positions else None)
        if self.config.head_std is not None:
            redraw_head(made, self.config.head_std, generator)
        return made

    def final(self, config: TrainConfig, path: Path, label: str | None = None) -> dict[str, Any]:
        """The result of a run on all of train, tested; read from its folder where it has ended."""
        settings = run_settings("finetune", self.start, self.images.train, config)
        with Workdir(path, settings, tensorboard=False, world=self.world) as folder:
            if folder.finished:
                return folder.read_result()
        return run(
            config, path, self.images, lambda: self.create(config.seed), command="finetune", start=self.start,
            label=label, device=self.device, tensorboard=self.tensorboard, microbatch=self.microbatch,
            world=self.world,
        ).result  # fmt: skip

    def trial(self, lr: float, rest: Dataset, held: Dataset, path: Path) -> dict[str, Any]:
        """The score of a learning rate: trained on the rest, judged on the held-out part; None where it diverged."""
        steps, warmup = self.config.total_steps(len(self.images.train)), self.config.optim.warmup_steps
        decay = self.config.average_decay
        if (short := self.config.sweep_steps) is not None:  # warm-up and average span the same share of it
            steps, warmup, decay = short, warmup * short // steps, decay and decay ** (steps / short)
        config = self.config.single(lr)
        config = dataclasses.replace(
            config,
            steps=steps,
            epochs=None,
            average_decay=decay,
            optim=dataclasses.replace(config.optim, warmup_steps=warmup),
            data=dataclasses.replace(config.data, eval_split=held.split),
        )
        settings = run_settings("finetune", self.start, rest, config) | {"held_out": self.config.held_out}
        place = choose_device(self.world.device(self.device))

        judged: list[Evaluation] = []  # the latest; the last of a training is of the weights that it returns

        def judge(model: nn.Module) -> dict[str, float]:
            judged[:] = [judge_split(config, model, held, place, self.world)]
            return {f"{held.split}_{name}": value for name, value in judged[0].figures().items()}

        with Workdir(path, settings, tensorboard=self.tensorboard, world=self.world) as folder:
            if not folder.finished:
                try:
                    model = train(
                        config, folder, self.create(config.seed), dataset=rest, evaluate=judge, device=place,
                        label=f"rate {lr:g}", microbatch=self.microbatch, world=self.world,
                    )  # fmt: skip
                    found = judged[0] if judged else judge_split(config, model, held, place, self.world)
                    finite = math.isfinite(found.figures()["loss"])  # else the last update broke the weights
                    result: dict[str, Any] = {held.split: found.record() if finite else None}
                except NonFiniteError as error:
                    self.say(str(error))
                    result = {held.split: None}
                folder.write_result(result)
                if folder.writes:
                    shutil.rmtree(folder.checkpoints, ignore_errors=True)  # nobody asks for them again
            record = folder.read_result()[held.split]
        score = {"learning_rate": lr, "accuracy": None} | (_figures(record) if record else {})
        self.say(f"learning rate {lr:g}: {_score(score)}")
        return score


def _whole(task: _Task, workdir: Path) -> dict[str, Any]:
    """Search and runs, each in a folder of its own; returns the content of `workdir`/result.json."""
    config, train_split = task.config, task.images.train
    rates = config.learning_rates
    parts = hold_out(train_split, config.held_out, config.seed) if len(rates) > 1 else None
    settings = run_settings("finetune", task.start, train_split, config)
    with Workdir(workdir, settings, tensorboard=False, world=task.world) as folder:
        if folder.finished:
            return folder.read_result()
        folder.truncate_metrics(None)  # one line for each run that has ended, the same at every start
        scores, records = [], []
        if parts:
            rest, held = parts
            for lr in rates:
                scores.append(task.trial(lr, rest, held, workdir / "sweep" / f"lr-{lr}"))
                folder.log_metrics(len(scores), scores[-1])
        best = best_rate(scores) if scores else config.optim.lr
        for number in range(config.runs):
            single = config.single(best, config.seed + number)
            record = task.final(single, workdir / f"run-{number}", f"run {number}")["test"]
            records.append(record)
            folder.log_metrics(
                len(scores) + len(records), {"learning_rate": best, "seed": single.seed, **_figures(record)}
            )
        if folder.writes:
            save_model(load_model(workdir / "run-0"), workdir / "model", extra=load_card(workdir / "run-0"))
        accuracies = [record["accuracy"] for record in records]
        folder.write_result({
            "learning_rate": best,
            "sweep": scores,
            "runs": [{"seed": config.seed + number, **_figures(record)} for number, record in enumerate(records)],
            "accuracy_mean": statistics.fmean(accuracies),
            "accuracy_sd": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
            "test": records[0],
            **unreadable(task.images),
        })  # fmt: skip
        return folder.read_result()


def check_search(config: FinetuneConfig) -> None:
    """Raises UserError where there is a search and `optim.lr` is none of its rates: it would never be used."""
    if len(config.learning_rates) > 1 and config.optim.lr not in config.learning_rates:
        rates = ", ".join(f"{rate:g}" for rate in config.learning_rates)
        raise UserError(
            f"optim.lr is {config.optim.lr:g} and learning_rates are {rates}, which are tried instead of it. To train "
            f"at optim.lr, set learning_rates=() and sweep_steps=None; to try it as well, add it to learning_rates."
        )


def best_rate(scores: Sequence[Mapping[str, Any]]) -> float:
    """The learning rate with the highest accuracy; of equals that with the lowest loss, and the smallest. Those without
    an accuracy diverged."""
    scored = [score for score in scores if score["accuracy"] is not None]
    if not scored:
        tried = ", ".join(f"{score['learning_rate']:g}" for score in scores)
        raise NonFiniteError(f"the training diverged at every learning rate ({tried}); try smaller ones.")
    best = max(scored, key=lambda score: (score["accuracy"], -score["loss"], -score["learning_rate"]))
    return best["learning_rate"]


def hold_out(dataset: Dataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """The training split without `share` of each class, and that part, chosen by `seed` (App. B.1.1).

    Raises ValueError where one of the two is empty.
    """
    parts = stratified_split(dataset.labels, {"held_out": share}, seed, Stream.HELD_OUT)
    rest, held = (dataset.take(parts[name]) for name in ("train", "held_out"))
    if not len(rest) or not len(held):
        raise UserError(
            f"held_out={share:g} leaves {len(rest)} images of {dataset.name} to train on and {len(held)} to judge by "
            f"(a class needs at least two); give another share, or one rate and no search (`--learning-rates 0.01`)."
        )
    return rest, dataclasses.replace(held, split="held_out")


def _figures(record: Mapping[str, Any]) -> dict[str, Any]:
    """The headline numbers of a record."""
    return {name: record[name] for name in ("accuracy", "loss", "top5", "images") if name in record}


def _score(score: Mapping[str, Any]) -> str:
    if score["accuracy"] is None:
        return "diverged"
    return f"{score['accuracy']:.2%} of {score['images']} held-out images right, loss {score['loss']:.4f}"
