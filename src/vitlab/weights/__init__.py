"""Sec. 3.2: checkpoints in and out. `load_model` is the one door for every format, `save_model` writes ours.

Importing this does not import torch.
"""

import contextlib
import dataclasses
import functools
import logging
import typing
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitlab.errors import UserError
from vitlab.preprocessing import Preprocessing

if typing.TYPE_CHECKING:
    from torch import Tensor

    from vitlab.models import ModelConfig
    from vitlab.models.config import ImageSize, Interpolation
    from vitlab.models.vit import Model

logger = logging.getLogger(__name__)
__all__ = [
    "Checkpoint", "ParityError", "class_names", "convert", "load_card", "load_checkpoint", "load_model", "save_model"
]  # fmt: skip

PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
READABLE = (
    "a Google .npz, a folder of save_model, timm or Hugging Face, timm's weights as .safetensors, the work folder of a "
    "finished training (with model/ in it), or a hub's hub:OWNER/NAME or timm:NAME.TAG"
)
Format = Literal["google", "vitlab", "timm", "huggingface"]


class ParityError(RuntimeError):
    """What was written does not compute what it was written from."""


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
    """The model of a checkpoint, in float32 and in evaluation mode (`.train()` turns dropout on).

    `path` is what READABLE lists; which of them, and what model, the content tells. With nothing else given, the
    model is exactly what is there, but for this: every model here takes images in [-1, 1], and where a checkpoint
    was made for another mean and deviation, these are folded into its patch embedding. To carry it to another size
    or task (Sec. 3.2):

    - `image_size` interpolates the position embeddings as the checkpoint's own library does (Google's, timm's, Hugging
      Face's), unless `interpolation` asks for another method. (For a file that does not tell its own size, see
      `read_google`, it says which.)
    - `num_classes`: where it differs from the checkpoint's, the head is a new one, all zero; 0 leaves it out.
    - `reset_head=True` makes a new head also where the number of classes is the same. A new task needs this.
    - `pre_logits="drop"` leaves out the layer before the head, as Google's fine-tuning does; it asks for a
      new head.
    - `head_bias` is the bias of a new head, `dropout` the rate from now on (kept unless given).

    Raises ValueError saying what was found, what can be read, and what to do.
    """
    import torch

    from vitlab.models import ViTConfig, build_model
    from vitlab.weights.adapt import adapt

    config, state = _read(*_find(path), image_size)
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
    with torch.device("meta"):  # nothing is drawn that the checkpoint overwrites
        model = build_model(config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    return model.eval()


def save_model(model: "Model", folder: Path | str, *, extra: dict[str, Any] | None = None) -> None:
    """Writes `folder`/model.safetensors and config.json: all or nothing, replacing a model that stands there.

    `extra` goes into config.json for `load_card`: `classes` (names of the outputs), `preprocessing` (what
    `Preprocessing.to_card` returns), `source`, and whatever else JSON can say. Raises ValueError where it cannot, or
    where the folder holds other files.
    """
    from vitlab.weights.folder import write_folder

    write_folder(model, folder, extra or {})


def convert(
    source: Path | str,
    destination: Path | str,
    *,
    to: Format,
    image_size: "ImageSize | None" = None,
    interpolation: "Interpolation | None" = None,
) -> dict[str, Any]:
    """Writes a checkpoint in another format, reads that back, and returns what came of it.

    `destination` is a file for `google` and a folder otherwise; the card's `classes` go along where the format has a
    place for them; rates of dropout and stochastic depth are not part of the others' weights and stay behind.
    `image_size` and `interpolation` are as in `load_model`. The result: `format`, `path`, `parameters`, and
    `difference`, the largest between the two models' logits (or features, without a head) on random images, over
    their root mean square. Raises ValueError for a model that the format cannot say, naming the setting, and where
    something would be destroyed.
    """
    import torch

    destination = Path(destination)
    _check_destination(source, destination, to)
    model = load_model(source, image_size=image_size, interpolation=interpolation)
    card = load_card(source, image_size=image_size)
    match to:
        case "google":
            from vitlab.weights.google import write_google

            write_google(model, destination)
        case "vitlab":
            save_model(model, destination, extra=card | {"source": str(source)})
        case "timm":
            from vitlab.weights.timm import write_timm

            write_timm(model, destination, card)
        case "huggingface":
            from vitlab.weights.huggingface import write_huggingface

            write_huggingface(model, destination, card)
        case _:
            raise UserError(f"to is {to!r}; allowed: {', '.join(map(repr, typing.get_args(Format)))}.")
    written = load_model(destination, image_size=model.config.image_size)
    images = torch.rand(2, 3, *model.config.image_hw, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        before, after = model(images), written(images)
    difference = float((before - after).abs().max() / before.square().mean().sqrt().clamp(min=1e-12))
    if not difference <= 1e-4:
        raise ParityError(
            f"{destination} was written, but the model read back from it differs by {difference:.1e} of the outputs' "
            f"root mean square; do not use it, and report this with the model's configuration."
        )
    return {
        "format": to,
        "path": str(destination),
        "parameters": model.config.num_parameters,
        "difference": difference,
    }


def _check_destination(source: Path | str, destination: Path, to: Format) -> None:
    """Raises ValueError where writing would destroy the source, or a file that is no checkpoint."""
    place = _find(source)[1]
    if destination.exists() and destination.resolve() in (place.resolve(), Path(source).resolve()):
        raise UserError(f"{destination} is what is to be converted; give another place to write to.")
    if to != "google" or not destination.exists():
        return
    if destination.is_dir():
        raise UserError(f"{destination} is a folder, and Google's format is one file; give a name such as model.npz.")
    from vitlab.io import open_regular

    with open_regular(destination) as file:
        if file.read(2) != b"PK":
            raise UserError(f"{destination} is there already and no .npz; give another name.")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model in evaluation mode, what its checkpoint says of itself, and how images are prepared for it."""

    model: "Model"
    card: dict[str, Any]
    preprocessing: Preprocessing
    """For the model's image size."""


def load_checkpoint(
    path: Path | str, *, image_size: "ImageSize | None" = None, interpolation: "Interpolation | None" = None
) -> Checkpoint:
    """A checkpoint as its own library evaluates it: at the size that its preprocessing says unless `image_size` is
    given, which may be another than that of its position embeddings (DINOv2's: 224 and 518).

    `interpolation` and the errors are those of `load_model`.
    """
    _, place = _find(path)
    card = load_card(place)
    preprocessing = Preprocessing.read(card, str(path))
    size = preprocessing.image_size if image_size is None else image_size
    model = load_model(place, image_size=size, interpolation=interpolation)
    return Checkpoint(model, card, preprocessing.at(model.config.image_size))


def load_card(path: Path | str, *, image_size: "ImageSize | None" = None) -> dict[str, Any]:
    """What a checkpoint says of itself beside its weights, which are not loaded: the `extra` that a model was saved
    with, or the `classes` of a timm or Hugging Face folder.

    `preprocessing` is always there, for `Preprocessing.read`: the checkpoint's own, in proportion to `image_size`; that
    of Google's code for its files; and the defaults of `Preprocessing` where nothing is said.
    """
    card, model_size = _read_card(*_find(path))
    preprocessing = Preprocessing.read(card, str(path), model_size)
    if image_size is not None:
        preprocessing = preprocessing.at(image_size)
    card.pop("eval_resize", None)
    return card | {"preprocessing": preprocessing.to_card()}


def _read_card(kind: Format, place: Path) -> "tuple[dict[str, Any], ImageSize | None]":
    """The card, and the model's image size where that is known without its weights."""
    match kind:
        case "google":
            return {"preprocessing": Preprocessing.google().to_card()}, None
        case "vitlab":
            from vitlab.models import ModelConfig
            from vitlab.settings import from_dict
            from vitlab.weights.folder import read_card

            card = read_card(place)
            return card["extra"], from_dict(ModelConfig, card["model"]).image_size
        case "timm":
            from vitlab.weights.timm import card_timm

            return card_timm(place), None
    from vitlab.weights.huggingface import card_huggingface

    return card_huggingface(place), None


def class_names(card: Mapping[str, Any], outputs: int) -> tuple[str, ...]:
    """What a checkpoint's outputs are called: as its card says, else by their numbers."""
    return tuple(map(str, card.get("classes") or range(outputs)))


def _read(kind: Format, place: Path, image_size: "ImageSize | None") -> "tuple[ModelConfig, dict[str, Tensor]]":
    match kind:
        case "google":
            from vitlab.weights.google import read_google

            return read_google(place, image_size=image_size)
        case "vitlab":
            from vitlab.weights.folder import read_folder

            return read_folder(place)
        case "timm":
            from vitlab.weights.timm import read_timm

            return read_timm(place)
    from vitlab.weights.huggingface import read_huggingface

    return read_huggingface(place)


def _find(given: Path | str) -> tuple[Format, Path]:
    """Which format lies at a path or on a hub, judged by content, and where exactly."""
    from vitlab.io import clear_leftovers, open_regular

    path = _fetched(str(given)) if str(given).startswith(("hub:", "timm:")) else Path(given)
    for folder in (path.resolve(), path.resolve() / "model"):
        with contextlib.suppress(OSError):  # a folder of others, or one that is not to be written to
            clear_leftovers(folder.parent, folder.name)
    if not path.exists():
        raise UserError(f"there is nothing at {path}; give {READABLE}.")
    if path.is_dir():
        return _find_folder(path)
    try:
        with open_regular(path) as file:
            start = file.read(9)
        is_safetensors = start[8:] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size - 8
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    # Both may begin with 0x80: a pickle always, and a safetensors file by the length of its header.
    is_pickle = start[:1] == b"\x80" and not is_safetensors
    if path.suffix in PICKLED or is_pickle or _zips_a_pickle(path):
        raise UserError(_refuse_pickle(path))
    if start.startswith(b"PK"):
        return "google", path
    if path.name == "model.safetensors" and (path.parent / "config.json").is_file():
        return _find_folder(path.parent)
    if path.suffix == ".safetensors" or is_safetensors:
        if "embedding.weight" in _names(path):
            raise UserError(
                f"{path} holds weights of vitlab without the config.json that says of which model; give {READABLE}."
            )
        return "timm", path
    raise UserError(f"{path} is no checkpoint, or a damaged one; give {READABLE}.")


@functools.cache
def _fetched(spec: str) -> Path:
    """Where a hub's checkpoint lies. A process asks the hub once, so that card and weights are of the same commit."""
    from vitlab.weights.hub import download_checkpoint

    return download_checkpoint(spec)


def _find_folder(folder: Path) -> tuple[Format, Path]:
    if (folder / "model" / "config.json").is_file():
        from vitlab.io import find_damage

        for name, what in find_damage(folder, ("model/config.json",)).items():  # which has the checksum of the weights
            logger.warning("%s %s: what it says of the model cannot be trusted", folder / name, what)
        return "vitlab", folder / "model"
    names = {path.name for path in folder.iterdir()}
    weights = names & {"model.safetensors", "model.safetensors.index.json"}
    if "config.json" in names and weights:
        return _whose(folder / "config.json"), folder
    for name in sorted(names):
        if Path(name).suffix in PICKLED:
            raise UserError(_refuse_pickle(folder / name))
    if names & {"metrics.jsonl", "checkpoints"}:
        raise UserError(
            f"{folder} is the work folder of a training that has not ended: there is no model/ in it. Run "
            f"its command again to finish it."
        )
    if "config.json" in names:
        return _whose(folder / "config.json"), folder
    raise UserError(f"{folder} holds no checkpoint; give {READABLE}.")


def _whose(config: Path) -> Format:
    """Who wrote this `config.json`; anything unknown is read as ours, which then says what is wrong with it."""
    from vitlab.io import read_json

    try:
        keys = set(read_json(config))
    except (OSError, UserError, TypeError):
        keys = set()
    if keys & {"architecture", "pretrained_cfg"}:
        return "timm"
    return "huggingface" if keys & {"model_type", "architectures", "transformers_version"} else "vitlab"


def _names(path: Path) -> list[str]:
    """The tensors of a safetensors file."""
    import safetensors

    try:
        with safetensors.safe_open(path, framework="np") as file:
            return list(file.keys())
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is no safetensors file, or a damaged one ({error}); give {READABLE}.") from error


def _zips_a_pickle(path: Path) -> bool:
    """Whether it is a file of torch.save, which is a zip archive like an .npz."""
    from vitlab.io import ARCHIVE_DAMAGE

    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    except ARCHIVE_DAMAGE:
        return False


def _refuse_pickle(path: Path) -> str:
    return (
        f"{path} is a pickle, which can run any code and is never loaded; convert it to safetensors where "
        f"you trust it, or give {READABLE}."
    )
