"""Sec. 3: the models. `MODELS` is the table of the paper's names; `create_model` builds one. Imports no torch."""

from vitlab.models.config import ModelConfig as ModelConfig
from vitlab.models.config import ResNetConfig as ResNetConfig
from vitlab.models.config import ViTConfig as ViTConfig
from vitlab.models.registry import MODELS as MODELS
from vitlab.models.registry import create_model as create_model
from vitlab.models.registry import get_config as get_config
from vitlab.models.registry import list_models as list_models
from vitlab.models.resnet_config import ResNetBody as ResNetBody
from vitlab.models.variant import Rotary as Rotary
from vitlab.models.variant import Variant as Variant
