"""Table 4: carry a checkpoint to another task, at another resolution."""

import dataclasses
import hashlib
from pathlib import Path

from vitlab.models.config import ViTConfig
from vitlab.models.vit import ViT
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
    source = load_model(checkpoint)
    config = adapted(source.config, config, len(pictures.train.classes), image_size)
    if on_settings:
        on_settings(config)
    start = f"{Path(checkpoint).name} {_digest(source)}"
    return run(
        config, workdir, pictures, lambda: _carried(checkpoint, config.model), command="finetune", start=start,
        device=device, tensorboard=tensorboard,
    )  # fmt: skip


def adapted(source: ViTConfig, config: TrainConfig, num_classes: int, image_size: int | None = None) -> TrainConfig:
    """`config` with the model of a checkpoint: its own shape, at the recipe's resolution or `image_size`."""
    model = dataclasses.replace(
        source,
        image_size=image_size or config.model.image_size,
        num_classes=num_classes,
        representation_size=None,
        dropout=config.model.dropout,
        head_bias=0.0,
    )
    return dataclasses.replace(config, model=model)


def _carried(checkpoint: str | Path, wanted: ViTConfig) -> ViT:
    model = load_model(
        checkpoint, image_size=wanted.image_size, num_classes=wanted.num_classes, reset_head=True,
        pre_logits="drop", dropout=wanted.dropout,
    )  # fmt: skip
    assert model.config == wanted, f"{model.config} is not {wanted}"
    return model


def _digest(model: ViT) -> str:
    """A short name for exactly these weights, whatever file they came in."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return f"sha256:{digest.hexdigest()[:16]}"
