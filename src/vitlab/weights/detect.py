"""The format of a checkpoint, from its content. Imports no torch."""

import contextlib
import functools
import logging
import zipfile
from pathlib import Path
from typing import Literal

from vitlab.errors import UserError
from vitlab.io import NPZ_ERRORS, clear_leftovers, find_corrupt_files, open_regular, read_json

logger = logging.getLogger(__name__)

Format = Literal["google", "vitlab", "timm", "huggingface"]
PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
READABLE = (
    "a Google .npz, a folder of save_model, timm or Hugging Face, timm's weights as .safetensors, the work folder of a "
    "finished training (with model/ in it), or a hub's hub:OWNER/NAME or timm:NAME.TAG"
)


def find_checkpoint(given: Path | str) -> tuple[Format, Path]:
    """Format and path of the checkpoint at a path or on a hub. Raises UserError for anything else."""
    path = _fetch(str(given)) if str(given).startswith(("hub:", "timm:")) else Path(given)
    for folder in (path.resolve(), path.resolve() / "model"):
        with contextlib.suppress(OSError):  # a folder of others, or one that is read-only
            clear_leftovers(folder.parent, folder.name)
    if not path.exists():
        raise UserError(f"there is nothing at {path}; give {READABLE}.")
    return _find_in_folder(path) if path.is_dir() else _find_file(path)


@functools.cache
def _fetch(spec: str) -> Path:
    """The local copy of a hub's checkpoint; fetched once per process, so that card and weights are of one commit."""
    from vitlab.weights.hub import download_checkpoint

    return download_checkpoint(spec)


def _find_file(path: Path) -> tuple[Format, Path]:
    try:
        with open_regular(path) as file:
            start = file.read(9)
        is_safetensors = start[8:] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size - 8
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}.") from error
    # Both may begin with 0x80: a pickle always, and a safetensors file by the length of its header.
    is_pickle = start[:1] == b"\x80" and not is_safetensors
    if path.suffix in PICKLED or is_pickle or _is_zipped_pickle(path):
        raise _refuse_pickle(path)
    if start.startswith(b"PK"):
        return "google", path
    if path.name == "model.safetensors" and (path.parent / "config.json").is_file():
        return _find_in_folder(path.parent)
    if path.suffix == ".safetensors" or is_safetensors:
        return "timm", path
    raise UserError(f"{path} is not a checkpoint, or is corrupt; give {READABLE}.")


def _find_in_folder(folder: Path) -> tuple[Format, Path]:
    if (folder / "model" / "config.json").is_file():
        corrupt = find_corrupt_files(folder, ("model/config.json",))  # which has the checksum of the weights
        for name, problem in corrupt.items():
            logger.warning("%s %s: its description of the model may be wrong", folder / name, problem)
        return "vitlab", folder / "model"
    names = {path.name for path in folder.iterdir()}
    has_weights = not names.isdisjoint({"model.safetensors", "model.safetensors.index.json"})
    pickles = sorted(name for name in names if Path(name).suffix in PICKLED)
    if pickles and not (has_weights and "config.json" in names):
        raise _refuse_pickle(folder / pickles[0])
    if not has_weights and names & {"metrics.jsonl", "checkpoints"}:
        raise UserError(
            f"{folder} is the work folder of a training that has not ended: there is no model/ in it. Run its command "
            f"again to finish it."
        )
    if "config.json" not in names:
        raise UserError(f"{folder} holds no checkpoint; give {READABLE}.")
    try:
        keys = set(read_json(folder / "config.json"))
    except (OSError, UserError, TypeError):
        keys = set()  # the reader of our format reports what is wrong with it
    if keys & {"architecture", "pretrained_cfg"}:
        return "timm", folder
    return "huggingface" if keys & {"model_type", "architectures", "transformers_version"} else "vitlab", folder


def _is_zipped_pickle(path: Path) -> bool:
    """Whether it is a file of torch.save, which is a zip archive like an .npz."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    except NPZ_ERRORS:
        return False


def _refuse_pickle(path: Path) -> UserError:
    return UserError(
        f"{path} is a pickle, which can run any code and is never loaded; convert it to safetensors if you trust it, "
        f"or give {READABLE}."
    )
