"""Predictions for images without a label, from files and folders."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from small_disk import small_disk

from vitlab.data.registry import load_dataset
from vitlab.data.transforms import EvalTransform
from vitlab.errors import UserError, WriteError
from vitlab.evaluation import predict as module
from vitlab.evaluation.calibration import Calibrator
from vitlab.evaluation.options import ModelOptions
from vitlab.evaluation.predict import Prediction, predict, writing_table
from vitlab.models import ViTConfig
from vitlab.models.vit import ViT
from vitlab.weights import load_metadata, load_model, save_model
from vitlab.weights.imagenet_classes import imagenet_names


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    """Seven digits as PNG files of their own size, two of them in a folder below."""
    dataset = load_dataset("digits", "test", classes=(0, 1, 2))
    (tmp_path / "images" / "more").mkdir(parents=True)
    paths = [tmp_path / "images" / ("more" if i > 4 else "") / f"{i}.png" for i in range(7)]
    for i, path in enumerate(paths):
        Image.fromarray(dataset.image(i)).save(path)
    return [str(path) for path in paths]


CPU = ModelOptions(device="cpu")


def predictions(checkpoint: Path, *sources: str, **options: Any) -> list[Prediction]:
    return list(predict(checkpoint, sources, CPU, **options))


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("batch_size", [3, 32])
def test_files(workdir: Path, images: list[str], batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCH_SIZE", batch_size)
    result = predictions(workdir, *images)
    pixels = [np.array(Image.open(path)) for path in images]
    with torch.no_grad():
        shares = load_model(workdir)(EvalTransform(8).apply(pixels)).softmax(dim=1)
    assert [prediction.path for prediction in result] == images
    for prediction, row in zip(result, shares.tolist(), strict=True):
        expected = sorted(zip("012", row, strict=True), key=lambda pair: -pair[1])
        assert [name for name, _ in prediction.top] == [name for name, _ in expected]
        assert [share for _, share in prediction.top] == pytest.approx([share for _, share in expected], rel=1e-5)
        assert prediction.error is None


@pytest.mark.usefixtures("pretrained")
def test_prediction_sets(workdir: Path, images: list[str], tmp_path: Path) -> None:
    """The most probable classes up to the limit of the metadata; what the metadata does not allow is an error."""
    masses = np.linspace(0.1, 0.9, 30).tolist()
    save_model(load_model(workdir), tmp_path / "model", extra={**load_metadata(workdir), "coverage_masses": masses})
    limit = Calibrator(None, masses).limit(0.8)
    for prediction in predictions(tmp_path / "model", *images, coverage=0.8):
        assert prediction.labels is not None
        names = [name for name, _ in prediction.top]
        before = np.cumsum([0, *(share for _, share in prediction.top[:-1])])
        assert list(prediction.labels) == names[: int((before <= limit).sum())]
        assert prediction.describe().startswith(", ".join(prediction.labels))
    for checkpoint, coverage, message in (
        (workdir, 0.8, "no held-out images"),
        (tmp_path / "model", 0.99, "at most 0.968"),
        (tmp_path / "model", 1.0, "between 0 and 1"),
    ):
        with pytest.raises(UserError, match=message):
            predictions(checkpoint, *images, coverage=coverage)


@pytest.mark.usefixtures("pretrained")
def test_images_of_low_probability_are_rejected(workdir: Path, images: list[str], tmp_path: Path) -> None:
    """Those below the threshold, not those at it; auto is the threshold of the metadata."""
    highest = sorted(prediction.top[0][1] for prediction in predictions(workdir, *images))
    threshold = highest[3]
    rejected = predictions(workdir, *images, reject_below=threshold)
    assert [prediction.rejected for prediction in rejected] == [each.top[0][1] < threshold for each in rejected]
    assert sum(prediction.rejected for prediction in rejected) == 3
    (line,) = {prediction.as_line() for prediction in rejected if prediction.top[0][1] == highest[0]}
    assert ": not sure (" in line
    metadata = load_metadata(workdir)
    save_model(load_model(workdir), tmp_path / "model", extra={**metadata, "reject_below": threshold})
    assert predictions(tmp_path / "model", *images, reject_below="auto") == rejected
    (first,) = predictions(workdir, images[0], top=1)
    assert dict(first.top) == pytest.approx(dict(rejected[0].top[:1]), rel=1e-5)
    assert first.record().keys() == {"path", "top", "error", "rejected"}
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text().replace(f'"reject_below": {threshold}', '"reject_below": NaN'))
    for checkpoint, options, message in (
        (workdir, {"reject_below": "auto"}, "--reject-below 0"),
        (workdir, {"reject_below": 1.5}, "reject_below is 1"),
        (workdir, {"reject_below": float("nan")}, "reject_below is nan"),
        (tmp_path / "model", {"reject_below": "auto"}, "reject_below is nan"),
        (workdir, {"top": 0}, "top is 0"),
    ):
        with pytest.raises(UserError, match=message):
            predictions(checkpoint, images[0], **options)


def test_table(tmp_path: Path) -> None:
    """A row for each image, also for one that cannot be read and one whose name is not UTF-8."""
    made = [
        Prediction("a, b.png", (("cat", 0.75), ('say "dog"', 0.25)), rejected=True),
        Prediction("broken.png", error="cut off"),
        Prediction("\udcff.png", (("cat", 1.0), ("dog", 0.0))),
    ]
    with writing_table(tmp_path / "new" / "p.csv") as write:
        for prediction in made:
            write(prediction)
    with (tmp_path / "new" / "p.csv").open(newline="", errors="surrogateescape") as file:
        assert list(csv.reader(file)) == [
            ["image", "class_1", "probability_1", "class_2", "probability_2", "rejected", "error"],
            ["a, b.png", "cat", "0.75", 'say "dog"', "0.25", "1", ""],
            ["broken.png", "", "", "", "", "0", "cut off"],
            ["\udcff.png", "cat", "1.0", "dog", "0.0", "0", ""],
        ]


def test_a_table_on_a_full_disk(tmp_path: Path) -> None:
    """A message that names the folder; the rows before it stay."""
    rows = [Prediction(f"{i}.png", (("cat", 0.75),)) for i in range(400)]
    full = pytest.raises(WriteError, match=f"nothing more can be written to {tmp_path}")
    with full, small_disk(), writing_table(tmp_path / "p.csv") as write:
        list(map(write, rows))
    assert (tmp_path / "p.csv").read_text().splitlines()[1:3] == ["0.png,cat,0.75,0,", "1.png,cat,0.75,0,"]


@pytest.mark.usefixtures("pretrained")
def test_broken_image_gives_its_error(workdir: Path, images: list[str], tmp_path: Path) -> None:
    broken, empty = tmp_path / "broken.jpg", tmp_path / "empty.png"
    broken.write_bytes(Path(images[0]).read_bytes()[:60])
    empty.touch()
    sources = (images[0], str(broken), str(empty), images[1])
    result = {prediction.path: prediction for prediction in predictions(workdir, *sources)}
    assert list(result) == list(sources)
    for path in (broken, empty):
        prediction = result[str(path)]
        assert prediction.error
        assert prediction.top == ()
        assert prediction.as_line() == f"{path}: cannot be read: {prediction.error}"
    assert dict(result[images[1]].top) == pytest.approx(dict(predictions(workdir, images[1])[0].top), rel=1e-5)


@pytest.mark.usefixtures("pretrained")
def test_saturated_probabilities_are_ranked_by_their_logits(workdir: Path, images: list[str], tmp_path: Path) -> None:
    model = load_model(workdir)
    assert model.head is not None
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor([30.0, 50.0, 40.0])
    save_model(model, tmp_path / "model", extra={"multi_label": True})
    (prediction,) = predictions(tmp_path / "model", images[0])
    assert prediction.top == (("1", 1.0), ("2", 1.0), ("0", 1.0))


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize(("thresholds", "labels"), [([0.9, 0.99, 0.2], ("2", "0")), (None, ("1", "2"))])
def test_labels_are_set_by_their_thresholds(
    thresholds: list[float] | None, labels: tuple[str, ...], workdir: Path, images: list[str], tmp_path: Path
) -> None:
    """Also those beyond `top`, in text, table and plain data; without stored thresholds from 0.5, which is said."""
    model = load_model(workdir)
    assert model.head is not None
    torch.nn.init.zeros_(model.head.weight)
    model.head.bias.data = torch.tensor([0.9, 0.98, 0.5]).logit() if thresholds else torch.tensor([-0.1, 2.0, 0.1])
    extra = {"multi_label": True} | ({"label_thresholds": thresholds} if thresholds else {})
    save_model(model, tmp_path / "model", extra=extra)
    log: list[str] = []
    broken = tmp_path / "broken.png"
    broken.touch()
    error, prediction = predict(tmp_path / "model", [str(broken), images[0]], CPU, top=1, log=log.append)
    expected = tuple(sorted(labels, key="102".index))
    assert prediction.labels == prediction.record()["labels"] == expected
    assert prediction.as_line().startswith(f"{images[0]}: {', '.join(expected)} (1 ")
    assert any("thresholds" in line and ("0.5" in line) == (thresholds is None) for line in log)
    with writing_table(tmp_path / "p.csv") as write:
        write(error)
        write(prediction)
    head, _, row = csv.reader((tmp_path / "p.csv").read_text().splitlines())
    assert dict(zip(head, row, strict=True))["labels"] == "|".join(expected)
    for reject_below in ("auto", 0.5):
        with pytest.raises(UserError, match=r"several labels .* leave it out"):
            next(predict(tmp_path / "model", images[:1], CPU, reject_below=reject_below))


@pytest.mark.usefixtures("pretrained")
def test_images_are_brought_to_size_as_in_the_test(workdir: Path, tmp_path: Path) -> None:
    """With the resize of the card: a mark at the edge of a wide image lies outside the central crop."""
    model = load_model(workdir)
    save_model(model, tmp_path / "crops", extra={"preprocessing": {"resize": 8, "interpolation": "area"}})
    save_model(model, tmp_path / "squashes")  # whose classes have no names
    for name, color in (("plain", (0, 0, 0)), ("marked", (255, 255, 255))):
        image = Image.new("RGB", (32, 8))
        image.paste(color, (0, 0, 6, 8))
        image.save(tmp_path / f"{name}.png")
    for checkpoint, same in (("crops", True), ("squashes", False)):
        plain, marked = predictions(tmp_path / checkpoint, str(tmp_path / "plain.png"), str(tmp_path / "marked.png"))
        assert (plain.top == marked.top) == same
        assert {name for name, _ in plain.top} == {"0", "1", "2"}


def test_lines() -> None:
    assert Prediction("a.png", (("cat", 0.91234), ("dog", 0.08))).as_line() == "a.png: cat 91.2%, dog 8.0%"
    assert Prediction("a\nb.png", (("\x1b[31mcat", 0.5),)).as_line() == "'a\\nb.png': '\\x1b[31mcat' 50.0%"


def small(classes: int, scale: float) -> ViT:
    model = ViT(ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, num_classes=classes))
    assert model.head is not None
    torch.nn.init.uniform_(model.head.weight, 0, scale)
    return model


def test_heads(tmp_path: Path, images: list[str]) -> None:
    """Of ImageNet, whose names are known, of zeros, and of outputs that are not finite."""
    for name, model in {"imagenet": small(1000, 1), "new": small(7, 0), "overflow": small(7, 3e38)}.items():
        save_model(model, tmp_path / name)
    log: list[str] = []
    (prediction,) = predict(tmp_path / "imagenet", images[:1], CPU, log=log.append)
    assert {name for name, _ in prediction.top} <= set(imagenet_names(1000))
    assert "ImageNet's 1,000" in log[-1]
    with pytest.raises(UserError, match=r"is zero.*`vitlab finetune \S+new --dataset"):
        predictions(tmp_path / "new", images[0])
    (prediction,) = predictions(tmp_path / "overflow", images[0])
    assert prediction.top == ()
    assert "not finite" in (prediction.error or "")
