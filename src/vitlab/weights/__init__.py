"""Sec. 3.2: checkpoints in and out. `load_model` is the one door for every format, `save_model` writes ours.

Importing this does not import torch.
"""

import dataclasses
import typing
import zipfile
from pathlib import Path
from typing import Any, Literal

if typing.TYPE_CHECKING:
    from vitlab.models.vit import ViT

__all__ = ["load_card", "load_model", "save_model"]

PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
READABLE = "a Google .npz, a folder of save_model, or the work folder of a finished training (with model/ in it)"


def load_model(
    path: Path | str,
    *,
    image_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    reset_head: bool = False,
    pre_logits: Literal["keep", "drop"] = "keep",
    head_bias: float = 0.0,
    dropout: float | None = None,
) -> "ViT":
    """The model of a checkpoint, in float32 and in evaluation mode (`.train()` turns dropout on).

    `path` is a Google `.npz`, a folder of `save_model`, or a training's work folder. With nothing else given,
    the model is exactly what is there. To carry it to another size or task (Sec. 3.2):

    - `image_size` interpolates the position embeddings. (For a file that does not tell its own size, see
      `read_google`, it says which.)
    - `num_classes`: where it differs from the checkpoint's, the head is a new one, all zero; 0 leaves it out.
    - `reset_head=True` makes a new head also where the number of classes is the same. A new task needs this.
    - `pre_logits="drop"` leaves out the layer before the head, as Google's fine-tuning does; it asks for a
      new head.
    - `head_bias` is the bias of a new head, `dropout` the rate from now on (kept unless given).

    Raises ValueError saying what was found, what can be read, and what to do.
    """
    import torch

    from vitlab.models.vit import ViT
    from vitlab.weights.adapt import adapt
    from vitlab.weights.folder import read_folder
    from vitlab.weights.google import read_google

    kind, place = _find(Path(path))
    config, state = read_google(place, image_size=image_size) if kind == "google" else read_folder(place)
    config, state = adapt(
        config,
        state,
        image_size=image_size,
        num_classes=num_classes,
        reset_head=reset_head,
        pre_logits=pre_logits,
        head_bias=head_bias,
    )
    if dropout is not None:
        config = dataclasses.replace(config, dropout=dropout)
    with torch.device("meta"):  # nothing is drawn that the checkpoint overwrites
        model = ViT(config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, assign=True)
    return model.eval()


def save_model(model: "ViT", folder: Path | str, *, extra: dict[str, Any] | None = None) -> None:
    """Writes `folder`/model.safetensors and config.json: all or nothing, replacing a model that stands there.

    `extra` goes into config.json for `load_card`: `classes` (names of the outputs), `eval_resize`, `source`,
    and whatever else JSON can say. Raises ValueError where it cannot, or where the folder holds other files.
    """
    from vitlab.weights.folder import write_folder

    write_folder(model, folder, extra or {})


def load_card(path: Path | str) -> dict[str, Any]:
    """The `extra` that a model was saved with; empty for a Google `.npz`, which has no place for it."""
    from vitlab.weights.folder import read_card

    kind, place = _find(Path(path))
    return read_card(place)["extra"] if kind == "folder" else {}


def _find(path: Path) -> tuple[Literal["google", "folder"], Path]:
    """Which format lies at `path`, judged by content, and where exactly."""
    if not path.exists():
        raise ValueError(f"there is nothing at {path}; give {READABLE}.")
    if path.is_dir():
        return "folder", _find_folder(path)
    try:
        with path.open("rb") as file:
            start = file.read(9)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error}.") from error
    if path.suffix in PICKLED or start.startswith(b"\x80") or _zips_a_pickle(path):
        raise ValueError(_refuse_pickle(path))
    if start.startswith(b"PK"):
        return "google", path
    if path.name == "model.safetensors" and (path.parent / "config.json").is_file():
        return "folder", path.parent
    if path.suffix == ".safetensors" or start[8:] == b"{":
        raise ValueError(f"{path} holds weights without the config.json that says of which model; give {READABLE}.")
    raise ValueError(f"{path} is no checkpoint, or a damaged one; give {READABLE}.")


def _find_folder(folder: Path) -> Path:
    names = {path.name for path in folder.iterdir()}
    if (folder / "model" / "config.json").is_file():
        return folder / "model"
    if {"config.json", "model.safetensors"} <= names:
        return folder
    for name in sorted(names):
        if Path(name).suffix in PICKLED:
            raise ValueError(_refuse_pickle(folder / name))
    if names & {"metrics.jsonl", "checkpoints"}:
        raise ValueError(
            f"{folder} is the work folder of a training that has not ended: there is no model/ in it. Run "
            f"its command again to finish it."
        )
    if "config.json" in names:
        return folder
    raise ValueError(f"{folder} holds no checkpoint; give {READABLE}.")


def _zips_a_pickle(path: Path) -> bool:
    """Whether it is a file of torch.save, which is a zip archive like an .npz."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    except zipfile.BadZipFile:
        return False


def _refuse_pickle(path: Path) -> str:
    return (
        f"{path} is a pickle, which can run any code and is never loaded; convert it to safetensors where "
        f"you trust it, or give {READABLE}."
    )
