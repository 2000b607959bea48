"""Checkpoints by their names on the Hugging Face hub, into its cache and from there."""

import re
from pathlib import Path

from vitlab.errors import UserError

PATTERNS = ("config.json", "preprocessor_config.json", "*.safetensors.index.json", "*.safetensors", "*.npz")
"""All that is ever downloaded: no pickles, no code."""


def download_checkpoint(spec: str) -> Path:
    """The path of a checkpoint on this machine, downloaded unless it is cached.

    | spec | repository |
    |---|---|
    | `hub:OWNER/NAME`, `hub:OWNER/NAME@REVISION` | that one; a revision is a branch, a tag or a commit |
    | `timm:NAME.TAG` | `timm/NAME.TAG`, where timm keeps its weights |

    Returns the folder with config and weights, or the `.npz` if that is all there is. The hub's cache and
    environment hold (`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`; `HF_HUB_OFFLINE=1` takes only what is cached). Raises
    UserError, with what to do.
    """
    match = re.fullmatch(r"(?:hub:([\w.-]+/[\w.-]+)|timm:([\w.-]+))(?:@(.+))?", spec)
    if not match:
        raise UserError(
            f"{spec!r} is not a name on a hub; write hub:OWNER/NAME, hub:OWNER/NAME@REVISION or timm:NAME.TAG "
            f"(hub:google/vit-base-patch16-224, timm:vit_base_patch16_224.augreg_in21k)."
        )
    folder = _download(spec, match[1] or f"timm/{match[2]}", match[3])
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if any(name.endswith(".safetensors") for name in names):
        return folder
    archives = [name for name in names if name.endswith(".npz")]
    if len(archives) > 1:
        raise UserError(f"{spec} holds several checkpoints: give one of {', '.join(archives)} in {folder}.")
    if not archives:
        raise UserError(
            f"{spec} holds no .safetensors and no .npz, and other weights are not loaded: a pickle (.bin, .pth) can "
            f"run any code. If you trust it, convert it to safetensors and give the folder."
        )
    return folder / archives[0]


def _download(spec: str, repository: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download  # slow to import

    try:
        return Path(
            snapshot_download(repository, revision=revision, allow_patterns=[*PATTERNS], ignore_patterns=["*/*"])
        )
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
        cause = error.__cause__ or error
        reason = f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '').rstrip('.')}"
        raise UserError(
            f"{spec} cannot be downloaded ({reason}). Check the name (timm's weights have a tag, timm:NAME.TAG), the "
            f"revision and the network; a private or gated repository requires a login (`hf auth login`, or HF_TOKEN). "
            f"Or download config.json, preprocessor_config.json and the .safetensors of {repository} elsewhere and "
            f"give the folder that holds them."
        ) from error
