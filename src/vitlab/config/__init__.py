"""Every setting of a training run, as frozen dataclasses. Types carry the allowed range; `check_fields` checks them.

Nothing here imports torch: recipes and the command line build on these in an instant.
"""

from vitlab.config.data import DataConfig as DataConfig
from vitlab.config.data import ReadConfig as ReadConfig
from vitlab.config.finetune import FinetuneConfig as FinetuneConfig
from vitlab.config.train import FewShotConfig as FewShotConfig
from vitlab.config.train import MaskingConfig as MaskingConfig
from vitlab.config.train import OptimConfig as OptimConfig
from vitlab.config.train import TrainConfig as TrainConfig
