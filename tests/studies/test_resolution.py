"""Fine-tuning at higher resolution: from one model, at sizes that its patches divide."""

import pytest
from finished import finished, noise, report

from vitlab.config import FinetuneConfig
from vitlab.models.config import ViTConfig
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.studies.point import Point, Scale
from vitlab.studies.presets import changed
from vitlab.studies.resolution import FACTORS, KINDS, RESOLUTION

ACCURACIES = {
    ("interpolated", 1.0): 0.80,
    ("interpolated", 1.5): 0.83,
    ("interpolated", 2.0): 0.84,
    ("fresh", 1.0): 0.78,
    ("fresh", 1.5): 0.79,
    ("fresh", 2.0): 0.79,
}


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
        if scale != "paper":
            assert not set(before.config.data.classes or ()) & set(config.data.classes or ())
    assert len(plain) == 1


def test_paper_scale_is_the_papers() -> None:
    before, *tuned = RESOLUTION.variants("paper")
    assert before.config == PRETRAIN["jft"]("ViT-B/16")
    assert [point.config.model.image_hw[0] for point in tuned[:3]] == [224, 336, 448]
    row = FINETUNE["imagenet"]()
    assert changed(tuned[0].config, model=row.model, average_decay=row.average_decay) == row


def test_report() -> None:
    def accuracy(point: Point) -> float:
        if point.start is None:
            return 0.9
        return ACCURACIES[str(point.labels["positions"]), float(point.labels["factor"])] + noise(point, 0.01)

    written = report(RESOLUTION, finished(RESOLUTION, accuracy))
    assert written["table"]["rows"] == [
        ["1 x", "16", "4 x 4", "80.0 ± 1.0", "78.0 ± 1.0"],
        ["1.5 x", "24", "6 x 6", "83.0 ± 1.0", "79.0 ± 1.0"],
        ["2 x", "32", "8 x 8", "84.0 ± 1.0", "79.0 ± 1.0"],
    ]
    assert [claim["measured"]["mean"] for claim in written["claims"]] == pytest.approx([0.03, 0.04, 0.04, 0.05])
    assert {claim["verdict"] for claim in written["claims"]} == {"shows"}
    lines = {line["name"]: line for line in written["panels"][0]["series"]}
    assert list(lines["interpolated positions"]["x"]) == [16, 24, 32]
    assert lines["fresh positions"]["y"] == pytest.approx([0.78, 0.79, 0.79])
    assert "30,000 images of fashion_mnist" in written["lead"]
    assert "fine-tuned on 600 images" in written["lead"]
