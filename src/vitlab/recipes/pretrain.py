"""Table 3: pre-training, one function per data set, one entry per model. App. B.1.2: masked patch prediction.

Where the table is silent, values come from files that the authors published:
- JFT, ImageNet-21k: sigmoid loss, head bias -10, last rate 1e-5 and, for ImageNet-21k, smoothing 1e-4, from
  uncertainty-baselines, baselines/jft/experiments/ (`jft300m_vit_base16.py`, `imagenet21k_vit_base16.py`).
- ImageNet: sigmoid loss and head bias -6.9 = ln(1/1000), from big_vision, configs/vit_i1k.py. Scenic's
  `imagenet_vit_config.py`, which has the rest of Table 3's row, starts at -10: `--model.head-bias -10`. Smoothing 1e-4
  is in its header, as an alternative input (`LS = 1e-4`); that it was the paper's is our choice.
The data sets cannot be downloaded: give your copy with `--data.name folder:PATH` or `shards:PATH`. Table 2 and Table 6
say what the runs took and reached. `vitlab plan imagenet21k --model ViT-L/16` says what one takes on your devices.

    vitlab pretrain imagenet21k --model ViT-L/16 --data.name shards:imagenet21k
"""

import dataclasses
from collections.abc import Collection

from vitlab.config import DataConfig, MaskingConfig, OptimConfig, TrainConfig
from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.registry import get_config, list_models
from vitlab.settings import nearest

WARMUP_STEPS = 10_000
BATCH_SIZE = 4096

# Table 3, JFT-300M: model -> (epochs, base learning rate).
JFT = {
    "ViT-B/16": (7.0, 8e-4),
    "ViT-B/32": (7.0, 8e-4),
    "ViT-L/32": (7.0, 6e-4),
    "ViT-L/16": (14.0, 4e-4),  # the table says 7/14: `--epochs 7` is the shorter run of Table 6
    "ViT-H/14": (14.0, 3e-4),
    "R50x1": (7.0, 1e-3),
    "R50x2": (7.0, 1e-3),
    "R101x1": (7.0, 8e-4),
    "R152x1": (7.0, 6e-4),
    "R152x2": (7.0, 6e-4),  # Table 6 has a run of 14 epochs too
    "R50+ViT-B/16": (7.0, 8e-4),
    "R50+ViT-B/32": (7.0, 8e-4),
    "R50+ViT-L/32": (7.0, 2e-4),
    "R50+ViT-L/16": (14.0, 4e-4),  # 7/14, as ViT-L/16
}

IMAGENET21K = ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32")


def jft(model: str = "ViT-B/16") -> TrainConfig:
    """JFT-300M: 18,291 classes, several labels per image, no dropout."""
    _check_row(model, JFT, "JFT")
    epochs, lr = JFT[model]
    return TrainConfig(
        model=_model(model, num_classes=18_291, dropout=0.0),
        data=_data("shards:jft300m"),
        optim=OptimConfig(lr=lr, weight_decay=0.1, schedule="linear", end_lr=1e-5, warmup_steps=WARMUP_STEPS),
        loss="sigmoid",
        epochs=epochs,
        batch_size=BATCH_SIZE,
    )


def imagenet21k(model: str = "ViT-B/16") -> TrainConfig:
    """ImageNet-21k: 21,843 classes, dropout 0.1; 90 epochs (the table says 30/90 for the large models)."""
    _check_row(model, IMAGENET21K, "ImageNet-21k")
    return TrainConfig(
        model=_model(model, num_classes=21_843, dropout=0.1),
        data=_data("shards:imagenet21k"),
        optim=OptimConfig(lr=1e-3, weight_decay=0.03, schedule="linear", end_lr=1e-5, warmup_steps=WARMUP_STEPS),
        loss="sigmoid",
        label_smoothing=1e-4,
        epochs=90.0,
        batch_size=BATCH_SIZE,
    )


def imagenet(model: str = "ViT-B/16") -> TrainConfig:
    """ImageNet from scratch, any ViT: 300 epochs, strong decay, gradients clipped."""
    _check_row(model, list_models("ViT-*"), "ImageNet")
    return TrainConfig(
        model=_model(model, num_classes=1000, dropout=0.1, head_bias=-6.9),
        data=_data("folder:imagenet"),
        optim=OptimConfig(lr=3e-3, weight_decay=0.3, schedule="cosine", warmup_steps=WARMUP_STEPS, clip_norm=1.0),
        loss="sigmoid",
        label_smoothing=1e-4,
        epochs=300.0,
        batch_size=BATCH_SIZE,
    )


def masked(model: str = "ViT-B/16") -> TrainConfig:
    """Masked patch prediction on JFT-300M: a million steps, about 14 epochs (`--steps 100000` is nearly as good).

    The result is a ViT without a head, to be fine-tuned as any other checkpoint. The appendix gives batch, rate,
    warm-up and schedule; the decay is that of all models (Sec. 4.1), dropout and images those of pre-training on JFT.
    """
    return TrainConfig(
        model=dataclasses.replace(headless(get_config(model)), dropout=0.0),
        data=_data("shards:jft300m"),
        optim=OptimConfig(lr=2e-4, weight_decay=0.1, schedule="cosine", warmup_steps=WARMUP_STEPS),
        masking=MaskingConfig(target="mean-color", share=0.5),
        steps=1_000_000,
        batch_size=BATCH_SIZE,
    )


def headless(config: ModelConfig) -> ViTConfig:
    """The ViT without its head, for masked patch prediction. Raises UserError for a ResNet or a hybrid."""
    if isinstance(config, ResNetConfig) or config.stem is not None:
        raise UserError(
            "masked patch prediction needs patches that are cut from the image, and a ResNet or a hybrid has none; "
            "take a ViT (`vitlab list models 'ViT*'`)."
        )
    return dataclasses.replace(config, num_classes=0, representation_size=None)


def _model(name: str, num_classes: int, dropout: float, head_bias: float = -10.0) -> ModelConfig:
    """224 pixels; the head's bias starts all classes near probability 0; its hidden layer is as wide as the ViT."""
    config = get_config(name, num_classes=num_classes, head_bias=head_bias)
    if isinstance(config, ResNetConfig):
        return config
    return dataclasses.replace(config, dropout=dropout, representation_size=config.width)


def _data(name: str) -> DataConfig:
    return DataConfig(name=name, crop="inception", min_area=0.05, flip=True, eval_resize=256)


def _check_row(model: str, rows: Collection[str], data: str) -> None:
    if model not in rows:
        raise UserError(
            f"Table 3 has no row for {model!r} on {data}; {nearest(model, rows)}. Take one of its rows and override "
            "`--model.*` and `--optim.lr`."
        )
