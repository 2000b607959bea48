"""Table 4 and App. D.10: VTAB-1k. One setting for all 19 tasks, each fine-tuned on 1,000 examples and tested whole.

Augmentation that would change a task's labels is left out (`label_preserving`).
`studies/vtab_table.py` has Table 9 and Fig. 2.
Deviation: the benchmark's code drops the last, incomplete batch of a test part; here every image counts once.
"""

import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitlab.checksums import find_corrupt_files
from vitlab.config import DataConfig, TrainConfig
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.data.vtab.tasks import GROUPS, TASKS, task_named
from vitlab.errors import UserError
from vitlab.models.config import ModelConfig
from vitlab.recipes.rules import adapt_config
from vitlab.runs.init_from_checkpoint import fingerprint, init_from_checkpoint
from vitlab.runs.run import RunContext, TrainingRun
from vitlab.runs.splits import Splits
from vitlab.settings import to_dict
from vitlab.train.distributed import SINGLE, World
from vitlab.train.precision import choose_device
from vitlab.train.workdir import Workdir
from vitlab.weights import load_model

MEANS = {group: [name for name, task in TASKS.items() if task.group == group] for group in GROUPS}
MEANS |= {"all 19": list(TASKS)}
"""The tasks of each mean."""

# As in BiT (Kolesnikov et al. 2020), whose pre-processing the paper takes for VTAB.
NO_CROP = ("clevr_count", "clevr_distance", "dmlab", "kitti_distance", "dsprites_location")
NO_FLIP = ("dsprites_location", "dsprites_orientation", "smallnorb_azimuth")


def vtab(
    checkpoint: str | Path,
    config: TrainConfig,
    root: str | Path | None,
    out: str | Path,
    *,
    tasks: Sequence[str] | Literal["available"] = "available",
    select: bool = False,
    download: bool = True,
    image_size: int | None = None,
    device: str = "auto",
    tensorboard: bool = True,
    log: Callable[[str], None] = lambda _: None,
    world: World = SINGLE,
) -> dict[str, Any]:
    """Fine-tunes `checkpoint` on every task as `config` says; returns the content of OUT/result.json.

    tasks: names of `TASKS`, whose data is required, or "available": all whose data is in `root` or can be downloaded.
    select: train on the 800 and score on the 200, without the test parts. `log` receives each task's accuracy. The same
    call resumes an interrupted one. Raises UserError for unknown tasks and missing data.
    """
    names = list(TASKS if tasks == "available" else dict.fromkeys(tasks))
    _check_tasks(names, config.data)
    world.check_batch_size(config.batch_size)
    context = RunContext(choose_device(world.device(device)), tensorboard, world)
    init_id = f"{Path(checkpoint).name} {fingerprint(source := load_model(checkpoint))}"
    splits = ("train", "val") if select else ("trainval", "test")
    data = dataclasses.replace(config.data, name="vtab:TASK", root=None, train_split=splits[0], eval_split=splits[1])
    config = dataclasses.replace(config, data=data)
    model = adapt_config(source.config, config, num_classes=2, image_size=image_size).model  # classes: of each task
    data.preprocessing(model.image_size)  # raises for an invalid size
    settings = {"command": "vtab", "start": init_id, "select": select, "image_size": image_size, **to_dict(config)}

    def load(name: str) -> Splits:
        read = functools.partial(load_dataset, f"vtab:{name}", root=root, download=download, on_error=data.on_error)
        train, test = map(read, splits)
        return Splits(train, test, test)

    def record_of(name: str) -> dict[str, Any] | None:  # as rank 0 reads it
        return world.broadcast_object(lambda: _record(Path(out) / name))

    with Workdir(out, settings, tensorboard=False, world=world) as folder:
        unfinished = [name for name in names if record_of(name) is None]
        missing = world.broadcast_object(lambda: _missing(unfinished, load))  # rank 0 downloads; all do the same tasks
        if missing and tasks != "available":
            raise UserError("\n  ".join([f"{len(missing)} of the requested tasks are missing:", *missing.values()]))
        for name in names:
            if name in unfinished and name not in missing:
                task = _task_config(config, model, name, root)
                create_model = functools.partial(init_from_checkpoint, checkpoint, task.model)
                run = TrainingRun(task, load(name), create_model, "vtab", context, init_id, description=name)
                run.run(folder.path / name)
            record = record_of(name)
            if record and world.is_rank_0:
                shutil.rmtree(folder.path / name / "checkpoints", ignore_errors=True)  # 19 would fill a disk
                log(f"{name}: {record['accuracy']:.2%} of {record['images']:,}")
        records = {name: record for name in TASKS if (record := record_of(name))}
        result = summarize(records, missing) | {"scored_on": "val200" if select else "test"}
        folder.write_result(result)
    return result


def summarize(done: Mapping[str, Mapping[str, Any]], missing: Mapping[str, str]) -> dict[str, Any]:
    """The records of the tasks and their plain means: of each group and of all 19, None where a task is missing.

    missing: the reasons for some of them; the others get the source of their data.
    """

    def mean(group: str) -> float | None:
        names = MEANS[group]
        return sum(done[name]["accuracy"] for name in names) / len(names) if done.keys() >= set(names) else None

    rest = {name: f"not requested; data: {task.origin.how()}" for name, task in TASKS.items() if name not in done}
    return {
        "tasks": {name: {"task": t.title, "group": t.group, **done[name]} for name, t in TASKS.items() if name in done},
        "missing": {name: missing.get(name, reason) for name, reason in rest.items()},
        "groups": {group: mean(group) for group in GROUPS},
        "mean": mean("all 19"),
    }


def _check_tasks(names: list[str], data: DataConfig) -> None:
    """Raises UserError for unknown tasks, and for settings that the tasks fix."""
    if data.range is not None:
        raise UserError(f"data.range {data.range} is for your own images; VTAB's have 8 bits: leave it out.")
    for name in names:
        task_named(name)
    for name in ("classes", "exclude", "subset_fraction"):
        if (value := getattr(data, name)) is not None:
            raise UserError(f"{name} is {value!r}; classes and images of a VTAB task are fixed, leave it out.")


def _task_config(config: TrainConfig, model: ModelConfig, name: str, root: str | Path | None) -> TrainConfig:
    """The settings of one task; the size before the crop stays in proportion to the image size."""
    data = dataclasses.replace(
        label_preserving(name, config.data), name=f"vtab:{name}", root=None if root is None else str(root)
    )
    if data.crop_resize is not None:
        scale = model.image_hw[0] / config.model.image_hw[0]
        data = dataclasses.replace(data, crop_resize=round(data.crop_resize * scale))
    return dataclasses.replace(config, data=data, model=dataclasses.replace(model, num_classes=TASKS[name].classes))


def label_preserving(name: str, data: DataConfig) -> DataConfig:
    """`data` without the crop or the flip that would change the labels of this task."""
    if name in NO_CROP:
        data = data.without_crop()
    return dataclasses.replace(data, flip=data.flip and name not in NO_FLIP)


def _missing(names: Sequence[str], load: Callable[[str], Splits]) -> dict[str, str]:
    """The reason for each task whose data is missing."""
    reasons = {}
    for name in names:
        try:
            load(name)
        except ImageError:
            raise
        except ValueError as error:
            reasons[name] = str(error)
    return reasons


def _record(folder: Path) -> dict[str, Any] | None:
    """Accuracy and numbers of images of a finished task; None where its result is missing or corrupt."""
    if not (folder / "result.json").is_file() or find_corrupt_files(folder, ("result.json",)):
        return None
    test = json.loads((folder / "result.json").read_bytes())["test"]
    return {name: test[name] for name in ("accuracy", "images", "skipped")}
