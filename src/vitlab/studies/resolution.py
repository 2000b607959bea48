"""Sec. 3.2: what a higher resolution brings in fine-tuning, and what the interpolated position embeddings add."""

from vitlab.config import FinetuneConfig, TrainConfig
from vitlab.models.config import ViTConfig
from vitlab.recipes import finetune, pretrain
from vitlab.studies.presets import finetuning, pretraining, vit
from vitlab.studies.spec import Chart, Claim, Scale, Study, StudyRun, changed, difference, percent

FACTORS = (1.0, 1.5, 2.0)
"""Sides of the images in fine-tuning, relative to pre-training."""
KINDS = ("interpolated", "fresh")
"""Position embeddings: the checkpoint's, or new ones."""
CROP = {"crop": "inception", "min_area": 0.5, "pad": 4}


def variants(scale: Scale) -> list[StudyRun]:
    """One pre-training, and a fine-tuning from it for each resolution and kind of position embeddings.

    Deviation: `small` pre-trains at half of the images' resolution; more pixels would show nothing new.
    """
    pretrain_config, finetune_config = _configs(scale)
    assert isinstance(pretrain_config.model, ViTConfig)
    runs = [StudyRun("pretrained", pretrain_config, {"run": "pre-training"})]
    for kind in KINDS:
        for factor in FACTORS:
            side = round(factor * pretrain_config.model.image_hw[0])
            model = ViTConfig(image_size=side, patch_size=pretrain_config.model.patch_size)
            config = changed(finetune_config, model=model, fresh_positions=kind == "fresh")
            labels = {"run": "fine-tuning", "positions": kind, "factor": factor}
            runs.append(StudyRun(f"{kind}-{side}", config, labels, init_from="pretrained"))
    return runs


def _configs(scale: Scale) -> tuple[TrainConfig, FinetuneConfig]:
    """The pre-training and the fine-tuning."""
    if scale == "paper":
        return pretrain.jft(), changed(finetune.imagenet(), average_decay=None)
    # Position embeddings start at 0.1, not at the 1.0 of `tiny.vit`: else what is interpolated is mostly their random
    # start, whose norm interpolation halves.
    pretrain_config = pretraining(vit(16, 4, 64, 4, position_std=0.1), 3000, data=CROP, fewshot=None)
    return pretrain_config, finetuning(subset_fraction=0.1, steps=1500, batch_size=64, data=CROP)


def _claim(text: str, paper: str, more: tuple[str, float], less: tuple[str, float]) -> Claim:
    ahead, behind = ({"positions": kind, "factor": factor} for kind, factor in (more, less))
    return Claim(text, f"{paper}; no numbers (Sec. 3.2)", difference("accuracy", ahead, behind))


HELPS = "it is often beneficial"
LOST = "at another resolution they may no longer be meaningful, so they are interpolated; new ones are not tried"
BEATS = "interpolated position embeddings beat new ones."
RESOLUTION = Study(
    name="resolution",
    source="Sec. 3.2",
    question="Does fine-tuning at a higher resolution help, and do the position embeddings need to be interpolated?",
    variants=variants,
    seeds=10,
    summary="A ViT is pre-trained at one resolution and fine-tuned at 1, 1.5 and 2 times that, with the position "
    "embeddings that it learned, interpolated (at 1 times they stay as they are), or with new ones.",
    rows=("factor",),
    columns={
        "resolution": lambda row: f"{row.labels['factor']:g} x",
        "pixels": lambda row: str(row.model.image_hw[0]),
        "patches": lambda row: " x ".join(map(str, row.model.grid)),
        **{f"{kind} positions, %": percent("accuracy", positions=kind) for kind in KINDS},
    },
    claims=(
        _claim("Fine-tuning at 1.5 times the resolution helps.", HELPS, ("interpolated", 1.5), ("interpolated", 1.0)),
        _claim("Fine-tuning at twice the resolution helps.", HELPS, ("interpolated", 2.0), ("interpolated", 1.0)),
        _claim(f"At 1.5 times, {BEATS}", LOST, ("interpolated", 1.5), ("fresh", 1.5)),
        _claim(f"At twice, {BEATS}", LOST, ("interpolated", 2.0), ("fresh", 2.0)),
    ),
    charts=(
        Chart(
            "Fine-tuned at higher resolution",
            "test accuracy",
            "accuracy",
            x=lambda group: group.model.image_hw[0],
            lines=lambda group: f"{group.labels['positions']} positions",
            where=lambda group: "positions" in group.labels,
            x_label="side of the image in fine-tuning, pixels",
        ),
    ),
)
