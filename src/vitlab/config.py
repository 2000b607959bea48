"""Every setting of a training run: frozen dataclasses that say themselves what is wrong with them.

Nothing here needs torch: recipes and the command line build on these in an instant.
"""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from vitlab.errors import UserError
from vitlab.models.config import ImageSize, ModelConfig, ViTConfig
from vitlab.preprocessing import Preprocessing
from vitlab.settings import check_fields

ABOVE_0 = "above 0"
COUNTS_WITH: dict[str, dict[str, tuple[str, Any]]] = {
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
        "randaugment_magnitude": ("randaugment_layers", ABOVE_0),
    },
}
"""Settings of a section that have an effect with one value of another alone, its switch. With any other value of the
switch such a setting keeps its default, or is refused. (What never goes together, the sections refuse themselves.)"""


def counts_with(value: Any, wanted: Any) -> bool:
    """Whether a switch of COUNTS_WITH that has this value lets the setting count."""
    return value > 0 if wanted == ABOVE_0 else value == wanted


@dataclass(frozen=True)
class DataConfig:
    """Which images, and what is done to them (Sec. 4.1, App. B.1)."""

    name: str = "digits"
    """A data set's name, `folder:PATH` or `shards:PATH` (`vitlab list datasets`)."""
    root: str | None = None
    """Folder that holds, or receives, a named data set; None means the cache folder."""
    train_split: str = "train"
    """Split to learn from; `trainval` adds the held-out part."""
    eval_split: str = "val"
    """Split to evaluate on while training."""
    classes: tuple[int, ...] | None = None
    """Keep only these classes, renumbered from 0; None keeps all."""
    crop: Literal["inception", "random", "pad", "none"] = "inception"
    """Training crop: `inception` (part of the area, squashed to size), `random` (resize, then crop), `pad` (shift)
    or `none` (the whole image)."""
    min_area: float = 0.05
    """Least share of the area that an inception crop keeps."""
    crop_resize: int | None = None
    """Side in pixels to which `random` resizes before it crops."""
    pad: int = 4
    """Most pixels, at the model's size, by which `pad` shifts."""
    flip: bool = True
    """Mirror left and right with probability 1/2."""
    randaugment_layers: int = 0
    """Operations per image of RandAugment; 0 turns it off."""
    randaugment_magnitude: int = 10
    """Strength of RandAugment, 0-30."""
    eval_resize: int | None = None
    """Test images: None squashes them to size; a number resizes the shorter side to it and crops the center."""
    eval_interpolation: Literal["bilinear", "bicubic", "lanczos", "box", "hamming", "nearest"] | None = None
    """Filter for test images, antialiased as by Pillow, timm and Hugging Face; None resizes as Google's code does:
    bilinear without antialiasing (vision_transformer), or by area averaging with eval_resize (big_vision)."""
    workers: int = 0
    """Processes that read images; 0 reads in the training process."""
    fast_decode: bool = False
    """Images in files, for training: resize each crop with antialiasing, to whole gray levels, from JPEGs decoded no
    larger than it needs. Off, crops are looked up in the whole image without antialiasing, as in Google's code."""
    on_error: Literal["raise", "skip"] = "raise"
    """What an unreadable image does: stop the run, or be left out, named and counted."""
    partial: bool = False
    """Accept a val folder of imagenet or imagenet_real that lacks images; the result says so."""
    exclude: str | None = None
    """A list of images to leave out of the training split, as `vitlab duplicates` writes it (`exclude.txt`)."""
    part: float | None = None
    """Share of each class of the training split that is learned from; a smaller one lies in every larger one."""
    part_seed: int | None = None
    """Which images these are; None is 0."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("train_split", "eval_split"):
            if getattr(self, name) == "all":
                raise UserError(
                    f"{name} is 'all', which holds what a run learns from and what it is tested on: only `vitlab "
                    f"evaluate` judges it. Give train, val, trainval or test."
                )
        if self.part is not None and not 0 < self.part <= 1:
            raise UserError(
                f"part is {self.part}; it is a share of each class of the training split, in (0, 1], or None for all."
            )
        if not 0 <= (self.part_seed or 0) < 2**63:
            raise UserError(f"part_seed is {self.part_seed}; it must be 0 or more, and below 2**63.")
        if self.part is None and self.part_seed is not None:
            raise UserError(f"part_seed is {self.part_seed} and there is no part that it chooses; give a part too.")
        if not 0 < self.min_area <= 1:
            raise UserError(f"min_area is {self.min_area}; it is a share of the image's area, in (0, 1].")
        if (self.crop == "random") != (self.crop_resize is not None):
            raise UserError(
                f"crop={self.crop!r} with crop_resize={self.crop_resize}: `random` needs a size to resize to before "
                f"it crops, and no other crop uses one."
            )
        if self.randaugment_layers < 0 or not 0 <= self.randaugment_magnitude <= 30:
            raise UserError(
                f"RandAugment of {self.randaugment_layers} layers at magnitude {self.randaugment_magnitude}: layers "
                f"must be at least 0 and the magnitude within 0-30."
            )
        if self.workers < 0 or self.pad < 0:
            raise UserError(f"workers={self.workers} and pad={self.pad} must not be negative.")

    def preprocessing(self, image_size: ImageSize) -> Preprocessing:
        """How test images are prepared for a model of this size; raises UserError if `eval_resize` is too small."""
        if self.eval_interpolation is None:
            return Preprocessing.google(image_size, self.eval_resize)
        return Preprocessing(image_size, self.eval_resize, interpolation=self.eval_interpolation)


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer and its schedule (Tables 3 and 4)."""

    name: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-3
    """Base learning rate, reached at the end of the warm-up; for the global batch."""
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    """Momentum of SGD."""
    weight_decay: float = 0.0
    """Decoupled weight decay: each step takes lr * weight_decay * p off a parameter p."""
    decay_on: Literal["all", "kernels"] = "all"
    """What decays: every parameter, as in the paper's time, or matrices and patch filters only (big_vision)."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    """Steps over which the rate rises linearly from 0."""
    cooldown_steps: int = 0
    """Last steps over which the rate falls linearly to 0, on top of the schedule."""
    end_lr: float = 0.0
    """Rate at the last step of a linear schedule (1e-5 in Google's code)."""
    clip_norm: float | None = None
    """Largest global norm of the gradient; None does not clip."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("lr", "weight_decay", "end_lr", "warmup_steps", "cooldown_steps"):
            if not getattr(self, name) >= 0 or math.isinf(getattr(self, name)):
                raise UserError(f"{name} is {getattr(self, name)}; it must be 0 or more, and finite.")
        for name in ("beta1", "beta2", "momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; it must lie in [0, 1).")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise UserError(f"clip_norm is {self.clip_norm}; give a positive norm, or None not to clip.")


@dataclass(frozen=True)
class FewShotConfig:
    """Few-shot accuracy while training (Sec. 4.1): least squares on the frozen representation, at each evaluation."""

    dataset: str | None = None
    """Data set, `folder:PATH` or `shards:PATH`; None means the run's own."""
    root: str | None = None
    """Folder that holds a named data set."""
    train_split: str = "train"
    """Split that the few examples are drawn from: all of it, also where the run learns from a part."""
    test_split: str = "val"
    """Split to measure on."""
    shots: tuple[int, ...] = (1, 5, 10, 25)
    """Examples of each class; one figure for each number."""
    l2: float = 1024.0
    """Strength of the penalty (2^10 in Google's code)."""
    seeds: int = 3
    """Draws of the examples; the figure is their mean."""
    test_images: int | None = None
    """Measure on no more images than these, taken evenly from the split; None takes all."""
    classes: tuple[int, ...] | None = None
    """Judge on these classes alone, by their numbers in the whole data set: also others than the run learns. None
    means the run's own of its own data set, and all of another."""

    def __post_init__(self) -> None:
        check_fields(self)
        if self.classes is not None and (
            len(self.classes) < 2 or len(set(self.classes)) < len(self.classes) or min(self.classes) < 0
        ):
            raise UserError(f"classes is {self.classes}; give two numbers of classes or more, all different, or None.")
        if self.root is not None and self.dataset is None:
            raise UserError(f"root is {self.root!r} and there is no dataset; the run's own data set brings its own.")
        if not self.shots or min(self.shots) < 1:
            raise UserError(f"shots is {self.shots}; give numbers of examples a class, each at least 1.")
        if not 0 < self.l2 < math.inf:
            raise UserError(f"l2 is {self.l2}; it must be positive and finite.")
        if self.seeds < 1:
            raise UserError(f"seeds is {self.seeds}; at least one draw is needed.")
        if self.test_images is not None and self.test_images < 1:
            raise UserError(f"test_images is {self.test_images}; it must be at least 1, or None for all.")


@dataclass(frozen=True)
class MaskingConfig:
    """Masked patch prediction (Sec. 4.6, App. B.1.2): learning without labels, from the images alone."""

    target: Literal["mean-color", "downsized", "regression"] = "mean-color"
    """What is told of a corrupted patch: its mean color in 3 bits a channel; those of the patch at 4x4 pixels; or
    all of its pixels, in L2."""
    share: float = 0.5
    """Share of the patches of each image that are corrupted (0.15 is the paper's other rate)."""
    masked: float = 0.8
    """Share of these whose embedding gives way to a learned one."""
    replaced: float = 0.1
    """Share of these that get the embedding of another patch; the rest keep their own."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.share <= 1:
            raise UserError(f"share is {self.share}; it is a share of the patches, in (0, 1].")
        if not (self.masked >= 0 and self.replaced >= 0 and self.masked + self.replaced <= 1 + 1e-9):
            raise UserError(
                f"masked={self.masked} and replaced={self.replaced} are shares of the corrupted patches: neither may "
                f"be negative, nor both together more than 1."
            )

    def corrupted(self, patches: int) -> int:
        """How many of so many patches are corrupted: the share, rounded, in every image alike; at least one."""
        return max(1, round(self.share * patches))

    def draws(self, patches: int) -> int:
        """Uniform numbers that a image's corruption takes: one a patch, and two more for each corrupted one."""
        return patches + 2 * self.corrupted(patches)


@dataclass(frozen=True)
class TrainConfig:
    """One run, whole: the same config and the same data give the same weights."""

    model: ModelConfig = field(default_factory=ViTConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loss: Literal["softmax", "sigmoid"] = "softmax"
    label_smoothing: float = 0.0
    """Softmax: the share spread over all classes. Sigmoid: targets become 1 - s and s."""
    mixup: float = 0.0
    """Parameter of mixup's Beta distribution; 0 turns it off."""
    steps: int | None = None
    """Updates to make; give either this or `epochs`."""
    epochs: float | None = None
    """Passes over the training split; steps = round(epochs * examples / batch_size)."""
    batch_size: int = 4096
    """Images per update, over all devices and micro-batches."""
    microbatch: int | None = None
    """Most images that go through the model at once; gradients are summed up to `batch_size`."""
    average_decay: float | None = None
    """Polyak averaging: the averaged weights keep this share of themselves at each step (0.9999, Sec. 4.1)."""
    precision: Literal["auto", "float32", "autocast", "bfloat16"] = "auto"
    """Numbers that training computes in. `bfloat16` keeps float32 weights and one bfloat16 copy of them a step;
    `autocast` casts at each use; `auto` takes bfloat16 on a CPU that is faster in it, autocast on a GPU, else
    float32."""
    float8: bool = False
    """Round both factors of the matrix products in a ViT's blocks to 8 bits (torchao): with `compile`, for GPUs with
    units for it (Ada, Hopper or later); elsewhere emulated, which gains no time and shows what accuracy it costs."""
    compile: bool = False
    """Compile the model with torch.compile."""
    cuda_graphs: bool = False
    """With `compile`: replay a step's kernels from CUDA graphs (torch.compile's `reduce-overhead`), for small models
    whose kernels take longer to launch than to run; batches of one shape. Not yet tried on a GPU; elsewhere no change.
    """
    activation_checkpointing: bool = False
    """Keep no activations inside a block for the backward pass but compute them again there: less memory, more time."""
    fsdp: bool = False
    """Several processes hold a part each of weights, gradients and the optimizer's memory (FSDP2), and not all of them
    whole (DDP)."""
    seed: int = 0
    log_every: int = 50
    """Steps between records in metrics.jsonl."""
    eval_every: int | None = None
    """Steps between evaluations; None evaluates only at the end."""
    fewshot: FewShotConfig | None = None
    """Few-shot accuracy at each evaluation; None leaves it out."""
    masking: MaskingConfig | None = None
    """Masked patch prediction in place of classes; None learns the classes."""
    checkpoint_every: int = 1000
    """Steps between checkpoints."""
    keep_checkpoints: int = 2
    """How many of the last checkpoints stay on disk."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.steps is None) == (self.epochs is None):
            raise UserError(f"steps={self.steps} and epochs={self.epochs}: give exactly one of them.")
        for name in ("steps", "epochs", "batch_size", "microbatch", "log_every", "eval_every", "checkpoint_every",
                     "keep_checkpoints"):  # fmt: skip
            given = getattr(self, name)
            if given is not None and not 0 < given < math.inf:
                raise UserError(f"{name} is {given}; it must be positive and finite.")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed is {self.seed}; it must be 0 or more, and below 2**63.")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing is {self.label_smoothing}; it must lie in [0, 1).")
        if not 0 <= self.mixup < math.inf:
            raise UserError(f"mixup is {self.mixup}; it must be 0 (off) or a positive Beta parameter.")
        if self.average_decay is not None and not 0 < self.average_decay < 1:
            raise UserError(f"average_decay is {self.average_decay}; it must lie in (0, 1), or be None.")
        if self.masking is not None:
            self._check_masking()
        if self.float8 and not (isinstance(self.model, ViTConfig) and self.model.width % 16 == 0):
            given = f"a width of {self.model.width}" if isinstance(self.model, ViTConfig) else "a ResNet"
            raise UserError(
                f"float8 multiplies in a ViT's blocks, with a width that is a multiple of 16, and this is {given}; "
                f"take such a ViT, or leave float8 out."
            )
        if self.cuda_graphs:
            self._check_cuda_graphs()
        self._check_idle()

    def _check_idle(self) -> None:
        """No setting has a value of its own where its switch leaves it without effect."""
        for section, settings in COUNTS_WITH.items():
            part = getattr(self, section)
            for name, (switch, wanted) in settings.items():
                value, default, found = getattr(part, name), getattr(type(part), name), getattr(part, switch)
                if value != default and not counts_with(found, wanted):
                    needed = f"{section}.{switch} {wanted}" if wanted == ABOVE_0 else f"{section}.{switch}={wanted!r}"
                    raise UserError(
                        f"{section}.{name}={value!r} has no effect with {section}.{switch}={found!r}; give {needed} "
                        f"too, or leave {section}.{name} at {default!r}."
                    )

    def _check_cuda_graphs(self) -> None:
        """One shape, one forward and backward pass a step, and gradients that lie where the graphs write them."""
        size = self.microbatch or self.batch_size
        for wrong, what in (
            (not self.compile, "are recorded by torch.compile; give --compile too"),
            (size < self.batch_size, f"take a step's images at once. Leave out microbatch={size} (fine-tuning "
             f"chooses one for large models: give --microbatch {self.batch_size})"),
            (self.fsdp, "need weights that stay where they are, and fsdp brings them together anew; give one of them"),
            (self.data.on_error == "skip", "take batches of one shape, and data.on_error='skip' makes smaller ones; "
             "give 'raise'"),
        ):  # fmt: skip
            if wrong:
                raise UserError(f"cuda_graphs {what}, or leave cuda_graphs out.")

    def _check_masking(self) -> None:
        """Masked patch prediction takes a ViT that is all patches, and no setting that speaks of classes."""
        model = self.model
        if not isinstance(model, ViTConfig):
            raise UserError("masked patch prediction needs patches, and a ResNet has none; take a ViT.")
        if model.stem is not None:
            raise UserError(
                "masked patch prediction needs patches cut from the image: a hybrid's convolutions have seen what "
                "lies around them, so that nothing is hidden where an embedding is. Take a ViT without a stem."
            )
        if model.num_patches < 2:
            raise UserError(f"a image of {model.num_patches} patch leaves nothing to tell it from; take smaller ones.")
        if model.pool == "map" or model.representation_size is not None or model.num_classes:
            raise UserError(
                f"masked patch prediction trains no head: pool={model.pool!r}, representation_size="
                f"{model.representation_size} and num_classes={model.num_classes} would stay as they were drawn. Set "
                f"pool to 'token' or 'gap', representation_size to None and num_classes to 0; fine-tuning adds a head."
            )
        idle = {"loss": "softmax", "label_smoothing": 0.0, "mixup": 0.0}
        for name, off in idle.items():
            if getattr(self, name) != off:
                raise UserError(
                    f"{name}={getattr(self, name)!r} has no effect in masked patch prediction, which has no classes; "
                    f"leave it at {off!r}."
                )

    def total_steps(self, examples: int) -> int:
        """Updates for a training split of so many examples."""
        if self.steps is not None:
            return self.steps
        assert self.epochs is not None
        return max(1, round(self.epochs * examples / self.batch_size))


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    """A whole fine-tuning (App. B.1.1): the learning rate sought on a part of train, then runs on all of it."""

    learning_rates: tuple[float, ...] = ()
    """Learning rates to search; one rate, or --optim.lr, skips the search (Table 4). With two or more, the best on the
    held-out part takes `optim.lr`'s place; with one or none there is no search."""
    held_out: float = 0.1
    """Share of each class of the training split that the search is judged on."""
    sweep_steps: int | None = None
    """Updates for each rate tried; None takes the run's own number, as the paper does."""
    runs: int = 1
    """Final runs, with the seeds `seed`, `seed` + 1, ...; their mean and deviation are reported."""
    from_scratch: bool = False
    """Start from fresh weights, drawn by each run's seed, in the checkpoint's shape: the control that tells what its
    pre-training is worth."""
    fresh_positions: bool = False
    """Draw new position embeddings for the images' grid, by each run's seed, instead of interpolating the
    checkpoint's (Sec. 3.2): the control that tells what interpolation keeps."""
    head_std: float | None = None
    """Standard deviation of the new head's weights, drawn by each run's seed; None starts it at zero, as the paper
    does. That costs a short training its first steps: until the head has grown, nothing below it learns."""
    automatic: tuple[
        Literal["steps", "warmup_steps", "mixup", "batch_size", "sweep_steps", "image_size", "preprocessing"], ...
    ] = ()
    """Settings left to the number of training images (BiT's rule), to the checkpoint (its image size, and how test
    images are prepared) and to the device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.masking is not None:
            raise UserError("masking is for pre-training, and fine-tuning learns classes; leave it out.")
        if not all(0 < rate < math.inf for rate in self.learning_rates):
            raise UserError(f"learning_rates are {self.learning_rates}; each must be positive and finite.")
        if len(set(self.learning_rates)) < len(self.learning_rates):
            raise UserError(f"learning_rates are {self.learning_rates}; name each of them once.")
        if not 0 < self.held_out < 1:
            raise UserError(f"held_out is {self.held_out}; it is a share of the training split, in (0, 1).")
        if self.runs < 1:
            raise UserError(f"runs is {self.runs}; it must be at least 1.")
        if self.fresh_positions and self.from_scratch:
            raise UserError("fresh_positions has no effect from scratch, where all weights are new; leave it out.")
        if self.head_std is not None and not 0 < self.head_std < math.inf:
            raise UserError(
                f"head_std is {self.head_std}; it must be positive and finite, or None for a head of zeros."
            )
        if self.sweep_steps is not None and (self.sweep_steps < 1 or len(self.learning_rates) < 2):
            raise UserError(
                f"sweep_steps is {self.sweep_steps} for the learning rates {self.learning_rates}; give at least 1 "
                f"step, and two rates or more to choose from."
            )

    def single(self, lr: float | None = None, seed: int | None = None) -> TrainConfig:
        """One of its runs, at the rate `lr` (`optim.lr` unless given) and with `seed` (its own unless given)."""
        settings = {each.name: getattr(self, each.name) for each in fields(TrainConfig)}
        optim = self.optim if lr is None else replace(self.optim, lr=lr)
        return TrainConfig(**settings | {"optim": optim, "seed": self.seed if seed is None else seed})
