"""Figures against plain loops over made-up logits, and the evaluation of a checkpoint."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_files import put
from sklearn.metrics import average_precision_score
from torch import Tensor, nn

from vitlab.config import TrainConfig
from vitlab.data.dataset import Dataset, Labels
from vitlab.data.decode import Entry, ImageError
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.evaluation import accuracy
from vitlab.evaluation.accuracy import evaluate, evaluate_checkpoint
from vitlab.evaluation.calibration import Calibrator
from vitlab.evaluation.options import EvalOptions, LoaderOptions
from vitlab.evaluation.predictions import read_predictions
from vitlab.evaluation.result import Evaluation, format_evaluation
from vitlab.preprocessing import Preprocessing
from vitlab.runs.pretrain import pretrain
from vitlab.runs.run import PREDICTIONS, RunResult
from vitlab.train.distributed import init_distributed
from vitlab.weights import load_model, save_model
from vitlab.weights.google import write_google

N, K = 23, 7
BATCHES, SKIP = LoaderOptions(5), LoaderOptions(5, on_error="skip")


class Table(nn.Module):
    """Gives the image whose every pixel is i the i-th row of logits, and records its batches."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits
        self.batches: list[list[int]] = []
        self.modes: set[bool] = set()

    def forward(self, images: Tensor) -> Tensor:
        rows = ((images[:, 0, 0, 0] + 1) * 127.5).round().long()
        self.batches.append(rows.tolist())
        self.modes.add(self.training)
        return self.logits[rows]


def images(count: int = N, classes: int = K) -> Dataset:
    pixels = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 4, 4, 3)).copy()
    labels = np.arange(count, dtype=np.int64) % (classes - 1)  # the last class has no image
    return Dataset("made", "test", tuple(f"class {i}" for i in range(classes)), labels, pixels)


def test_a_calibrator() -> None:
    """Losses and confidences of divided logits, and its prediction sets; the error without a temperature is kept."""
    count = 120
    logits = 4 * torch.randn(count, K, generator=torch.Generator().manual_seed(0))
    dataset = images(count)
    plain = evaluate(Table(logits), dataset, (4, 4), BATCHES)
    assert plain.with_calibrator(Calibrator(2.0, [0.5])) == plain
    kept = evaluate(Table(logits), dataset, (4, 4), BATCHES, keep_logits=True)
    masses = np.linspace(0.3, 0.99, 50).tolist()
    same, half = kept.with_calibrator(Calibrator(None, masses)), kept.with_calibrator(Calibrator(2.0, masses))
    divided = evaluate(Table(logits / 2), dataset, (4, 4), BATCHES)
    for mine, expected in ((same, plain), (half, divided)):
        np.testing.assert_allclose(mine.losses, expected.losses, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(mine.confidences, expected.confidences, rtol=1e-5)
        np.testing.assert_array_equal(mine.predictions, expected.predictions)
    record, before, after = half.record(), plain.record(), divided.record()
    assert record["temperature"] == half.metadata()["temperature"] == 2.0
    assert record["uncalibrated_error"] == pytest.approx(before["expected_calibration_error"])
    assert record["expected_calibration_error"] == pytest.approx(after["expected_calibration_error"])
    assert "temperature" not in same.record()
    assert half.metadata()["coverage_masses"] == masses
    sets = Calibrator(2.0, masses).sets((logits / 2).softmax(dim=1).numpy(), 0.9)
    measured = np.mean([sets[row, label] for row, label in enumerate(dataset.labels)])
    expected = {"expected": 0.9, "measured": measured, "mean_size": sets.sum() / count}
    assert record["coverage"] == pytest.approx(expected)
    several = with_sets(images(3), [[0], [1, 2], [2]])
    assert evaluate(Table(logits[:3]), several, (4, 4), keep_logits=True).logits is None


def with_sets(dataset: Dataset, lists: list[list[int]]) -> Dataset:
    sets = Labels.of_lists(lists)
    return dataclasses.replace(dataset, labels=sets.first_labels, label_sets=sets)


@pytest.fixture
def logits() -> Tensor:
    return 2 * torch.randn(N, K)


def assert_same(one: Evaluation, two: Evaluation) -> None:
    """To the bit, in the same order."""
    for field in dataclasses.fields(Evaluation):
        a, b = getattr(one, field.name), getattr(two, field.name)
        if isinstance(a, Labels):
            np.testing.assert_array_equal(a.values, b.values)
            np.testing.assert_array_equal(a.offsets, b.offsets)
        else:
            np.testing.assert_array_equal(a, b, err_msg=field.name)


def test_every_image_once_in_order_in_evaluation_mode(logits: Tensor) -> None:
    model = Table(logits).train()
    result = evaluate(model, images(), (4, 4), BATCHES)
    assert [len(rows) for rows in model.batches] == [5, 5, 5, 5, 3]
    assert list(itertools.chain(*model.batches)) == list(range(N)) == result.indices.tolist()
    assert model.modes == {False}
    assert_same(result, evaluate(model.eval(), images(), (4, 4)))
    with pytest.raises(UserError, match=r"7 classes and made has 9.*vitlab finetune"):
        evaluate(model, images(N, 9), (4, 4))


SEVERAL = ("mean_average_precision", "f1", "exact_match", "images")


@pytest.mark.parametrize("kind", ["one", "alternatives", "several"])
def test_figures_against_a_plain_loop(logits: Tensor, kind: str) -> None:
    """An image is right if any of its labels is predicted; of k alternatives each has the target 1/k, of several labels
    each its own probability."""
    lists: list[list[int]] = [[i % (K - 1)] for i in range(N)]
    dataset = images()
    if kind != "one":
        lists = [sorted({i % K, (3 * i + 1) % K, i % 2}, reverse=True) for i in range(N)]
        alternatives = kind == "alternatives"
        dataset = dataclasses.replace(with_sets(dataset, lists), left_out=4, labels_are_alternatives=alternatives)
    result = evaluate(Table(logits), dataset, (4, 4), BATCHES)
    confusion = np.zeros((K, K), int)
    for i, labels in enumerate(lists):
        row: list[float] = logits[i].tolist()
        order = sorted(range(K), key=lambda k: -row[k])
        shares = [math.exp(value) / sum(map(math.exp, row)) for value in row]
        cross_entropy = -sum(math.log(shares[k]) for k in labels) / len(labels)
        if kind == "several":
            shares = [1 / (1 + math.exp(-value)) for value in row]
            cross_entropy = -sum(math.log(shares[k] if k in labels else 1 - shares[k]) for k in range(K))
        confusion[labels[0], order[0]] += 1
        assert (result.predictions[i], result.labels[i]) == (order[0], labels[0])
        assert (result.correct[i], result.in_top5[i]) == (order[0] in labels, bool(set(order[:5]) & set(labels)))
        assert result.confidences[i] == pytest.approx(shares[order[0]], rel=1e-5)
        assert result.losses[i] == pytest.approx(cross_entropy, rel=1e-5)
    assert 0 < result.correct.sum() < result.in_top5.sum() < N
    expected = {
        "accuracy": result.correct.mean(),
        "loss": result.losses.astype(float).mean(),
        "top5": result.in_top5.mean(),
    }
    if kind == "several":
        hot = [[c in labels for c in range(K)] for labels in lists]
        expected["mean_average_precision"] = average_precision_score(hot, logits, average="macro")
    record = result.record()
    assert result.metrics() == pytest.approx(expected)
    assert (record["images"], record.get("left_out")) == (N, None if kind == "one" else 4)
    if kind == "several":  # its rows are those of test_multi_label.py
        assert result.metadata().keys() == {f"test_{name}" for name in SEVERAL}
        return
    rate = "recall" if kind == "one" else "accuracy"
    for k, per_class in enumerate(result.per_class()):
        members = [i for i in range(N) if k in lists[i]]
        predicted = [i for i in range(N) if logits[i].argmax() == k]
        assert per_class == {
            "class": f"class {k}",
            "images": len(members),
            rate: pytest.approx(result.correct[members].mean()) if members else None,
            "precision": pytest.approx(result.correct[predicted].mean()) if predicted else None,
        }
    if kind == "one":
        recalls = [row["recall"] for row in result.per_class() if row["images"]]
        assert record["balanced_accuracy"] == pytest.approx(np.mean(recalls))
        np.testing.assert_array_equal(result.confusion, confusion)
    low, high = record["accuracy_interval"]
    assert 0 < low < record["accuracy"] < high < 1
    metadata = {"test_accuracy": record["accuracy"], "test_images": N, "test_accuracy_interval": [low, high]}
    assert metadata.items() <= result.metadata().items()


def test_table_of_known_predictions() -> None:
    logits = torch.eye(4)[[0, 0, 0, 1, 2, 2]] * 20
    classes = ("a", "\x1b[31mb", "c", "d")
    dataset = dataclasses.replace(images(6, 4), labels=np.array([0, 0, 0, 0, 1, 1]), classes=classes)
    result = dataclasses.replace(evaluate(Table(logits), dataset, (4, 4)), full_size=9)
    assert result.with_thresholds([0.5] * 4) is result  # without scores no label is set
    assert result.metrics().keys() == {"accuracy", "loss"}  # the top 5 of four classes say nothing
    head, *rows, last = [line.split() for line in result.as_table().splitlines()]
    assert head == ["class", "images", "recall", "precision"]
    assert rows == [["a", "4", "75.0%", "100.0%"], [r"'\x1b[31mb'", "2", "0.0%", "0.0%"], ["c", "0", "-", "0.0%"]]
    for fact in ("6 of 9 images of 2 of the 4", "50.00% (95% interval 18.76% to 81.24%)", "37.50%", "loss 10.0000"):
        assert fact in " ".join(last)
    assert "loss" not in format_evaluation(result.record() | {"loss": None})  # JSON has no NaN


def test_mean_average_precision_of_several_labels_alone(logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of alternatives, nor of more scores than are kept; NaN where a score is."""
    dataset = with_sets(images(), [sorted({i % (K - 1), i * i % (K - 2)}) for i in range(N)])
    alternatives = dataclasses.replace(dataset, labels_are_alternatives=True)
    assert "accuracy_interval" in evaluate(Table(logits), alternatives, (4, 4)).record()
    assert "mean_average_precision" not in evaluate(Table(logits), alternatives, (4, 4)).record()
    logits[0, 0] = math.nan
    assert math.isnan(evaluate(Table(logits), dataset, (4, 4)).metrics()["mean_average_precision"])
    monkeypatch.setattr(accuracy, "MAX_SCORES", N * K - 1)
    assert "mean_average_precision" not in evaluate(Table(logits), dataset, (4, 4)).record()


def test_unreadable_images(logits: Tensor) -> None:
    broken = {i: ImageError(f"image {i}", "zero bytes") for i in (3, 22)}
    dataset = dataclasses.replace(images(), failures=broken)
    result = evaluate(Table(logits), dataset, (4, 4), SKIP)
    assert result.indices.tolist() == [i for i in range(N) if i not in broken]
    assert result.skipped == result.record()["skipped"] == 2
    with pytest.raises(ImageError, match="image 3"):
        evaluate(Table(logits), dataset, (4, 4), BATCHES)
    dataset.failures |= {i: ImageError("x", "broken") for i in range(N)}
    with pytest.raises(UserError, match="none of the 23 images"):
        evaluate(Table(logits), dataset, (4, 4), SKIP)


@pytest.fixture
def on_disk(tmp_path: Path) -> Dataset:
    """Thirteen images, each of one gray and with one to three labels; number 4 is empty."""
    entries = []
    for i in range(13):
        put(tmp_path / f"{i:02}.png", i, (10 + i, 20 - i))
        entries.append(Entry(str(tmp_path / f"{i:02}.png")))
    (tmp_path / "04.png").write_bytes(b"")
    made = Dataset("disk", "test", tuple("abcdefg"), np.zeros(13, np.int64), entries=entries)
    return with_sets(made, [[i % 7, (i + 3) % 7, 6][: 1 + i % 3] for i in range(13)])


@pytest.mark.parametrize(("count", "size"), [(2, 13), (3, 2)])
def test_several_processes(
    count: int, size: int, on_disk: Dataset, in_ranks: Callable[[int, Callable[[], Any]], list[Any]]
) -> None:
    """Each has the whole; also where a process has no readable image at all."""
    model = Table(torch.randn(13, 7))
    dataset = on_disk.take(np.arange(5, 5 - size, -1) % 13)
    alone = evaluate(model, dataset, (8, 8), LoaderOptions(2, on_error="skip"))
    assert (len(alone.labels), alone.skipped) == (size - 1, 1)

    def job() -> Evaluation:
        with init_distributed() as world:
            return evaluate(model, dataset, (8, 8), LoaderOptions(2, on_error="skip"), world=world)

    for result in in_ranks(count, job):
        assert_same(result, alone)


CPU = EvalOptions(batch_size=256, device="cpu")


def at(**options: Any) -> EvalOptions:
    return dataclasses.replace(CPU, **options)


def test_checkpoint_is_evaluated_as_its_run_was(pretrained: RunResult, workdir: Path) -> None:
    """On its own data set, classes and split, which its card names."""
    written, _ = read_predictions(workdir / PREDICTIONS, ("0", "1", "2"))
    assert_same(evaluate_checkpoint(workdir, options=CPU), written)
    assert written.record() == pretrained.result["test"]
    train = evaluate_checkpoint(workdir, split="train", options=at(batch_size=64))
    assert len(train.labels) == len(load_dataset("digits", "train", classes=(0, 1, 2)))


def test_size_and_resize(config: TrainConfig, tmp_path: Path) -> None:
    """Those of the checkpoint's card, in proportion to another size, unless they are given."""
    data = dataclasses.replace(config.data, eval_resize=14)
    finished = pretrain(dataclasses.replace(config, data=data), tmp_path, device="cpu", tensorboard=False)
    dataset, lines, model = load_dataset("digits", "test", classes=(0, 1, 2)), list[str](), load_model(tmp_path)
    result = evaluate_checkpoint(tmp_path, options=CPU, log=lines.append)
    assert result.record() == finished.result["test"]
    assert lines == [f"images: {Preprocessing.google(8, 14).describe()}"]
    assert not np.array_equal(evaluate(model, dataset, (8, 8)).losses, result.losses)
    larger, google = load_model(tmp_path, image_size=12), Preprocessing.google(12, 21)
    expected = evaluate(larger, dataset, (12, 12), preprocessing=google)
    assert_same(evaluate_checkpoint(tmp_path, options=at(image_size=12)), expected)
    resized = evaluate(model, dataset, (8, 8), preprocessing=Preprocessing.google(8, 9))
    assert_same(evaluate_checkpoint(tmp_path, options=at(image_size=8), resize=9), resized)


@pytest.mark.usefixtures("pretrained")
def test_checkpoints_that_do_not_fit(workdir: Path, tmp_path: Path) -> None:
    for name in ("ant", "bee", "fly"):
        for split in ("train", "test"):
            put(tmp_path / "data" / split / name / "0.png")
    write_google(load_model(workdir), tmp_path / "vit.npz")
    save_model(load_model(workdir, num_classes=0), tmp_path / "headless")
    for checkpoint, data, message in (
        (workdir, f"folder:{tmp_path / 'data'}", "classes 0, 1, 2 and not ant, bee, fly"),
        (tmp_path / "vit.npz", None, "--dataset"),
        (tmp_path / "vit.npz", "digits", "3 classes and digits has 10"),
        (tmp_path / "headless", "digits", "has no head"),
        ("missing", "digit", "unknown data set 'digit'"),
    ):
        with pytest.raises(UserError, match=message):
            evaluate_checkpoint(checkpoint, data, options=CPU)


@pytest.mark.usefixtures("pretrained")
def test_cards_of_folders(workdir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Images that the run skipped are skipped in its own data set, whose `root` and class indices are not those of
    others; elsewhere an unreadable image stops the evaluation."""
    for i in range(36):
        put(tmp_path / "mine" / str(3 + i % 3) / f"{i}.png", i)
    own = f"folder:{tmp_path / 'mine'}"
    cards: dict[str, dict[str, Any]] = {"strict": {"on_error": "raise"}, "lenient": {"on_error": "skip"}}
    cards["moved"] = {"dataset": "digits", "root": "/nowhere", "class_indices": [0, 1, 2]}
    for name, card in cards.items():
        card = {"dataset": own, "root": None, "classes": ["3", "4", "5"]} | card
        save_model(load_model(workdir), tmp_path / name, extra=card)
    assert evaluate_checkpoint(tmp_path / "moved", own, options=CPU).classes == ("3", "4", "5")
    images = len(evaluate_checkpoint(tmp_path / "strict", split="all", options=CPU).labels)
    (tmp_path / "mine" / "4" / "1.png").write_bytes(b"")
    result = evaluate_checkpoint(tmp_path / "lenient", split="all", options=CPU)
    assert (len(result.labels), result.skipped) == (images - 1, 1)
    with pytest.raises(ImageError, match=r"1\.png"):
        evaluate_checkpoint(tmp_path / "strict", split="all", options=CPU)
    assert "no image of" not in caplog.text
    for image in (tmp_path / "mine" / "4").iterdir():
        image.write_bytes(b"")
    evaluate_checkpoint(tmp_path / "lenient", split="all", options=CPU)
    assert f"no image of 4 in {own} (all) can be read" in caplog.text
