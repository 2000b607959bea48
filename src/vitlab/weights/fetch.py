"""Checkpoints by their names on the Hugging Face hub, into its cache and from there."""

import re
from pathlib import Path

from vitlab.errors import UserError

CONFIGS = ("config.json", "preprocessor_config.json", "*.safetensors.index.json")
WEIGHTS = ("*.safetensors", "*.npz")
"""All that is ever fetched: no pickles, no code."""


def fetch(spec: str) -> Path:
    """Where the checkpoint of that name lies on this machine, fetched unless it is there already.

    | spec | repository |
    |---|---|
    | `hub:OWNER/NAME`, `hub:OWNER/NAME@REVISION` | that one; a revision is a branch, a tag or a commit |
    | `timm:NAME.TAG` | `timm/NAME.TAG`, where timm keeps its weights |

    The answer is the folder with config and weights, or the `.npz` if that is all there is. The hub's own cache and
    environment hold (`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`; `HF_HUB_OFFLINE=1` takes only what is cached); what was
    fetched once needs no network.

    Raises ValueError, with what to do: for another spec, without the package, without a network, for a repository that
    does not exist or has nothing that could be loaded.
    """
    repository, revision = _parse(spec)
    folder = _download(spec, repository, revision)
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if any(name.endswith(".safetensors") for name in names):
        return folder
    archives = sorted(name for name in names if name.endswith(".npz"))
    if len(archives) > 1:
        raise UserError(f"{spec} holds several checkpoints: give one of {', '.join(archives)} in {folder}.")
    if not archives:
        raise UserError(
            f"{spec} holds no .safetensors and no .npz, and other weights are not loaded: a pickle (.bin, .pth) can "
            f"run any code. Where you trust it, convert it to safetensors and give the folder."
        )
    return folder / archives[0]


def _parse(spec: str) -> tuple[str, str | None]:
    """The repository's name and the revision."""
    found = re.fullmatch(r"(?:hub:([\w.-]+/[\w.-]+)|timm:([\w.-]+))(?:@(.+))?", spec)
    if not found:
        raise UserError(
            f"{spec!r} is no name on a hub; write hub:OWNER/NAME, hub:OWNER/NAME@REVISION or timm:NAME.TAG "
            f"(hub:google/vit-base-patch16-224, timm:vit_base_patch16_224.augreg_in21k)."
        )
    return found[1] or f"timm/{found[2]}", found[3]


def _download(spec: str, repository: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import errors, snapshot_download
    except ModuleNotFoundError as error:
        raise UserError(
            f"{spec} needs the package huggingface-hub, which is not installed: pip install 'vitlab[hub]'. "
            f"{_by_hand(repository)}"
        ) from error
    try:
        folder = snapshot_download(
            repository, revision=revision, allow_patterns=[*CONFIGS, *WEIGHTS], ignore_patterns=["*/*"]
        )
    except errors.HFValidationError as error:
        raise UserError(f"{spec} is no name on the hub: {error}") from error
    except errors.GatedRepoError as error:
        raise UserError(
            f"{spec} cannot be fetched: its owner gives access on request. Ask for it on the hub's page of "
            f"{repository}, then log in (`hf auth login`, or the variable HF_TOKEN)."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(f"{spec} cannot be fetched: {_why_not_found(repository)}") from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"{spec} cannot be fetched: {repository} has no revision {revision!r}; its page on the hub shows them."
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise UserError(
            f"{spec} cannot be fetched: it is not (wholly) in the hub's cache on this machine, and the hub cannot be "
            f"reached ({_reason(error)}). {_by_hand(repository)}"
        ) from error
    except (errors.HTTPError, OSError) as error:  # pyright: ignore[reportPrivateImportUsage]
        raise UserError(
            f"{spec} cannot be fetched ({_reason(error)}). Try again later. {_by_hand(repository)}"
        ) from error
    return Path(folder)


def _why_not_found(repository: str) -> str:
    owner, name = repository.split("/")
    if owner == "timm" and "." not in name:
        return (
            f"timm's weights are named with a tag, timm:{name}.TAG; "
            f"`timm.list_pretrained('{name}.*')` and the hub's pages of timm show which there are."
        )
    return (
        f"there is no repository {repository} on the hub, or it is private. Check the name, or log in "
        f"(`hf auth login`, or the variable HF_TOKEN)."
    )


def _reason(error: Exception) -> str:
    """The first line of what lies behind the error."""
    first = error.__cause__ or error
    return next(iter(str(first).splitlines()), "").rstrip(".") or type(first).__name__


def _by_hand(repository: str) -> str:
    return (
        f"Or download config.json, preprocessor_config.json and the .safetensors of {repository} elsewhere, and give "
        f"the folder that holds them."
    )
