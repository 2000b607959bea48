"""The pages of a training and of a checkpoint: what they say, and that they are whole, small and escaped."""

from typing import Any

import numpy as np
import pytest
from inside import photograph, random_capture
from markup import Page, check

from vitlab.inspect.figures import LIGHT
from vitlab.inspect.report import Inspection, Mistakes, Phase, Rollout, checkpoint_page, draw, training_page
from vitlab.models import MODELS, ViTConfig, get_config

EVIL = "<script>alert(\"1\")</script> & 'co'"


def phase(name: str = "Pre-training", kinds: int = 3) -> Phase:
    random = np.random.default_rng(0)
    records = [{"step": s, "epoch": s / 9, "loss": 1 / s, "lr": 1e-3} for s in range(1, 9)]
    records.append({"step": 9, "eval_accuracy": 0.75, "eval_loss": float("nan")})
    confusion = np.array([[5, 2, 0], [0, 7, 0], [1, 0, 9]])
    classes = ["cat", EVIL, "a rather long name of a class"]
    if kinds != 3:
        confusion, classes = random.integers(0, 9, (kinds, kinds)), [f"class {i}" for i in range(kinds)]
    return Phase(
        name=name,
        explanation=f"What was done.\n\nA second paragraph, with {EVIL}.",
        numbers={"Test accuracy": "87.5 %", EVIL: "<b>"},
        records=records,
        classes=classes,
        confusion=confusion,
        mistakes=Mistakes(
            random.integers(0, 256, (3, 8, 8, 3), dtype=np.uint8),
            np.array([1, 1, 0]),
            np.array([0, 0, 2]),
            np.array([0.5, 0.9, 0.7]),
        ),
        rollout=Rollout(
            random.integers(0, 256, (2, 16, 16, 3), dtype=np.uint8), ["cat", EVIL], random.random((2, 4, 4))
        ),
        filters=random.random((12, 2, 2, 3)),
        positions=random.uniform(-1, 1, (4, 4, 4, 4)),
        distances=random.random((3, 2)) * 8,
    )


@pytest.fixture(scope="module")
def text() -> str:
    return training_page("Digits & more", f"The lead. {EVIL}", [phase(), phase("Fine-tuning")])


@pytest.fixture(scope="module")
def parsed(text: str) -> Page:
    return Page(text)


def test_the_page_of_a_training_is_valid_without_scripts(text: str) -> None:
    assert not check(text).all("script")


def test_names_of_classes_are_escaped(text: str, parsed: Page) -> None:
    assert "<script" not in text
    assert "<b>" not in text
    assert parsed.words.count('<script>alert("1")</script>') >= 4


def test_figures_have_a_dark_version(parsed: Page) -> None:
    assert len(parsed.all("img")) == 2 * (3 + 1 + 3 + 2 + 3)
    dark = parsed.all("source")
    assert len(dark) == 2 * (3 + 1 + 3)
    assert all(source["media"] == "(prefers-color-scheme: dark)" for source in dark)
    assert not {source["srcset"] for source in dark} & {image["src"] for image in parsed.all("img")}


def test_what_the_page_says(parsed: Page) -> None:
    for words in (
        "Digits & more",
        "87.5 %",
        "21 of 24 test images",
        "predicted cat\n70% sure\nlabel a rather",
        "28.6%",
    ):
        assert words in parsed.words
    sure = [parsed.words.index(part) for part in ("90% sure", "70% sure", "50% sure")]
    assert sure == sorted(sure), "the surest mistake comes first"
    alts = [image["alt"] for image in parsed.all("img")]
    assert "Loss over training steps: loss ends at 0.125, eval loss ends at nan." in alts
    assert "Accuracy over training steps: eval accuracy ends at 0.75." in alts


def test_a_phase_of_few_parts_and_a_run_without_mistakes() -> None:
    bare = Page(training_page("T", "L", [Phase(name="N", explanation="E", numbers={})]))
    assert not bare.all("img", "table", "dl", "h3")
    none = np.zeros(0, dtype=np.int64)
    perfect = Phase(
        name="N",
        explanation="E",
        numbers={},
        classes=["a", "b"],
        confusion=np.eye(2, dtype=np.int64),
        mistakes=Mistakes(np.zeros((0, 8, 8, 3), dtype=np.uint8), none, none, np.zeros(0)),
    )
    shown = Page(training_page("T", "L", [perfect]))
    assert "There are none." in shown.words
    assert not shown.all("table")


def test_a_hundred_classes_stay_small() -> None:
    made = training_page("T", "L", [phase(kinds=100)])
    assert len(made) < 1_500_000
    assert len(Page(made).all("tr")) == 1 + 8


def test_names_must_fit_the_matrix() -> None:
    wrong = Phase(name="Run", explanation="", numbers={}, classes=["a"], confusion=np.eye(2, dtype=np.int64))
    with pytest.raises(ValueError, match="Run: a confusion matrix of 2 classes and 1 class names"):
        training_page("T", "L", [wrong])


def test_a_class_without_images_is_no_trouble() -> None:
    counts = np.array([[0, 0], [1, 2]])
    shown = Page(training_page("T", "L", [Phase("N", "E", {}, classes=["a", "b"], confusion=counts)]))
    assert "2 of 3 test images" in shown.words
    assert "33.3%" in shown.words


# ---- the page of a checkpoint ----


def inspection(config: ViTConfig, images: int, **other: Any) -> Inspection:
    h, w = config.grid
    random = np.random.default_rng(0)
    given: dict[str, Any] = {
        "checkpoint": "folder/model", "config": config, "card": {"classes": [f"kind {i}" for i in range(9)] + [EVIL]},
        "filters": random.random((28, 4, 4, 3)), "positions": random.uniform(-1, 1, (1, h, w, h, w)),
        "capture": random_capture(config, images) if images else None, "names": [f"{i}.png" for i in range(images)],
        "images": [photograph(config.image_hw, i) for i in range(images)],
    }  # fmt: skip
    return Inspection(**given | other)


def config(**other: Any) -> ViTConfig:
    sizes: dict[str, Any] = {"image_size": 32, "patch_size": 8, "width": 8, "depth": 3, "heads": 2, "mlp_dim": 8}
    return ViTConfig(**{**sizes, "num_classes": 10, **other})


def shown(given: Inspection, **options: Any) -> tuple[str, Page]:
    text = checkpoint_page(given, draw(given), **options)
    return text, check(text)


@pytest.fixture(scope="module")
def large() -> str:
    """The largest page that is meant to be: 16 images through L/16 at 384 pixels, its maps hard to compress."""
    model = get_config("ViT-L/16", image_size=384, num_classes=10)
    assert isinstance(model, ViTConfig)
    given = inspection(model, 16)
    return checkpoint_page(given, draw(given))


def test_sixteen_images_of_a_large_model_are_under_5_mb(large: str) -> None:
    assert 2_000_000 < len(large.encode()) < 5_000_000
    assert "mean of" not in large[large.index("<main") : large.index("viewer")], "nothing had to be pooled"


def test_a_checkpoint_s_page_is_whole_and_runs_its_own_script_alone(large: str) -> None:
    page = check(large)
    assert len(page.all("script")) == 1
    assert len(page.all("canvas")) == 16
    assert len(page.all("source")) == 4  # each figure for a dark page


def test_what_a_checkpoint_s_page_says() -> None:
    given = inspection(config(), 3, unreadable=[("bad <1>.png", "cut off")], card={"dataset": "digits"})
    text, page = shown(given, top=2)
    for words in (
        "Inside folder/model", "ViT/8", f"{config().num_parameters:,}", "32 × 32", "4 × 4", "3 × 2", "class token",
        "trained on", "digits", "Patch filters", "Position embeddings", "Attention distance", "bad <1>.png", "cut off",
        "2.png", "Attention of the prediction", "Every layer and every head", "weights from",
    ):  # fmt: skip
        assert words in page.words, words
    assert len(page.all("ol")) == 1 + 3
    assert text.count('class="bar"') == 3 * 2
    assert "kind 0" not in text, "the card has no names: classes are numbers"


def test_predictions_are_sorted() -> None:
    given = inspection(config(), 2)
    assert given.capture is not None
    assert given.capture.probabilities is not None
    predictions = given.predictions(1, 3)
    row = given.capture.probabilities[1]
    assert [share for _, share in predictions] == pytest.approx(sorted(row, reverse=True)[:3])
    assert predictions[0][0] == [*[f"kind {i}" for i in range(9)], EVIL][int(row.argmax())]
    assert len(given.predictions(0, 99)) == 10


def test_a_model_without_a_head_makes_no_predictions() -> None:
    _, page = shown(inspection(config(num_classes=0), 1))
    assert "none: no head" in page.words
    assert "it makes no predictions" in page.words


def test_without_images_there_are_filters_positions_and_the_card() -> None:
    given = inspection(config(), 0)
    assert [drawing.name for drawing in draw(given)] == ["filters", "positions"]
    _, page = shown(given)
    assert len(page.all("img")) == 2
    assert "Attention of the prediction" not in page.words
    _, page = shown(inspection(config(position="none"), 0, positions=None))
    assert len(page.all("img")) == 1


def test_hybrids_and_axial_models_are_called_so() -> None:
    hybrid, axial = MODELS["R50+ViT-B/16"], config(encoder="axial", image_size=(32, 16))
    assert isinstance(hybrid, ViTConfig)
    given = inspection(hybrid, 0)
    text, page = shown(given)
    assert "hybrid" in page.words
    assert "first convolution of the ResNet" in text
    given = inspection(axial, 1)
    _, page = shown(given)
    assert "axial attention" in page.words
    (distances,) = [drawing for drawing in draw(given) if drawing.name == "distances"]
    # two patches along a row: half the weight is 8 pixels away; four along a column
    assert distances.arrays["uniform"].tolist() == pytest.approx([4, 8 * 1.25])


def test_the_line_of_uniform_attention_is_the_closed_form() -> None:
    given = inspection(get_config("ViT-B/16", num_classes=10), 1)  # pyright: ignore[reportArgumentType]
    (distances,) = [drawing for drawing in draw(given) if drawing.name == "distances"]
    assert distances.arrays["uniform"] == pytest.approx([116.5], abs=0.05)


def test_a_page_of_few_of_many_images_and_of_pooled_maps_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.inspect.viewer.CELLS", 100)
    many = inspection(config(), 2)
    assert many.capture is not None
    object.__setattr__(many.capture, "count", 1234)
    _, page = shown(many)
    assert "the first 2 of 1,234 images" in page.words
    assert "the mean of 2 × 2 patches" in page.words


def test_a_training_stands_below_the_checkpoint() -> None:
    given = inspection(config(), 0)
    page = check(checkpoint_page(given, draw(given), phases=[phase("Its training")]))
    assert "Its training" in page.words
    assert LIGHT.page in checkpoint_page(given, draw(given))
