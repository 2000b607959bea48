"""Our own format: a folder with the weights and a card that says what they are.

    model.safetensors   the parameters, by the names of `Model.state_dict()`
    config.json         format and version, the model's configuration, the weights' checksum, and `extra`

`extra` is what a user of the model should know. By convention: `classes`, the names of the outputs in order;
`preprocessing`, how test images are brought to size (`Preprocessing.to_card`); `source`, where the weights come from.
"""

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.io import JSON_BYTES, check_regular, open_regular, read_json, replacing_folder
from vitlab.models import ModelConfig, ViTConfig, build_model
from vitlab.models.vit import Model
from vitlab.settings import from_dict, to_dict
from vitlab.weights.shapes import check_shapes, some

FORMAT, VERSION = "vitlab model", 1
WEIGHTS, CARD = "model.safetensors", "config.json"


def write_folder(model: Model, folder: Path | str, extra: dict[str, Any]) -> None:
    """Writes all of the folder or nothing; a model that stands there is replaced, anything else refused."""
    folder = Path(folder)
    card: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "model": to_dict(model.config),
        "extra": extra,
    }
    check_classes(extra, model.config)
    check_replaceable(folder, (WEIGHTS, CARD))
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    with replacing_folder(folder) as aside:
        weights = aside / WEIGHTS
        safetensors.torch.save_file(state, weights, metadata={"format": "pt"})
        weights.chmod(aside.stat().st_mode & 0o666)  # safetensors lets only the owner read
        card["sha256"] = _sha256(weights)
        (aside / CARD).write_text(to_json(card))


def read_folder(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The configuration and the parameters; raises ValueError where they do not fit or a byte has changed."""
    card = read_card(folder)
    try:
        config = from_dict(ModelConfig, card["model"])
    except ValueError as error:
        raise UserError(f"{folder / CARD} describes no model that can be built: {error}") from error
    check_classes(card["extra"], config, str(folder / CARD))
    weights = folder / WEIGHTS
    _check_bytes(weights, config)
    if _sha256(weights) != card["sha256"]:
        raise UserError(
            f"{weights} is damaged: it is not the file that was written with {CARD} (the checksums differ). "
            f"Take another copy or checkpoint."
        )
    try:
        state = safetensors.torch.load_file(weights)
    except safetensors.SafetensorError as error:
        raise UserError(f"{weights} is no safetensors file: {error}") from error
    if len(state) < _blocks(config):
        raise UserError(
            f"{folder / CARD} describes a model of {_blocks(config):,} blocks, but the arrays do not fit (there are "
            f"{len(state)} of them): take another copy of the folder."
        )
    with torch.device("meta"):
        expected = {name: tuple(tensor.shape) for name, tensor in build_model(config).state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in state.items()}
    check_shapes(f"{folder / CARD} describes a model of {config.num_parameters:,} parameters", expected, found)
    return config, state


def read_card(folder: Path) -> dict[str, Any]:
    """What `config.json` says, checked to be ours."""
    path = folder / CARD
    try:
        card = read_json(path)
    except (OSError, UserError) as error:
        raise UserError(f"{path} cannot be read ({error}); take another copy of the folder.") from error
    if not isinstance(card, dict) or card.get("format") != FORMAT:
        keys = sorted(map(str, card)) if isinstance(card, dict) else []
        raise UserError(
            f"{folder} holds a {CARD} of something else (its keys: {some(keys) or 'none'}); load_model reads those of "
            f"save_model, timm and Hugging Face."
        )
    if card.get("version") != VERSION:
        raise UserError(
            f"{path} is of version {card.get('version')!r}, and this vitlab reads version {VERSION}: take "
            f"the vitlab that wrote it, or a later one."
        )
    wrong = [
        name
        for name, kind in (("model", dict), ("extra", dict), ("sha256", str))
        if not isinstance(card.get(name), kind)
    ]
    if wrong:
        raise UserError(f"{path} lacks {', '.join(wrong)}; it is damaged: take another copy of the folder.")
    if not isinstance(card["extra"].get("classes"), list | None):
        given = repr(card["extra"]["classes"])[:40]
        raise UserError(f"{path} says extra.classes={given}; it is a list of one name for each output, or left out.")
    return card


def check_classes(extra: dict[str, Any], config: ModelConfig, where: str = "extra['classes']") -> None:
    """Raises ValueError where `extra` names more or fewer classes than the model has outputs; `where` is its name."""
    classes = extra.get("classes")
    if classes is not None and len(classes) != config.num_classes:
        raise UserError(
            f"{where} names {len(classes)} classes and the model has {config.num_classes} outputs; "
            f"give one name for each output, or leave the names out."
        )


def check_replaceable(folder: Path, names: Collection[str]) -> None:
    """Raises ValueError where writing files called `names` would put them beside, or in place of, something else."""
    if folder.is_dir():
        others = sorted(path.name for path in folder.iterdir() if path.name not in names)
        if not others:
            return
        raise UserError(f"{folder} already holds {some(others)}; give a new folder, or one with a saved model.")
    if folder.exists():
        raise UserError(f"{folder} is a file; give the name of a folder to write the model into.")


def to_json(card: dict[str, Any]) -> str:
    """The card in ASCII, for the names of folders in it may be no text; raises ValueError for what JSON cannot say."""
    try:
        return json.dumps(card, indent=2, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise UserError(f"extra can only hold what JSON can say: {error}") from error


def _sha256(path: Path) -> str:
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); take another copy of the folder.") from error


def _check_bytes(weights: Path, config: ModelConfig) -> None:
    """Raises UserError where the file is too small or too large for the model, before either is looked at closer."""
    try:
        check_regular(weights)
        size = weights.stat().st_size
    except OSError as error:
        raise UserError(f"{weights} cannot be read ({error}); take another copy of the folder.") from error
    if not config.num_parameters <= size <= 8 * config.num_parameters + JSON_BYTES:  # a byte each, or float64 and names
        raise UserError(
            f"{weights} is damaged, or of another model: it has {size:,} bytes, and {CARD} describes a model of "
            f"{config.num_parameters:,} parameters. Take another copy of the folder."
        )


def _blocks(config: ModelConfig) -> int:
    """How many blocks or units it is built of; each has arrays of its own."""
    body = config.stem if isinstance(config, ViTConfig) else config.body
    return (config.depth if isinstance(config, ViTConfig) else 0) + (sum(body.layers) if body else 0)
