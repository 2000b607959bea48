"""Checkpoints in and out (Sec. 3.2), for every format. Importing this does not import torch."""

import dataclasses
import importlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitlab.errors import UserError
from vitlab.io import open_regular
from vitlab.preprocessing import Preprocessing
from vitlab.weights.detect import Format, find_checkpoint

if typing.TYPE_CHECKING:
    from torch import Tensor

    from vitlab.models import ModelConfig
    from vitlab.models.config import ImageSize, Interpolation
    from vitlab.models.vit import Model


class ParityError(RuntimeError):
    """A written file does not compute what its model computes."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model in evaluation mode, its card, and its preprocessing, for the model's image size."""

    model: "Model"
    card: dict[str, Any]
    preprocessing: Preprocessing


def load_model(
    path: Path | str,
    *,
    image_size: "ImageSize | None" = None,
    num_classes: int | None = None,
    reset_head: bool = False,
    pre_logits: Literal["keep", "drop"] = "keep",
    head_bias: float = 0.0,
    dropout: float | None = None,
    interpolation: "Interpolation | None" = None,
) -> "Model":
    """Returns the model of a checkpoint, in float32 and in evaluation mode.

    `path` is any of `READABLE`; format and sizes follow from the content. Every model takes images in [-1, 1]: another
    mean and std of the checkpoint are folded into its patch embedding. By default the model is otherwise unchanged;
    for another image size or task (Sec. 3.2):

    - `image_size` interpolates the position embeddings as the checkpoint's own library does (Google's, timm's, Hugging
      Face's), or by `interpolation`. (For a file that leaves its own size open, see `read_google`, it gives that.)
    - `num_classes`: another number makes a new head, all zero; 0 removes the head.
    - `reset_head=True` makes a new head also for the same number of classes. A new task needs this.
    - `pre_logits="drop"` removes the layer before the head, as Google's fine-tuning does; requires a new head.
    - `head_bias` is the bias of a new head, `dropout` the rate from now on.

    Raises ValueError with what was given, what can be read, and what to do.
    """
    import torch

    from vitlab.models import ViTConfig, build_model
    from vitlab.weights.adapt import adapt

    config, state = _read(*find_checkpoint(path), image_size)
    config, state = adapt(
        config,
        state,
        image_size=image_size,
        num_classes=num_classes,
        reset_head=reset_head,
        pre_logits=pre_logits,
        head_bias=head_bias,
        interpolation=interpolation,
    )
    if dropout is not None:
        if not isinstance(config, ViTConfig):
            raise UserError(f"dropout={dropout}: {path} holds a ResNet, which has none; leave it out.")
        config = dataclasses.replace(config, dropout=dropout)
    with torch.device("meta"):  # draws no numbers that the checkpoint overwrites
        model = build_model(config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    return model.eval()


def save_model(model: "Model", folder: Path | str, *, extra: dict[str, Any] | None = None) -> None:
    """Writes `folder`/model.safetensors and config.json, all or nothing, replacing a model that is there.

    `extra` goes into config.json for `load_card`: `classes` (names of the outputs), `preprocessing`
    (`Preprocessing.to_card`), `source`, and any other JSON. Raises ValueError for a value that is not JSON, and for a
    folder with other files.
    """
    from vitlab.weights.folder import write_folder

    write_folder(model, Path(folder), extra or {})


def load_checkpoint(
    path: Path | str, *, image_size: "ImageSize | None" = None, interpolation: "Interpolation | None" = None
) -> Checkpoint:
    """Returns a checkpoint as its own library evaluates it: at the image size of its preprocessing unless `image_size`
    is given, which may differ from that of its position embeddings (DINOv2: 224 and 518).

    `interpolation` and errors: see `load_model`.
    """
    _, place = find_checkpoint(path)
    card = load_card(place)
    preprocessing = Preprocessing.read(card, str(path))
    size = preprocessing.image_size if image_size is None else image_size
    model = load_model(place, image_size=size, interpolation=interpolation)
    return Checkpoint(model, card, preprocessing.at(model.config.image_size))


def load_card(path: Path | str, *, image_size: "ImageSize | None" = None) -> dict[str, Any]:
    """Returns what a checkpoint says of itself, without loading its weights: the `extra` that a model was saved with,
    or the `classes` of a timm or Hugging Face folder.

    `preprocessing` is always there, for `Preprocessing.read`: the checkpoint's, in proportion to `image_size`; that of
    Google's code for its files; the defaults of `Preprocessing` where there is none.
    """
    card, model_size = _read_card(*find_checkpoint(path))
    preprocessing = Preprocessing.read(card, str(path), model_size)
    if image_size is not None:
        preprocessing = preprocessing.at(image_size)
    card.pop("eval_resize", None)
    return card | {"preprocessing": preprocessing.to_card()}


def class_names(card: Mapping[str, Any], outputs: int) -> tuple[str, ...]:
    """The names of a checkpoint's outputs: those of its card, or their numbers."""
    return tuple(map(str, card.get("classes") or range(outputs)))


def convert(
    source: Path | str,
    destination: Path | str,
    *,
    to: Format,
    image_size: "ImageSize | None" = None,
    interpolation: "Interpolation | None" = None,
) -> dict[str, Any]:
    """Writes a checkpoint in another format, reads it back, and compares.

    `destination` is a file for `google`, a folder otherwise. The card's `classes` and preprocessing are kept where the
    format has a place for them; rates of dropout and stochastic depth only by `vitlab`. `image_size` and
    `interpolation` are as in `load_model`. Returns `format`, `path`, `parameters`, and `difference`, the largest
    between both models' outputs on random images, over their root mean square. Raises ValueError for a model that the
    format cannot represent, and where a file would be destroyed; ParityError where the outputs differ.
    """
    import torch

    if to not in typing.get_args(Format):
        raise UserError(f"to is {to!r}; allowed: {', '.join(map(repr, typing.get_args(Format)))}.")
    destination = Path(destination)
    _check_destination(source, destination, to)
    model = load_model(source, image_size=image_size, interpolation=interpolation)
    card = load_card(source, image_size=image_size)
    if to == "vitlab":
        save_model(model, destination, extra=card | {"source": str(source)})
    elif to == "google":
        _library(to).write_google(model, destination)  # has no place for a card
    else:
        getattr(_library(to), f"write_{to}")(model, destination, card)
    copy = load_model(destination, image_size=model.config.image_size)
    images = torch.rand(2, 3, *model.config.image_hw, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        before, after = model(images), copy(images)
    difference = float((before - after).abs().max() / before.square().mean().sqrt().clamp(min=1e-12))
    if not difference <= 1e-4:
        raise ParityError(
            f"{destination} was written, but the outputs of the model read back from it differ by {difference:.1e} of "
            f"their root mean square; do not use it, and report this with the model's configuration."
        )
    parameters = model.config.num_parameters
    return {"format": to, "path": str(destination), "parameters": parameters, "difference": difference}


def _check_destination(source: Path | str, destination: Path, to: Format) -> None:
    """Raises UserError where writing would destroy the source, or a file that is not a checkpoint."""
    place = find_checkpoint(source)[1]
    if destination.exists() and destination.resolve() in (place.resolve(), Path(source).resolve()):
        raise UserError(f"{destination} is the source; give another destination.")
    if to != "google" or not destination.exists():
        return
    if destination.is_dir():
        raise UserError(f"{destination} is a folder, and Google's format is one file; give a name such as model.npz.")
    with open_regular(destination) as file:
        if file.read(2) != b"PK":
            raise UserError(f"{destination} exists and is not an .npz; give another name.")


def _library(kind: Format) -> Any:
    """The module of a format of others."""
    return importlib.import_module(f"vitlab.weights.{kind}")


def _read(kind: Format, place: Path, image_size: "ImageSize | None") -> "tuple[ModelConfig, dict[str, Tensor]]":
    if kind == "vitlab":
        from vitlab.weights.folder import read_folder

        return read_folder(place)
    options = {"image_size": image_size} if kind == "google" else {}
    return getattr(_library(kind), f"read_{kind}")(place, **options)


def _read_card(kind: Format, place: Path) -> "tuple[dict[str, Any], ImageSize | None]":
    """The card, and the model's image size where that is known without its weights."""
    if kind == "vitlab":
        from vitlab.models import ModelConfig
        from vitlab.settings import from_dict
        from vitlab.weights.folder import read_card

        card = read_card(place)
        return card["extra"], from_dict(ModelConfig, card["model"]).image_size
    if kind == "google":
        return {"preprocessing": Preprocessing.google().to_card()}, None
    return getattr(_library(kind), f"card_{kind}")(place), None
