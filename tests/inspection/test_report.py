"""The pages of a training and of a checkpoint: what they show, and that they are valid, small and escaped."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from inside import photograph, random_capture
from markup import Page, check

from vitlab.inspection import figures
from vitlab.inspection.page import page
from vitlab.inspection.report import (
    DataSection,
    Inspection,
    RunSection,
    checkpoint_page,
    details_of,
    make_embedding_figures,
    make_figures,
    numbers_of,
)
from vitlab.models import ResNetBody, ResNetConfig, ViTConfig, get_config
from vitlab.models.registry import name_of
from vitlab.models.vit import ViT

pytestmark = pytest.mark.usefixtures("unrendered")
EVIL = "<script>alert(\"1\")</script> & 'co'"
SMALL = ViTConfig(image_size=32, patch_size=8, width=8, depth=3, heads=2, mlp_dim=8, num_classes=10)
HYBRID = replace(SMALL, patch_size=1, stem=ResNetBody((1, 1), width=32))
FILTERS = figures.filters(np.random.default_rng(0).random((12, 2, 2, 3)))
POSITIONS = figures.positions(np.random.default_rng(0).uniform(-1, 1, (1, 2, 2, 2, 2)))
RESNET = ResNetConfig(image_size=32, body=ResNetBody((1, 1), width=32, version="v2"), num_classes=4)


@pytest.mark.parametrize(
    ("config", "name"),
    [(SMALL, "ViT/8"), (replace(SMALL, encoder="axial"), "Axial ViT/8"), (HYBRID, "Hybrid/8"), (RESNET, "ResNet")],
)
def test_numbers_of_other_models(config: Any, name: str) -> None:
    """They are named after their kinds."""
    assert name_of(config) == name
    assert numbers_of(config)["Model"] == name
    assert ("Patches, h × w" in numbers_of(config)) == (config is not RESNET)
    assert details_of(config)["num classes"] == str(config.num_classes)


def section(name: str = "Pre-training", **other: Any) -> RunSection:
    records = [{"step": s, "epoch": s / 9, "loss": 1 / s, "lr": 1e-3} for s in range(1, 9)]
    records.append({"step": 9, "eval_accuracy": 0.75, "eval_loss": float("nan")})
    values: dict[str, Any] = {
        "explanation": f"What was done.\n\nA second paragraph, with {EVIL}.",
        "numbers": {"Test accuracy": "87.5%", EVIL: "<b>"},
        "records": records,
        "classes": ["cat", EVIL, "a rather long name of a class"],
        "confusion": np.array([[5, 2, 0], [0, 7, 0], [1, 0, 9]]),
        "per_class": [
            {"class": "cat", "images": 7, "recall": 0.75, "precision": None},
            {"class": EVIL, "images": 9, "recall": 0.125, "precision": 1.0},
            {"class": "absent", "images": 0, "recall": None, "precision": None},
        ],
        "calibration": [np.array([0, 60, 180]), np.array([np.nan, 0.5, 1]), np.array([np.nan, 0.6, 0.9])],
        "mistakes": [figures.PageImage(figures.encode(photograph((8, 8))), f"An image of {EVIL}.", 96, EVIL)],
        "attention": figures.pairs(random_capture(SMALL, 1), [photograph((32, 32))])[0],
        "embedding_figures": [FILTERS, POSITIONS],
    }
    return RunSection(name, **values | other)


def training_page(title: str, lead: str, runs: list[RunSection]) -> str:
    return page("runs.html.j2", title, lead, runs=runs)


@pytest.fixture(scope="module")
def text() -> str:
    return training_page("Digits & more", f"The lead. {EVIL}", [section(), RunSection("Fine-tuning", "", {})])


def test_the_page_of_a_training(text: str) -> None:
    markup = check(text)
    assert "<script" not in text
    assert "<b>" not in text
    assert markup.words.count(EVIL) >= 4
    for words in ("Digits & more", "87.5%", "21 of 24", "28.6%"):
        assert words in markup.words
    assert "absent" not in markup.words
    assert markup.words.index("12.5%") < markup.words.index("75.0%"), "the worst class comes first"
    alts = [image["alt"] for image in markup.all("img")]
    assert len(alts) == 1 + 1 + 1 + 1 + 1 + 2
    assert any("loss ends at 0.125, eval accuracy ends at 0.75" in alt for alt in alts)
    assert any("50.0% at a mean confidence of 60.0% (60 images)" in alt for alt in alts)

    def mistakes(markup: Page) -> str:
        return markup.words.partition("Wrong predictions")[2].partition("Attention of")[0]

    assert "attention rollout" not in mistakes(markup)
    assert "attention rollout" in mistakes(Page(training_page("T", "L", [section(attended=True)])))


def test_sections_of_few_parts_and_of_many_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mistakes; with classes without images; too many for a drawing, where the confusions are still listed."""
    few = section(calibration=[np.array([9]), np.array([1.0]), np.array([1.0])])
    assert "9 test images are too few" in Page(training_page("T", "L", [few])).words
    bare = Page(training_page("T", "L", [RunSection("N", "E", {})]))
    assert not bare.all("img", "table", "dl", "h3")
    perfect = RunSection("N", "E", {}, classes=["a", "b"], confusion=np.eye(2, dtype=np.int64), mistakes=[])
    assert not Page(training_page("T", "L", [perfect])).all("table")
    counts = np.random.default_rng(0).integers(0, 9, (100, 100))
    counts[0] = 0
    many = RunSection("N", "E", {}, classes=[f"class {i}" for i in range(100)], confusion=counts)
    assert len(Page(training_page("T", "L", [many])).all("tr")) == 1 + 8
    with pytest.raises(ValueError, match="100 classes has 99 class names"):
        training_page("T", "L", [replace(many, classes=many.classes[1:])])
    monkeypatch.setattr("vitlab.inspection.report.MAX_DRAWN_CLASSES", 2)
    markup = Page(training_page("T", "L", [section()]))
    assert not [image for image in markup.all("img") if "Confusion" in image["alt"]]
    assert "28.6%" in markup.words


def inspection(config: ViTConfig, images: int, **other: Any) -> Inspection:
    values: dict[str, Any] = {
        "metadata": {"classes": [f"kind {i}" for i in range(9)] + [EVIL]},
        "embeddings": [FILTERS, POSITIONS],
        "capture": random_capture(config, images) if images else None,
        "names": [f"far/away/{i}.png" for i in range(images)],
        "images": [photograph(config.image_hw, i) for i in range(images)],
        "predictions": [[("b", 0.75), (EVIL, 0.25)][: config.num_classes]] * images,
    }
    return Inspection("folder/model", config, **values | other)


def page_of(inspection: Inspection, **options: Any) -> Page:
    return check(checkpoint_page(inspection, make_figures(inspection), **options))


def test_the_page_of_a_checkpoint() -> None:
    inspected = inspection(SMALL, 3, unreadable=[("bad <1>.png", "cut off")], metadata={"dataset": "digits"})
    assert inspected.capture is not None
    inspected = replace(inspected, capture=replace(inspected.capture, count=1234))
    markup = page_of(inspected, runs=[RunSection("Its training", "", {})])
    numbers = ("folder/model", "ViT/8", f"{SMALL.num_parameters:,}", "32 × 32", "4 × 4", "3 × 2", "digits")
    parts = ("Patch filters", "Position embeddings", "Attention distance", "Its training")
    images = ("bad <1>.png", "cut off", "away/2.png", "3 of 1,234 images")
    for words in (*numbers, *parts, *images):
        assert words in markup.words, words
    assert len(markup.all("span")) == 3 * (2 * 3 + 2)
    assert (len(markup.all("script")), len(markup.all("canvas"))) == (1, 3)
    assert "kind 0" not in markup.words, "the metadata has no names: classes are numbers"


def test_the_images_of_a_run_follow_it() -> None:
    pair = figures.PageImage(figures.encode(photograph((8, 20))), EVIL, 280, EVIL)
    data = DataSection("They were compared.", {"Pairs": "1"}, [pair], [(EVIL, "cut off")])
    markup = page_of(inspection(SMALL, 0), runs=[RunSection("Its training", "", {})], data=data)
    assert all(words in markup.words for words in ("Pairs", EVIL, "cut off"))
    parts = [markup.words.rindex(part) for part in ("Its training", "They were compared.", "Patch filters")]
    assert parts == sorted(parts)
    for unreadable in ([], None):
        words = page_of(inspection(SMALL, 0), data=DataSection("E", unreadable=unreadable)).words
        assert ("Unreadable" in words) == (unreadable is not None)


def test_without_images_there_are_filters_and_positions() -> None:
    markup = page_of(inspection(HYBRID, 0))
    assert len(markup.all("img")) == 2
    assert "Attention of the prediction" not in markup.words
    assert [drawing.name for drawing in make_embedding_figures(ViT(SMALL))] == ["filters", "positions"]
    assert [drawing.name for drawing in make_embedding_figures(ViT(replace(SMALL, position="none")))] == ["filters"]


@pytest.mark.parametrize(
    ("config", "pixels"),
    [
        # two patches along a row: half the weight is 8 pixels away; four along a column
        (replace(SMALL, encoder="axial", image_size=(32, 16)), [4, 8 * 1.25]),
        (get_config("ViT-B/16", num_classes=10), [116.5]),
    ],
)
def test_the_line_of_uniform_attention_is_the_closed_form(config: ViTConfig, pixels: list[float]) -> None:
    (distances,) = [drawing for drawing in make_figures(inspection(config, 1)) if drawing.name == "distances"]
    assert distances.arrays["uniform"].tolist() == pytest.approx(pixels, abs=0.05)
