"""config.json of a run, against the settings and images of another start (`Workdir`)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.errors import UserError

MAX_SHOWN = 20
"""Differences of settings in a message."""
IGNORED = ("microbatch", "reasons")
"""Keys of config.json that may differ: the micro-batch depends on the machine's memory, `reasons` say how the settings
came about."""
ABSENT = "not set"


def require_same_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Raises UserError where the run of this config.json has other settings, or is on other images."""
    try:
        saved = dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is not readable JSON ({error}); give another --workdir.") from error
    differences = _differences(_comparable(saved), _comparable(settings))
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
    """Dotted name -> (old, new) of every setting that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        prefix = f"{name}." if name else ""
        differences = {}
        for key in sorted(old.keys() | new.keys()):
            differences |= _differences(old.get(key, ABSENT), new.get(key, ABSENT), prefix + key)
        return differences
    return {} if old == new else {name: (old, new)}


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` without IGNORED, without the place of the user's images, which `images` identifies by their content,
    and without that of the list that `excluded` identifies."""
    settings = {name: value for name, value in settings.items() if name not in IGNORED}
    if isinstance(data := settings.get("data"), dict) and "name" in data:
        kind, _, path = str(data["name"]).partition(":")
        is_local = kind in ("folder", "csv", "shards") and "://" not in path and not path.startswith("hub:")
        settings["data"] = data | {"root": None} | ({"name": f"{kind}:"} if is_local else {})
        if "excluded" in settings:
            settings["data"]["exclude"] = None
    return settings
