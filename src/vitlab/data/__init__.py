"""Data: images in, batches out (Sec. 4.1).

`registry.py` names the data sets, `dataset.py` has their type. They come from image folders (`folder.py`), ImageNet's
layouts (`imagenet.py`), files of pixels (`pixels.py`), tars (`shards.py`; on a server `remote.py`), the Hugging Face
hub (`hub.py`) and VTAB-1k's sources (`vtab/`). `decode.py` reads images, `transforms.py` crops and resizes them,
`loader.py` puts them in order. Names are imported on first use, so that this package does not import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitlab.data.dataset import Dataset
    from vitlab.data.decode import ImageError, decode_image
    from vitlab.data.loader import Batch, epoch_order, eval_batches, example_at, train_batches
    from vitlab.data.registry import DATASETS, DatasetInfo, load_dataset
    from vitlab.data.transforms import EvalTransform, TrainTransform, mixup

__all__ = [
    "DATASETS",
    "Batch",
    "Dataset",
    "DatasetInfo",
    "EvalTransform",
    "ImageError",
    "TrainTransform",
    "decode_image",
    "epoch_order",
    "eval_batches",
    "example_at",
    "load_dataset",
    "mixup",
    "train_batches",
]

_MODULES = {
    "registry": ("DATASETS", "DatasetInfo", "load_dataset"),
    "loader": ("Batch", "epoch_order", "eval_batches", "example_at", "train_batches"),
    "decode": ("ImageError", "decode_image"),
    "dataset": ("Dataset",),
    "transforms": ("EvalTransform", "TrainTransform", "mixup"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
