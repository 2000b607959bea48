"""Seconds of the few-shot solver for a whole grid of l2, against one direct solve for each l2; on one core.

    OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/fewshot.py --out benchmarks/results/fewshot.json

The size is ImageNet's 10-shot evaluation by a ViT-L: 1,000 classes x 10 images, D = 1024, 50,000 test images, the
30 l2 of the paper's time. The representations are drawn: a mean for each class, noise, a falling spectrum.

- `vitlab`: `Ridge`, one eigendecomposition in float64; answers for all l2 by `Ridge.correct`.
- `direct`: for each l2 a solve of (X'X + l2 I) W = X'Y in float64, scores of all test images, the highest counted.

Both give the same answer for each image and l2 or the benchmark fails. `--direct-l2 6` times the direct way on
six of the l2, evenly chosen, and scales its time up. Seconds are of the processor, so that other work on
the machine does not count; wall-clock seconds stand beside them.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from run_record import describe_run

from vitlab.evaluation.fewshot import BIAS, Ridge
from vitlab.evaluation.options import FewShotProtocol

L2_GRID = FewShotProtocol(original=True).l2_grid


@dataclasses.dataclass(frozen=True)
class Arguments:
    classes: int = 1000
    shots: int = 10
    width: int = 1024
    """D."""
    test: int = 50_000
    apart: float = 0.2
    """How far the classes' means are apart; decides the accuracy."""
    direct_l2: int = 30
    """How many of the l2 the direct way is timed on."""
    out: Path | None = None
    """JSON file for the figures."""


def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = work()
    return result, {"cpu_s": time.process_time() - cpu, "wall_s": time.perf_counter() - wall}


def representations(arguments: Arguments) -> tuple[np.ndarray, ...]:
    """(x, labels) to learn from, (x, labels) to test on; float32."""
    rng = np.random.default_rng(0)
    spectrum = np.arange(1, arguments.width + 1) ** -0.5
    means = rng.standard_normal((arguments.classes, arguments.width)) * spectrum
    mixing = rng.standard_normal((arguments.width, arguments.width)) / arguments.width**0.5

    def draw(labels: np.ndarray) -> np.ndarray:
        noise = rng.standard_normal((len(labels), arguments.width)) * spectrum
        return ((arguments.apart * means[labels] + noise) @ mixing).astype(np.float32)

    train = np.repeat(np.arange(arguments.classes), arguments.shots)
    test = rng.integers(0, arguments.classes, arguments.test)
    return draw(train), train, draw(test), test


def direct(x: np.ndarray, labels: np.ndarray, test_x: np.ndarray, test_labels: np.ndarray, l2: float) -> np.ndarray:
    """Whether each test image's label has the highest score, by one solve."""
    wide = x.astype(np.float64)
    mean, std = wide.mean(axis=0), wide.std(axis=0) + 1e-5
    full = np.column_stack([(wide - mean) / std, np.full(len(x), BIAS)])
    targets = 2.0 * np.eye(labels.max() + 1)[labels] - 1.0
    weights = np.linalg.solve(full.T @ full + l2 * np.eye(full.shape[1]), full.T @ targets)
    answers = []
    for start in range(0, len(test_x), 4096):  # bounded memory, for both
        scores = (test_x[start : start + 4096] - mean) / std @ weights[:-1] + BIAS * weights[-1]
        answers.append(scores.argmax(axis=1))
    return np.concatenate(answers) == test_labels


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    x, labels, test_x, test_labels = representations(arguments)
    ridge, fit = timed(lambda: Ridge(x, labels, arguments.classes))
    right, grid = timed(lambda: ridge.correct(test_x, test_labels, L2_GRID))
    _, single = timed(lambda: ridge.correct(test_x, test_labels, [2.0**10]))
    tried = sorted(set(np.linspace(0, len(L2_GRID) - 1, arguments.direct_l2).round().astype(int).tolist()))
    slow = {"cpu_s": 0.0, "wall_s": 0.0}
    for number in tried:
        answers, spent = timed(lambda l2=L2_GRID[number]: direct(x, labels, test_x, test_labels, l2))
        slow = {name: slow[name] + spent[name] for name in slow}
        if not np.array_equal(answers, right[number]):
            raise SystemExit(
                f"l2 = {L2_GRID[number]}: {(answers != right[number]).sum()} images are answered otherwise"
            )
    slow = {name: seconds * len(L2_GRID) / len(tried) for name, seconds in slow.items()}
    results = {
        "fit": fit,
        "grid_of_30": grid,
        "single_l2": single,
        "direct_30": slow,
        "direct_timed_on": len(tried),
        "speed_up_cpu": slow["cpu_s"] / (fit["cpu_s"] + grid["cpu_s"]),
        "accuracy": {str(L2_GRID[i]): float(right[i].mean()) for i in (0, 10, 20, 29)},
    }
    for name, value in results.items():
        print(name, value)
    if arguments.out is not None:
        record = {"environment": describe_run(arguments, np), "results": results}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
