"""Table 4 and App. D.10: VTAB-1k. One setting for all 19 tasks, each fine-tuned on 1,000 examples and tested whole.

Augmentation that would change a task's labels is left out (`label_preserving`).
The means of the tasks, Table 9 and Fig. 2 are in `vtab_table`.
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
from vitlab.data.vtab.tasks import TASKS, task_named
from vitlab.errors import UserError
from vitlab.inspection import figures, plots
from vitlab.io import write_bytes
from vitlab.models.config import ModelConfig
from vitlab.pipelines.init_from_checkpoint import adapt_config, fingerprint, init_from_checkpoint
from vitlab.pipelines.pretrain import Execution, run
from vitlab.pipelines.splits import Splits
from vitlab.pipelines.vtab_table import figure2, summary
from vitlab.settings import to_dict
from vitlab.train.distributed import SINGLE, World
from vitlab.train.precision import choose_device
from vitlab.train.workdir import Workdir
from vitlab.weights import load_model

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
    """Fine-tunes `checkpoint` on every task as `config` says; returns the content of OUT/result.json; draws Fig. 2.

    tasks: names of `TASKS`, whose data is required, or "available": all whose data is in `root` or can be downloaded.
    select: train on the 800 and score on the 200, without the test parts. `log` receives each task's accuracy. The same
    call resumes an interrupted one. Raises UserError for unknown tasks and missing data.
    """
    names = list(TASKS if tasks == "available" else dict.fromkeys(tasks))
    _check_tasks(names, config.data)
    world.check_batch_size(config.batch_size)
    execution = Execution(choose_device(world.device(device)), tensorboard, world)
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
                run(task, folder.path / name, load(name), create_model, "vtab", execution, init_id, description=name)
            record = record_of(name)
            if record and world.is_rank_0:
                shutil.rmtree(folder.path / name / "checkpoints", ignore_errors=True)  # 19 would fill a disk
                log(f"{name}: {record['accuracy']:.2%} of {record['images']:,}")
        records = {name: record for name in TASKS if (record := record_of(name))}
        result = summary(records, missing) | {"scored_on": "val200" if select else "test"}
        folder.write_result(result)
        _draw(result, Path(checkpoint).name, folder.path / "figure.png", world)
    return result


def _draw(result: Mapping[str, Any], name: str, path: Path, world: World) -> None:
    """Fig. 2 of the test parts, once a group is complete."""
    panel = figure2(result, name) if result["scored_on"] == "test" else None
    if panel and world.is_rank_0:
        write_bytes(path, figures.png(plots.panels([panel])))


def _check_tasks(names: list[str], data: DataConfig) -> None:
    """Raises UserError for unknown tasks, and for settings that the tasks fix."""
    if data.range is not None:
        raise UserError(f"data.range {data.range} is for your own images; VTAB's have 8 bits: leave it out.")
    for name in names:
        task_named(name)
    for name in ("classes", "exclude", "part"):
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
