"""Which image size suits the least-squares head: its leave-one-out loss and test accuracy at several sizes.

    python benchmarks/head_sizes.py DATA/draws/cifar10-100-seed0-test500 --checkpoint CHECKPOINT --sizes 84 112 224

The folder, with train/ and test/, is one that `finetune_peers.py` has drawn. Prints a JSON line for each size.
"""

import dataclasses
import json
from pathlib import Path

import tyro
from tyro.conf import Positional

from vitlab.data.registry import load_dataset
from vitlab.evaluation.features import features
from vitlab.evaluation.linear_head import least_squares_head
from vitlab.evaluation.options import LoaderOptions
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_metadata, load_model


@dataclasses.dataclass(frozen=True)
class Arguments:
    folder: Positional[Path]
    checkpoint: str
    sizes: tuple[int, ...] = (84, 112, 140, 168, 224)


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    train, test = (load_dataset(f"folder:{given.folder}", split) for split in ("trainval", "test"))
    for size in given.sizes:
        model = load_model(given.checkpoint, image_size=size).eval()
        preprocessing = Preprocessing.read(load_metadata(given.checkpoint), given.checkpoint, size).at(size)
        options = LoaderOptions(64)
        x, test_x = (features(model, part, options, preprocessing=preprocessing) for part in (train, test))
        head = least_squares_head(x.x[None], x.labels, len(train.classes))
        accuracy = float((head.logits(test_x.x).argmax(axis=1) == test_x.labels).mean())
        row = {"data": given.folder.name, "size": size, "images": len(x.x), "leave_one_out_loss": head.loss}
        print(json.dumps(row | {"leave_one_out_accuracy": head.accuracy, "test_accuracy": accuracy}), flush=True)


if __name__ == "__main__":
    main()
