"""A checkpoint of any format: its model, its metadata, the names of its classes (Sec. 3.2); and `save_model`.

`find_checkpoint` detects the format, the module of the format reads the file, and `adapt` changes image size and head.
`conversion.py` writes the other formats. Importing this does not import torch.
"""

import dataclasses
import importlib
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vitlab.errors import UserError, first_ten
from vitlab.models.config import LEARNED_POSITIONS, ImageSize, ModelConfig, Pool
from vitlab.models.variant import Interpolation
from vitlab.preprocessing import Preprocessing
from vitlab.settings import from_dict
from vitlab.weights.assumptions import Assumptions
from vitlab.weights.detect import Format, find_checkpoint
from vitlab.weights.imagenet_classes import imagenet_names

if typing.TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor, nn

    from vitlab.models.vit import Model

Verb = Literal["read", "metadata", "write"]
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
    image_size: ImageSize | None = None,
    num_classes: int | None = None,
    reset_head: bool = False,
    pre_logits: Literal["keep", "drop"] = "keep",
    head_bias: float = 0.0,
    dropout: float | None = None,
    patch_dropout: float | None = None,
    stochastic_depth: float | None = None,
    interpolation: Interpolation | None = None,
    dynamic_image_size: bool | None = None,
    in_chans: int | None = None,
    depth: int | None = None,
    pool: Pool | None = None,
    assume: Mapping[str, Any] | None = None,
    device: "torch.device | str" = "cpu",
    display_name: str = "",
) -> "Model":
    """Returns the model of a checkpoint on `device`, in float32 and in evaluation mode; `model.preprocessing` is the
    checkpoint's own, for `vitlab.preprocess`.

    `path` is any of `READABLE`; format and sizes are inferred from the content. Every model takes images in [-1, 1]:
    another mean and std of the checkpoint are folded into its patch embedding. By default the model is otherwise
    unchanged; for another image size or task (Sec. 3.2):

    - `image_size` interpolates the position embeddings as the checkpoint's library does, or by `interpolation`.
    - `num_classes`: a different number replaces the head by a zero-initialized one; 0 removes it.
    - `reset_head=True`, for a new task, replaces the head also for the same number of classes.
    - `pre_logits="drop"` removes the layer before the head, as Google's fine-tuning does; requires a new head.
    - `head_bias` is the bias of a new head; `dropout`, `patch_dropout` and `stochastic_depth` are rates in training.
    - `in_chans`: another number of channels than 3 sums the patch embedding over them (1), or repeats and rescales it.
    - `depth` keeps the first blocks, and the last LayerNorm; `pool` makes the class token (`token`), the mean over
      patches (`gap`) or both (`token+gap`) the representation. Both require a new head, or none.
    - `dynamic_image_size=True` takes images of any size that patches divide, and interpolates in each forward pass
      from the checkpoint's own position embeddings. A checkpoint that does so by itself has one size with `image_size`.

    A bare .safetensors says less: what is assumed is logged, and changed by `assume`, the settings of `Assumptions` by
    name (`{"heads": 6, "gelu": "quick"}`). There and in an .npz, `image_size` is also the size of the position table
    where that has as many rows: 36 patches of 16 pixels are 4x9 for (64, 144), and else 6x6.
    Messages have `display_name` instead of the path. Raises UserError with what was given, what is read, what to do.
    """
    adaptation = {
        "image_size": image_size,
        "num_classes": num_classes,
        "reset_head": reset_head,
        "pre_logits": pre_logits,
        "head_bias": head_bias,
        "interpolation": interpolation,
        "in_chans": in_chans,
        "depth": depth,
        "pool": pool,
    }
    rates = {"dropout": dropout, "patch_dropout": patch_dropout, "stochastic_depth": stochastic_depth}
    model = _load(path, adaptation, rates, dynamic_image_size, assume, display_name).to(device)
    model.preprocessing = Preprocessing.read(load_metadata(path, image_size=image_size, assume=assume), str(path))
    return model


def _load(
    path: Path | str,
    adaptation: Mapping[str, Any],
    rates: Mapping[str, float | None],
    dynamic_image_size: bool | None,
    assume: Mapping[str, Any] | None = None,
    display_name: str = "",
) -> "Model":
    """The model of a checkpoint, changed by the arguments of `adapt` and the rates that are not None."""
    import torch

    from vitlab.models.vit import build_model
    from vitlab.weights.adapt import adapt

    saved, state = _read("read", path, adaptation["image_size"], assume, display_name)
    config, state = adapt(saved, state, **adaptation)
    dynamic = _dynamic_image_size(path, saved, config, dynamic_image_size)
    settings = {**rates, "dynamic_image_size": dynamic}
    changes = {name: value for name, value in settings.items() if value is not None}
    if changes and config.kind != "vit":
        raise UserError(f"{path} holds a ResNet, which has no {' and no '.join(changes)}; leave it out.")
    with torch.device("meta"):  # draws no numbers that the checkpoint overwrites
        model = build_model(dataclasses.replace(config, **changes))
    model.load_state_dict(_finite_floats(path, state), assign=True)
    return model.eval()


def _read(
    verb: Verb, path: Path | str, image_size: ImageSize | None, assume: Mapping[str, Any] | None, name: str = ""
) -> Any:
    """What `read_FORMAT` or `metadata_FORMAT` returns for a checkpoint. Not all of timm's and Google's files describe
    their model: these readers take more than the path. Raises UserError for `assume` with a file that does."""
    kind, local = find_checkpoint(path)
    if assume and not (kind == "timm" and local.is_file()):
        raise UserError(f"assume={dict(assume)} is for a bare .safetensors; {local} says this itself: leave it out.")
    arguments: dict[str, Any] = {}
    if kind in ("timm", "google"):
        arguments["image_size"] = image_size
    if kind == "timm":
        arguments |= {"assume": from_dict(Assumptions, dict(assume or {})), "name": name}
    return format_function(verb, kind)(local, **arguments)


def _dynamic_image_size(path: Path | str, saved: ModelConfig, config: ModelConfig, given: bool | None) -> bool | None:
    """The setting of the model: position embeddings that were interpolated once are not interpolated again."""
    if config.kind != "vit" or config.position not in LEARNED_POSITIONS or config.grid == saved.grid:
        return given
    if given:
        raise UserError(
            f"image_size={config.image_size} interpolates the position embeddings of {path} once, and "
            f"dynamic_image_size=True would do so again for every image: leave out one of the two."
        )
    return False


def _finite_floats(path: Path | str, state: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """The parameters in float32. Raises UserError, naming them, for those that are NaN or infinite. A tensor's sum
    shows them at a fifteenth of the cost of looking at each number; one that overflows is looked at."""
    state = {name: tensor.float() for name, tensor in state.items()}
    suspects = [name for name, tensor in state.items() if not tensor.sum().isfinite()]
    if invalid := [name for name in suspects if not state[name].isfinite().all()]:
        raise UserError(
            f"{path} holds weights that are NaN or infinite in {len(invalid)} of {len(state)} tensors: "
            f"{first_ten(invalid)}. Its training has diverged, or the file is corrupt; take an earlier checkpoint."
        )
    return state


def save_model(model: "nn.Module", folder: Path | str, *, extra: dict[str, Any] | None = None) -> None:
    """Writes `folder`/model.safetensors and config.json, all or nothing, replacing a model that is there.

    `model` may be compiled, or wrapped for data parallelism; a head that was replaced by another nn.Linear, or by
    nn.Identity, is saved as it is. What is written is read back first. Raises UserError for a model that `load_model`
    could not read: with unmerged adapters, other modules, sharded weights, or weights that are not finite.

    `extra` goes into config.json for `load_metadata`: `classes` (names of the outputs), `preprocessing`
    (`Preprocessing.to_metadata`), `source`, and any other JSON. Raises UserError for a value that is not JSON, and for
    a folder with other files.
    """
    format_function("write", "vitlab")(model, Path(folder), extra or {})


def load_checkpoint(
    path: Path | str,
    *,
    image_size: ImageSize | None = None,
    interpolation: Interpolation | None = None,
    dynamic_image_size: bool | None = None,
    **adaptation: Any,
) -> Checkpoint:
    """Returns a checkpoint as its library evaluates it: at `image_size`, by default its preprocessing's, which
    may differ from its position embeddings' (DINOv2: 224 and 518).

    With `dynamic_image_size` the model keeps the checkpoint's position embeddings, and `preprocessing` its own size.
    adaptation: `num_classes`, `depth` and `pool` as in `load_model`.
    """
    metadata = load_metadata(path, image_size=None if dynamic_image_size else image_size)
    preprocessing = Preprocessing.read(metadata, str(path))
    size = preprocessing.image_size if image_size is None and not dynamic_image_size else image_size
    model = _load(path, {"image_size": size, "interpolation": interpolation, **adaptation}, {}, dynamic_image_size)
    if not dynamic_image_size or preprocessing.image_size is None:
        preprocessing = preprocessing.at(model.config.image_size)
    model.preprocessing = preprocessing
    return Checkpoint(model, without_stale_classes(metadata, model), preprocessing)


def load_metadata(
    path: Path | str, *, image_size: ImageSize | None = None, assume: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns what a checkpoint says of itself, without loading its weights: the `extra` that a model was saved with,
    or the `classes` of a timm or Hugging Face folder.

    `preprocessing` is always there, for `Preprocessing.read`: the checkpoint's, rescaled to `image_size`;
    Google's for files of its code; what the names of a bare file's tensors show (`assume` as in `load_model`); the
    defaults of `Preprocessing` where there is none.
    """
    metadata = _read("metadata", path, image_size, assume)
    preprocessing = Preprocessing.read(metadata, str(path))
    if image_size is not None:
        preprocessing = preprocessing.at(image_size)
    return metadata | {"preprocessing": preprocessing.to_metadata()}


def without_stale_classes(metadata: dict[str, Any], model: "Model") -> dict[str, Any]:
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


def format_function(verb: Verb, kind: Format) -> Callable[..., Any]:
    """`read_FORMAT`, `metadata_FORMAT` or `write_FORMAT` of the format's module, which imports torch."""
    return getattr(importlib.import_module(f"vitlab.weights.{MODULES[kind]}"), f"{verb}_{kind}")
