"""Fig. 13's study: every model beside its axial form."""

import dataclasses

import pytest
from finished import check_points, finished, noise

from vitlab.inspect.plots import panels
from vitlab.models.config import ResNetConfig, ViTConfig
from vitlab.studies.axial import AXIAL, FIG13, FORMS
from vitlab.studies.study import Point, Scale


def test_points() -> None:
    check_points(AXIAL)


@pytest.mark.parametrize("scale", ["tiny", "gpu", "paper"])
def test_a_pair_differs_by_its_attention_alone(scale: Scale) -> None:
    configs = {str(point.labels["model"]): point.config for point in AXIAL.points(scale) if point.config.seed == 0}
    assert configs.keys() == FIG13.keys()
    for plain, axial in FORMS.items():
        model = configs[axial].model
        if isinstance(model, ViTConfig):
            assert model.encoder == "axial"
            back = dataclasses.replace(model, encoder="full")
        else:
            assert model.body.mixing == "axial"
            back = dataclasses.replace(model, body=dataclasses.replace(model.body, mixing="conv"))
        assert dataclasses.replace(configs[axial], model=back) == configs[plain]
        assert model.forward_macs > configs[plain].model.forward_macs  # "at the cost of more compute"


def test_the_papers_models() -> None:
    models = {str(point.labels["model"]): point.config.model for point in AXIAL.points("paper")}
    resnet = models["AxialResNet"]
    assert isinstance(resnet, ResNetConfig)
    assert (resnet.body.layers, resnet.num_classes) == ((3, 4, 6, 3), 18_291)
    sides = [getattr(models[name], "patch_size") for name in ("ViT-coarse", "Axial-ViT-fine")]  # noqa: B009
    assert sides == [32, 16]


def accuracy(point: Point, gain: float) -> float:
    return 0.7 + gain * (point.labels["model"] in FORMS.values()) + noise(point)


def test_report() -> None:
    report = AXIAL.report(finished(AXIAL.points("tiny"), lambda point: accuracy(point, 0.02)))
    assert [claim.verdict for claim in report.claims] == ["shows"] * 6
    assert report.claims[0].text == "Axial-ViT, P = 7 has a higher 5-shot accuracy than ViT, P = 7."
    assert report.claims[0].paper.startswith("57.5-60.0 % against 55.0-57.5 %")
    assert [row[0] for row in report.rows][1::2] == ["Axial-ViT, P = 7", "Axial-ViT, P = 4", "AxialResNet"]
    assert "1.79 (Axial-ViT, P = 7), 1.63 (Axial-ViT, P = 4), 1.34 (AxialResNet)" in report.lead
    vit = report.panels[0].series[0]
    assert (vit.name, list(vit.notes)) == ("ViT", ["P = 7", "P = 4"])
    assert vit.x[0] < vit.x[1]
    assert panels(report.panels).axes


def test_report_of_another_outcome() -> None:
    claims = AXIAL.report(finished(AXIAL.points("tiny"), lambda point: accuracy(point, -0.02))).claims
    assert [claim.verdict for claim in claims] == ["contradicted"] * 6
