"""The images of a data set on their way through a model in evaluation mode."""

import contextlib
from collections.abc import Iterator

from torch import nn

from vitlab.data.dataset import Dataset
from vitlab.data.loader import Batch, eval_batches
from vitlab.data.transforms import EvalTransform
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError
from vitlab.evaluate.load import device_of
from vitlab.evaluate.options import LoaderOptions
from vitlab.models.vit import evaluation_mode
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import SINGLE, World


@contextlib.contextmanager
def evaluation_batches(
    model: nn.Module,
    dataset: Dataset,
    image_size: tuple[int, int],
    preprocessing: Preprocessing | None,
    options: LoaderOptions,
    *,
    label: str = "evaluation",
    draws: int = 0,
    shard: bool = True,
    world: World = SINGLE,
) -> Iterator[Iterator[Batch]]:
    """A context in which `model` is in evaluation mode; gives the batches of this process, on the model's device.

    Unreadable images are left out, and batches that are empty without them. Rank 0 shows the progress as `label`.
    `shard`: each process takes its share of the images; else the whole `dataset`. `draws` is as in `eval_batches`.
    """
    world_size = world.world_size if shard else 1
    batches = eval_batches(
        dataset, EvalTransform(image_size, preprocessing or Preprocessing()), rank=world.rank if shard else 0,
        batch_size=options.batch_size * world_size, world_size=world_size, workers=options.workers,
        on_error=options.on_error, device=device_of(model), draws=draws,
    )  # fmt: skip

    def nonempty() -> Iterator[Batch]:
        done = 0
        for batch in batches:
            world.check_peers()
            if len(batch.labels):
                yield batch
            done += len(batch.labels) + batch.skipped
            progress.update(done)

    progress = ProgressDisplay(label, -(-len(dataset) // world_size), quiet=not world.is_rank_0)
    with evaluation_mode(model), progress:
        yield nonempty()


def nothing_readable(dataset: Dataset) -> UserError:
    return UserError(f"none of the {len(dataset)} images of {dataset.name} ({dataset.split}) could be read.")
