"""scikit-learn's own tools on images: cross-validation, grid search, pipelines, clones, pickles."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.special import expit
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils import estimator_checks
from torch import nn

from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.evaluation import features as features_module
from vitlab.evaluation.linear_head import least_squares_head
from vitlab.models import ViTConfig
from vitlab.models.vit import build_model
from vitlab.sklearn import ViTClassifier, ViTFeatures
from vitlab.weights import load_model, save_model

CONFIG = ViTConfig(image_size=8, patch_size=4, width=16, depth=8, heads=2, mlp_dim=32, num_classes=3, head_std=0.1)
FLOAT: dict[str, Any] = {"device": "cpu", "precision": "float32"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its last four blocks hide most of what the fourth gives."""
    model: Any = build_model(CONFIG, generator=torch.Generator().manual_seed(0))
    for block in model.blocks[4:]:
        nn.init.normal_(block.mlp.fc2.weight, std=3.0, generator=torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("sklearn") / "model"
    save_model(model, folder)
    return folder


@pytest.fixture(scope="module")
def digits() -> tuple[np.ndarray, np.ndarray]:
    """200 images, uint8 [n, 8, 8, 3], and their names."""
    dataset = load_dataset("digits", "train").take(np.arange(200))
    assert dataset.pixels is not None
    return dataset.pixels, np.array([f"digit {label}" for label in dataset.labels])


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_representations(checkpoint: Path, digits: Any, tmp_path: Path) -> None:
    """Of pixels, PIL images, files and encoded bytes: those of the model."""
    pixels, _ = digits
    estimator = ViTFeatures(checkpoint, **FLOAT)
    x = estimator.fit_transform(pixels[:6])
    images = torch.from_numpy(pixels[:6]).permute(0, 3, 1, 2) / 127.5 - 1
    model: Any = load_model(checkpoint, num_classes=0).eval()
    with torch.inference_mode():
        np.testing.assert_allclose(x, model(images), rtol=1e-4, atol=1e-4)
    paths = [tmp_path / f"{number}.png" for number in range(6)]
    for path, image in zip(paths, pixels, strict=False):
        Image.fromarray(image).save(path)
    for others in (paths, np.array(list(map(str, paths))), [Image.fromarray(image) for image in pixels[:6]]):
        np.testing.assert_allclose(estimator.transform(others), x)
    np.testing.assert_allclose(estimator.transform([path.read_bytes() for path in paths]), x)
    assert list(estimator.get_feature_names_out()[:2]) == ["vitfeatures0", "vitfeatures1"]


def test_an_image_is_computed_once(checkpoint: Path, digits: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the set that it is in; a corrupt entry of the cache is computed again."""
    pixels, _ = digits
    estimator = ViTFeatures(checkpoint, **FLOAT).fit(pixels)
    x = estimator.transform(pixels[:9])
    compute, counts = features_module._compute, []

    def counted(model: Any, representation: Any, dataset: Any, *arguments: Any) -> Any:
        counts.append(len(dataset))
        return compute(model, representation, dataset, *arguments)

    monkeypatch.setattr(features_module, "_compute", counted)
    np.testing.assert_array_equal(estimator.transform(pixels[3:7]), x[3:7])
    assert estimator.transform(pixels[5:12]).shape == (7, 16)
    assert counts == [3]
    for file in estimator._model(estimator.options_).cache.rglob("*.npz"):
        file.write_bytes(b"corrupt")
    np.testing.assert_allclose(estimator.transform(pixels[:9]), x, rtol=1e-4, atol=1e-5)
    assert counts == [3, 9]


def test_the_block_is_chosen_by_the_labels(checkpoint: Path, digits: Any) -> None:
    pixels, labels = digits
    chosen = ViTFeatures(checkpoint, layer="auto", pool="gap", **FLOAT).fit(pixels, labels)
    assert (chosen.options_.layer, chosen.options_.pool) == (4, "gap")
    assert chosen.transform(pixels[:2]).shape == (2, 16)
    with pytest.raises(UserError, match="chooses by the labels"):
        ViTFeatures(checkpoint, layer="auto", **FLOAT).fit(pixels)


def test_the_classifier_is_the_least_squares_head(checkpoint: Path, digits: Any) -> None:
    pixels, labels = digits
    classifier = ViTClassifier(checkpoint, layer=4, **FLOAT).fit(pixels[:150], labels[:150])
    x = ViTFeatures(checkpoint, layer=4, **FLOAT).fit_transform(pixels)
    classes, numbers = np.unique(labels[:150], return_inverse=True)
    head = least_squares_head(x[None, :150], numbers, 10)
    logits = classifier.decision_function(pixels[150:])
    np.testing.assert_allclose(logits, head.logits(x[150:]), rtol=1e-5)
    np.testing.assert_allclose(classifier.predict_proba(pixels[150:]), torch.from_numpy(logits).softmax(1), rtol=1e-5)
    assert list(classifier.predict(pixels[150:])) == [classes[row] for row in logits.argmax(axis=1)]
    assert classifier.score(pixels[150:], labels[150:]) > 0.5
    assert classifier.head_.accuracy == head.accuracy
    with pytest.raises(UserError, match="two classes"):
        ViTClassifier(checkpoint, **FLOAT).fit(pixels[:3], ["a"] * 3)


def test_two_classes(checkpoint: Path, digits: Any) -> None:
    """`decision_function` has one number, which the areas under curves take."""
    pixels, labels = digits
    two = np.isin(labels, ["digit 0", "digit 1"])
    classifier = ViTClassifier(checkpoint, layer=4, **FLOAT).fit(pixels[two], labels[two])
    scores = classifier.decision_function(pixels[two])
    assert scores.shape == (two.sum(),)
    np.testing.assert_array_equal(classifier.classes_[(scores > 0).astype(int)], classifier.predict(pixels[two]))
    np.testing.assert_allclose(expit(scores), classifier.predict_proba(pixels[two])[:, 1], rtol=1e-4)
    images, names = list(pixels[two]), labels[two]
    areas = cross_val_score(ViTClassifier(checkpoint, layer=4, **FLOAT), images, names, cv=3, scoring="roc_auc")
    assert areas.mean() > 0.9


def test_output_as_tables(checkpoint: Path, digits: Any) -> None:
    """Only `transform` has it."""
    pixels, labels = digits
    pytest.importorskip("pandas")
    classifier = ViTClassifier(checkpoint, layer=4, **FLOAT).set_output(transform="pandas").fit(pixels, labels)
    assert classifier.transform(pixels[:2]).shape == (2, 16)
    assert classifier.predict(pixels[:2]).shape == (2,)


def test_images_that_are_no_key_by_themselves(checkpoint: Path, digits: Any) -> None:
    """Open files by their content; a palette and an orientation, as the decoder applies them."""
    pixels, _ = digits
    estimator = ViTFeatures(checkpoint, **FLOAT).fit(pixels)
    x = estimator.transform(pixels[:2])

    def opened(image: np.ndarray) -> io.BytesIO:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "PNG")
        return file

    for row in (0, 1, 0):
        np.testing.assert_allclose(estimator.transform([opened(pixels[row])]), x[row : row + 1], rtol=1e-5)
    palette = Image.fromarray(pixels[0]).quantize()
    inverted = palette.copy()
    inverted.putpalette([255 - value for value in palette.getpalette() or ()])
    assert np.abs(np.subtract(*estimator.transform([palette, inverted]))).max() > 0.01


def test_class_weight(checkpoint: Path, digits: Any) -> None:
    pixels, labels = digits
    few = np.concatenate([np.flatnonzero(labels == "digit 8")[:3], np.flatnonzero(labels == "digit 3")])
    weighted = {"digit 8": 2.0, "digit 3": 0.5}
    heads = [
        ViTClassifier(checkpoint, layer=4, class_weight=weight, **FLOAT).fit(pixels[few], labels[few]).head_
        for weight in (None, "balanced", weighted)
    ]
    assert len({head.loss for head in heads}) == 3
    for weight in ({"digit 8": 0.0, "digit 3": 1.0}, {"digit 8": -1.0, "digit 3": 1.0}):
        with pytest.raises(UserError, match="positive weight"):
            ViTClassifier(checkpoint, layer=4, class_weight=weight, **FLOAT).fit(pixels[few], labels[few])


def test_the_tools_of_scikit_learn(checkpoint: Path, digits: Any) -> None:
    """Groups, a search over blocks, another classifier; a clone of a fitted estimator, and its pickle."""
    pixels, labels = digits
    images, groups = list(pixels), np.arange(200) // 5
    scores = cross_val_score(ViTClassifier(checkpoint, **FLOAT), images, labels, groups=groups, cv=GroupKFold(3))
    assert scores.mean() > 0.5
    search = GridSearchCV(ViTClassifier(checkpoint, **FLOAT), {"layer": [4, 8]}, cv=3).fit(pixels, labels)
    assert search.best_params_ == {"layer": 4}
    pipeline = make_pipeline(ViTFeatures(checkpoint, layer=4, **FLOAT), StandardScaler(), LogisticRegression())
    assert pipeline.fit(pixels, labels).score(pixels, labels) > 0.9
    classifier = ViTClassifier(checkpoint, layer=4, **FLOAT).fit(pixels, labels)
    copy = pickle.loads(pickle.dumps(classifier))  # noqa: S301
    np.testing.assert_array_equal(copy.predict_proba(pixels[:5]), classifier.predict_proba(pixels[:5]))
    assert not hasattr(clone(classifier), "head_")


def test_another_checkpoint_at_the_same_path(checkpoint: Path, digits: Any, tmp_path: Path) -> None:
    pixels, _ = digits
    save_model(load_model(checkpoint), tmp_path / "model")
    estimator = ViTFeatures(tmp_path / "model", **FLOAT)
    before = estimator.fit_transform(pixels[:3])
    save_model(build_model(CONFIG, generator=torch.Generator().manual_seed(5)), tmp_path / "model")
    assert np.abs(estimator.fit_transform(pixels[:3]) - before).max() > 0.1


@pytest.mark.parametrize(
    ("x", "message"),
    [
        ("photo.jpg", "give a list or an array of images"),
        (np.zeros((3, 5)), "give uint8"),
        ([np.zeros((2, 8, 8, 3), np.uint8)], "2 images; give one image in each row"),
        ([Path("nowhere.jpg")], "no file or folder"),
    ],
)
def test_what_is_no_list_of_images(x: Any, message: str, checkpoint: Path, digits: Any) -> None:
    estimator = ViTFeatures(checkpoint, **FLOAT).fit(digits[0])
    with pytest.raises(UserError, match=message):
        estimator.transform(x)


@pytest.mark.parametrize("kind", [ViTFeatures, ViTClassifier])
@pytest.mark.parametrize(
    "check",
    [
        "check_estimator_cloneable",
        "check_estimator_repr",
        "check_estimator_tags_renamed",
        "check_get_params_invariance",
        "check_mixin_order",
        "check_no_attributes_set_in_init",
        "check_parameters_default_constructible",
        "check_set_params",
        "check_valid_tag_types",
    ],
)
def test_checks_of_scikit_learn(kind: Any, check: str) -> None:
    """Those that need no table of numbers; `check_estimator` leaves all others out for estimators of images."""
    getattr(estimator_checks, check)(kind.__name__, kind())
