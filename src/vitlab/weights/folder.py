"""Folders of weights and JSON: our format, and what timm's and Hugging Face's share with it.

    model.safetensors   the parameters; here by the names of `Model.state_dict()`
    config.json         here: format and version, the model's configuration, SHA-256 of the weights, and `extra`
    README.md           the model card (`model_card`), if there is one

`extra` is free. By convention: `classes`, the names of the outputs in order; `preprocessing`, how evaluation images are
prepared (`Preprocessing.to_metadata`); `source`, where the weights come from.
"""

import contextlib
import dataclasses
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from types import MappingProxyType
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from vitlab.checksums import sha256
from vitlab.errors import RunError, UserError, first_ten
from vitlab.io import JSON_BYTES, check_regular, clear_leftovers, read_json, replacing_folder
from vitlab.models import ModelConfig, ViTConfig
from vitlab.models.vit import WRAPPERS, Model, unwrap, unwrap_module
from vitlab.preprocessing import Preprocessing, pair
from vitlab.settings import from_dict, read_fields, to_dict
from vitlab.weights.json_fields import EXTRA
from vitlab.weights.layout import check_arrays, renamed_layout

logger = logging.getLogger(__name__)

FORMAT, VERSION = "vitlab model", 1
WEIGHTS, CONFIG, README = "model.safetensors", "config.json", "README.md"
RETRY = "take another copy of the folder"


def write_vitlab(model: nn.Module, folder: Path, extra: Mapping[str, Any]) -> None:
    """Writes our format, atomically: replaces a saved model, and raises UserError for a folder of anything else, and
    for a model that `read_vitlab` could not read."""
    config, state = _described_state(unwrap(model))
    settings = {"format": FORMAT, "version": VERSION, "model": to_dict(config), "extra": dict(extra)}
    check_classes(extra, config)
    to_json(settings)  # before anything is written
    with _replacing_model(folder, state, {CONFIG}) as new:
        digest = sha256(new / WEIGHTS)
        (new / CONFIG).write_text(to_json(settings | {"sha256": digest}), encoding="utf-8")
        if (folder / README).is_file() and digest in _digests(folder):  # a corrupt copy of this model is replaced
            shutil.copyfile(folder / README, new / README)
        _check_written(new, state)


def _described_state(model: Model) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model's configuration, with the number of its present head's outputs, and its parameters on the CPU. Raises
    UserError for parameters that the configuration does not describe, and as `_cpu_tensors`."""
    head = unwrap_module(model.head)
    config = dataclasses.replace(model.config, num_classes=getattr(head, "out_features", 0))
    named = {
        ".".join(part for part in name.split(".") if part not in WRAPPERS): value
        for name, value in model.state_dict().items()
        if isinstance(value, Tensor)
    }
    try:
        if head is not None and type(head) not in (nn.Linear, nn.Identity):
            raise UserError(f"its head is a {type(head).__module__}.{type(head).__name__}.")
        check_arrays("its config describes another one", renamed_layout(config, lambda name: {name: 1}), named)
    except UserError as error:
        raise UserError(
            f"load_model could not read this model, so nothing was written: {error} Merge adapters "
            f"(merge_and_unload), remove parametrizations and quantization, make the head one nn.Linear with a bias, "
            f"and let model.config say what was changed (dataclasses.replace)."
        ) from error
    return config, _cpu_tensors(named)


def _cpu_tensors(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, each with memory of its own, as safetensors requires. Raises UserError for a tensor that
    is not whole, or whose values are not finite."""
    state: dict[str, Tensor] = {}
    storages = set()
    for name, value in named.items():
        if value.is_meta or hasattr(value, "full_tensor") or not value.is_floating_point():
            kind = "on the meta device" if value.is_meta else f"{type(value).__name__}s of {value.dtype}"
            raise UserError(f"nothing was written: {name} is {kind}; give whole floating-point tensors with values.")
        tensor = value.detach().cpu().contiguous()
        if not (tensor.sum().isfinite() or tensor.isfinite().all()):  # the first is fast, and may overflow
            raise UserError(f"nothing was written: {name} has values that are not finite; save an earlier state.")
        storage = tensor.untyped_storage().data_ptr()
        state[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    return state


def _check_written(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Raises RunError unless config.json and the arrays' names, shapes and lengths are read as they were written. The
    values are not read again, which takes as long as `load_model`: 5 s for a ViT-L on one core."""
    try:
        _read_config(folder)
        with safetensors.safe_open(folder / WEIGHTS, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if shapes != {name: tuple(tensor.shape) for name, tensor in state.items()}:
            raise UserError("other arrays")
    except (UserError, OSError, safetensors.SafetensorError) as error:
        raise RunError(
            f"the model that was written cannot be read again ({error}), so what was there stays; check the disk."
        ) from error


def _digests(folder: Path) -> set[Any]:
    """Checksums of the weights in a folder: the one in config.json and the file's, where they can be read."""
    digests = set[Any]()
    with contextlib.suppress(OSError, UserError):
        digests.add(str(read_settings(folder / CONFIG).get("sha256")))
    with contextlib.suppress(OSError):
        digests.add(sha256(folder / WEIGHTS))
    return digests


def read_vitlab(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Configuration and parameters of our format. Raises UserError where they do not fit or a byte has changed."""
    config, settings = _read_config(folder)
    weights = folder / WEIGHTS
    what = f"{folder / CONFIG} describes a model of {config.num_parameters:,} parameters"
    try:
        check_regular(weights)
        size = weights.stat().st_size
    except OSError as error:
        raise UserError(f"{weights} cannot be read ({error}); {RETRY}.") from error
    # Before the file is read: a byte each at least, at most float64 and names.
    if not config.num_parameters <= size <= 8 * config.num_parameters + JSON_BYTES:
        raise UserError(f"{what}, and {weights} is corrupt or of another model: it has {size:,} bytes; {RETRY}.")
    if sha256(weights) != settings["sha256"]:
        raise UserError(f"{weights} is corrupt: its SHA-256 is not the one in {CONFIG}; {RETRY}.")
    state = read_safetensors(weights)
    check_arrays(what, renamed_layout(config, lambda name: {name: 1}), state)
    return config, state


def metadata_vitlab(folder: Path) -> dict[str, Any]:
    """The `extra` that a model was saved with; its `preprocessing` is complete."""
    config, settings = _read_config(folder)
    prepared = Preprocessing.read(settings["extra"], str(folder), config.image_size)
    return settings["extra"] | {"preprocessing": prepared.to_metadata()}


def _read_config(folder: Path) -> tuple[ModelConfig, dict[str, Any]]:
    """The model's configuration, and all of config.json."""
    path = folder / CONFIG
    settings = read_settings(path)
    if settings.get("format") != FORMAT:
        raise UserError(
            f"{folder} holds a {CONFIG} of another program (its keys: {first_ten(sorted(settings)) or 'none'}); "
            f"supported are folders of save_model, timm and Hugging Face."
        )
    if settings.get("version") != VERSION:
        raise UserError(
            f"{path} has version {settings.get('version')!r}; this vitlab reads version {VERSION}: update it."
        )
    for name, kind in {"model": dict, "extra": dict, "sha256": str}.items():
        if not isinstance(settings.get(name), kind):
            raise UserError(f"{path} lacks {name}; {RETRY}.")
    try:
        config = from_dict(ModelConfig, settings["model"])
    except ValueError as error:
        raise UserError(f"{path} describes an invalid model: {error}") from error
    settings["extra"] = read_fields(settings["extra"], EXTRA, f"{path}: extra")
    check_classes(settings["extra"], config, str(path))
    return config, settings


# ------------------------------------------------------------------------------------------------ for all formats


def write_files(folder: Path, state: Mapping[str, Tensor], files: Mapping[str, dict[str, Any] | str]) -> None:
    """Writes the weights, and JSON and text files by name, all or nothing. Replaces a model in `folder`. Raises
    UserError for a folder that has other files, and for values that are not JSON."""
    texts = {name: content if isinstance(content, str) else to_json(content) for name, content in files.items()}
    with _replacing_model(folder, state, files.keys()) as new:
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")


@contextlib.contextmanager
def _replacing_model(folder: Path, state: Mapping[str, Tensor], names: Set[str]) -> Iterator[Path]:
    """A new folder with the weights, for the files of these names; in the end it replaces the model in `folder`."""
    check_replaceable(folder, {WEIGHTS, *names})
    contiguous = {name: tensor.contiguous() for name, tensor in state.items()}
    with replacing_folder(folder, sum(tensor.nbytes for tensor in contiguous.values())) as new:
        weights = new / WEIGHTS
        safetensors.torch.save_file(contiguous, weights, metadata={"format": "pt"})
        weights.chmod(new.stat().st_mode & 0o666)  # safetensors makes it readable to the owner alone
        yield new


def check_replaceable(folder: Path, names: Set[str]) -> None:
    """Raises UserError for a folder that has files other than a model's of these names."""
    if folder.is_file():
        raise UserError(f"{folder} is a file; give the name of a folder to write the model into.")
    clear_leftovers(folder)
    others = {path.name for path in folder.iterdir()} - names if folder.is_dir() else set()
    if (folder / WEIGHTS).exists():
        others.discard(README)  # of the replaced model
    if others:
        raise UserError(f"{folder} already holds {first_ten(sorted(others))}; give a new folder, or a model's.")


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Raises UserError where a file cannot be read as safetensors inside."""
    try:
        check_regular(path)
        yield
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({error}); get the file again.") from error


def read_safetensors(path: Path) -> dict[str, Tensor]:
    with _reading(path):
        return safetensors.torch.load_file(path)


def read_shapes(path: Path) -> dict[str, Tensor]:
    """The tensors of a file without their values, on the meta device."""
    with _reading(path), safetensors.safe_open(path, framework="pt") as file:
        return {name: torch.empty(file.get_slice(name).get_shape(), device="meta") for name in file.keys()}  # noqa: SIM118


def read_settings(path: Path, fields: Mapping[str, Any] = MappingProxyType({})) -> dict[str, Any]:
    """The JSON object in a file, with its `fields` as `read_fields` checks them."""
    try:
        settings = read_json(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); get the file again.") from error
    if not isinstance(settings, dict):
        raise UserError(f"{path} does not hold a JSON object; get the file again.")
    return read_fields(settings, fields, str(path))


def check_classes(extra: Mapping[str, Any], config: ModelConfig, where: str = "extra") -> None:
    """Raises UserError where a field of `extra` has another type, or `classes` not a name for each of the outputs."""
    classes = read_fields(dict(extra), EXTRA, where).get("classes")
    if classes is not None and len(classes) != config.num_classes:
        raise UserError(
            f"{where}: classes is {len(classes)} names, and the model has {config.num_classes} outputs; give a list "
            f"with one name for each output, or leave it out."
        )


def processed_size(prepared: Preprocessing, config: ModelConfig) -> tuple[int, int]:
    """Height and width of the images that another library's processor makes: `crop_size` where it has one, unless, with
    a warning, the model's patches would cover more of it than `image_size`."""
    covered = pair(prepared.image_size or config.image_size)
    if prepared.crop_size is None:
        return covered
    patch_size = config.patch_size if isinstance(config, ViTConfig) else 1
    height, width = pair(prepared.crop_size)
    if (height // patch_size * patch_size, width // patch_size * patch_size) == covered:
        return height, width
    logger.warning("crop_size=%s is not written: only the image_size %s of the patches is", prepared.crop_size, covered)
    return covered


def to_json(content: Any) -> str:
    """JSON in ASCII, because the names of folders in it may not be valid text. Raises UserError for other values."""
    try:
        return json.dumps(content, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(f"extra can only hold what JSON can represent: {error}") from error
