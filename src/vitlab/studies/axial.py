"""Fig. 13, App. D.6: attention along rows and then columns, in a Vision Transformer and in a ResNet.

Fig. 13 has two axes for cost: FLOPs, which are counted here, and speed, which is not measured.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from vitlab.config import TrainConfig
from vitlab.inspect.panels import Panel
from vitlab.models.config import ModelConfig, ResNetConfig
from vitlab.models.registry import get_config
from vitlab.models.resnet_config import ResNetBody
from vitlab.studies.small import FEWSHOT, LEARNED, gpu, gpu_vit, jft, series, tiny, tiny_vit, told
from vitlab.studies.statistics import difference, estimate, percent
from vitlab.studies.study import SEEDS, Claim, Done, Point, Report, Scale, Study

FIG13 = {
    "ViT-coarse": "55.0-57.5",
    "Axial-ViT-coarse": "57.5-60.0",
    "ViT-fine": "62.5-65.0",
    "Axial-ViT-fine": "above 65.0",
    "ResNet": "about 50",
    "AxialResNet": "55.0-57.5",
}
"""Model -> 5-shot accuracy on ImageNet in percent, as far as the figure's ticks tell it: ViT-B/32 and B/16 (coarse and
fine patches), ResNet50 and their axial forms after 7 epochs of JFT-300M."""

FORMS = {"ViT-coarse": "Axial-ViT-coarse", "ViT-fine": "Axial-ViT-fine", "ResNet": "AxialResNet"}
"""Model -> its axial form."""


def models(scale: Scale) -> dict[str, ModelConfig]:
    """Of the small scales, by their names in FIG13; the two of a pair differ by the axial attention alone."""
    if scale == "tiny":
        coarse, fine, side, layers = tiny_vit(), tiny_vit(patch_size=4), 28, (1, 1)
    else:
        coarse, fine, side, layers = gpu_vit(patch_size=8), gpu_vit(), 32, (2, 2)
    found: dict[str, ModelConfig] = {}
    for name, vit in (("coarse", coarse), ("fine", fine)):
        found[f"ViT-{name}"] = vit
        found[f"Axial-ViT-{name}"] = dataclasses.replace(vit, encoder="axial")
    body = ResNetBody(layers, width=32 if scale == "tiny" else 64, version="v2")
    found["ResNet"] = ResNetConfig(image_size=side, body=body, num_classes=len(LEARNED))
    found["AxialResNet"] = dataclasses.replace(found["ResNet"], body=dataclasses.replace(body, mixing="axial"))
    return found


def points(scale: Scale) -> list[Point]:
    """Every model at three seeds; at the paper's scale its six, once."""
    if scale == "paper":
        return [_point(name, config) for name, config in _paper().items()]
    found = []
    for seed in SEEDS:
        for name, model in models(scale).items():
            # tiny: 18 runs, 19 TFLOP, 9 minutes of one core at 36 GFLOP/s; gpu: 11 PFLOP, 2 minutes at 100 TFLOP/s
            config = tiny(model, seed, steps=800) if scale == "tiny" else gpu(model, seed, steps=2500)
            found.append(_point(name, config))
    return found


def _paper() -> dict[str, TrainConfig]:
    """Table 3's recipes of the models that they are the axial forms of."""
    return {
        "ViT-coarse": jft("ViT-B/32"),
        "Axial-ViT-coarse": jft("ViT-B/32", encoder="axial"),
        "ViT-fine": jft("ViT-B/16"),
        "Axial-ViT-fine": jft("ViT-B/16", encoder="axial"),
        "ResNet": jft("R50x1"),
        "AxialResNet": jft("R50x1", body=_axial_body()),
    }


def _axial_body() -> ResNetBody:
    config = get_config("AxialResNet50")
    assert isinstance(config, ResNetConfig)
    return config.body


def _point(name: str, config: TrainConfig) -> Point:
    return Point(f"{name}.seed-{config.seed}", config, {"model": name})


def title(name: str, model: ModelConfig) -> str:
    """What a table calls a model."""
    return name if isinstance(model, ResNetConfig) else f"{name.rsplit('-', 1)[0]}, P = {model.patch_size}"


def report(done: Sequence[Done]) -> Report:
    """A row for every model, with its cost beside; both accuracies over FLOPs, as Fig. 13's left half."""
    configs = {str(each.point.labels["model"]): each.point.config.model for each in done}
    rows = []
    for name, model in configs.items():
        rows.append((
            title(name, model), f"{model.num_parameters:,}", f"{2 * model.forward_macs / 1e9:.3g}",
            percent(estimate(done, FEWSHOT, model=name)), FIG13[name], percent(estimate(done, "accuracy", model=name)),
        ))  # fmt: skip
    ratios = ", ".join(
        f"{configs[axial].forward_macs / configs[plain].forward_macs:.2f} ({title(axial, configs[axial])})"
        for plain, axial in FORMS.items()
    )
    return Report(
        lead=f"ViTs with patches of two sizes and a ResNet, each beside its axial form. The axial forms take so many "
        f"times the FLOPs of a forward pass: {ratios}. Speed, Fig. 13's other half, is not measured here. {told(done)}",
        columns=("model", "parameters", "GFLOPs", "5-shot, %", "paper: 5-shot on ImageNet, %", "accuracy, %"),
        rows=rows,
        claims=_claims(done, configs),
        panels=[_panel(done, configs, FEWSHOT, "5-shot accuracy"), _panel(done, configs, "accuracy", "test accuracy")],
    )


def _claims(done: Sequence[Done], configs: Mapping[str, ModelConfig]) -> list[Claim]:
    return [
        Claim(
            f"{title(axial, configs[axial])} has a higher {words} than {title(plain, configs[plain])}.",
            f"{FIG13[axial]} % against {FIG13[plain]} % 5-shot (Fig. 13)",
            difference(done, figure, {"model": axial}, {"model": plain}),
        )
        for figure, words in ((FEWSHOT, "5-shot accuracy"), ("accuracy", "accuracy in pre-training's own task"))
        for plain, axial in FORMS.items()
    ]


def _panel(done: Sequence[Done], configs: Mapping[str, ModelConfig], figure: str, name: str) -> Panel:
    drawn = []
    for family in dict.fromkeys(_family(model) for model in configs):
        own = [model for model in configs if _family(model) == family]
        drawn.append(series(
            family, [2 * configs[model].forward_macs / 1e9 for model in own],
            [estimate(done, figure, model=model) for model in own], [_note(configs[model]) for model in own],
        ))  # fmt: skip
    return Panel(f"Axial attention: {name}", "GFLOPs of a forward pass", name, drawn, log_x=True)


def _note(model: ModelConfig) -> str:
    return "" if isinstance(model, ResNetConfig) else f"P = {model.patch_size}"


def _family(name: str) -> str:
    return name.removesuffix("-coarse").removesuffix("-fine")


AXIAL = Study(
    name="axial",
    source="Fig. 13, App. D.6",
    about="What does attention along rows and columns gain over attention among all patches, and what does it cost?",
    points=points,
    report=report,
)
