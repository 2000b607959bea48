"""Studies that have ended, without training: every point with the figures that a test gives it."""

import re
from collections.abc import Callable, Sequence

from vitlab.studies.study import Done, Point, Scale, Study, exaflops

IMAGES: dict[Scale, int] = {"tiny": 30_000, "gpu": 25_000, "paper": 303_000_000}
"""Of the training split: half of the classes of Fashion-MNIST and of CIFAR-10, and JFT-300M."""


def finished(
    points: Sequence[Point],
    accuracy: Callable[[Point], float],
    fewshot: Callable[[Point], float] | None = None,
    examples: int = 30_000,
) -> list[Done]:
    """Few-shot accuracy is the accuracy unless told, and grows to it in two evaluations."""
    found = []
    for point in points:
        own, shots = accuracy(point), (fewshot or accuracy)(point)
        curve = [{"step": 5, "loss": 1.0}] + [{"step": s, "fewshot_5shot": shots * s / 20} for s in (10, 20)]
        found.append(Done(point, {"accuracy": own, "loss": 1 - own, "fewshot_5shot": shots}, curve, examples))
    return found


def noise(point: Point, size: float = 1e-3) -> float:
    """What differs from seed to seed and is the same for all points of a seed."""
    return size * (point.config.seed - 1)


def check_points(study: Study, core_minutes: float = 24.0) -> None:
    """Names that make folders; seeds; and the time that each scale may take."""
    for scale, images in IMAGES.items():
        points = study.points(scale)
        names = [point.name for point in points]
        assert len(set(names)) == len(names)
        assert all(re.fullmatch(r"[\w.-]+", name) for name in names)
        groups: dict[tuple, list[int]] = {}
        for point in points:
            groups.setdefault(tuple(point.labels.items()), []).append(point.config.seed)
        expected = [0] if scale == "paper" else [0, 1, 2]
        assert all(sorted(seeds) == expected for seeds in groups.values())
        whole = 1e18 * sum(exaflops(point.config, images) for point in points)
        if scale == "tiny":
            assert whole <= core_minutes * 60 * 36e9
        if scale == "gpu":
            assert whole <= 25 * 60 * 100e12
