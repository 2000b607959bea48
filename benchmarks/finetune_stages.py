"""What each stage of `vitlab finetune` adds: head, views, start of the head, optimizer, trained blocks, search.

    python benchmarks/finetune_stages.py DATA --checkpoint CHECKPOINT --out stages.jsonl

DATA is the folder that `finetune_peers.py --prepare` writes. All variants of a set and a seed follow each other, at one
image size; those that fine-tune see every training image `--epochs` times. `default` and those after it take the
average of the fine-tuned weights and those of the head of 5 views that is best on held-out images; the others are the
fine-tuned model. A row is added for each run, and a table of means and standard deviations over seeds is printed.
"""

import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import tyro
from finetune_peers_data import draw
from tyro.conf import Positional

from vitlab.config import FinetuneConfig, OptimConfig
from vitlab.finetuning.protocol import sweep_and_finetune
from vitlab.recipes.finetune import staged

SGD = OptimConfig(name="sgd", lr=0.01, momentum=0.9, clip_norm=1.0)
ADAMW = staged().optim
SEARCH = {"learning_rates": (3e-5, 1e-4, 3e-4), "optim": ADAMW}
LS: dict[str, Any] = {"head": "least_squares"}
VARIANTS: dict[str, dict[str, Any]] = {
    "head alone": {**LS, "runs": 0},
    "head of 5 views": {**LS, "runs": 0, "head_views": 4},
    "zeros, SGD 0.01": {"optim": SGD},
    "zeros, AdamW 1e-4": {"optim": ADAMW},
    "head, SGD 0.001": {**LS, "optim": dataclasses.replace(SGD, lr=0.001)},
    "head, AdamW 1e-4": {**LS, "optim": ADAMW},
    "head, AdamW 3e-5": {**LS, "optim": dataclasses.replace(ADAMW, lr=3e-5)},
    "head, AdamW 3e-4": {**LS, "optim": dataclasses.replace(ADAMW, lr=3e-4)},
    "head, AdamW 1e-4, last 4 blocks": {**LS, "optim": ADAMW, "trained_blocks": 4},
    "head, AdamW 1e-4, chosen augmentation": {**LS, "optim": ADAMW, "head_views": 4},
    "half of the weights, no sweep": {**LS, "optim": ADAMW, "head_views": 4, "alpha": 0.5},
    "quarter of the weights, no sweep": {**LS, "optim": ADAMW, "head_views": 4, "alpha": 0.25},
    "default": {**LS, "optim": ADAMW, "head_views": 4, "learning_rates": (1e-4,)},
    "default, search": {**LS, **SEARCH, "head_views": 4},
}
"""Fields of FinetuneConfig."""


@dataclasses.dataclass(frozen=True)
class Arguments:
    data: Positional[Path]
    checkpoint: str
    sets: tuple[str, ...] = ("flowers102:5", "cifar10:25", "fashion_mnist:25", "digits:10")
    """NAME:IMAGES A CLASS."""
    variants: tuple[str, ...] = tuple(VARIANTS)
    seeds: tuple[int, ...] = (0, 1, 2)
    epochs: float = 3.0
    min_steps: int = 30
    """Steps at least, where the images are few."""
    image_size: int = 84
    test_images: int = 500
    out: Path = Path("finetune_stages.jsonl")


def make_config(given: Arguments, variant: str, folder: Path, seed: int) -> FinetuneConfig:
    base = staged()
    images = sum(1 for _ in (folder / "train").rglob("*.*"))
    steps = max(round(given.epochs * images / 32), given.min_steps)
    changes = dict(VARIANTS[variant])
    changes.setdefault("optim", ADAMW)
    changes["optim"] = dataclasses.replace(changes["optim"], warmup_steps=steps // 10)
    plain = {"learning_rates": (), "head": None, "head_views": None, "steps": steps, "batch_size": 32, "seed": seed}
    plain |= {"alpha": 1.0 if "head" in changes and "learning_rates" not in changes else None}
    data = dataclasses.replace(base.data, name=f"folder:{folder}")
    return dataclasses.replace(base, **{**plain, "data": data, **changes})


def as_table(rows: list[dict[str, Any]]) -> str:
    """Markdown: mean and standard deviation of the accuracy over seeds, in percent."""
    sets = list(dict.fromkeys(row["dataset"] for row in rows))
    lines = [f"| variant | {' | '.join(sets)} |", "|---" * (len(sets) + 1) + "|"]
    for variant in dict.fromkeys(row["variant"] for row in rows):
        cells = [variant]
        for name in sets:
            found = [100 * row["accuracy"] for row in rows if (row["variant"], row["dataset"]) == (variant, name)]
            spread = f" ± {statistics.stdev(found):.1f}" if len(found) > 1 else ""
            cells.append(f"{statistics.fmean(found):.1f}{spread}" if found else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    rows = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    done = {(row["dataset"], row["seed"], row["variant"]) for row in rows}
    for seed in given.seeds:
        for dataset in given.sets:
            name, _, shots = dataset.partition(":")
            folder = draw(given.data, name, int(shots), seed, given.test_images)
            for variant in given.variants:
                if (dataset, seed, variant) in done:
                    continue
                with tempfile.TemporaryDirectory() as work:
                    config = make_config(given, variant, folder, seed)
                    options: dict[str, Any] = {"image_size": given.image_size, "tensorboard": False}
                    options["open_settings"] = ("data.eval_resize", "data.eval_interpolation")
                    result = sweep_and_finetune(given.checkpoint, config, Path(work) / "run", **options).result
                row = {"dataset": dataset, "seed": seed, "variant": variant, "accuracy": result["test"]["accuracy"]}
                row |= {name: result["test"].get(name) for name in ("loss", "expected_calibration_error")}
                row |= {"chosen": result.get("chosen"), "alpha": result.get("alpha")}
                held_out = (*result.get("sweep", ()), result.get("linear", {}).get("held_out"))
                scores = {f"{score.get('learning_rate', 'head')}": score for score in held_out if score}
                row["held_out"] = {name: score["accuracy"] for name, score in scores.items()}
                row["held_out_loss"] = {name: score.get("loss") for name, score in scores.items()}
                if result.get("linear"):
                    row["head_accuracy"] = result["linear"]["accuracy"]
                print(json.dumps(row), file=sys.stderr, flush=True)
                rows.append(row)
                with given.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    print(as_table([row for row in rows if row["dataset"] in given.sets]))


if __name__ == "__main__":
    main()
