"""Whether a run may resume: `Workdir` compares its config.json with the settings and images of the present start."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vitlab.errors import UserError

MAX_SHOWN = 20
"""Maximum number of differences in a message."""
IGNORED = ("microbatch", "reasons")
"""Keys that may differ: the micro-batch depends on the machine's memory; `reasons` only explain the settings."""
IMAGE_KEYS = ("images", "classes")
"""Keys with the names and content of the images, by `data.identity.identify`."""
FOLLOWING_KEYS = ("names_and_labels", "examples")
"""Keys that also differ if the images do. They say less, so the message omits them."""
ABSENT = "not set"


def require_same_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Raises UserError if the run of this config.json has other settings or other images."""
    try:
        saved = dict(json.loads(file.read_bytes()))
    except (ValueError, TypeError) as error:
        raise UserError(f"{file} is not readable JSON ({error}); give another --workdir.") from error
    differences = _differences(_comparable(saved), _comparable(settings))
    of_images = {name: d for name, d in differences.items() if name.partition(".")[0] in IMAGE_KEYS}
    if of_images:
        differences = {name: d for name, d in differences.items() if name.partition(".")[0] not in FOLLOWING_KEYS}
    if not differences:
        return
    kind = "on other images (their names and content)" if differences == of_images else "with other settings"
    lines = [f"{name}: {old} -> {new}" for name, (old, new) in differences.items()]
    if len(lines) > MAX_SHOWN:
        lines[MAX_SHOWN:] = [f"... ({len(lines)})"]
    raise UserError(
        f"the work folder {file.parent} holds a run {kind}:\n  "
        + "\n  ".join(lines)
        + "\nGive another --workdir, or the same settings and images to resume that run."
    )


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` without what may differ: the keys IGNORED, and paths whose content another key identifies.

    `images` identifies the images in `data.root` and in a local `data.name`, `excluded` the list in `data.exclude`.
    """
    settings = {key: value for key, value in settings.items() if key not in IGNORED}
    if isinstance(data := settings.get("data"), dict) and "name" in data:
        kind, _, path = str(data["name"]).partition(":")
        is_local = kind in ("folder", "csv", "shards") and "://" not in path and not path.startswith("hub:")
        settings["data"] = data | {"root": None} | ({"name": f"{kind}:"} if is_local else {})
        if "excluded" in settings:
            settings["data"]["exclude"] = None
    return settings


def _differences(old: Any, new: Any, name: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted name -> (old, new) of every setting that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        prefix = f"{name}." if name else ""
        differences = {}
        for key in sorted(old.keys() | new.keys()):
            differences |= _differences(old.get(key, ABSENT), new.get(key, ABSENT), prefix + key)
        return differences
    return {} if old == new else {name: (old, new)}
