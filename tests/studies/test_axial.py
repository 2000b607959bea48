"""Fig. 13's study: every model beside its axial form."""

from dataclasses import replace

import pytest
from finished import noise, report, verdicts

from vitlab.models.config import ResNetConfig, ViTConfig
from vitlab.studies.axial import AXIAL, FIG13, FORMS
from vitlab.studies.spec import Scale


@pytest.mark.parametrize("scale", ["tiny", "gpu", "paper"])
def test_a_pair_differs_only_by_its_attention(scale: Scale) -> None:
    configs = {str(point.labels["model"]): point.config for point in AXIAL.variants(scale)}
    assert configs.keys() == FIG13.keys()
    for plain, axial in FORMS.items():
        model = configs[axial].model
        if isinstance(model, ViTConfig):
            assert model.encoder == "axial"
            back = replace(model, encoder="full")
        else:
            assert model.body.mixing == "axial"
            back = replace(model, body=replace(model.body, mixing="conv"))
        assert replace(configs[axial], model=back) == configs[plain]
        assert model.forward_macs > configs[plain].model.forward_macs


def test_models_of_the_paper() -> None:
    models = {str(point.labels["model"]): point.config.model for point in AXIAL.variants("paper")}
    resnet, coarse, fine = models["AxialResNet"], models["ViT-coarse"], models["Axial-ViT-fine"]
    assert isinstance(resnet, ResNetConfig)
    assert (resnet.body.layers, resnet.num_classes) == ((3, 4, 6, 3), 18_291)
    assert isinstance(coarse, ViTConfig)
    assert isinstance(fine, ViTConfig)
    assert (coarse.patch_size, fine.patch_size) == (32, 16)


@pytest.mark.parametrize(("gain", "verdict"), [(0.02, "shows"), (-0.02, "contradicted")])
def test_report(gain: float, verdict: str) -> None:
    written = report(AXIAL, lambda point: 0.7 + gain * (point.labels["model"] in FORMS.values()) + noise(point))
    assert verdicts(written) == [verdict] * 6
    assert "1.79 (Axial-ViT, P = 7), 1.63 (Axial-ViT, P = 4), 1.34 (AxialResNet)" in written["lead"]
    line = written["panels"][0]["series"][0]
    assert (line["name"], list(line["notes"])) == ("ViT", ["P = 7", "P = 4"])
