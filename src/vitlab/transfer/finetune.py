"""Table 4: carry a checkpoint to another task, at another resolution."""

import dataclasses
import hashlib
from pathlib import Path

from vitlab.models.config import ModelConfig, ViTConfig
from vitlab.models.vit import Model
from vitlab.train.config import TrainConfig
from vitlab.transfer.run import OnSettings, Outcome, load_pictures, run
from vitlab.weights import load_model


def finetune(
    checkpoint: str | Path,
    config: TrainConfig,
    workdir: str | Path,
    *,
    image_size: int | None = None,
    device: str = "auto",
    tensorboard: bool = True,
    on_settings: OnSettings | None = None,
) -> Outcome:
    """Fine-tunes `checkpoint` as `config` says, then tests it (Sec. 3.2, App. B.1.1).

    The model is the checkpoint's with a new zero head for the data set's classes, and position embeddings
    interpolated to `image_size` (the recipe's unless given); a pre-logits layer is dropped, as the paper does.
    The same call on the same folder continues an interrupted run. `on_settings` hears the complete settings.
    """
    pictures = load_pictures(config.data)
    source, digest = _identity(load_model(checkpoint))
    config = adapted(source, config, len(pictures.train.classes), image_size)
    if on_settings:
        on_settings(config)
    start = f"{Path(checkpoint).name} {digest}"
    return run(
        config, workdir, pictures, lambda: _carried(checkpoint, config.model), command="finetune", start=start,
        device=device, tensorboard=tensorboard,
    )  # fmt: skip


def adapted(source: ModelConfig, config: TrainConfig, num_classes: int, image_size: int | None = None) -> TrainConfig:
    """`config` with the model of a checkpoint: its own shape, at the recipe's resolution or `image_size`.

    Raises ValueError where the recipe's resolution is far from the checkpoint's, and none was asked for.
    """
    side = max(source.image_hw)
    if image_size is None and config.model.image_hw[0] ** 2 > 16 * side**2:
        raise ValueError(
            f"the recipe's {config.model.image_hw[0]} pixels are far from the {side} that the checkpoint was trained "
            f"at, and would cost it {(config.model.image_hw[0] / side) ** 2:.0f} times the patches; say which size "
            f"you want, e.g. --image-size {2 * side}."
        )
    size = config.model.image_size if image_size is None else image_size
    model = dataclasses.replace(source, image_size=size, num_classes=num_classes, head_bias=0.0)
    if isinstance(model, ViTConfig):
        assert isinstance(config.model, ViTConfig), "every fine-tuning recipe has a ViT's settings"
        model = dataclasses.replace(model, representation_size=None, dropout=config.model.dropout)
    elif isinstance(config.model, ViTConfig) and config.model.dropout:
        raise ValueError(f"dropout={config.model.dropout}: the checkpoint is a ResNet, which has none; leave it out.")
    return dataclasses.replace(config, model=model)


def _carried(checkpoint: str | Path, wanted: ModelConfig) -> Model:
    dropout = wanted.dropout if isinstance(wanted, ViTConfig) else None
    model = load_model(
        checkpoint, image_size=wanted.image_size, num_classes=wanted.num_classes, reset_head=True,
        pre_logits="drop", dropout=dropout,
    )  # fmt: skip
    assert model.config == wanted, f"{model.config} is not {wanted}"
    return model


def _identity(model: Model) -> tuple[ModelConfig, str]:
    """A model's shape, and a short name for exactly its weights, whatever file they came in."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return model.config, f"sha256:{digest.hexdigest()[:16]}"
