"""Fig. 8, App. D.2: which dimension of a Vision Transformer to enlarge, when there is compute for more."""

from typing import Any

from vitlab.models.config import ViTConfig
from vitlab.studies.presets import FEWSHOT, Models, comparison, fewshot_and_accuracy, vit
from vitlab.studies.spec import Claim, Point, Results, Scale, Study, parameters, percent

DIMENSIONS = {
    "depth": "depth",
    "width": "width",
    "mlp": "width of the MLP",
    "patch": "patch side",
    "all": "all together",
}
"""Each is varied alone, the last with all others; `base` is the point where they meet."""

# tiny: 42 runs, 21 TFLOP in total, 10 minutes of one core at 36 GFLOP/s; gpu: 39 runs, 13 PFLOP in total, 2 minutes at
# 100 TFLOP/s, more for the many small kernels of deep ones
MODELS: Models = {"tiny": (vit(28, 7, 32, 2, heads=2), 800), "gpu": (vit(32, 8, 128, 4), 2500), "paper": "ViT-L/32"}

# The paper's base has 8 blocks, D = 1024, MLPs of 2048 and patches of 32 pixels; the other two are small versions of
# it. The paper does not print which values it tried: these span about the tenfold compute of Fig. 8. The width of a
# head stays the same.
SHAPES: dict[Scale, dict[str, list[dict[str, Any]]]] = {
    "tiny": {
        "base": [{}],
        "depth": [{"depth": depth} for depth in (4, 8, 16)],
        "width": [{"width": width, "heads": width // 16} for width in (64, 96, 128)],
        "mlp": [{"mlp_dim": hidden} for hidden in (128, 256, 512)],
        "patch": [{"patch_size": side} for side in (14, 4)],
        "all": [{"depth": depth, "width": 48, "heads": 3, "mlp_dim": 96, "patch_size": 4} for depth in (3, 4)],
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
        "base": [{"depth": 8, "mlp_dim": 2048}],
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


def variants(scale: Scale) -> list[Point]:
    """The base and every variation."""
    points, (base,) = [], SHAPES[scale]["base"]
    for dimension, variations in SHAPES[scale].items():
        for changes in variations:
            config = comparison(scale, MODELS, **base | changes)
            model = config.model
            assert isinstance(model, ViTConfig)
            shape = f"L{model.depth}-D{model.width}-M{model.mlp_dim}-P{model.patch_size}"
            name = dimension if dimension == "base" else f"{dimension}.{shape}"
            points.append(Point(name, config, {"dimension": dimension, "shape": shape}))
    return points


def compute(group: Results) -> float:
    """Multiply-accumulates of a forward pass, relative to the base."""
    return group.model.forward_macs / group.study.where(dimension="base").model.forward_macs


def _lines(group: Results) -> list[str]:
    """The base belongs to every line."""
    dimension = str(group.labels["dimension"])
    return list(DIMENSIONS.values()) if dimension == "base" else [DIMENSIONS[dimension]]


def _claims(results: Results) -> list[Claim]:
    largest = {name: max(results.where(dimension=name).groups(), key=compute) for name in DIMENSIONS}
    base, times = {"dimension": "base"}, {name: f"{compute(group):.1f}" for name, group in largest.items()}
    claims = [
        (
            f"Depth is worth more than width: the deepest ViT, at {times['depth']} times the base's compute, is better "
            f"than the widest, at {times['width']} times",
            "width brings the smallest changes",
            "depth",
            largest["width"].labels,
        ),
        (
            f"Depth helps, at {times['depth']} times the base's compute",
            "depth is what improves most, up to 64 layers",
            "depth",
            base,
        ),
        (
            f"Smaller patches help, at {times['patch']} times the compute",
            "robust improvements without more parameters",
            "patch",
            base,
        ),
        (
            f"All together help, at {times['all']} times the compute",
            "scaling all dimensions in proportion improves robustly",
            "all",
            base,
        ),
    ]
    return [
        Claim(f"{text}, {by}.", f"{paper} (Fig. 8; its values are not printed)", metric, largest[more].labels, less)
        for text, paper, more, less in claims
        for metric, by in ((FEWSHOT, "5-shot"), ("accuracy", "on its own task"))
    ]


SHAPE = Study(
    name="shape",
    source="Fig. 8, App. D.2",
    question="Which is worth its compute: depth, width, width of the MLPs, smaller patches, or all together?",
    variants=variants,
    summary="A base ViT and others that differ from it in one dimension, or in all. Compute is that of a forward pass, "
    "relative to the base's. The paper does not print which values it tried.",
    rows=("dimension", "shape"),
    columns={
        "varied": lambda row: DIMENSIONS.get(str(row.labels["dimension"]), "the base"),
        **{
            title: lambda row, name=name: str(getattr(row.model, name))
            for title, name in (("depth", "depth"), ("width", "width"), ("MLP", "mlp_dim"), ("patch", "patch_size"))
        },
        "parameters": parameters,
        "compute": lambda row: f"{compute(row):.2f}",
        "5-shot, %": percent(FEWSHOT),
        "accuracy, %": percent("accuracy"),
    },
    claims=_claims,
    charts=fewshot_and_accuracy("Shape", x=compute, lines=_lines, x_label="relative compute", log_x=True),
)
