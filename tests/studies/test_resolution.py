"""Fine-tuning at higher resolution: from one model, at sizes that its patches divide."""

import pytest
from finished import noise, report, verdicts

from vitlab.config import FinetuneConfig
from vitlab.models.config import ViTConfig
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.studies.presets import changed
from vitlab.studies.resolution import FACTORS, KINDS, RESOLUTION
from vitlab.studies.spec import Point, Scale

ACCURACIES = {"interpolated": (0.80, 0.83, 0.84), "fresh": (0.78, 0.79, 0.79)}


@pytest.mark.parametrize("scale", ["tiny", "gpu", "paper"])
def test_only_size_and_positions_differ(scale: Scale) -> None:
    before, *tuned = RESOLUTION.variants(scale)
    assert len(tuned) == len(FACTORS) * len(KINDS)
    assert isinstance(before.config.model, ViTConfig)
    plain = set()
    for point in tuned:
        config = point.config
        assert isinstance(config, FinetuneConfig)
        assert isinstance(config.model, ViTConfig)
        assert config.model.patch_size == before.config.model.patch_size
        assert config.model.image_hw[0] == point.labels["factor"] * before.config.model.image_hw[0]
        assert config.fresh_positions == (point.labels["positions"] == "fresh")
        plain.add(changed(config, model=before.config.model, fresh_positions=False))
    assert len(plain) == 1


def test_runs_of_the_paper() -> None:
    before, *tuned = RESOLUTION.variants("paper")
    assert before.config == PRETRAIN["jft"]("ViT-B/16")
    assert [point.config.model.image_hw[0] for point in tuned[:3]] == [224, 336, 448]
    row = FINETUNE["imagenet"]()
    assert changed(tuned[0].config, model=row.model, average_decay=row.average_decay) == row


def test_report() -> None:
    def accuracy(point: Point) -> float:
        if point.start is None:
            return 0.9
        kind, factor = str(point.labels["positions"]), float(point.labels["factor"])
        return ACCURACIES[kind][FACTORS.index(factor)] + noise(point, 0.01)

    written = report(RESOLUTION, accuracy)
    assert written["table"]["rows"] == [
        ["1 x", "16", "4 x 4", "80.0 ± 1.0", "78.0 ± 1.0"],
        ["1.5 x", "24", "6 x 6", "83.0 ± 1.0", "79.0 ± 1.0"],
        ["2 x", "32", "8 x 8", "84.0 ± 1.0", "79.0 ± 1.0"],
    ]
    assert [claim["measured"]["mean"] for claim in written["claims"]] == pytest.approx([0.03, 0.04, 0.04, 0.05])
    assert verdicts(written) == ["shows"] * 4
    lines = {line["name"]: line for line in written["panels"][0]["series"]}
    assert list(lines["interpolated positions"]["x"]) == [16, 24, 32]
    assert lines["fresh positions"]["y"] == pytest.approx(ACCURACIES["fresh"])
    assert "30,000 images of fashion_mnist" in written["lead"]
    assert "fine-tuned on 600 images" in written["lead"]
