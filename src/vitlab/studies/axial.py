"""Fig. 13, App. D.6: attention along rows and then columns, in a Vision Transformer and in a ResNet.

Fig. 13 has two measures of cost: FLOPs, which are counted here, and speed, which `vitlab bench` measures.
"""

from vitlab.models.config import ResNetConfig
from vitlab.studies.presets import MEASURED, Models, comparison, resnet, transfer, transfer_and_accuracy, vit
from vitlab.studies.spec import Claim, Results, Scale, Study, StudyRun, changed, difference, named

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

NO_CONVOLUTIONS = "without 3 x 3 convolutions ViTs overtake ResNets on no fewer than 9 million images (Fig. 4)"
"""Why only the paper's scale shows an AxialResNet, which has attention in their place, ahead of a ResNet."""

MODELS: dict[str, Models] = {
    "ViT-coarse": {"small": (vit(28, 7, 48, 3), 3000), "paper": "ViT-B/32"},
    "ViT-fine": {"small": (vit(28, 4, 48, 3), 3000), "paper": "ViT-B/16"},
    "ResNet": {"small": (resnet(1, 1), 3000), "paper": "R50x1"},
}


def variants(scale: Scale) -> list[StudyRun]:
    """Pairs that differ only by the axial attention."""
    runs = []
    for plain, axial in FORMS.items():
        config = comparison(scale, MODELS[plain])
        form = {"body": {"mixing": "axial"}} if isinstance(config.model, ResNetConfig) else {"encoder": "axial"}
        runs.append(StudyRun(plain, config, {"model": plain}))
        runs.append(StudyRun(axial, changed(config, model=form), {"model": axial}))
    return runs


def _gflops(group: Results) -> float:
    return 2 * group.model.forward_macs / 1e9


AXIAL = Study(
    name="axial",
    source="Fig. 13, App. D.6",
    question="What does attention along rows and columns gain over attention among all patches, and what does it cost?",
    variants=variants,
    summary="ViTs with patches of two sizes and a ResNet, each with its axial form.",
    rows=("model",),
    columns={
        "model": "model",
        "GFLOPs": lambda row: f"{_gflops(row):.3g}",
        "paper: 5-shot on ImageNet, %": named("model", FIG13),
        **MEASURED,
    },
    claims=tuple(
        Claim(
            f"{axial} has a higher {measure} than {plain}.",
            f"{FIG13[axial]}% against {FIG13[plain]}% 5-shot (Fig. 13)",
            difference(metric, {"model": axial}, {"model": plain}),
            out_of_reach=NO_CONVOLUTIONS if plain == "ResNet" else "",
        )
        for metric, measure in ((transfer, "transfer accuracy"), ("accuracy", "accuracy on the pre-training task"))
        for plain, axial in FORMS.items()
    ),
    charts=transfer_and_accuracy(
        "Axial attention",
        x=_gflops,
        lines=lambda group: group.labels["model"].removesuffix("-coarse").removesuffix("-fine"),
        log_x=True,
        x_label="GFLOPs of a forward pass",
    ),
)
