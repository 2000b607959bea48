"""Every setting of a training run, as frozen dataclasses. Types carry the allowed range; `check_fields` checks them.

Nothing here imports torch: recipes and the command line build on these in an instant.
"""

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from vitlab.errors import UserError
from vitlab.models.config import ImageSize, ModelConfig, ViTConfig, check_rgb
from vitlab.preprocessing import Preprocessing
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
from vitlab.switches import check_switches


@dataclass(frozen=True)
class DataConfig:
    """Which images, and what is done to them (Sec. 4.1, App. B.1)."""

    name: str = "digits"
    """A data set's name, `folder:PATH`, `csv:PATH` or `shards:PATH` (`vitlab list datasets`)."""
    root: str | None = None
    """Folder that holds, or receives, a named data set; None means the cache folder."""
    train_split: str = "train"
    """Split to train on; `trainval` adds the held-out split."""
    eval_split: str = "val"
    """Split to evaluate on while training."""
    classes: tuple[int, ...] | None = None
    """Keep only these classes, renumbered from 0; None keeps all."""
    crop: Literal["inception", "random", "pad", "none"] = "inception"
    """Training crop: `inception` (part of the area, squashed to size), `random` (resize, then crop), `pad` (shift)
    or `none` (the whole image)."""
    min_area: Fraction = 0.05
    """Smallest fraction of the area that an inception crop keeps."""
    crop_resize: PositiveInt | None = None
    """Side in pixels to which `random` resizes before it crops."""
    pad: NonNegativeInt = 4
    """Most pixels, at the model's size, by which `pad` shifts."""
    flip: bool = True
    """Mirror left and right with probability 1/2."""
    randaugment_layers: NonNegativeInt = 0
    """Operations per image of RandAugment; 0 turns it off."""
    randaugment_magnitude: Annotated[int, Ge(0), Le(30)] = 10
    """Strength of RandAugment, 0-30."""
    eval_resize: PositiveInt | None = None
    """Test images: None squashes them to size; a number resizes the shorter side to it and crops the center."""
    eval_interpolation: Literal["bilinear", "bicubic", "lanczos", "box", "hamming", "nearest"] | None = None
    """Filter for test images, antialiased as by Pillow, timm and Hugging Face; None resizes as Google's code does:
    bilinear without antialiasing (vision_transformer), or by area averaging with eval_resize (big_vision)."""
    workers: NonNegativeInt = 0
    """Processes that read images; 0 reads in the training process."""
    fast_decode: bool = False
    """Images in files, for training: resize each crop with antialiasing, to whole gray levels, from JPEGs decoded no
    larger than it needs. Off, crops are looked up in the whole image without antialiasing, as in Google's code."""
    on_error: Literal["raise", "skip"] = "raise"
    """At an unreadable image: stop the run, or skip the image, with a warning and a count."""
    partial: bool = False
    """Accept a val folder of imagenet or imagenet_real that lacks images; the result says so."""
    exclude: str | None = None
    """A list of images to exclude from the training split, as `vitlab duplicates` writes it (`exclude.txt`)."""
    part: Fraction | None = None
    """Fraction of each class of the training split to train on; a smaller subset is contained in every larger one."""
    part_seed: Seed | None = None
    """Seed that chooses these images; None is 0."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.train_split in ("test", "all") or self.eval_split == "all":
            raise UserError(
                f"train_split={self.train_split!r} and eval_split={self.eval_split!r}: a model is trained without test "
                f"images, and `all` holds them; give train, trainval or val to train on, train, val or test to "
                f"evaluate on."
            )
        if self.part is None and self.part_seed is not None:
            raise UserError(f"part_seed={self.part_seed} has no effect without part; give part too.")
        if (self.crop == "random") != (self.crop_resize is not None):
            raise UserError(
                f"crop={self.crop!r} with crop_resize={self.crop_resize}: the crop `random` requires crop_resize, no "
                "other crop uses it."
            )

    def without_crop(self) -> "DataConfig":
        """The same with whole training images."""
        return replace(self, crop="none", crop_resize=None, min_area=DataConfig.min_area, pad=DataConfig.pad)

    def preprocessing(self, image_size: ImageSize) -> Preprocessing:
        """How test images are prepared for a model of this size; raises UserError if `eval_resize` is too small."""
        if self.eval_interpolation is None:
            return Preprocessing.google(image_size, self.eval_resize)
        return Preprocessing(image_size, self.eval_resize, interpolation=self.eval_interpolation)


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
    """Learning rate of each block over that of the block after it; the head has `lr`, the embedding the lowest."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate changes after the warm-up."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which the rate rises linearly from 0."""
    cooldown_steps: NonNegativeInt = 0
    """Last steps over which the rate falls linearly to 0, on top of the schedule."""
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
    classes: tuple[NonNegativeInt, ...] | None = None
    """Evaluate on these classes only, by their numbers in the whole data set; they may differ from the run's. None
    means the run's classes for its own data set, and all classes of another."""

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
    compile: bool = False
    """Compile the model with torch.compile."""
    trained_blocks: NonNegativeInt | None = None
    """Train the last blocks of the encoder and the head only, this many; 0 trains the head, None everything."""
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
        check_switches(self)

    def _check_masking(self) -> None:
        """Masked patch prediction takes a headless ViT with patches of pixels, and no setting about classes."""
        model = self.model
        if not isinstance(model, ViTConfig) or model.stem is not None:
            raise UserError("masked patch prediction requires patches cut from the image; take a ViT without a stem.")
        if model.patch_dropout:
            raise UserError(
                f"masked patch prediction needs every patch; leave patch_dropout={model.patch_dropout} out."
            )
        if model.final_norm == "mean":
            raise UserError("masked patch prediction normalizes tokens; set model.final_norm='tokens', not 'mean'.")
        if model.num_patches < 2:
            raise UserError(f"masked patch prediction requires 2 patches or more, not {model.num_patches}.")
        if model.pool == "map" or model.representation_size is not None or model.num_classes:
            raise UserError(
                f"masked patch prediction trains no head: set pool={model.pool!r} to 'token' or 'gap', "
                f"representation_size={model.representation_size} to None and num_classes={model.num_classes} to 0."
            )
        for name, default in {"loss": "softmax", "label_smoothing": 0.0, "mixup": 0.0}.items():
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


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    """A fine-tuning job (App. B.1.1): a learning rate sweep on part of train, then runs on all of it."""

    learning_rates: tuple[PositiveFloat, ...] = ()
    """To try on the held-out split (Table 4); the best replaces `optim.lr`. One is tried only beside a `head`."""
    held_out: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Fraction of each class of the training split that the sweep is evaluated on."""
    sweep_steps: PositiveInt | None = None
    """Updates per learning rate of the sweep; None takes the run's own number, as the paper does."""
    runs: NonNegativeInt = 1
    """Final runs, with the seeds `seed`, `seed` + 1, ...; 0 ends with the least-squares head."""
    from_scratch: bool = False
    """Draw all weights by each run's seed: the control that shows what pre-training is worth."""
    fresh_positions: bool = False
    """Draw new position embeddings by each run's seed, instead of interpolating the checkpoint's (Sec. 3.2): the
    control that shows what interpolation preserves."""
    head: Literal["least_squares"] | None = None
    """Start of the new head: zeros, as in the paper (None), or the least-squares classifier of the frozen
    representations (Sec. 4.1). That is tested by itself first, then fine-tuned (LP-FT, Kumar et al. 2022); by the loss
    on the held-out split, the result is the one, the other, or an average of their weights (WiSE-FT, Wortsman et al.
    2022)."""
    alpha: Annotated[float, Gt(0), Le(1)] | None = None
    """Weight of the fine-tuned model in that average where no `learning_rates` are tried; None takes 0.25."""
    head_views: PositiveInt | None = None
    """Augmented views of each training image for the least-squares head. Crops and mirroring that make it worse are
    left out, of fine-tuning too. None takes no views and augments as `data` says."""
    halvings: PositiveInt | None = None
    """Successive halving in the sweep: how often the better half of the rates starts again with twice the steps."""
    head_std: PositiveFloat | None = None
    """Standard deviation of the new head's weights, drawn by each run's seed; None starts it at zero, as the paper
    does. That costs a short training its first steps: until the head has grown, nothing below it learns."""
    automatic: tuple[
        Literal["steps", "warmup_steps", "mixup", "batch_size", "learning_rates", "sweep_steps"]
        | Literal["image_size", "preprocessing", "loss", "runs", "head_views", "part"],
        ...,
    ] = ()
    """Settings left to the number of training images (BiT's rule), to the checkpoint and to the device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.masking is not None:
            raise UserError("masking is for pre-training; fine-tuning learns classes. Leave it out.")
        if len(set(self.learning_rates)) < len(self.learning_rates):
            raise UserError(f"learning_rates is {self.learning_rates}; give each learning rate once.")
        if self.fresh_positions and self.from_scratch:
            raise UserError("fresh_positions has no effect with from_scratch, where all weights are new; leave it out.")
        if self.head and (self.from_scratch or self.fresh_positions or self.head_std is not None):
            raise UserError(
                f"head={self.head!r} is fitted to the checkpoint as it is; leave from_scratch, fresh_positions and "
                f"head_std out, or give --recipe custom."
            )
        if self.head_views and not self.head:
            raise UserError(f"head_views={self.head_views} has no effect without head='least_squares'; leave it out.")
        if self.alpha is not None and (not self.head or self.tried_rates):
            raise UserError(
                f"alpha={self.alpha:g} has no effect without head='least_squares', and where learning_rates are tried "
                f"held-out images choose it; leave it out, or give one rate that is not tried (`--optim.lr 1e-4`)."
            )
        if not self.runs and not self.head:
            raise UserError("runs=0 tests the least-squares head alone; give head='least_squares' too.")
        whole = self.sweep_steps is None and "sweep_steps" not in self.automatic
        if self.halvings and (whole or 2**self.halvings > len(self.learning_rates)):
            raise UserError(
                f"halvings={self.halvings} requires sweep_steps and {2**self.halvings} learning_rates or more; there "
                f"are {len(self.learning_rates)}."
            )
        if self.sweep_steps is not None and not self.tried_rates:
            raise UserError(f"sweep_steps={self.sweep_steps} has no effect without two learning_rates or more.")

    @property
    def tried_rates(self) -> tuple[float, ...]:
        """Those of the sweep; empty without one."""
        return self.learning_rates if len(self.learning_rates) > 1 or (self.head and self.runs) else ()

    def single(self, lr: float | None = None, seed: int | None = None) -> TrainConfig:
        """One of its runs, at the rate `lr` (`optim.lr` unless given) and with `seed` (its own unless given)."""
        settings = {item.name: getattr(self, item.name) for item in fields(TrainConfig)}
        optim = self.optim if lr is None else replace(self.optim, lr=lr)
        return TrainConfig(**settings | {"optim": optim, "seed": self.seed if seed is None else seed})
