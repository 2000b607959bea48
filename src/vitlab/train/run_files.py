"""What a run or a job of several runs leaves: one list, which shows missing and corrupt files."""

import logging
from pathlib import Path, PurePath

from vitlab.checksums import MISSING, SUMS, find_corrupt_files, read_sums, write_sums
from vitlab.io import clear_leftovers

logger = logging.getLogger(__name__)
RUNTIME, METRICS, SPEED, PLAN = "runtime.json", "metrics.jsonl", "speed.jsonl", "plan.json"
RUNS = ("linear", "run-*", "sweep/lr-*")
"""The folders of a job's runs; each has its own SHA256SUMS."""
RESULTS = (
    *("result.json", "predictions.csv", "model/*", "masking.safetensors", "reconstructions.png"),
    *(f"{run}/{SUMS}" for run in RUNS),
)
"""Files that are regenerated from the last checkpoint, or by the runs of the job."""
PAGE, CARD = "report/index.html", "model/README.md"
REPORT = ("report/*", "report/figures/*", CARD)
"""Files that follow a finished job, and are made again from its results. The card may be edited."""
RECORDS = ("config.json", PLAN, RUNTIME, METRICS, SPEED, "tensorboard/*", "checkpoints/*/*")
"""Files that only training itself can regenerate."""


def is_result(name: str) -> bool:
    """Whether a file is one of RESULTS, of the folder or of one of its runs."""
    return _matches(name, RESULTS) and not is_report(name)


def is_report(name: str) -> bool:
    """Whether a file is one of REPORT."""
    return _matches(name, REPORT)


def run_files(folder: Path) -> set[str]:
    """Names of the RESULTS and RECORDS in the folder."""
    return {name for name in _present(folder, (*RESULTS, *RECORDS)) if not is_report(name)}


def find_corrupt(folder: Path) -> dict[str, str]:
    """The corrupt files of a finished run and of the runs in it: name -> problem, with a warning for each. Checkpoints
    may have been deleted."""
    if (folder / "result.json").is_file() and not (folder / SUMS).exists():  # killed before it wrote them
        write_sums(folder, run_files(folder))
    corrupt = find_corrupt_files(folder)
    corrupt = {name: what for name, what in corrupt.items() if what != MISSING or not name.startswith("checkpoints/")}
    for name, what in corrupt.items():
        fate = "it cannot be regenerated; the model and the result do not depend on it"
        fate = "it is regenerated" if is_result(name) or is_report(name) else fate
        fate = "it is regenerated, unless it was edited" if name == CARD else fate
        logger.warning("%s %s: %s", folder / name, what, fate)
    for run in _runs(folder) if (folder / "result.json").is_file() else ():
        name = run.relative_to(folder).as_posix()
        corrupt |= {f"{name}/{file}": what for file, what in find_corrupt(run).items()}
    return corrupt


def has_report(folder: Path) -> bool:
    """Whether the files of REPORT are complete and as they were written."""
    names = [name for name in read_sums(folder) if is_report(name)]
    return {PAGE, CARD} <= set(names) and not find_corrupt_files(folder, names)


def record_report(folder: Path) -> None:
    """Writes the checksums of the files of REPORT, in place of earlier ones."""
    known = read_sums(folder)
    unknown = set() if known else run_files(folder)  # SHA256SUMS is corrupt
    write_sums(folder, _present(folder, REPORT) | unknown, {name for name in known if is_report(name)})


def clear_run(folder: Path) -> None:
    """Removes what killed processes have left in the folder of a run or job."""
    for run in (folder, *_runs(folder)):
        for part in (run, run / "model", run / "report", run / "report" / "figures"):
            clear_leftovers(part)


def _runs(folder: Path) -> list[Path]:
    return [path for pattern in RUNS for path in sorted(folder.glob(pattern)) if path.is_dir()]


def _present(folder: Path, patterns: tuple[str, ...]) -> set[str]:
    paths = [path for pattern in patterns for path in folder.glob(pattern) if path.is_file()]
    return {path.relative_to(folder).as_posix() for path in paths}


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(PurePath(name).match(pattern) for pattern in patterns)
