"""Table 4 and App. D.10: VTAB-1k. One setting for all 19 tasks, each fine-tuned on 1,000 examples and tested whole.

Only what would change a task's labels is left out of its augmentation (`without_harm`).
The result is the plain mean over the tasks, and over those of each group; there is none while a task is missing.
Deviation: the benchmark's code drops the last, incomplete batch of a test part; here every image counts once.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from vitlab.config import DataConfig, TrainConfig
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.data.vtab.tasks import GROUPS, TASKS, task_named
from vitlab.errors import UserError
from vitlab.evaluate.load import choose_device
from vitlab.io import find_damage
from vitlab.pipelines.init_from_checkpoint import adapted, carried, identity
from vitlab.pipelines.pretrain import Images, run
from vitlab.settings import to_dict
from vitlab.train.distributed import SINGLE, World
from vitlab.train.workdir import Workdir
from vitlab.weights import load_model

OnTask = Callable[[str, dict[str, Any]], None]

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
    on_task: OnTask | None = None,
    world: World = SINGLE,
) -> dict[str, Any]:
    """Fine-tunes `checkpoint` on every task as `config` says; returns the content of OUT/result.json.

    tasks: names of `TASKS`, whose data must all be there before the first is trained, or "available": whichever can be
    had from `root` (or downloaded, if `download`), the others listed with the reason. select: train on the 800 and
    score on the 200, to choose settings without a look at the test parts. on_task hears of each task's record.
    The same call continues an interrupted one: a task that has ended (OUT/TASK/result.json) is not touched again, and
    stays part of the result when others are asked for. Raises ValueError for unknown tasks, missing data, and a folder
    of other settings.
    """
    asked = list(TASKS if tasks == "available" else dict.fromkeys(tasks))
    for name in asked:
        task_named(name)
    if config.data.classes is not None:
        raise UserError(f"classes are {config.data.classes}; a VTAB task keeps all of its own, leave them out.")
    if config.data.exclude is not None:
        raise UserError(f"exclude is {config.data.exclude!r}; a VTAB task trains on its own 1,000 images, all of them.")
    if config.data.part is not None:
        raise UserError(f"part is {config.data.part}; a VTAB task trains on its own 1,000 images, all of them.")
    choose_device(world.device(device))
    world.check_batch_size(config.batch_size)
    source, digest = identity(load_model(checkpoint))
    start = f"{Path(checkpoint).name} {digest}"
    # What these two refuse is refused before any data is read.
    single = adapted(source, config, 2, image_size)
    config.data.preprocessing(single.model.image_size)
    parts = ("train", "val") if select else ("trainval", "test")
    data = dataclasses.replace(config.data, name="vtab:TASK", root=None, train_split=parts[0], eval_split=parts[1])
    config = dataclasses.replace(config, data=data)
    settings = {"command": "vtab", "start": start, "select": select, "image_size": image_size, **to_dict(config)}

    def images(name: str) -> Images:
        train, test = (
            load_dataset(f"vtab:{name}", part, root=root, download=download, on_error=data.on_error) for part in parts
        )
        return Images(train, test, test)

    def train_and_score(name: str, path: Path) -> None:
        here = without_harm(name, data)
        here = dataclasses.replace(here, name=f"vtab:{name}", root=None if root is None else str(root))
        single = adapted(source, config, TASKS[name].classes, image_size)
        if here.crop_resize is not None:  # it goes with the recipe's size
            scale = single.model.image_hw[0] / config.model.image_hw[0]
            here = dataclasses.replace(here, crop_resize=round(here.crop_resize * scale))
        single = dataclasses.replace(single, data=here)
        run(
            single, path, images(name), lambda: carried(checkpoint, single.model), command="vtab", start=start,
            label=name, device=device, tensorboard=tensorboard, world=world,
        )  # fmt: skip

    def record_of(name: str) -> dict[str, Any] | None:
        return world.broadcast_object(lambda: _record(Path(out) / name))

    with Workdir(out, settings, tensorboard=False, world=world) as folder:
        open_tasks = [name for name in asked if record_of(name) is None]
        missing = world.broadcast_object(
            lambda: _missing(open_tasks, images)
        )  # the first alone downloads; all do the same tasks
        if missing and tasks != "available":
            raise UserError("\n  ".join([f"{len(missing)} of the tasks asked for cannot be had:", *missing.values()]))
        for name in asked:
            if name not in missing and record_of(name) is None:
                train_and_score(name, folder.path / name)
            record = record_of(name)
            if (
                record and world.is_rank_0
            ):  # 19 tasks would fill a disk; also what a kill has left of a task that had ended
                shutil.rmtree(folder.path / name / "checkpoints", ignore_errors=True)
            if on_task and record and world.is_rank_0:
                on_task(name, record)
        done = {name: record for name in TASKS if (record := record_of(name))}
        result = summary(done, missing) | {"scored_on": "val200" if select else "test"}
        folder.write_result(result)
    return result


def without_harm(name: str, data: DataConfig) -> DataConfig:
    """`data` without the crop, or the mirroring, after which a image of the task would have another label."""
    if name in NO_CROP:
        data = dataclasses.replace(
            data, crop="none", crop_resize=None, min_area=DataConfig.min_area, pad=DataConfig.pad
        )
    return dataclasses.replace(data, flip=data.flip and name not in NO_FLIP)


def _missing(names: Sequence[str], images: Callable[[str], Images]) -> dict[str, str]:
    """Why the data of a task cannot be had, for those of which that is so."""
    reasons = {}
    for name in names:
        try:
            images(name)
        except ImageError:
            raise
        except ValueError as error:
            reasons[name] = str(error)
    return reasons


def _record(folder: Path) -> dict[str, Any] | None:
    """What a task that has ended left: accuracy, images counted, images that could not be read.

    None also where that is damaged: its run then makes it again.
    """
    if not (folder / "result.json").is_file() or find_damage(folder, ("result.json",)):
        return None
    test = json.loads((folder / "result.json").read_bytes())["test"]
    return {name: test[name] for name in ("accuracy", "images", "skipped")}


def summary(done: Mapping[str, Mapping[str, Any]], missing: Mapping[str, str]) -> dict[str, Any]:
    """The records of the tasks and their plain means: of a group, and of all 19, or None where a task lacks.

    missing: why some of them lack; of the others it is said how their data is had.
    """
    rows = {name: {"task": task.csv, "group": task.group, **done[name]} for name, task in TASKS.items() if name in done}

    def mean(names: Sequence[str]) -> float | None:
        return sum(done[name]["accuracy"] for name in names) / len(names) if set(names) <= set(done) else None

    return {
        "tasks": rows,
        "missing": {
            name: missing.get(name, f"not asked for; data: {task.how()}")
            for name, task in TASKS.items()
            if name not in done
        },
        "groups": {group: mean([name for name, task in TASKS.items() if task.group == group]) for group in GROUPS},
        "mean": mean(list(TASKS)),
    }


def as_table(result: Mapping[str, Any]) -> str:
    """The result to be read by a person: each task, the means, and what is missing for them."""
    lines = [f"{'task':12}  {'group':11}  {'images':>8}  accuracy"]
    for row in result["tasks"].values():
        skipped = f"  ({row['skipped']} could not be read)" if row["skipped"] else ""
        lines.append(f"{row['task']:12}  {row['group']:11}  {row['images']:8,}  {row['accuracy']:8.2%}{skipped}")
    for group, value in (*result["groups"].items(), ("all 19", result["mean"])):
        size = sum(task.group == group or group == "all 19" for task in TASKS.values())
        there = sum(group in (row["group"], "all 19") for row in result["tasks"].values())
        said = f"{value:8.2%}" if value is not None else f"none: {there} of its {size} tasks are there"
        lines.append(f"{'mean of ' + group:35}  {said}")
    if result["missing"]:
        lines.append("missing:")
        lines += [f"  {name}: {reason}" for name, reason in result["missing"].items()]
    return "\n".join([*lines, f"scored on: {result['scored_on']}"])
