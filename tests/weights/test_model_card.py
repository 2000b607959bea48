"""README.md of converted models: what the Hub reads, and code that loads them, run as it stands there."""

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image

from vitlab.models import ResNetBody, ResNetConfig
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights import convert, load_model, save_model
from vitlab.weights.model_card import model_card

RUN = {
    "dataset": "folder:/secret/photos of flowers",
    "root": "/secret",
    "classes": ["rose", "a|b", "<i>", "tulip", "\udcff"],
    "test_accuracy": 0.875,
    "start": "base sha256:0123",
    "preprocessing": Preprocessing(12, 14, interpolation="bicubic").to_metadata(),
}


@pytest.fixture
def folder(tmp_path: Path, tiny: Callable[..., ViT], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Beside `theirs`, where a converted run is written."""
    save_model(tiny(), tmp_path / "ours", extra=RUN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(folder: Path) -> list[dict[str, Any]]:
    """The names that each Python block of the card leaves, run in its folder."""
    found = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    results: list[dict[str, Any]] = [{} for _ in found]
    with contextlib.chdir(folder):
        for code, names in zip(found, results, strict=True):
            exec(code, names)
    return results


@pytest.mark.parametrize(("to", "library"), [("timm", "timm"), ("huggingface", "transformers")])
def test_the_card_of_a_run(folder: Path, to: Any, library: str) -> None:
    report = convert("ours", "theirs", to=to)
    card = ModelCard.load(folder / "theirs" / "README.md")
    data = card.data.to_dict()
    assert (data["library_name"], data["pipeline_tag"]) == (library, "image-classification")
    assert {"vitlab", "image-classification"} < set(data["tags"])
    assert data["model-index"][0]["results"][0]["metrics"] == [{"type": "accuracy", "value": 0.875}]
    assert not {"license", "base_model", "datasets"} & data.keys()  # of which nothing is known
    facts = ("# ViT/4 for photos of flowers", "87.50%", f"{report['parameters']:,}", "12 x 12", "base sha256:0123")
    for fact in (*facts, r"a\|b, \<i\>"):
        assert fact in card.text
    assert "secret" not in card.content
    convert("ours", "theirs", to=to)  # in place of an earlier one
    assert convert("theirs", "again", to=to)["difference"] < 1e-4


def several_labels() -> dict[str, Any]:
    """The metadata of a run of several labels."""
    test = {"test_mean_average_precision": 0.728, "test_f1": 0.5, "test_exact_match": 0.25, "test_accuracy": 1.0}
    return RUN | test | {"test_images": 9, "label_thresholds": [0.125] * 5, "multi_label": True}


def test_the_card_of_several_labels(tiny: Callable[..., ViT]) -> None:
    """With their thresholds, and without an accuracy, which one label that all images have makes 100%."""
    text = model_card("vitlab", Path("several"), tiny().config, several_labels())
    (result,) = ModelCard(text).data.to_dict()["model-index"][0]["results"]
    assert result["metrics"] == [{"type": "mean_average_precision", "value": 0.728}]
    for fact in ("72.80% of 9 images |", "| mean F1 | 50.00% |", "25.00% |", "| rose 0.125, "):
        assert fact in text
    assert "100.00%" not in text


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_its_code_loads_the_model(to: Any, several: bool, folder: Path, tiny: Callable[..., ViT]) -> None:
    if several:
        save_model(tiny(), "ours", extra=several_labels())
    convert("ours", "theirs", to=to)
    theirs, ours = blocks(folder / "theirs")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8))
    if to == "timm":
        prepared = theirs["transform"](image)[None]
        outputs = theirs["model"](prepared)
    else:
        prepared = theirs["processor"](image, return_tensors="pt")["pixel_values"]
        outputs = theirs["model"](prepared).logits
    assert prepared.shape == (1, 3, 12, 12)
    with torch.no_grad():
        logits = ours["model"](prepared)
    torch.testing.assert_close(outputs, logits, rtol=1e-4, atol=1e-4)
    if to == "huggingface" and not several:
        best, probabilities = theirs["classify"](image)[0], logits.softmax(1)[0]
        assert best["label"] == RUN["classes"][int(probabilities.argmax())]
        assert best["score"] == pytest.approx(float(probabilities.max()), rel=1e-3)


def test_the_card_of_a_folder_of_ours(folder: Path) -> None:
    """With the numbers of the test; its code is ours alone. Without them there are none."""
    config, numbers = load_model("ours").config, {"test_accuracy_interval": [0.8, 0.925], "test_images": 1234}
    numbers |= {"test_balanced_accuracy": 0.75, "test_expected_calibration_error": 0.015, "alpha": 0.25}
    text = model_card("vitlab", folder / "ours", config, RUN | numbers)
    (folder / "ours" / "README.md").write_text(text, "utf-8")
    assert ModelCard(text).data.to_dict()["library_name"] == "vitlab"
    for fact in ("80.00% to 92.50%", "1,234 images", "| 75.00% |", "| 1.50% |", "25% fine-tuned"):
        assert fact in text
    (names,) = blocks(folder / "ours")
    assert names["model"].config == config
    fewer = model_card("vitlab", folder / "ours", config, RUN)
    for word in ("interval", "balanced", "calibration", "fine-tuned"):
        assert word not in fewer


def test_hostile_names_end_neither_a_title_nor_the_front_matter(folder: Path) -> None:
    evil = "a: 'b'\n---\n# <b>\x1b\u202e"
    card = several_labels() | {"dataset": f"folder:x/{evil}", "classes": [evil, "$b", "c", "d", "e"]}
    text = model_card("vitlab", folder / evil, load_model("ours").config, card)
    assert not re.search("[\x1b\u202e]|^# <b>", text, re.MULTILINE)
    assert ModelCard(text).data.to_dict()["model-index"][0]["name"] == repr(evil)
    assert [line for line in text.splitlines() if line.startswith("# ")] == [
        line for line in text.splitlines() if "# ViT" in line
    ]
    assert r"\$b" in text


@pytest.mark.parametrize(("to", "name"), [("timm", "forward_features"), ("huggingface", "processor")])
def test_a_model_without_a_head(folder: Path, tiny: Callable[..., ViT], to: Any, name: str) -> None:
    save_model(tiny(num_classes=0), folder / "ours")
    convert("ours", "theirs", to=to)
    card = ModelCard.load(folder / "theirs" / "README.md")
    assert card.data.to_dict()["pipeline_tag"] == "image-feature-extraction"
    theirs, ours = blocks(folder / "theirs")
    assert name in theirs or hasattr(theirs["model"], name)
    assert ours["model"].head is None


def test_what_is_on_the_hub_is_linked() -> None:
    config = ResNetConfig(image_size=32, body=ResNetBody((1, 1), width=32, version="v2"), num_classes=4)
    for source, hub_id in (("hub:google/bit-50@main", "google/bit-50"), ("timm:a.b", "timm/a.b"), ("runs/x", None)):
        card = {"source": source, "dataset": "hub:owner/data", "test_accuracy": 0.5}
        data = ModelCard(model_card("timm", Path("folder"), config, card)).data.to_dict()
        assert (data.get("base_model"), data["datasets"]) == (hub_id, "owner/data")
        assert data["model-index"][0]["results"][0]["dataset"]["name"] == "owner/data"
