"""The format of a checkpoint, from its content; downloads from the Hugging Face hub. Imports no torch."""

import contextlib
import functools
import logging
import re
import shlex
import zipfile
from pathlib import Path
from typing import Literal

from vitlab.checksums import find_corrupt_files
from vitlab.errors import UserError, first_ten
from vitlab.io import NPZ_ERRORS, clear_leftovers, open_regular, read_json, resolved

logger = logging.getLogger(__name__)

Format = Literal["google", "vitlab", "timm", "huggingface"]
HUBS = ("hub:", "timm:")
"""Beginnings of the name of a checkpoint on a hub."""
HUB_NAME = re.compile(r"(?:hub:([\w.-]+/[\w.-]+)|timm:([\w.-]+))(?:@(.+))?")
"""The whole name: OWNER/NAME, or the NAME of timm's; and the revision."""
PICKLED = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle", ".pth.tar", ".pt.tar")
OPEN_CLIP_CONFIG = "open_clip_config.json"
NOT_WEIGHTS = re.compile("optim|sched|scaler|rng_state|training_args")
"""In the names of pickles that trainers write beside the weights."""
READABLE = (
    "a Google .npz, a folder of save_model, timm or Hugging Face, a .safetensors of a ViT, the work folder of a "
    "finished training (with model/ in it), or a hub's hub:OWNER/NAME or timm:NAME.TAG"
)
FOR_DATA = "Images come after the checkpoint, a data set as --dataset folder:PATH or csv:PATH."
DOWNLOADED = (
    *("config.json", "preprocessor_config.json", "processor_config.json", OPEN_CLIP_CONFIG),
    *("*.safetensors.index.json", "*.safetensors", "*.npz"),
)
"""All that is ever downloaded: no pickles, no code."""


def find_checkpoint(spec: Path | str) -> tuple[Format, Path]:
    """Format and path of the checkpoint at a path or on a hub. Raises UserError for anything else."""
    path = download_checkpoint(str(spec)) if str(spec).startswith(HUBS) else Path(spec)
    for folder in (resolved(path), resolved(path) / "model"):
        with contextlib.suppress(OSError):  # a folder of others, or one that is read-only
            clear_leftovers(folder.parent, folder.name)
    if not path.exists():
        raise UserError(f"there is no file or folder {path}; give {READABLE}.")
    return _find_in_folder(path) if path.is_dir() else _find_file(path)


def _find_file(path: Path) -> tuple[Format, Path]:
    """From content, then suffix; a model.safetensors beside its config.json stands for the folder."""
    start, is_safetensors = _beginning(path)
    if is_pickle(path):
        raise _pickles_error([path], f"{path} is a pickle")
    if start.startswith(b"PK"):
        return "google", path
    if path.name == "model.safetensors" and (path.parent / "config.json").is_file():
        return _find_in_folder(path.parent)
    if path.suffix == ".safetensors" or is_safetensors:
        return "timm", path
    raise UserError(f"{path} is not a checkpoint, or is corrupt; give {READABLE}. {FOR_DATA}")


def is_pickle(path: Path) -> bool:
    """Whether a file is a pickle, from its content or its name. Raises UserError for one that cannot be read."""
    start, is_safetensors = _beginning(path)
    # Both may begin with 0x80: a pickle always, and a safetensors file by the length of its header.
    begins = start[:1] == b"\x80" and not is_safetensors
    return path.name.endswith(PICKLED) or begins or _is_zipped_pickle(path)


def _beginning(path: Path) -> tuple[bytes, bool]:
    """The first bytes of a file, and whether they are safetensors'."""
    try:
        with open_regular(path) as file:
            start = file.read(9)
        return start, start[8:] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size - 8
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}.") from error


def _find_in_folder(folder: Path) -> tuple[Format, Path]:
    """In this order: a work folder of ours, open_clip, pickles without weights beside them, an unfinished training, one
    bare file without config.json, and the format of config.json."""
    if (folder / "model" / "config.json").is_file():
        # This file has the checksum of the weights.
        for name, problem in find_corrupt_files(folder, ("model/config.json",)).items():
            logger.warning("%s %s: its description of the model may be wrong", folder / name, problem)
        return "vitlab", folder / "model"
    names = {path.name for path in folder.iterdir()}
    has_weights = not names.isdisjoint({"model.safetensors", "model.safetensors.index.json"})
    bare = [folder / name for name in names if name.endswith(".safetensors")]
    if OPEN_CLIP_CONFIG in names and not has_weights and len(bare) == 1:
        return "timm", bare[0]
    pickles = sorted(name for name in names if name.endswith(PICKLED))
    if pickles and not (has_weights and "config.json" in names):
        what = f"{folder} holds no weights with their config.json but pickles ({first_ten(pickles)})"
        raise _pickles_error([folder / name for name in pickles], what)
    if not has_weights and names & {"metrics.jsonl", "checkpoints"}:
        raise UserError(
            f"{folder} is the work folder of a training that has not ended: there is no model/ in it. Run its command "
            f"again to finish it."
        )
    if "config.json" not in names:
        if len(bare) == 1:
            return "timm", bare[0]
        raise UserError(f"{folder} holds no checkpoint; give {READABLE}. {FOR_DATA}")
    return format_of_config(folder / "config.json"), folder


def format_of_config(path: Path) -> Format:
    """The format whose config.json a file is; vitlab's for any other, because that reader reports what is wrong."""
    try:
        keys = set(read_json(path))
    except (OSError, UserError, TypeError):
        keys = set()
    if keys & {"architecture", "pretrained_cfg"}:
        return "timm"
    return "huggingface" if keys & {"model_type", "architectures", "transformers_version"} else "vitlab"


def _is_zipped_pickle(path: Path) -> bool:
    """Whether it is a file of torch.save, which is a zip archive like an .npz."""
    try:
        with zipfile.ZipFile(path) as archive:
            return any(name.endswith(".pkl") for name in archive.namelist())
    except NPZ_ERRORS:
        return False


def _pickles_error(paths: list[Path], what: str) -> UserError:
    """The error that points to `vitlab convert`, for the best of several files: by its name, or else the largest."""
    best = max(paths, key=lambda path: (not NOT_WEIGHTS.search(path.name), "best" in path.name, path.stat().st_size))
    return UserError(
        f"{what}. A pickle can run any code, and is not loaded here; `vitlab convert {shlex.quote(str(best))} OUT` "
        f"copies the weights out of it, running none, into a folder that every command takes."
    )


# ------------------------------------------------------------------------------------------------------------ hub


@functools.cache  # so that metadata and weights are of one commit
def download_checkpoint(spec: str) -> Path:
    """The path of a checkpoint on this machine, downloaded unless it is cached.

    `hub:OWNER/NAME` and `hub:OWNER/NAME@REVISION` (a branch, a tag or a commit) name the repository; `timm:NAME.TAG` is
    `timm/NAME.TAG`, where timm keeps its weights.

    Returns the folder with config and weights, or the `.npz` if that is all there is. The hub's cache and environment
    variables apply (`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`; `HF_HUB_OFFLINE=1` takes only what is cached).
    """
    from huggingface_hub import errors, snapshot_download  # slow to import

    match = HUB_NAME.fullmatch(spec)
    if not match:
        raise UserError(
            f"{spec!r} is not a name on a hub; write hub:OWNER/NAME, hub:OWNER/NAME@REVISION or timm:NAME.TAG "
            f"(hub:google/vit-base-patch16-224, timm:vit_base_patch16_224.augreg_in21k)."
        )
    repository = match[1] or f"timm/{match[2]}"
    try:
        folder = Path(
            snapshot_download(repository, revision=match[3], allow_patterns=[*DOWNLOADED], ignore_patterns=["*/*"])
        )
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '').rstrip('.')}"
        raise UserError(
            f"{spec} cannot be downloaded ({reason}). Check the name (timm's weights have a tag, timm:NAME.TAG), the "
            f"revision and the network; a private or gated repository requires a login (`hf auth login`, or HF_TOKEN). "
            f"Without a network, give a checkpoint of this machine, a file or a folder, or what "
            f"`hf download {repository} --local-dir FOLDER` has made on another."
        ) from error
    if any(folder.glob("*.safetensors")):
        return folder
    archives = sorted(folder.glob("*.npz"))
    if len(archives) != 1:
        names = ", ".join(path.name for path in archives) or "none"
        raise UserError(
            f"{spec} holds no .safetensors, and other than one .npz ({names}); give one of {folder} by its path. "
            f"Pickles (.bin, .pth) are not downloaded: if it has one, `hf download {repository} config.json "
            f"pytorch_model.bin --local-dir FOLDER`, then `vitlab convert FOLDER/pytorch_model.bin OUT`."
        )
    return archives[0]
