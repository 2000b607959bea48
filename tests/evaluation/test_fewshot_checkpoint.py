"""Few-shot accuracy of a checkpoint: what the command prints, from images on."""

import json
from pathlib import Path

import numpy as np
import pytest
from image_files import write_images

from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.evaluation import load
from vitlab.evaluation.features import features, frozen_preprocessing
from vitlab.evaluation.fewshot import Ridge, choose_l2, sample_shots
from vitlab.evaluation.fewshot_checkpoint import fewshot_checkpoint, format_fewshot
from vitlab.evaluation.options import FeatureOptions, FewShotProtocol
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_model

GOOGLE = frozen_preprocessing(Preprocessing.google(), (8, 8))
"""Google's few-shot evaluation: 9 is 8 * 256 / 224."""
CPU = FeatureOptions(device="cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "vitlab" / "features"


@pytest.mark.usefixtures("pretrained")
def test_checkpoint_on_digits(workdir: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where all features are in the cache."""
    settings = (workdir, ["digits"], FewShotProtocol(shots=(1, 5)))
    report = fewshot_checkpoint(*settings, options=CPU, out=tmp_path / "result.json")
    train, test = load_dataset("digits", "train"), load_dataset("digits", "test")
    train_x, test_x = (features(load_model(workdir), part, preprocessing=GOOGLE) for part in (train, test))
    assert [(row["shots"], row["l2"]) for row in report["rows"]] == [(1, 1024.0), (5, 1024.0)]
    for row in report["rows"]:
        for seed, accuracy in enumerate(row["accuracies"]):
            rows = sample_shots(train.labels, 10, row["shots"], seed)
            ridge = Ridge(train_x.x[rows], train.labels[rows], 10)
            assert accuracy == ridge.correct(test_x.x, test.labels, [1024.0]).mean()
        assert (row["train_images"], row["test_images"], row["short_classes"]) == (10 * row["shots"], len(test), 0)
        assert row["mean"] == pytest.approx(np.mean(row["accuracies"]))
        assert row["deviation"] == pytest.approx(np.std(row["accuracies"], ddof=1))
        assert f"{row['mean']:.2%} ± {row['deviation']:.2%}" in format_fewshot(report)
    assert json.loads((tmp_path / "result.json").read_text()) == json.loads(json.dumps(report))
    assert report["settings"]["preprocessing"]["resize"] == 9  # 8 * 256 / 224
    assert len(list(cache.glob("*.npz"))) == 2
    monkeypatch.delattr(load, "eval_batches")
    assert fewshot_checkpoint(*settings, options=CPU) == report


@pytest.mark.usefixtures("pretrained")
def test_original_form_on_two_sets(workdir: Path, tmp_path: Path) -> None:
    """The first images of each class, one l2 for all sets and each number of shots, chosen by rank."""
    write_images(tmp_path / "some", load_dataset("digits", "train").take(np.arange(200)))
    names, grid = ["digits", f"folder:{tmp_path / 'some'}"], FewShotProtocol(original=True).l2_grid
    report = fewshot_checkpoint(workdir, names, FewShotProtocol(shots=(5,), original=True), options=CPU)
    model, table = load_model(workdir), []
    for name in names:
        train, test = load_dataset(name, "train"), load_dataset(name, "test")
        train_x, test_x = (features(model, part, preprocessing=GOOGLE) for part in (train, test))
        rows = sample_shots(train.labels, 10, 5, None)
        ridge = Ridge(train_x.x[rows], train.labels[rows], 10)
        table.append(ridge.correct(test_x.x, test_x.labels, grid).mean(axis=1))
    best = choose_l2(np.stack(table))[0]
    for row, accuracies_by_l2 in zip(report["rows"], table, strict=True):
        assert (row["l2"], row["accuracies"], row["deviation"]) == (grid[best], [accuracies_by_l2[best]], None)
    protocol = FewShotProtocol(shots=(5,), original=True, leave_self_out=True)
    left = fewshot_checkpoint(workdir, names, protocol, options=CPU)
    assert [row["l2"] for row in left["rows"]] == [grid[choose_l2(table[other][None])[0]] for other in (1, 0)]


@pytest.mark.usefixtures("pretrained")
def test_small_and_broken_folder(workdir: Path, tmp_path: Path) -> None:
    """Fewer images than shots: what is there is used, and the table says so; what cannot be read is counted."""
    digits = load_dataset("digits", "train", classes=(0, 1))
    write_images(tmp_path / "few", digits.take(np.arange(30)))
    name = f"folder:{tmp_path / 'few'}"
    train = load_dataset(name, "train")
    Path(train.entries[0].file).write_bytes(b"")
    protocol, skip = FewShotProtocol(shots=(5, 25)), FeatureOptions(on_error="skip", device="cpu")
    with pytest.raises(ImageError, match="zero bytes"):
        fewshot_checkpoint(workdir, [name], protocol, options=CPU)
    report = fewshot_checkpoint(workdir, [name], protocol, options=skip)
    assert [(row["short_classes"], row["skipped"]) for row in report["rows"]] == [(0, 1), (2, 1)]
    assert "2 classes have fewer images than shots; 1 images could not be read" in format_fewshot(report)
