"""Table 4: fine-tuning. SGD with momentum, cosine decay, batch 512, no decay, gradients clipped, 384 pixels.

The base learning rate is the best of the row's grid on a held-out part of the training split (App. B.1.1); `optim.lr`
is the one for those who do not search. The model of these configs is a stand-in that gives the resolution:
`vitlab.pipelines.finetune` puts the checkpoint's own in its place.
"""

import dataclasses

from vitlab.config import DataConfig, FinetuneConfig, OptimConfig
from vitlab.models.config import ViTConfig

SMALL_GRID = (0.001, 0.003, 0.01, 0.03)


def imagenet() -> FinetuneConfig:
    """20,000 steps at 512 pixels (give `--image-size 518` for patches of 14), Polyak average 0.9999 (Sec. 4.1)."""
    run = _row(
        "imagenet", (0.003, 0.01, 0.03, 0.06), held_out=0.01, steps=20_000, warmup_steps=500, lr=0.03,
        image_size=512,
    )  # fmt: skip
    return dataclasses.replace(run, average_decay=0.9999)


def cifar100() -> FinetuneConfig:
    return _row("cifar100", SMALL_GRID, held_out=0.02, steps=10_000, warmup_steps=500)


def cifar10() -> FinetuneConfig:
    return _row("cifar10", SMALL_GRID, held_out=0.02, steps=10_000, warmup_steps=500)


def pets() -> FinetuneConfig:
    return _row("pets", SMALL_GRID, held_out=0.1, steps=500, warmup_steps=100)


def flowers() -> FinetuneConfig:
    """The official training part alone, 1,020 images, as Google's code; `--data.train-split trainval` has 2,040."""
    run = _row("flowers102", SMALL_GRID, held_out=0.1, steps=500, warmup_steps=100)
    return dataclasses.replace(run, data=dataclasses.replace(run.data, train_split="train"))


def vtab() -> FinetuneConfig:
    """2,500 steps at rate 0.01, the same for all 19 tasks (`vitlab vtab`).

    Images as in BiT, but at one size: squashed to 448, a random 384 of it, mirrored; not where that changes a label.
    """
    run = _row("vtab:TASK", (0.01,), held_out=0.2, steps=2_500, warmup_steps=500)
    return dataclasses.replace(run, data=dataclasses.replace(run.data, crop="random", crop_resize=448))


def own() -> FinetuneConfig:
    """Your own images, of any number and size: length, batch and mixup by BiT's rule, the best of three learning rates.

    The values here are those for fewer than 20,000 images.
    Deviation: BiT always takes a batch of 512, its own two resolutions and one rate. A batch of at most an eighth of
    the images spares a small set hundreds of repetitions, and the checkpoint's own size most of the time; the search
    tries each rate for a fifth of the steps. Test images are shrunk with antialiasing, where Google's code looks up
    single points.
    """
    run = _row("", (0.003, 0.01, 0.03), held_out=0.1, steps=500, warmup_steps=100, image_size=224)
    return dataclasses.replace(
        run,
        data=dataclasses.replace(run.data, min_area=0.3, eval_interpolation="bilinear"),
        automatic=("steps", "warmup_steps", "mixup", "batch_size", "sweep_steps", "image_size", "preprocessing"),
        log_every=10,
        checkpoint_every=25,
    )


def _row(
    name: str, learning_rates: tuple[float, ...], *, held_out: float, steps: int, warmup_steps: int, lr: float = 0.01,
    image_size: int = 384,
) -> FinetuneConfig:  # fmt: skip
    """Warm-up is not in the table; the steps are those of Google's code, as are crop, flip and test images: squashed
    bilinearly without antialiasing (vision_transformer's `input_pipeline.py`)."""
    return FinetuneConfig(
        model=ViTConfig(image_size=image_size),
        data=DataConfig(name=name, train_split="trainval", eval_split="test", crop="inception", workers=2),
        optim=OptimConfig(name="sgd", lr=lr, momentum=0.9, schedule="cosine", warmup_steps=warmup_steps, clip_norm=1.0),
        steps=steps,
        batch_size=512,
        learning_rates=learning_rates,
        held_out=held_out,
    )
