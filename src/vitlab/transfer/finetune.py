"""Table 4: carry a checkpoint to another task, at another resolution."""

import dataclasses
import hashlib
from pathlib import Path

from vitlab.data.datasets import load_dataset
from vitlab.models.config import ViTConfig
from vitlab.models.vit import ViT
from vitlab.train.config import TrainConfig
from vitlab.transfer.run import Outcome, run
from vitlab.weights import load_model


def finetune(
    checkpoint: str | Path,
    config: TrainConfig,
    workdir: str | Path,
    *,
    device: str = "auto",
    tensorboard: bool = True,
) -> Outcome:
    """Fine-tunes `checkpoint` as `config` says, then tests it (Sec. 3.2, App. B.1.1).

    `config` comes from `adapted`, so that its model is the checkpoint's own shape with a new zero head and position
    embeddings for the new grid; a pre-logits layer is dropped, as the paper does.
    """
    start = f"{Path(checkpoint).name} {_digest(load_model(checkpoint))}"
    return run(
        config, workdir, lambda: _carried(checkpoint, config.model), command="finetune", start=start, device=device,
        tensorboard=tensorboard,
    )  # fmt: skip


def adapted(checkpoint: str | Path, config: TrainConfig, image_size: int | None = None) -> TrainConfig:
    """`config` with its model replaced by the checkpoint's, for the classes of the data set and `image_size`.

    Without an image size the recipe's own is taken.
    """
    found = load_model(checkpoint).config
    data = config.data
    classes = load_dataset(data.name, data.train_split, root=data.root, classes=data.classes).classes
    model = dataclasses.replace(
        found,
        image_size=image_size or config.model.image_size,
        num_classes=len(classes),
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
