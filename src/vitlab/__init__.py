"""The Vision Transformer ("An Image is Worth 16x16 Words", ICLR 2021) as software.

The public names. Each is imported on first use, so that `import vitlab` is fast and does not import torch.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
    from vitlab import data as data
    from vitlab import evaluation as evaluation
    from vitlab import inspection as inspection
    from vitlab import models as models
    from vitlab import pipelines as pipelines
    from vitlab import recipes as recipes
    from vitlab import train as train
    from vitlab import weights as weights
    from vitlab.api import evaluate as evaluate
    from vitlab.api import finetune as finetune
    from vitlab.api import inspect as inspect
    from vitlab.api import predict as predict
    from vitlab.config import DataConfig as DataConfig
    from vitlab.config import OptimConfig as OptimConfig
    from vitlab.config import TrainConfig as TrainConfig
    from vitlab.data.registry import load_dataset as load_dataset
    from vitlab.models import MODELS as MODELS
    from vitlab.models import ResNetConfig as ResNetConfig
    from vitlab.models import ViTConfig as ViTConfig
    from vitlab.models import create_model as create_model
    from vitlab.models import get_config as get_config
    from vitlab.models import list_models as list_models
    from vitlab.models.resnet import ResNet as ResNet
    from vitlab.models.vit import ViT as ViT
    from vitlab.train.optim import parameter_groups as parameter_groups
    from vitlab.weights import convert as convert
    from vitlab.weights import load_model as load_model
    from vitlab.weights import save_model as save_model

__version__ = "0.1.0"

SUBPACKAGES = ("app", "data", "evaluation", "inspection", "models", "pipelines", "recipes", "train", "weights")
MODULE_OF = {
    "MODELS": "vitlab.models",
    "evaluate": "vitlab.api",
    "finetune": "vitlab.api",
    "inspect": "vitlab.api",
    "predict": "vitlab.api",
    "DataConfig": "vitlab.config",
    "OptimConfig": "vitlab.config",
    "TrainConfig": "vitlab.config",
    "ViT": "vitlab.models.vit",
    "ResNet": "vitlab.models.resnet",
    "ResNetConfig": "vitlab.models",
    "ViTConfig": "vitlab.models",
    "convert": "vitlab.weights",
    "create_model": "vitlab.models",
    "get_config": "vitlab.models",
    "list_models": "vitlab.models",
    "load_dataset": "vitlab.data.registry",
    "load_model": "vitlab.weights",
    "parameter_groups": "vitlab.train.optim",
    "save_model": "vitlab.weights",
}


if not typing.TYPE_CHECKING:  # or a type checker would take any name for a public one

    def __getattr__(name: str) -> typing.Any:
        if name in SUBPACKAGES:
            return importlib.import_module(f"vitlab.{name}")
        if name in MODULE_OF:
            return getattr(importlib.import_module(MODULE_OF[name]), name)
        raise AttributeError(f"vitlab has no {name!r}; its public names are {', '.join((*MODULE_OF, *SUBPACKAGES))}.")


def __dir__() -> list[str]:
    return ["__version__", *MODULE_OF, *SUBPACKAGES]
