"""config.json of a run, against the settings and images of another start (`Workdir`). A run of an earlier version
resumes too: settings that were renamed, or removed at a value without effect, are no difference."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.config.data import RENAMED
from vitlab.config.train import REMOVED
from vitlab.data.identity import listed, normalized_location
from vitlab.errors import UserError
from vitlab.models.variant import nested

MAX_SHOWN = 20
"""Differences of settings in a message."""
IGNORED = ("microbatch", "reasons", "automatic")
"""Keys of config.json that may differ: the micro-batch depends on the machine's memory, `reasons` (in earlier versions
`automatic`) say how the settings came about."""
ABSENT = "not set"


def require_same_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Raises UserError where the run of this config.json has other settings, or is on other images."""
    try:
        saved = dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is not readable JSON ({error}); give another --workdir.") from error
    identified = "images" in saved
    if not identified:  # by an earlier version
        saved |= {name: settings[name] for name in ("images", "classes") if name in settings}
        saved |= _classes_of_model(file.parent)
    differences = _differences(_comparable(saved, identified), _comparable(settings, identified))
    of_images = {name for name in differences if name.partition(".")[0] in ("images", "classes")}
    if of_images:  # these say more than the names and numbers that follow from them
        following = ("names_and_labels", "examples")
        differences = {name: d for name, d in differences.items() if name.partition(".")[0] not in following}
    if differences:
        other_images = differences.keys() == of_images
        kind = "on other images (their names and content)" if other_images else "with other settings"
        lines = [f"{name}: {old} -> {new}" for name, (old, new) in differences.items()]
        if len(lines) > MAX_SHOWN:
            lines[MAX_SHOWN:] = [f"... ({len(lines)})"]
        raise UserError(
            f"the work folder {file.parent} holds a run {kind}:\n  "
            + "\n  ".join(lines)
            + "\nGive another --workdir, or the same settings and images to resume that run."
        )


def _differences(old: Any, new: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (old, new) of every setting that differs.

    A setting missing on one side and None on the other is not a difference, so that later versions can resume the run.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        prefix = f"{name}." if name else ""
        differences = {}
        for key in sorted(old.keys() | new.keys()):
            differences |= _differences(old.get(key, ABSENT), new.get(key, ABSENT), prefix + key)
        return differences
    switched_off = all(value in (None, ABSENT) for value in (old, new))
    return {} if old == new or switched_off else {name: (old, new)}


def _comparable(settings: Mapping[str, Any], identified: bool) -> dict[str, Any]:
    """`settings` under their present names, without IGNORED and without the location of images that are `identified`
    by their content."""
    settings = {name: value for name, value in settings.items() if name not in IGNORED}
    if isinstance(optim := settings.get("optim"), dict):
        settings["optim"] = REMOVED | optim
    if isinstance(model := settings.get("model"), dict):
        settings["model"] = nested(model)
    if isinstance(data := settings.get("data"), dict) and "name" in data:
        data = {RENAMED.get(name) or name: value for name, value in data.items()}
        settings["data"] = normalized_location(data, identified)
        if "excluded" in settings:  # which identifies the list
            settings["data"]["exclude"] = None
    return settings


def _classes_of_model(folder: Path) -> dict[str, Any]:
    """`classes` of the model of a finished run, as in settings; empty without one."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        return {"classes": listed(json.loads((folder / "model" / "config.json").read_bytes())["extra"]["classes"])}
    return {}
