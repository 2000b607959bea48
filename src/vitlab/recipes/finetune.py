"""Table 4: fine-tuning. SGD with momentum, cosine decay, batch 512, no decay, gradients clipped, 384 pixels.

The base learning rate is the best of the row's grid on images held out of the training split (App. B.1.1); `optim.lr`
is the one without a sweep. The model gives only the resolution: `resolve` replaces it by the checkpoint's. The last
functions are ours, for any images: `custom` (BiT's rule), `bit` and `staged`, the default of the command. They leave
settings open (`OPEN`), which the rules in `rules.py` choose: 500 to 20,000 steps by the number of images, at the
checkpoint's own size, on a CPU at most 224 pixels. The 224 and 500 that stand here are then replaced.

    vitlab finetune CHECKPOINT --recipe cifar10 --runs 3
"""

from dataclasses import replace
from typing import Any

from vitlab.config import DataConfig, FinetuneConfig, OptimConfig
from vitlab.models.config import ViTConfig

SMALL_GRID = (0.001, 0.003, 0.01, 0.03)
TABLE4 = {
    "imagenet": ((0.003, 0.01, 0.03, 0.06), 0.01, 20_000, 500),
    "cifar100": (SMALL_GRID, 0.02, 10_000, 500),
    "cifar10": (SMALL_GRID, 0.02, 10_000, 500),
    "pets": (SMALL_GRID, 0.1, 500, 100),
    "flowers102": (SMALL_GRID, 0.1, 500, 100),
    "vtab:TASK": ((0.01,), 0.2, 2_500, 500),
    "": ((0.003, 0.01, 0.03), 0.1, 500, 100),
}
"""Data set -> base learning rates, held-out fraction, steps, and warm-up steps. Warm-up is not in the table; the steps
are those of Google's code. The last row, without a data set, is ours, for any images."""

BIT = ("steps", "optim.warmup_steps", "mixup")
CUSTOM = (*BIT, "batch_size", "sweep_steps", "loss", "model.image_size", "data.eval_resize", "data.eval_interpolation")
STAGED = ("learning_rates", "held_out", "refit", "runs", "head_views", "data.subset_fraction", "data.min_area")
LAYER = ("model.depth", "model.pool")
OPEN = {"bit": BIT, "bit-small": BIT, "custom": CUSTOM, "staged": (*CUSTOM, *STAGED, *LAYER)}
"""Recipe -> the settings that it leaves open, for `resolve` to choose; without a row a recipe has none."""


def imagenet() -> FinetuneConfig:
    """20,000 steps at 512 pixels (give `--image-size 518` for patches of 14), Polyak average 0.9999 (Sec. 4.1)."""
    run = _row("imagenet", image_size=512)
    return replace(run, optim=replace(run.optim, lr=0.03), average_decay=0.9999)


def cifar100() -> FinetuneConfig:
    return _row("cifar100")


def cifar10() -> FinetuneConfig:
    return _row("cifar10")


def pets() -> FinetuneConfig:
    return _row("pets")


def flowers() -> FinetuneConfig:
    """The official training part alone, 1,020 images, as Google's code; `--data.train-split trainval` has 2,040."""
    return _row("flowers102", train_split="train")


def vtab() -> FinetuneConfig:
    """2,500 steps at rate 0.01, the same for all 19 tasks (`vitlab vtab`).

    Images as in BiT, but at one size: squashed to 448, a random 384 of it, mirrored; not where that changes a label.
    """
    return _row("vtab:TASK", crop="random", crop_resize=448)


def custom() -> FinetuneConfig:
    """Your own images: steps, batch and mixup by BiT's rule, the best of three learning rates.

    The values here are those for fewer than 20,000 images; `OPEN` names what `resolve` chooses by the data.
    Deviation: BiT always takes a batch of 512, its own two resolutions and one rate. A batch of at most an eighth of
    the images spares a small set hundreds of repetitions, and the checkpoint's own size most of the time; the sweep
    tries each rate for a fifth of the steps. Test images are prepared as the checkpoint says.
    """
    config = _row("", image_size=224, min_area=0.3, eval_interpolation="bilinear")
    return replace(config, log_every=10, checkpoint_every=25)


def bit(resize: int = 512, crop: int = 480) -> FinetuneConfig:
    """BiT's own setup, which the paper also tries for ResNets, to keep the better run (App. B.1.1).

    BiT's rule for steps, warm-up and mixup; one rate, no clipping. Images are squashed to 512, a random 480 of them,
    mirrored (for your labels, check that a mirror does not change them), and tested at 480. Deviation: on a CPU the
    steps are fewer.
    """
    config = _row("", image_size=crop, crop="random", crop_resize=resize)
    optim = replace(config.optim, lr=0.003, schedule="staircase", clip_norm=None)
    return replace(config, optim=optim, learning_rates=())


def bit_small() -> FinetuneConfig:
    """The same for images of fewer than 96 x 96 pixels: squashed to 160, a random 128 of them."""
    return bit(resize=160, crop=128)


def staged() -> FinetuneConfig:
    """Your own images, not the paper's protocol: the least-squares head first, then AdamW from it.

    The later a block, the larger its learning rate. The sweep trains without a fifth of the training images, at most
    1,000, and compares the losses on these: is the fine-tuned model better than the head alone? The sweep takes as many
    steps as the final run, because the first steps make the head worse.
    """
    config = custom()
    optim = OptimConfig(lr=1e-4, weight_decay=0.05, decay_on="kernels", layer_decay=0.75, clip_norm=1.0)
    head: dict[str, Any] = {"head": "least_squares", "head_views": 4, "held_out": 0.2}
    return replace(config, optim=optim, learning_rates=(optim.lr,), **head)


def _row(name: str, image_size: int = 384, **data: Any) -> FinetuneConfig:
    """Crop, flip and test images are those of Google's code: squashed bilinearly without antialiasing
    (vision_transformer's `input_pipeline.py`)."""
    learning_rates, held_out, steps, warmup_steps = TABLE4[name]
    settings: dict[str, Any] = {"train_split": "trainval", "eval_split": "test", "crop": "inception"} | data
    optim = OptimConfig(name="sgd", lr=0.01, momentum=0.9, schedule="cosine", warmup_steps=warmup_steps, clip_norm=1.0)
    return FinetuneConfig(
        model=ViTConfig(image_size=image_size),
        data=DataConfig(name=name, **settings),
        optim=optim,
        steps=steps,
        batch_size=512,
        learning_rates=learning_rates,
        held_out=held_out,
    )
