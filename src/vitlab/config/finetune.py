"""A fine-tuning job: a learning rate sweep, then one run or several."""

from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal

from annotated_types import Gt, Le, Lt

from vitlab.config.train import TrainConfig
from vitlab.errors import UserError
from vitlab.settings import NonNegativeInt, PositiveFloat, PositiveInt

NO_SWEEP: dict[str, Any] = {"learning_rates": (), "sweep_steps": None, "refit": True}
"""The settings of a job without a sweep."""


@dataclass(frozen=True)
class FinetuneConfig(TrainConfig):
    """A fine-tuning job (App. B.1.1): a learning rate sweep on part of train, then runs on all of it."""

    learning_rates: tuple[PositiveFloat, ...] = ()
    """To try on the held-out split (Table 4); the best replaces `optim.lr`. A single rate is swept only with `head`."""
    held_out: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Fraction of each class of the training split that the sweep is evaluated on."""
    sweep_steps: PositiveInt | None = None
    """Updates per learning rate of the sweep; None takes the run's own number, as the paper does."""
    refit: bool = True
    """Whether the final run trains again, on all of train; if not, it is the best run of the sweep, which has not seen
    the held-out images."""
    runs: NonNegativeInt = 1
    """Final runs, with the seeds `seed`, `seed` + 1, ...; 0 ends with the least-squares head."""
    from_scratch: bool = False
    """Draw all weights by each run's seed: the control that shows what pre-training is worth."""
    fresh_positions: bool = False
    """Draw new position embeddings by each run's seed, instead of interpolating the checkpoint's (Sec. 3.2): the
    control that shows what interpolation preserves."""
    pre_logits: Literal["keep"] | None = None
    """`keep` keeps the hidden layer of the pre-trained head, and starts its last layer alone at zero: what the paper
    found a little less robust than replacing the whole head, as None does (App. B.1.1)."""
    head: Literal["least_squares"] | None = None
    """Start of the new head: zeros, as in the paper (None), or the least-squares classifier of the frozen
    representations (Sec. 4.1), which is then fine-tuned (LP-FT, Kumar et al. 2022). By the loss on the held-out split,
    the result is the one, the other, or an average of their weights (WiSE-FT, Wortsman et al. 2022). The classifier is
    also tested by itself."""
    alpha: Annotated[float, Gt(0), Le(1)] | None = None
    """Weight of the fine-tuned model in that average where no `learning_rates` are tried; None takes 0.25."""
    head_views: PositiveInt | None = None
    """Augmented views of each training image for the least-squares head. Crops and mirroring that make it worse are
    left out, of fine-tuning too. None takes no views and augments as `data` says."""
    head_std: PositiveFloat | None = None
    """Standard deviation of the new head's weights, drawn by each run's seed; None starts it at zero, as the paper
    does. That costs a short training its first steps: until the head has grown, nothing below it learns."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.masking is not None:
            raise UserError("masking is for pre-training; fine-tuning learns classes. Leave it out.")
        if len(set(self.learning_rates)) < len(self.learning_rates):
            raise UserError(f"learning_rates is {self.learning_rates}; give each learning rate once.")
        if self.fresh_positions and self.from_scratch:
            raise UserError("fresh_positions has no effect with from_scratch, where all weights are new; leave it out.")
        if self.pre_logits and (self.head or self.from_scratch):
            raise UserError(
                "pre_logits='keep' keeps a layer of the pre-trained head, and goes with neither head='least_squares' "
                "nor from_scratch; give --recipe custom, or leave it out."
            )
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
        if not self.refit and (self.runs != 1 or not self.tried_rates):
            raise UserError(
                "refit=False takes the best run of the sweep as the only final run; it requires runs=1 and "
                "learning_rates that are tried."
            )
        if self.sweep_steps is not None and not self.tried_rates:
            raise UserError(f"sweep_steps={self.sweep_steps} has no effect without two learning_rates or more.")

    @property
    def tried_rates(self) -> tuple[float, ...]:
        """The learning rates of the sweep; empty without one."""
        return self.learning_rates if len(self.learning_rates) > 1 or (self.head and self.runs) else ()

    def single(self, lr: float | None = None, seed: int | None = None) -> TrainConfig:
        """One of its runs, at the rate `lr` (default: `optim.lr`) and with `seed` (default: its own)."""
        settings = {item.name: getattr(self, item.name) for item in fields(TrainConfig)}
        optim = self.optim if lr is None else replace(self.optim, lr=lr)
        return TrainConfig(**settings | {"optim": optim, "seed": self.seed if seed is None else seed})
