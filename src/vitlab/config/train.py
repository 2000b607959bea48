"""A training run: model, data, optimizer, and what is evaluated while it trains."""

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from annotated_types import Gt, Lt

from vitlab.config.data import DataConfig
from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ViTConfig, check_rgb
from vitlab.settings import (
    Fraction,
    FractionBelow1,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Seed,
    check_fields,
)

ABOVE_0 = "above 0"
REQUIRES: dict[str, dict[str, tuple[str, Any]]] = {
    "optim": {
        "momentum": ("name", "sgd"),
        "beta1": ("name", "adam"),
        "beta2": ("name", "adam"),
        "end_lr": ("schedule", "linear"),
        "decay_on": ("weight_decay", ABOVE_0),
    },
    "data": {
        "min_area": ("crop", "inception"),
        "pad": ("crop", "pad"),
        "crop_resize": ("crop", "random"),
        "randaugment_magnitude": ("randaugment_layers", ABOVE_0),
    },
}
"""Settings that have an effect only with one value of another setting of their section. With any other value they must
keep their default."""


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule (Tables 3 and 4)."""

    name: Literal["adam", "sgd"] = "adam"
    """Which optimizer."""
    lr: NonNegativeFloat = 1e-3
    """Base learning rate, reached at the end of the warm-up; for the global batch."""
    beta1: FractionBelow1 = 0.9
    """Adam's decay of the gradient's mean."""
    beta2: FractionBelow1 = 0.999
    """Adam's decay of the mean of its squares."""
    momentum: FractionBelow1 = 0.9
    """Momentum of SGD."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled weight decay: each step takes lr * weight_decay * p off a parameter p."""
    decay_on: Literal["all", "kernels"] = "all"
    """What decays: every parameter, as in the paper's time, or matrices and patch filters only (big_vision)."""
    layer_decay: Fraction = 1.0
    """Ratio of each block's learning rate to the next block's; the head has `lr`, the embedding the lowest."""
    schedule: Literal["cosine", "linear", "constant", "staircase"] = "cosine"
    """How the learning rate changes after the warm-up; `staircase`: to a tenth after 30, 60 and 90% of the steps."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises linearly from 0."""
    end_lr: NonNegativeFloat = 0.0
    """Rate at the last step of a linear schedule (1e-5 in Google's code)."""
    clip_norm: PositiveFloat | None = None
    """Largest global norm of the gradient; None does not clip."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class FewShotConfig:
    """Few-shot accuracy while training (Sec. 4.1): least squares on the frozen representation, at each evaluation."""

    dataset: str | None = None
    """Data set, `folder:PATH`, `csv:PATH` or `shards:PATH`; None means the run's own."""
    root: str | None = None
    """Folder that holds a named data set."""
    train_split: str = "train"
    """Split that the few examples are drawn from: all of it, also where the run trains on a fraction."""
    test_split: str = "val"
    """Split to measure on."""
    shots: tuple[PositiveInt, ...] = (1, 5, 10, 25)
    """Examples of each class; one accuracy for each number."""
    l2: PositiveFloat = 1024.0
    """Strength of the penalty (2^10 in Google's code)."""
    seeds: PositiveInt = 3
    """Random samples of the examples; the accuracy is their mean."""
    test_images: PositiveInt | None = None
    """Maximum number of test images, taken evenly from the split; None takes all."""
    classes: tuple[NonNegativeInt | str, ...] | None = None
    """Evaluate on these classes only, by their names or numbers in the whole data set; they may differ from the run's.
    None means the run's classes for its own data set, and all classes of another."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.classes is not None and (len(self.classes) < 2 or len(set(self.classes)) < len(self.classes)):
            raise UserError(f"classes is {self.classes}; give two different classes or more, or None.")
        if self.root is not None and self.dataset is None:
            raise UserError(f"root={self.root!r} has no effect without dataset; set data.root instead.")
        if not self.shots:
            raise UserError("shots is empty; give at least one number of examples per class.")


@dataclass(frozen=True)
class MaskingConfig:
    """Masked patch prediction (Sec. 4.6, App. B.1.2): learning without labels, from the images alone."""

    target: Literal["mean-color", "downsized", "regression"] = "mean-color"
    """What is predicted for a corrupted patch: its mean color in 3 bits per channel; the same for each of 4x4 cells; or
    all of its pixels, with an L2 loss."""
    share: Fraction = 0.5
    """Fraction of each image's patches that is corrupted (0.15 is the paper's other rate)."""
    masked: NonNegativeFloat = 0.8
    """Fraction of these whose embedding is replaced by a learned one."""
    replaced: NonNegativeFloat = 0.1
    """Fraction of these that get the embedding of another patch; the rest stay unchanged."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.masked + self.replaced > 1 + 1e-9:
            raise UserError(f"masked={self.masked} and replaced={self.replaced}: their sum must be at most 1.")

    def corrupted(self, patches: int) -> int:
        """Number of corrupted patches of each image: `share` of `patches`, rounded, at least 1."""
        return max(1, round(self.share * patches))

    def num_uniforms(self, patches: int) -> int:
        """Uniform numbers that an image's corruption takes: one per patch, and two more per corrupted patch."""
        return patches + 2 * self.corrupted(patches)


@dataclass(frozen=True)
class TrainConfig:
    """One complete run: the same config and the same data give the same weights."""

    model: ModelConfig = field(default_factory=ViTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: Literal["softmax", "sigmoid"] = "softmax"
    """Cross-entropy over all classes together, or of each class by itself."""
    label_smoothing: FractionBelow1 = 0.0
    """Softmax: the fraction spread evenly over all classes. Sigmoid: targets become 1 - s and s."""
    mixup: NonNegativeFloat = 0.0
    """Parameter of mixup's Beta distribution; 0 turns it off."""
    balance: bool = False
    """Weight images by the inverse frequency of their class, so that all classes count the same."""
    steps: PositiveInt | None = None
    """Number of updates; give either this or `epochs`."""
    epochs: PositiveFloat | None = None
    """Passes over the training split; steps = round(epochs * examples / batch_size)."""
    batch_size: PositiveInt = 4096
    """Images per update, over all devices and micro-batches."""
    microbatch: PositiveInt | None = None
    """Largest number of images per forward pass; gradients are accumulated up to `batch_size`."""
    average_decay: Annotated[float, Gt(0), Lt(1)] | None = None
    """Polyak averaging (EMA): average = decay * average + (1 - decay) * weights after each step (0.9999, Sec. 4.1)."""
    precision: Literal["auto", "float32", "autocast", "bfloat16"] = "auto"
    """Precision of training. `bfloat16` keeps float32 master weights and one bfloat16 copy of them per step; `autocast`
    casts at each use; `auto` is bfloat16 on a CPU that is faster in it, autocast on a GPU, else float32."""
    compile: bool | Literal["auto"] = "auto"
    """Compile the model with torch.compile; `auto` does in long runs, on a CPU of hybrids and ResNets alone."""
    trained_blocks: NonNegativeInt | None = None
    """Train the last blocks of the encoder, this many, and what follows them; 0 trains the head alone, None all."""
    activation_checkpointing: bool = False
    """Recompute the activations inside a block in the backward pass: less memory, more time."""
    fsdp: bool = False
    """With several processes, shard weights, gradients and optimizer state (FSDP2) instead of DDP."""
    seed: Seed = 0
    """Seed of all random numbers."""
    log_every: PositiveInt = 50
    """Steps between records in metrics.jsonl."""
    eval_every: PositiveInt | None = None
    """Steps between evaluations; None evaluates only at the end."""
    fewshot: FewShotConfig | None = None
    """Few-shot accuracy at each evaluation; None leaves it out."""
    masking: MaskingConfig | None = None
    """Masked patch prediction in place of classes; None learns the classes."""
    checkpoint_every: PositiveInt = 1000
    """Steps between checkpoints."""
    keep_checkpoints: PositiveInt = 2
    """How many of the last checkpoints stay on disk."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.steps is None) == (self.epochs is None):
            raise UserError(f"steps={self.steps} and epochs={self.epochs}: give exactly one of them.")
        check_rgb(self.model)
        if self.masking is not None:
            self._check_masking()
        _check_effects(self)

    def _check_masking(self) -> None:
        """Masked patch prediction takes a headless ViT with patches of pixels, and no setting about classes."""
        model = self.model
        if not isinstance(model, ViTConfig) or model.stem is not None:
            raise UserError("masked patch prediction requires patches cut from the image; take a ViT without a stem.")
        if model.patch_dropout:
            raise UserError(
                f"masked patch prediction needs every patch; leave patch_dropout={model.patch_dropout} out."
            )
        if model.variant.final_norm == "mean":
            raise UserError(
                "masked patch prediction normalizes tokens; set model.variant.final_norm='tokens', not 'mean'."
            )
        if model.num_patches < 2:
            raise UserError(f"masked patch prediction requires 2 patches or more, not {model.num_patches}.")
        if model.pool == "map" or model.representation_size is not None or model.num_classes:
            raise UserError(
                f"masked patch prediction trains no head: set pool={model.pool!r} to 'token' or 'gap', "
                f"representation_size={model.representation_size} to None and num_classes={model.num_classes} to 0."
            )
        for name, default in {"loss": "softmax", "label_smoothing": 0.0, "mixup": 0.0, "balance": False}.items():
            if getattr(self, name) != default:
                raise UserError(
                    f"{name}={getattr(self, name)!r} has no effect in masked patch prediction; leave it out."
                )

    def total_steps(self, examples: int) -> int:
        """Number of updates for a training split of `examples` images."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * examples / self.batch_size))


def has_effect(value: Any, wanted: Any) -> bool:
    """Whether this value of the other setting gives a setting of REQUIRES an effect."""
    return value > 0 if wanted == ABOVE_0 else value == wanted


def _check_effects(config: Any) -> None:
    """Raises UserError for a setting of REQUIRES without effect."""
    for section, settings in REQUIRES.items():
        part = getattr(config, section)
        for name, (switch, wanted) in settings.items():
            value = getattr(part, name)
            default = getattr(type(part), name)
            current = getattr(part, switch)
            if value != default and not has_effect(current, wanted):
                required = f"{section}.{switch} {wanted}" if wanted == ABOVE_0 else f"{section}.{switch}={wanted!r}"
                raise UserError(
                    f"{section}.{name}={value!r} has no effect with {section}.{switch}={current!r}; give "
                    f"{required} too, or leave {section}.{name} at {default!r}."
                )
