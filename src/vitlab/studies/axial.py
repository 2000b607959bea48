"""Fig. 13, App. D.6: attention along rows and then columns, in a Vision Transformer and in a ResNet.

Fig. 13 has two measures of cost: FLOPs, which are counted here, and speed, which is not measured.
"""

from vitlab.models.config import ResNetConfig
from vitlab.studies.presets import FEWSHOT, Models, changed, comparison, fewshot_and_accuracy, resnet, vit
from vitlab.studies.spec import Claim, Point, Results, Scale, Study, parameters, percent

FIG13 = {
    "ViT-coarse": "55.0-57.5",
    "Axial-ViT-coarse": "57.5-60.0",
    "ViT-fine": "62.5-65.0",
    "Axial-ViT-fine": "above 65.0",
    "ResNet": "about 50",
    "AxialResNet": "55.0-57.5",
}
"""Model -> 5-shot accuracy on ImageNet in percent, read off the figure's ticks: ViT-B/32 and B/16 (coarse and fine
patches), ResNet50 and their axial forms after 7 epochs of JFT-300M."""
FORMS = {"ViT-coarse": "Axial-ViT-coarse", "ViT-fine": "Axial-ViT-fine", "ResNet": "AxialResNet"}
"""Model -> its axial form."""

# tiny: 18 runs, 19 TFLOP, 9 minutes of one core at 36 GFLOP/s; gpu: 11 PFLOP, 2 minutes at 100 TFLOP/s
MODELS: dict[str, Models] = {
    "ViT-coarse": {"tiny": (vit(28, 7, 48, 3), 800), "gpu": (vit(32, 8, 192, 6, 6), 2500), "paper": "ViT-B/32"},
    "ViT-fine": {"tiny": (vit(28, 4, 48, 3), 800), "gpu": (vit(32, 4, 192, 6, 6), 2500), "paper": "ViT-B/16"},
    "ResNet": {"tiny": (resnet(28, (1, 1)), 800), "gpu": (resnet(32, (2, 2), 64), 2500), "paper": "R50x1"},
}


def variants(scale: Scale) -> list[Point]:
    """Pairs that differ only by the axial attention."""
    points = []
    for plain, axial in FORMS.items():
        config = comparison(scale, MODELS[plain])
        form = {"body": {"mixing": "axial"}} if isinstance(config.model, ResNetConfig) else {"encoder": "axial"}
        points += [Point(plain, config, {"model": plain}), Point(axial, changed(config, model=form), {"model": axial})]
    return points


def _summary(results: Results) -> str:
    ratios = []
    for plain, axial in FORMS.items():
        form = results.where(model=axial)
        ratio = form.model.forward_macs / results.where(model=plain).model.forward_macs
        ratios.append(f"{ratio:.2f} ({_title(form)})")
    return (
        "ViTs with patches of two sizes and a ResNet, each beside its axial form. The axial forms take this many times "
        f"the FLOPs of a forward pass: {', '.join(ratios)}. Speed, the other half of Fig. 13, is not measured here."
    )


def _title(group: Results) -> str:
    """Name of a group's model, with its patch size."""
    return ", ".join(filter(None, (_family(group), _patch(group))))


def _family(group: Results) -> str:
    return str(group.labels["model"]).removesuffix("-coarse").removesuffix("-fine")


def _patch(group: Results) -> str:
    return "" if isinstance(group.model, ResNetConfig) else f"P = {group.model.patch_size}"


def _gflops(group: Results) -> float:
    return 2 * group.model.forward_macs / 1e9


def _claims(results: Results) -> list[Claim]:
    titles = {name: _title(results.where(model=name)) for name in FIG13}
    return [
        Claim(
            f"{titles[axial]} has a higher {measure} than {titles[plain]}.",
            f"{FIG13[axial]} % against {FIG13[plain]} % 5-shot (Fig. 13)",
            metric,
            {"model": axial},
            {"model": plain},
        )
        for metric, measure in ((FEWSHOT, "5-shot accuracy"), ("accuracy", "accuracy on the pre-training task"))
        for plain, axial in FORMS.items()
    ]


AXIAL = Study(
    name="axial",
    source="Fig. 13, App. D.6",
    question="What does attention along rows and columns gain over attention among all patches, and what does it cost?",
    variants=variants,
    summary=_summary,
    rows=("model",),
    columns={
        "model": _title,
        "parameters": parameters,
        "GFLOPs": lambda row: f"{_gflops(row):.3g}",
        "5-shot, %": percent(FEWSHOT),
        "paper: 5-shot on ImageNet, %": lambda row: FIG13[str(row.labels["model"])],
        "accuracy, %": percent("accuracy"),
    },
    claims=_claims,
    charts=fewshot_and_accuracy(
        "Axial attention", x=_gflops, lines=_family, note=_patch, log_x=True, x_label="GFLOPs of a forward pass"
    ),
)
