"""Fig. 8, App. D.2: which dimension of a Vision Transformer to enlarge, when there is compute for more."""

from collections.abc import Mapping, Sequence
from typing import Any

from vitlab.inspect.panels import Panel
from vitlab.models.config import ViTConfig
from vitlab.studies.small import FEWSHOT, gpu, gpu_vit, groups, jft, series, tiny, tiny_vit, told
from vitlab.studies.statistics import Estimate, difference, estimate, percent
from vitlab.studies.study import SEEDS, Claim, Done, Point, Report, Scale, Study

DIMENSIONS = {
    "depth": "depth", "width": "width", "mlp": "width of the MLP", "patch": "patch side", "all": "all together"
}  # fmt: skip
"""Each is varied alone, the last with all others; `base` is the point where they meet."""

# The paper's base has 8 blocks, D = 1024, MLPs of 2048 and patches of 32 pixels; these are two in small. Which values
# it tried is not printed: ours span about the tenfold compute of Fig. 8. Heads keep their width.
TINY = tiny_vit(width=32, depth=2, heads=2, mlp_dim=64)
GPU = gpu_vit(width=128, depth=4, heads=4, mlp_dim=256, patch_size=8)
SHAPES: dict[Scale, dict[str, list[dict[str, Any]]]] = {
    "tiny": {
        "base": [{}],
        "depth": [{"depth": depth} for depth in (4, 8, 16)],
        "width": [{"width": width, "heads": width // 16} for width in (64, 96, 128)],
        "mlp": [{"mlp_dim": hidden} for hidden in (128, 256, 512)],
        "patch": [{"patch_size": side} for side in (14, 4)],
        "all": [
            {"depth": 3, "width": 48, "heads": 3, "mlp_dim": 96, "patch_size": 4},
            {"depth": 4, "width": 48, "heads": 3, "mlp_dim": 96, "patch_size": 4},
        ],
    },
    "gpu": {
        "base": [{}],
        "depth": [{"depth": depth} for depth in (8, 16, 32)],
        "width": [{"width": width, "heads": width // 32} for width in (256, 480)],
        "mlp": [{"mlp_dim": hidden} for hidden in (512, 1024, 2048)],
        "patch": [{"patch_size": side} for side in (16, 4)],
        "all": [
            {"depth": 5, "width": 160, "heads": 5, "mlp_dim": 320, "patch_size": 4},
            {"depth": 6, "width": 192, "heads": 6, "mlp_dim": 384, "patch_size": 4},
        ],
    },
    "paper": {
        "base": [{}],
        "depth": [{"depth": depth} for depth in (1, 2, 4, 16, 32, 64)],
        "width": [{"width": width, "heads": width // 64} for width in (512, 2048, 4096)],
        "mlp": [{"mlp_dim": hidden} for hidden in (1024, 4096, 8192, 16_384)],
        "patch": [{"patch_size": side} for side in (56, 28, 16, 14)],
        "all": [
            {"depth": 10, "width": 1280, "heads": 20, "mlp_dim": 2560, "patch_size": 28},
            {"depth": 12, "width": 1536, "heads": 24, "mlp_dim": 3072, "patch_size": 28},
        ],
    },
}


def points(scale: Scale) -> list[Point]:
    """The base and every variation, at three seeds; at the paper's scale at one."""
    seeds = SEEDS if scale != "paper" else SEEDS[:1]
    return [
        _point(scale, dimension, changes, seed)
        for seed in seeds
        for dimension, variations in SHAPES[scale].items()
        for changes in variations
    ]


def _point(scale: Scale, dimension: str, changes: dict[str, Any], seed: int) -> Point:
    match scale:
        case "tiny":  # 42 runs, 21 TFLOP in all: 10 minutes of one core at 36 GFLOP/s
            config = tiny(tiny_vit(**_of(TINY) | changes), seed, steps=800)
        case "gpu":  # 39 runs, 13 PFLOP in all: two minutes at 100 TFLOP/s, but the deep ones are small kernels, many
            config = gpu(gpu_vit(**_of(GPU) | changes), seed, steps=2500)
        case "paper":
            config = jft("ViT-L/32", **{"depth": 8, "mlp_dim": 2048} | changes)
    assert isinstance(config.model, ViTConfig)
    shape = _shape(config.model)
    labels = {"dimension": dimension, "shape": shape}
    name = dimension if dimension == "base" else f"{dimension}.{shape}"
    return Point(f"{name}.seed-{seed}", config, labels)


def _of(base: ViTConfig) -> dict[str, Any]:
    return {name: getattr(base, name) for name in ("depth", "width", "heads", "mlp_dim", "patch_size")}


def _shape(model: ViTConfig) -> str:
    return f"L{model.depth}-D{model.width}-M{model.mlp_dim}-P{model.patch_size}"


def report(done: Sequence[Done]) -> Report:
    """A row for every shape, and both accuracies over compute, as Fig. 8."""
    rows, costs = [], compute(done)
    for dimension, shape in groups(done, "dimension", "shape"):
        own = {"dimension": dimension, "shape": shape}
        model = next(each.point.config.model for each in done if each.point.labels == own)
        assert isinstance(model, ViTConfig)
        rows.append((
            DIMENSIONS.get(str(dimension), "the base"), str(model.depth), str(model.width), str(model.mlp_dim),
            str(model.patch_size), f"{model.num_parameters:,}", f"{costs[shape]:.2f}",
            percent(estimate(done, FEWSHOT, **own)), percent(estimate(done, "accuracy", **own)),
        ))  # fmt: skip
    return Report(
        lead=f"A base ViT, and others that differ from it in one dimension, or in all; compute is that of a forward "
        f"pass, relative to the base's. The paper does not print which values it tried. {told(done)}",
        columns=("varied", "depth", "width", "MLP", "patch", "parameters", "compute", "5-shot, %", "accuracy, %"),
        rows=rows,
        claims=_claims(done, costs),
        panels=[_panel(done, costs, FEWSHOT, "5-shot accuracy"), _panel(done, costs, "accuracy", "test accuracy")],
    )


Costs = Mapping[str | float, float]


def compute(done: Sequence[Done]) -> dict[str | float, float]:
    """Of every shape, multiply-accumulates of a forward pass in those of the base."""
    macs = {each.point.labels["shape"]: each.point.config.model.forward_macs for each in done}
    (base,) = {each.point.labels["shape"] for each in done if each.point.labels["dimension"] == "base"}
    return {shape: count / macs[base] for shape, count in macs.items()}


def _by_compute(done: Sequence[Done], costs: Costs, dimension: str) -> list[str | float]:
    """The shapes along a dimension, the base among them, from the cheapest to the dearest."""
    shapes = [shape for own, shape in groups(done, "dimension", "shape") if own in (dimension, "base")]
    return sorted(shapes, key=lambda shape: costs[shape])


def _claims(done: Sequence[Done], costs: Costs) -> list[Claim]:
    deepest, widest, largest = (_by_compute(done, costs, dimension)[-1] for dimension in ("depth", "width", "all"))
    finest = _by_compute(done, costs, "patch")[-1]
    (base,) = (shape for dimension, shape in groups(done, "dimension", "shape") if dimension == "base")
    drawn = "(Fig. 8; its values are not printed)"

    def claims(more: str | float, less: str | float, text: str, paper: str) -> list[Claim]:
        """By few-shot accuracy, as Fig. 8, and by accuracy on pre-training's own task."""
        return [
            Claim(f"{text}, {by}.", f"{paper} {drawn}", difference(done, figure, {"shape": more}, {"shape": less}))
            for figure, by in ((FEWSHOT, "5-shot"), ("accuracy", "on its own task"))
        ]

    deep, wide = f"{costs[deepest]:.1f} times the base's compute", f"{costs[widest]:.1f} times"
    return [
        *claims(deepest, widest, f"Depth is worth more than width: the deepest ViT, at {deep}, is better than the "
                f"widest, at {wide}", "width brings the smallest changes"),
        *claims(deepest, base, f"Depth helps, at {deep}", "depth is what improves most, up to 64 layers"),
        *claims(finest, base, f"Smaller patches help, at {costs[finest]:.1f} times the compute",
                "robust improvements without more parameters"),
        *claims(largest, base, f"All together help, at {costs[largest]:.1f} times the compute",
                "scaling all dimensions in proportion improves robustly"),
    ]  # fmt: skip


def _panel(done: Sequence[Done], costs: Costs, figure: str, name: str) -> Panel:
    drawn = []
    for dimension, title in DIMENSIONS.items():
        shapes = _by_compute(done, costs, dimension)
        figures: list[Estimate] = [estimate(done, figure, shape=shape) for shape in shapes]
        drawn.append(series(title, [costs[shape] for shape in shapes], figures))
    return Panel(f"Shape: {name}", "relative compute", name, drawn, log_x=True)


SHAPE = Study(
    name="shape",
    source="Fig. 8, App. D.2",
    about="Which is worth its compute: depth, width, width of the MLPs, smaller patches, or all together?",
    points=points,
    report=report,
)
