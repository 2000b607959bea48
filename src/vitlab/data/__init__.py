"""Sec. 4.1: pictures in, batches out.

`datasets.py` names the sets, `sources.py` finds pictures (in tars: `shards.py`; in tars on a web server: `remote.py`,
on the hub: `hub_shards.py`; in other sets of the hub: `hub.py`), `pictures.py` reads them, `transforms.py` crops and
scales them, `loader.py` puts them in order. Names are imported on first use, so that importing this package does not
import torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitlab.data.datasets import DATASETS, DatasetInfo, load_dataset
    from vitlab.data.loader import Batch, epoch_order, eval_batches, example_at, train_batches
    from vitlab.data.pictures import PictureError, decode
    from vitlab.data.sources import Dataset
    from vitlab.data.transforms import EvalTransform, TrainTransform, mixup

__all__ = [
    "DATASETS",
    "Batch",
    "Dataset",
    "DatasetInfo",
    "EvalTransform",
    "PictureError",
    "TrainTransform",
    "decode",
    "epoch_order",
    "eval_batches",
    "example_at",
    "load_dataset",
    "mixup",
    "train_batches",
]

_MODULES = {
    "datasets": ("DATASETS", "DatasetInfo", "load_dataset"),
    "loader": ("Batch", "epoch_order", "eval_batches", "example_at", "train_batches"),
    "pictures": ("PictureError", "decode"),
    "sources": ("Dataset",),
    "transforms": ("EvalTransform", "TrainTransform", "mixup"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
