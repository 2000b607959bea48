"""For `Workdir`: the files of a run or of a job of several runs, which of them are missing or corrupt, and whether a
run may resume, by its config.json."""

import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path, PurePath
from typing import Any

from vitlab.checksums import MISSING, SUMS, find_corrupt_files, read_sums, write_sums
from vitlab.errors import UserError
from vitlab.io import clear_leftovers

logger = logging.getLogger(__name__)
RUNTIME = "runtime.json"
METRICS = "metrics.jsonl"
SPEED = "speed.jsonl"
PLAN = "plan.json"
SUSPECTS = "suspects.csv"
"""A list for people, who remove lines: it is neither checked nor written again."""
PAGE = "report/index.html"
CARD = "model/README.md"
RUNS = ("linear", "run-*", "sweep/lr-*")
"""The folders of a job's runs; each has its own SHA256SUMS."""
REPORT = (CARD, "report/*", "report/figures/*")
"""Can be made again from the results."""
RESULTS = (
    *("result.json", "predictions.csv", "model/*", "masking.safetensors", "reconstructions.png"),
    *(f"{run}/{SUMS}" for run in RUNS),
)
"""Can be made again from the last checkpoint; those of a job, from its runs."""
RECORDS = ("config.json", PLAN, RUNTIME, METRICS, SPEED, "tensorboard/*", "checkpoints/*/*")
"""Can be made again only by training again."""
KINDS = {"report": REPORT, "result": RESULTS, "record": RECORDS}
"""Kind -> patterns of names. The first match counts: CARD belongs to the report, though it also matches `model/*`."""
MAX_SHOWN = 20
"""Maximum number of differences in a message."""
IGNORED_SETTINGS = ("microbatch", "reasons", "layers")
"""Keys that may differ: the micro-batch depends on the machine's memory; `reasons` only explain the settings."""
IMAGE_KEYS = ("images", "classes")
"""Keys with the names and content of the images, by `data.identity.portable_fingerprints`."""
FOLLOWING_KEYS = ("names_and_labels", "examples")
"""Keys that also differ if the images do. They say less, so the message omits them."""
ABSENT = "not set"


def _kind_of(name: str) -> str | None:
    """The kind of a file, by its name in the folder of a run or job."""
    matches = (kind for kind, patterns in KINDS.items() for pattern in patterns if PurePath(name).match(pattern))
    return next(matches, None)


def is_result(name: str) -> bool:
    """Whether a file is a result of the folder or of one of its runs."""
    return _kind_of(name) == "result"


def run_files(folder: Path) -> set[str]:
    """Names of the results and records in the folder."""
    return _names_of_kinds(folder, {"result", "record"})


def _names_of_kinds(folder: Path, kinds: Collection[str]) -> set[str]:
    """Names of the files of these kinds in the folder."""
    patterns = [pattern for kind in kinds for pattern in KINDS[kind]]
    paths = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    names = {path.relative_to(folder).as_posix() for path in paths}
    return {name for name in names if _kind_of(name) in kinds}


def clear_run(folder: Path) -> None:
    """Removes what killed processes have left in the folder of a run or job."""
    for run in (folder, *_runs(folder)):
        for part in (run, run / "model", run / "report", run / "report" / "figures"):
            clear_leftovers(part)


def _runs(folder: Path) -> list[Path]:
    """The folders of a job's runs."""
    return [path for pattern in RUNS for path in sorted(folder.glob(pattern)) if path.is_dir()]


def find_corrupt(folder: Path) -> dict[str, str]:
    """Files of a finished run, and of the runs in it, that are missing or corrupt: name -> problem. Warns of each.

    A missing checkpoint is no problem: it may have been deleted.
    """
    finished = (folder / "result.json").is_file()
    if finished and not (folder / SUMS).exists():  # killed before it wrote them
        write_sums(folder, run_files(folder))
    corrupt = find_corrupt_files(folder)
    corrupt = {name: what for name, what in corrupt.items() if what != MISSING or not name.startswith("checkpoints/")}
    for name, what in corrupt.items():
        logger.warning("%s %s: %s", folder / name, what, _remedy(name))
    for run in _runs(folder) if finished else ():
        name = run.relative_to(folder).as_posix()
        corrupt |= {f"{name}/{file}": what for file, what in find_corrupt(run).items()}
    return corrupt


def _remedy(name: str) -> str:
    """What happens to a corrupt file."""
    if name == CARD:
        return "it is regenerated, unless it was edited"
    if _kind_of(name) in ("result", "report"):
        return "it is regenerated"
    return "it cannot be regenerated; the model and the result do not depend on it"


def has_report(folder: Path) -> bool:
    """Whether the report is complete and as it was written."""
    names = {name for name in read_sums(folder) if _kind_of(name) == "report"}
    return {PAGE, CARD} <= names and not find_corrupt_files(folder, names)


def record_report(folder: Path) -> None:
    """Writes the checksums of the report's files, in place of earlier ones. Without SHA256SUMS: of all files."""
    sums = read_sums(folder)
    kinds = {"report"} if sums else KINDS.keys()
    write_sums(folder, _names_of_kinds(folder, kinds), drop={name for name in sums if _kind_of(name) == "report"})


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
    """`settings` without what may differ: the keys IGNORED_SETTINGS, and paths whose content another key identifies.

    `images` identifies the images in `data.root` and in a local `data.name`, `excluded` the list in `data.exclude`.
    """
    settings = {key: value for key, value in settings.items() if key not in IGNORED_SETTINGS}
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
