"""Fig. 8, App. D.2: which dimension of a Vision Transformer to enlarge, when there is compute for more."""

from typing import Any

from vitlab.studies.presets import MEASURED, Models, comparison, transfer, transfer_and_accuracy, vit
from vitlab.studies.spec import Claim, Results, Scale, Study, StudyRun, difference, named

DIMENSIONS = {
    "depth": "depth",
    "width": "width",
    "mlp": "width of the MLP",
    "patch": "patch side",
    "all": "all together",
}
"""Each is varied alone, the last with all others, from the run `base`."""

MODELS: Models = {"small": (vit(28, 7, 32, 2, heads=2), 3000), "paper": "ViT-L/32"}

SETTINGS = {"depth": "depth", "width": "width", "mlp": "mlp_dim", "patch": "patch_size"}
SHAPES: dict[Scale, dict[str, tuple[Any, ...]]] = {
    "small": {
        "base": ((2, 32, 64, 7),),
        "depth": (4, 8, 16),
        "width": (64, 96, 112),
        "mlp": (128, 256, 512),
        "patch": (14, 4),
        "all": ((3, 48, 96, 4), (4, 48, 96, 4)),
    },
    "paper": {
        "base": ((8, 1024, 2048, 32),),
        "depth": (1, 2, 4, 16, 32, 64),
        "width": (512, 2048, 4096),
        "mlp": (1024, 4096, 8192, 16_384),
        "patch": (56, 28, 16, 14),
        "all": ((10, 1280, 2560, 28), (12, 1536, 3072, 28)),
    },
}
"""Values of each dimension, or of all four; the base of `small` is a small version of the paper's.

The paper does not print which values it tried: these span about the tenfold compute of Fig. 8.
"""
HEAD_WIDTH = {"small": 16, "paper": 64}
"""The same for all shapes."""


def variants(scale: Scale) -> list[StudyRun]:
    """The base and every variation."""
    runs, (base,) = [], SHAPES[scale]["base"]
    for dimension, values in SHAPES[scale].items():
        for value in values:
            sizes = dict(zip(SETTINGS, base if dimension in SETTINGS else value, strict=True))
            sizes |= {dimension: value} if dimension in SETTINGS else {}
            settings = {setting: sizes[name] for name, setting in SETTINGS.items()}
            config = comparison(scale, MODELS, heads=sizes["width"] // HEAD_WIDTH[scale], **settings)
            shape = "L{depth}-D{width}-M{mlp}-P{patch}".format(**sizes)
            name = dimension if dimension == "base" else f"{dimension}.{shape}"
            runs.append(StudyRun(name, config, {"dimension": dimension, "shape": shape}))
    return runs


def compute(group: Results) -> float:
    """Multiply-accumulates of a forward pass, relative to the base."""
    return group.model.forward_macs / group.study.where(dimension="base").model.forward_macs


def _lines(group: Results) -> list[str]:
    """The base belongs to every line."""
    dimension = group.labels["dimension"]
    return list(DIMENSIONS.values()) if dimension == "base" else [DIMENSIONS[dimension]]


CLAIMS = (
    ("The deepest ViT is better than the widest", "width brings the smallest changes", "depth", "width"),
    ("Depth helps", "depth is what improves most, up to 64 layers", "depth", "base"),
    ("Smaller patches help", "robust improvements without more parameters", "patch", "base"),
    ("All together help", "scaling all dimensions in proportion improves robustly", "all", "base"),
)
"""Claim, what the paper says, and the dimensions that are compared, each at its largest compute."""


def _claims(results: Results) -> list[Claim]:
    largest = {name: max(results.where(dimension=name).groups(), key=compute) for name in ("base", *DIMENSIONS)}
    times = {name: f"{compute(group):.1f}" for name, group in largest.items()}
    return [
        Claim(
            f"{text}, {by} ({times[ahead]} and {times[behind]} times the base's compute).",
            f"{paper} (Fig. 8; its values are not printed)",
            difference(metric, largest[ahead].labels, largest[behind].labels),
        )
        for text, paper, ahead, behind in CLAIMS
        for metric, by in ((transfer, "in transfer"), ("accuracy", "on the pre-training task"))
    ]


SHAPE = Study(
    name="shape",
    source="Fig. 8, App. D.2",
    question="Which is worth its compute: depth, width, width of the MLPs, smaller patches, or all together?",
    variants=variants,
    summary="A base ViT and others that differ from it in one dimension, or in all. Compute counts a forward pass, "
    "relative to the base's. The paper does not print which values it tried.",
    rows=("dimension", "shape"),
    columns={
        "varied": named("dimension", DIMENSIONS | {"base": "the base"}),
        "shape": "shape",
        "compute": lambda row: f"{compute(row):.2f}",
        **MEASURED,
    },
    claims=_claims,
    charts=transfer_and_accuracy("Shape", x=compute, lines=_lines, x_label="relative compute", log_x=True),
)
