"""Fig. 13, App. D.6: attention along rows and then columns, in a Vision Transformer and in a ResNet.

Fig. 13 has two measures of cost: FLOPs, which are counted here, and speed, which is not measured.
"""

from dataclasses import replace

from vitlab.config import TrainConfig
from vitlab.models.config import ModelConfig, ResNetConfig
from vitlab.models.registry import get_config
from vitlab.studies.point import Point, Scale
from vitlab.studies.presets import FEWSHOT, comparison, jft, resnet, vit
from vitlab.studies.spec import Chart, Claim, Study, share
from vitlab.studies.statistics import Results

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


def variants(scale: Scale) -> list[Point]:
    return [Point(name, config, {"model": name}) for name, config in _configs(scale).items()]


def _configs(scale: Scale) -> dict[str, TrainConfig]:
    if scale == "paper":  # Table 3's recipes of the models that these are the axial forms of
        axial = get_config("AxialResNet50")
        assert isinstance(axial, ResNetConfig)
        forms = {"ViT": {}, "Axial-ViT": {"encoder": "axial"}}
        sizes = {"coarse": "ViT-B/32", "fine": "ViT-B/16"}
        vits = {f"{form}-{size}": jft(row, **model) for size, row in sizes.items() for form, model in forms.items()}
        return vits | {"ResNet": jft("R50x1"), "AxialResNet": jft("R50x1", body=axial.body)}
    # tiny: 18 runs, 19 TFLOP, 9 minutes of one core at 36 GFLOP/s; gpu: 11 PFLOP, 2 minutes at 100 TFLOP/s
    steps = 800 if scale == "tiny" else 2500
    return {name: comparison(scale, model, steps) for name, model in _models(scale).items()}


def _models(scale: Scale) -> dict[str, ModelConfig]:
    """The small models; the two of a pair differ only by the axial attention."""
    if scale == "tiny":
        coarse, fine, layers, side, width = vit(28, 7, 48, 3), vit(28, 4, 48, 3), (1, 1), 28, 32
    else:
        coarse, fine, layers, side, width = vit(32, 8, 192, 6, 6), vit(32, 4, 192, 6, 6), (2, 2), 32, 64
    return {
        "ViT-coarse": coarse,
        "Axial-ViT-coarse": replace(coarse, encoder="axial"),
        "ViT-fine": fine,
        "Axial-ViT-fine": replace(fine, encoder="axial"),
        "ResNet": resnet(side, layers, width),
        "AxialResNet": resnet(side, layers, width, mixing="axial"),
    }


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
    name = str(group.labels["model"])
    return f"{_family(group)}, {_patch(group)}" if _patch(group) else name


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
        "parameters": lambda row: f"{row.model.num_parameters:,}",
        "GFLOPs": lambda row: f"{_gflops(row):.3g}",
        "5-shot, %": share(FEWSHOT),
        "paper: 5-shot on ImageNet, %": lambda row: FIG13[str(row.labels["model"])],
        "accuracy, %": share("accuracy"),
    },
    claims=_claims,
    charts=tuple(
        Chart(
            f"Axial attention: {title}",
            title,
            metric,
            x=_gflops,
            lines=_family,
            note=_patch,
            log_x=True,
            x_label="GFLOPs of a forward pass",
        )
        for title, metric in (("5-shot accuracy", FEWSHOT), ("test accuracy", "accuracy"))
    ),
)
