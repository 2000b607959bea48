"""Sec. 4.6, App. B.1.2: what masked patch prediction is worth, which target is best, and how much to corrupt."""

from vitlab.config import FinetuneConfig, MaskingConfig, TrainConfig
from vitlab.models.config import ViTConfig
from vitlab.recipes import finetune, pretrain, tiny
from vitlab.studies.presets import finetuning
from vitlab.studies.spec import Chart, Claim, Results, Scale, Study, StudyRun, changed, difference, percent

VARIANTS = {
    "mean-color-50": MaskingConfig(target="mean-color", share=0.5),
    "downsized-50": MaskingConfig(target="downsized", share=0.5),
    "regression-50": MaskingConfig(target="regression", share=0.5),
    "mean-color-15": MaskingConfig(target="mean-color", share=0.15),
}
"""The three targets, and the paper's other rate."""
STARTS = {
    "scratch": ("none: from scratch", "77.9"),
    "scratch-zero": ("none, and a head of zeros", ""),
    "mean-color-50": ("mean color, 50% corrupted", "79.9"),
    "mean-color-50-zero": ("mean color, 50% corrupted, and a head of zeros", ""),
    "downsized-50": ("4x4 colors, 50% corrupted", "works well"),
    "regression-50": ("all pixels in L2, 50% corrupted", "slightly worse"),
    "mean-color-15": ("mean color, 15% corrupted", "slightly worse"),
    "supervised": ("supervised", "84.2"),
}
"""Variant -> description, and accuracy of ViT-B/16 on ImageNet (Sec. 4.6, Table 5; App. B.1.2 has no numbers)."""
LABELED = 0.02
"""Fraction of CIFAR-10's labels that fine-tuning sees at `small`: 100 of each class."""
HEAD_STD = 0.1
"""Standard deviation of the new head's weights in a small fine-tuning."""
PRETRAINED, FINETUNED = "pre-trained", "fine-tuned"
BEST = "mean-color-50"
"""The paper's choice."""


def variants(scale: Scale) -> list[StudyRun]:
    """Fine-tunings that differ only in the weights below the head.

    At `small` heads start wide: a head of zeros, as in the paper, wastes the first steps of a short training, in which
    nothing below it learns; fresh weights lose more by it than trained ones. A pair with heads of zeros is run too.
    Only the paper's scale has supervised pre-training: at `small` it would see labels that fine-tuning must not see.
    """
    if scale == "paper":
        masked = pretrain.masked()
        others = {"scratch": pretrain.imagenet(), "supervised": pretrain.jft()}
        after = changed(finetune.imagenet(), model=ViTConfig(image_size=384), average_decay=None)
    else:
        masked, after = _small()
        others = {}
    pretrained = {name: changed(masked, masking=masking) for name, masking in VARIANTS.items()} | others
    finetuned = {name: (after, name) for name in pretrained}  # each with the run that it starts from
    if scale != "paper":  # from scratch is a fine-tuning that takes only the shape of the model of BEST
        from_scratch = changed(after, from_scratch=True)
        finetuned["scratch"] = (from_scratch, BEST)
        finetuned["scratch-zero"] = (changed(from_scratch, head_std=None), BEST)
        finetuned[f"{BEST}-zero"] = (changed(after, head_std=None), BEST)
    runs = [StudyRun(name, config, {"run": PRETRAINED, "variant": name}) for name, config in pretrained.items()]
    return runs + [
        StudyRun(f"{name}.finetuned", config, _finetuned(name), init_from=init_from)
        for name, (config, init_from) in finetuned.items()
    ]


def _small() -> tuple[TrainConfig, FinetuneConfig]:
    """On CIFAR-10; 9.7 TFLOP a pre-training, 5 minutes of one core at 33 GFLOP/s.

    Deviation: fine-tuning takes Adam where Table 4 has SGD, so that fresh weights are trained as Table 3 trains them.
    """
    base = tiny.masked_cifar10()
    model = {"width": 96, "depth": 3, "mlp_dim": 192}
    pretrained = changed(base, model=model, optim={"warmup_steps": 150}, epochs=None, steps=1500)
    after = finetuning(
        LABELED,
        steps=800,
        batch_size=64,
        model={"image_size": 32},
        data={"name": "cifar10", "classes": None, "crop": "inception", "min_area": 0.3, "pad": 4},
        optim={"name": "adam", "lr": 1e-3, "weight_decay": 0.05},
        log_every=50,
        head_std=HEAD_STD,
    )
    return pretrained, after


def _finetuned(variant: str) -> dict[str, str]:
    return {"run": FINETUNED, "variant": variant}


APPENDIX = "all settings work quite well (App. B.1.2)"
CLAIMS = {
    (BEST, "scratch"): (
        "Masked patch prediction with mean colors beats training from scratch.",
        "79.9% against 77.9% (Sec. 4.6, Table 5)",
    ),
    (f"{BEST}-zero", "scratch-zero"): ("It also does where both heads start at zero, as in the paper.", "as above"),
    ("downsized-50", "scratch"): ("Prediction of 4x4 colors beats training from scratch.", APPENDIX),
    ("regression-50", "scratch"): ("Regression of all pixels beats training from scratch.", APPENDIX),
    (BEST, "regression-50"): (
        "Mean colors are a better target than all pixels in L2.",
        "regression is slightly worse (App. B.1.2)",
    ),
    (BEST, "mean-color-15"): (
        "Corrupting 50% of the patches is better than 15%.",
        "15% is slightly worse, few-shot (App. B.1.2)",
    ),
    ("supervised", BEST): ("Supervised pre-training on the same images stays ahead.", "4 points (Sec. 4.6)"),
}
"""(ahead, behind) -> claim, and what the paper says."""


def _claims(results: Results) -> list[Claim]:
    """The claims about runs that this scale has."""
    present = set(results.values("variant"))
    return [
        Claim(text, paper, difference("accuracy", _finetuned(ahead), _finetuned(behind)))
        for (ahead, behind), (text, paper) in CLAIMS.items()
        if present >= {ahead, behind}
    ]


MASKING = Study(
    name="masking",
    source="Sec. 4.6, App. B.1.2",
    question="Is masked patch prediction worth it, with which target, and how much should be corrupted?",
    variants=variants,
    summary="A ViT learns without labels by masked patch prediction and is fine-tuned. At this scale, from scratch is "
    "the same shape with fresh weights, on the same labels for as many steps (the paper's is trained to the end), "
    f"heads start at a standard deviation of {HEAD_STD} unless a row says otherwise, and supervised pre-training is "
    "left out: it would see the labels that fine-tuning must not.",
    rows=("variant",),
    columns={
        "pre-training": lambda row: STARTS[row.labels["variant"]][0],
        "accuracy, %": percent("accuracy", run=FINETUNED),
        "paper: ImageNet, %": lambda row: STARTS[row.labels["variant"]][1],
    },
    claims=_claims,
    charts=(
        Chart(
            "Fine-tuned on few labels",
            "test accuracy",
            "accuracy",
            x="variant",
            x_label="pre-training",
            lines=lambda group: "after fine-tuning",
            where=lambda group: group.labels["run"] == FINETUNED,
        ),
    ),
)
