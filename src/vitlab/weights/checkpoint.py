"""Checkpoints in and out (Sec. 3.2), for every format. Importing this does not import torch."""

import contextlib
import dataclasses
import importlib
import logging
import shutil
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitlab.errors import UserError, first_ten
from vitlab.io import open_regular, replacing_folder, resolved, sync, temporary_folder
from vitlab.preprocessing import Preprocessing
from vitlab.settings import from_dict
from vitlab.weights.assumptions import Assumptions
from vitlab.weights.detect import HUBS, Format, find_checkpoint, is_pickle
from vitlab.weights.imagenet_classes import imagenet_names
from vitlab.weights.parity import check_parity

if typing.TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor, nn

    from vitlab.models.config import ImageSize, ModelConfig
    from vitlab.models.variant import Interpolation
    from vitlab.models.vit import Model

logger = logging.getLogger(__name__)

MODULES: dict[Format, str] = {"vitlab": "folder", "google": "google", "timm": "timm", "huggingface": "huggingface"}
"""Format -> the module with its `read_FORMAT`, `metadata_FORMAT` and `write_FORMAT`."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model in evaluation mode, its metadata, and its preprocessing, for an image size of the model."""

    model: "Model"
    metadata: dict[str, Any]
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
    patch_dropout: float | None = None,
    stochastic_depth: float | None = None,
    interpolation: "Interpolation | None" = None,
    dynamic_image_size: bool | None = None,
    in_chans: int | None = None,
    pool: Literal["token"] | None = None,
    assume: Mapping[str, Any] | None = None,
    device: "torch.device | str" = "cpu",
    display_name: str = "",
) -> "Model":
    """Returns the model of a checkpoint on `device`, in float32 and in evaluation mode.

    `path` is any of `READABLE`; format and sizes are inferred from the content. Every model takes images in [-1, 1]:
    another mean and std of the checkpoint are folded into its patch embedding. By default the model is otherwise
    unchanged; for another image size or task (Sec. 3.2):

    - `image_size` interpolates the position embeddings as the checkpoint's library does (Google's, timm's, Hugging
      Face's), or by `interpolation`.
    - `num_classes`: a different number replaces the head by a zero-initialized one; 0 removes it.
    - `reset_head=True`, for a new task, replaces the head also for the same number of classes.
    - `pre_logits="drop"` removes the layer before the head, as Google's fine-tuning does; requires a new head.
    - `head_bias` is the bias of a new head; `dropout`, `patch_dropout` and `stochastic_depth` are rates in training.
    - `in_chans`: another number of channels than 3 sums the patch embedding over them (1), or repeats and rescales it.
    - `pool="token"` takes the class token of a headless model that averages its patches beside one (timm's DINOv3).
    - `dynamic_image_size=True` takes images of any size that patches divide, and interpolates in each forward pass
      from the checkpoint's own position embeddings. A checkpoint that does so by itself has one size with `image_size`.

    A bare .safetensors says less: what is assumed is logged, and changed by `assume`, the settings of `Assumptions` by
    name (`{"heads": 6, "gelu": "quick"}`). There and in an .npz, `image_size` is also the size of the position table
    where that has as many rows: 36 patches of 16 pixels are 4x9 for (64, 144), and else 6x6.

    Messages have `display_name` instead of the path. Raises ValueError with what was given, what is read, what to do.
    """
    from vitlab.weights.adapt import adapt

    kind, local = find_checkpoint(path)
    saved, state = _function("read", kind)(local, **_options(kind, local, image_size, assume, display_name))
    shape: dict[str, Any] = {"image_size": image_size, "interpolation": interpolation, "in_chans": in_chans}
    head = {"num_classes": num_classes, "reset_head": reset_head, "pre_logits": pre_logits, "head_bias": head_bias}
    config, state = adapt(saved, state, **shape, **head, pool=pool)
    rates = {"dropout": dropout, "patch_dropout": patch_dropout, "stochastic_depth": stochastic_depth}
    dynamic = _dynamic_image_size(path, saved, config, dynamic_image_size)
    config = _with_options(path, config, rates | {"dynamic_image_size": dynamic})
    return _build(config, _finite_floats(path, state)).to(device).eval()


def _dynamic_image_size(
    path: Path | str, saved: "ModelConfig", config: "ModelConfig", given: bool | None
) -> bool | None:
    """The setting of the model: position embeddings that were interpolated once are not interpolated again."""
    from vitlab.models.config import LEARNED_POSITIONS

    if config.kind != "vit" or config.position not in LEARNED_POSITIONS or config.grid == saved.grid:
        return given
    if given:
        raise UserError(
            f"image_size={config.image_size} interpolates the position embeddings of {path} once, and "
            f"dynamic_image_size=True would do so again for every image: leave out one of the two."
        )
    return False


def _build(config: "ModelConfig", state: "Mapping[str, Tensor]") -> "Model":
    import torch

    from vitlab.models.vit import build_model

    with torch.device("meta"):  # draws no numbers that the checkpoint overwrites
        model = build_model(config)
    model.load_state_dict(state, assign=True)
    return model


def _finite_floats(path: Path | str, state: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """The parameters in float32. Raises UserError, naming them, for those that are NaN or infinite.

    A tensor's sum shows them at a fifteenth of the cost of looking at each number; one that overflows is looked at.
    """
    state = {name: tensor.float() for name, tensor in state.items()}
    suspects = [name for name, tensor in state.items() if not tensor.sum().isfinite()]
    if invalid := [name for name in suspects if not state[name].isfinite().all()]:
        raise UserError(
            f"{path} holds weights that are NaN or infinite in {len(invalid)} of {len(state)} tensors: "
            f"{first_ten(invalid)}. Its training has diverged, or the file is corrupt; take an earlier checkpoint."
        )
    return state


def _options(
    kind: Format, local: Path, image_size: "ImageSize | None", assume: Mapping[str, Any] | None, name: str = ""
) -> dict[str, Any]:
    """Further arguments of the readers of timm's and Google's files. Raises UserError for `assume` with others."""
    if assume and not (kind == "timm" and local.is_file()):
        raise UserError(f"assume={dict(assume)} is for a bare .safetensors; {local} says this itself: leave it out.")
    if kind == "timm":
        return {"image_size": image_size, "assume": from_dict(Assumptions, dict(assume or {})), "name": name}
    return {"image_size": image_size} if kind == "google" else {}


def _with_options(path: Path | str, config: "ModelConfig", options: Mapping[str, Any]) -> "ModelConfig":
    """`config` with the options that are not None. Raises UserError for a ResNet, which has none of them."""
    changes = {name: value for name, value in options.items() if value is not None}
    if changes and config.kind != "vit":
        raise UserError(f"{path} holds a ResNet, which has no {' and no '.join(changes)}; leave it out.")
    return dataclasses.replace(config, **changes)


def save_model(model: "nn.Module", folder: Path | str, *, extra: dict[str, Any] | None = None) -> None:
    """Writes `folder`/model.safetensors and config.json, all or nothing, replacing a model that is there.

    `model` may be compiled, or wrapped for data parallelism; a head that was replaced by another nn.Linear, or by
    nn.Identity, is saved as it is. What is written is read back first. Raises ValueError for a model that `load_model`
    could not read: with unmerged adapters, other modules, sharded weights, or weights that are not finite.

    `extra` goes into config.json for `load_metadata`: `classes` (names of the outputs), `preprocessing`
    (`Preprocessing.to_metadata`), `source`, and any other JSON. Raises ValueError for a value that is not JSON, and for
    a folder with other files.
    """
    _function("write", "vitlab")(model, Path(folder), extra or {})


def load_checkpoint(
    path: Path | str,
    *,
    image_size: "ImageSize | None" = None,
    interpolation: "Interpolation | None" = None,
    dynamic_image_size: bool | None = None,
) -> Checkpoint:
    """Returns a checkpoint as its library evaluates it: at the image size of its preprocessing unless `image_size`
    is given, which may differ from its position embeddings' (DINOv2: 224 and 518).

    With `dynamic_image_size` the model keeps the checkpoint's position embeddings, and `preprocessing` its own size.
    `interpolation` and errors: see `load_model`.
    """
    metadata = load_metadata(path, image_size=None if dynamic_image_size else image_size)
    preprocessing = Preprocessing.read(metadata, str(path))
    size = preprocessing.image_size if image_size is None and not dynamic_image_size else image_size
    model = load_model(path, image_size=size, interpolation=interpolation, dynamic_image_size=dynamic_image_size)
    if not dynamic_image_size or preprocessing.image_size is None:
        preprocessing = preprocessing.at(model.config.image_size)
    return Checkpoint(model, _of_outputs(metadata, model), preprocessing)


def load_metadata(
    path: Path | str, *, image_size: "ImageSize | None" = None, assume: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns what a checkpoint says of itself, without loading its weights: the `extra` that a model was saved with,
    or the `classes` of a timm or Hugging Face folder.

    `preprocessing` is always there, for `Preprocessing.read`: the checkpoint's, rescaled to `image_size`;
    Google's for files of its code; what the names of a bare file's tensors show (`assume` as in `load_model`); the
    defaults of `Preprocessing` where there is none.
    """
    kind, local = find_checkpoint(path)
    metadata = _function("metadata", kind)(local, **_options(kind, local, image_size, assume))
    preprocessing = Preprocessing.read(metadata, str(path))
    if image_size is not None:
        preprocessing = preprocessing.at(image_size)
    metadata.pop("eval_resize", None)
    return metadata | {"preprocessing": preprocessing.to_metadata()}


def _of_outputs(metadata: dict[str, Any], model: "Model") -> dict[str, Any]:
    """`metadata` without `classes` where the model has no head, as in folders whose config still names them."""
    return {name: value for name, value in metadata.items() if name != "classes" or model.config.num_classes}


def class_names(metadata: Mapping[str, Any], outputs: int) -> tuple[str, ...]:
    """The names of a checkpoint's outputs: its metadata's; ImageNet's where it has none, was not trained on another
    data set, and has as many outputs; or their numbers."""
    numbers = tuple(map(str, range(outputs)))
    names = tuple(map(str, metadata.get("classes") or numbers))
    if names != numbers or not str(metadata.get("dataset", "imagenet")).startswith("imagenet"):
        return names
    return imagenet_names(outputs) or names


def class_probabilities(logits: "Float[Tensor, '... K']", metadata: Mapping[str, Any]) -> "Float[Tensor, '... K']":
    """Softmax, or the sigmoid of each class where the model was trained on several labels (`multi_label`)."""
    return logits.sigmoid() if metadata.get("multi_label") else logits.softmax(dim=-1)


def convert(
    source: Path | str,
    destination: Path | str,
    *,
    to: Format = "vitlab",
    image_size: "ImageSize | None" = None,
    interpolation: "Interpolation | None" = None,
    pre_logits: Literal["keep", "drop"] = "keep",
    pool: Literal["token"] | None = None,
    key: str | None = None,
    assume: Mapping[str, Any] | None = None,
    log: Callable[[str], None] = logger.info,
) -> dict[str, Any]:
    """Writes a checkpoint in another format, reads it back, and compares; `destination` is replaced after that.

    `destination` is a file for `google`, a folder otherwise. `classes` and preprocessing are written where the format
    has them; rates of dropout and stochastic depth only by `vitlab`. The folders of `timm` and `huggingface` get a
    README.md, the model card of the Hugging Face hub. `image_size`, `interpolation`, `pool` and `assume` are as in
    `load_model`; `pre_logits="drop"` leaves out that layer, and the head that was trained on it.

    `source` may be a pickle (.pth, .pt, .bin, .ckpt), which nothing else opens: see `vitlab.weights.pickled`. `key`
    chooses the weights in it, and `log` receives what is in it.

    Returns `format`, `path`, `parameters`, and the `difference` of `check_parity`. Raises ValueError for a model that
    the format cannot represent, and where a file would be destroyed; ParityError where the outputs differ.
    """
    if to not in MODULES:
        raise UserError(f"to is {to!r}; allowed: {', '.join(map(repr, MODULES))}.")
    destination = Path(destination)
    pickled = not str(source).startswith(HUBS) and Path(source).is_file() and is_pickle(Path(source))
    if key is not None and not pickled:
        raise UserError(f"key={key!r} chooses the weights in a pickle, and {source} is none; leave it out.")
    _check_destination(Path(source) if pickled else find_checkpoint(source)[1], source, destination, to)
    final = destination if to == "google" else resolved(destination)  # so that "." has a name
    unpickling = _unpickled(Path(source), final, key, log) if pickled else contextlib.nullcontext(source)
    options = {"interpolation": interpolation, "pre_logits": pre_logits, "pool": pool, "assume": assume}
    with unpickling as opened:
        num_classes = 0 if pre_logits == "drop" else None
        name = str(source) if pickled else ""
        model = load_model(opened, image_size=image_size, num_classes=num_classes, display_name=name, **options)
        metadata = _of_outputs(load_metadata(opened, image_size=image_size, assume=assume), model)
    if str(source).startswith(HUBS) or not str(metadata.get("source")).startswith(HUBS):
        metadata["source"] = str(source)  # else it is a copy of what is on a hub
    if to != "vitlab" and (levels := metadata["preprocessing"]["range"]):
        logger.warning(
            "%s is without the range of the images (black at %d, white at %d of a file's values), which the format of "
            "%s cannot say: give it images with values from 0 to 255, scaled so, or use --to vitlab",
            *(destination, *levels, to),
        )
    difference = _write_compared(model, metadata, final, destination, to)
    parameters = model.config.num_parameters
    return {"format": to, "path": str(destination), "parameters": parameters, "difference": difference}


@contextlib.contextmanager
def _unpickled(source: Path, final: Path, key: str | None, log: Callable[[str], None]) -> Iterator[Path]:
    """The weights in a pickle, in a temporary folder beside the destination. Errors name `source` instead of it."""
    from vitlab.weights.pickled import unpickle

    with temporary_folder(final, source.stat().st_size) as folder:
        copy = folder / "unpickled"
        opened = unpickle(source, copy, key, log)
        try:
            yield opened
        except UserError as error:
            text = str(error).replace(str(copy / "model.safetensors"), str(source)).replace(str(copy), str(source))
            raise UserError(text) from error


def _write_compared(model: "Model", metadata: dict[str, Any], final: Path, destination: Path, to: Format) -> float:
    """Writes to `final` what is read back as the same model; returns the difference of the outputs."""
    from vitlab.weights.folder import check_replaceable

    replacing = temporary_folder if to == "google" else replacing_folder
    with replacing(final, 4 * model.config.num_parameters) as folder:
        new = folder / "new" / final.name  # model cards have the name of their folder
        _function("write", to)(model, new, metadata)
        if to != "google":
            check_replaceable(final, {file.name for file in new.iterdir()})
        copy = load_model(new, image_size=model.config.image_size)
        difference = check_parity(model, copy, f"{destination} (not written)")
        if to == "google":
            new.replace(final)
            sync(final.parent)
        else:
            for file in new.iterdir():
                file.replace(folder / file.name)
            shutil.rmtree(folder / "new")
    return difference


def _check_destination(local: Path, source: Path | str, destination: Path, to: Format) -> None:
    """Raises UserError where writing would destroy the source, or a file that is not a checkpoint."""
    if destination.exists() and resolved(destination) in (resolved(local), resolved(Path(source))):
        raise UserError(f"{destination} is the source; give another destination.")
    if to != "google" or not destination.exists():
        return
    if destination.is_dir():
        raise UserError(f"{destination} is a folder, and Google's format is one file; give a name such as model.npz.")
    with open_regular(destination) as file:
        if file.read(2) != b"PK":
            raise UserError(f"{destination} exists and is not an .npz; give another name.")


def _function(verb: Literal["read", "metadata", "write"], kind: Format) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"vitlab.weights.{MODULES[kind]}"), f"{verb}_{kind}")
