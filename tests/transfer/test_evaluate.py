"""Figures against plain loops over hand-made answers, and the judging of a checkpoint."""

import dataclasses
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from vitlab.data.datasets import load_dataset
from vitlab.data.sources import Dataset, PictureError
from vitlab.train.config import TrainConfig
from vitlab.transfer.evaluate import Evaluation, choose_device, evaluate, evaluate_checkpoint
from vitlab.transfer.run import Outcome, pretrain
from vitlab.weights import load_model, save_model
from vitlab.weights.google import write_google

N, K = 23, 7


class Table(nn.Module):
    """Answers the picture whose every pixel is i with row i, and keeps count of what it was asked."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits
        self.asked: list[list[int]] = []
        self.was_training: set[bool] = set()

    def forward(self, images: Tensor) -> Tensor:
        rows = ((images[:, 0, 0, 0] + 1) * 127.5).round().long()
        self.asked.append(rows.tolist())
        self.was_training.add(self.training)
        return self.logits[rows]


def pictures(count: int = N, classes: int = K) -> Dataset:
    pixels = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 4, 4, 3)).copy()
    labels = np.arange(count, dtype=np.int64) % (classes - 1)  # the last class has no picture
    return Dataset("made", "test", tuple(f"class {i}" for i in range(classes)), labels, pixels)


@pytest.fixture
def logits() -> Tensor:
    return 2 * torch.randn(N, K)


def test_every_picture_once_in_order(logits: Tensor) -> None:
    model = Table(logits)
    found = evaluate(model, pictures(), (4, 4), batch_size=5)
    assert [len(rows) for rows in model.asked] == [5, 5, 5, 5, 3]
    assert list(itertools.chain(*model.asked)) == list(range(N))
    assert found.indices.tolist() == list(range(N))
    assert found.labels.tolist() == pictures().labels.tolist()
    assert found.skipped == 0
    other = evaluate(model, pictures(), (4, 4), batch_size=256)
    for field in ("predictions", "confidences", "losses", "in_top5"):
        np.testing.assert_array_equal(getattr(found, field), getattr(other, field))


def test_figures_against_a_plain_loop(logits: Tensor) -> None:
    found = evaluate(Table(logits), pictures(), (4, 4), batch_size=5)
    right = top5 = 0
    loss = 0.0
    confusion = [[0] * K for _ in range(K)]
    for i in range(N):
        label, answer = i % (K - 1), logits[i].tolist()
        order = sorted(range(K), key=lambda k: -answer[k])
        shares = [math.exp(value) / sum(map(math.exp, answer)) for value in answer]
        right += order[0] == label
        top5 += label in order[:5]
        loss -= math.log(shares[label])
        confusion[label][order[0]] += 1
        assert found.predictions[i] == order[0]
        assert found.confidences[i] == pytest.approx(shares[order[0]], rel=1e-5)
        assert found.losses[i] == pytest.approx(-math.log(shares[label]), rel=1e-5)
        assert found.in_top5[i] == (label in order[:5])
    assert found.confusion.tolist() == confusion
    assert found.figures() == pytest.approx({"accuracy": right / N, "loss": loss / N, "top5": top5 / N})
    assert found.record()["pictures"] == N
    for k, row in enumerate(found.per_class()):
        own, said = sum(confusion[k]), sum(line[k] for line in confusion)
        assert row["class"] == f"class {k}"
        assert row["pictures"] == own
        assert row["recall"] == (pytest.approx(confusion[k][k] / own) if own else None)
        assert row["precision"] == (pytest.approx(confusion[k][k] / said) if said else None)


def test_table_of_known_answers() -> None:
    """Four pictures of a, two of b, none of c: a is found three times, b never, c is said twice, b once."""
    said = torch.eye(3)[[0, 0, 0, 1, 2, 2]] * 20
    dataset = dataclasses.replace(pictures(6, 3), labels=np.array([0, 0, 0, 0, 1, 1]), classes=("a", "b", "c"))
    found = evaluate(Table(said), dataset, (4, 4))
    assert found.accuracy == 0.5
    assert found.figures().keys() == {"accuracy", "loss"}  # top-5 of three classes says nothing
    assert found.as_table().splitlines() == [
        "class  pictures  recall  precision",
        "a             4   75.0%     100.0%",
        "b             2    0.0%       0.0%",
        "c             0       -       0.0%",
        "6 pictures · accuracy 50.00% · loss 10.0000",
    ]


def test_class_that_is_never_said() -> None:
    dataset = dataclasses.replace(pictures(2, 2), labels=np.array([0, 1]))
    found = evaluate(Table(torch.tensor([[9.0, 0.0]] * 2)), dataset, (4, 4))
    assert found.per_class()[1] == {"class": "class 1", "pictures": 1, "recall": 0.0, "precision": None}


def test_unreadable_pictures_are_left_out_and_counted(logits: Tensor) -> None:
    broken = {i: PictureError(f"picture {i}", "zero bytes") for i in (3, 22)}
    dataset = dataclasses.replace(pictures(), failures=broken)
    found = evaluate(Table(logits), dataset, (4, 4), batch_size=5, on_error="skip")
    assert found.indices.tolist() == [i for i in range(N) if i not in broken]
    assert found.skipped == found.record()["skipped"] == 2
    assert found.as_table().endswith(" · 2 could not be read")
    with pytest.raises(PictureError, match="cannot read the picture picture 3: zero bytes"):
        evaluate(Table(logits), dataset, (4, 4), batch_size=5)


def test_nothing_readable(logits: Tensor) -> None:
    dataset = dataclasses.replace(pictures(), failures={i: PictureError("x", "broken") for i in range(N)})
    with pytest.raises(ValueError, match=r"none of the 23 pictures of made \(test\) could be read"):
        evaluate(Table(logits), dataset, (4, 4), on_error="skip")


def test_in_evaluation_mode_and_back(logits: Tensor) -> None:
    model = Table(logits)
    for training in (True, False):
        evaluate(model.train(training), pictures(), (4, 4))
        assert model.training == training
    assert model.was_training == {False}


def test_model_of_other_classes(logits: Tensor) -> None:
    with pytest.raises(ValueError, match=r"answers with 7 classes and made has 9; fine-tune it .*`vitlab finetune`"):
        evaluate(Table(logits), pictures(N, 9), (4, 4))


# --------------------------------------------------------------------------------------------- checkpoints


def same_answers(one: Evaluation, two: Evaluation) -> bool:
    return one.record() == two.record() and np.array_equal(one.confidences, two.confidences)


def test_checkpoint_is_judged_as_its_run_was(pretrained: Outcome, workdir: Path) -> None:
    """On its own data set, classes and split, that its card names."""
    assert same_answers(evaluate_checkpoint(workdir, device="cpu"), pretrained.test)
    assert same_answers(evaluate_checkpoint(workdir, "digits", device="cpu"), pretrained.test)
    train = evaluate_checkpoint(workdir, split="train", batch_size=64, device="cpu")
    assert len(train.labels) == len(load_dataset("digits", "train", classes=(0, 1, 2)))


def test_resize_of_the_run_is_the_checkpoints(config: TrainConfig, tmp_path: Path) -> None:
    data = dataclasses.replace(config.data, eval_resize=14)
    outcome = pretrain(dataclasses.replace(config, data=data), tmp_path, device="cpu", tensorboard=False)
    assert same_answers(evaluate_checkpoint(tmp_path, device="cpu"), outcome.test)
    dataset = load_dataset("digits", "test", classes=(0, 1, 2))
    assert not same_answers(evaluate(outcome.model, dataset, (8, 8)), outcome.test)


@pytest.mark.usefixtures("pretrained")
def test_checkpoint_at_another_size(workdir: Path) -> None:
    found = evaluate_checkpoint(workdir, image_size=16, device="cpu")
    dataset = load_dataset("digits", "test", classes=(0, 1, 2))
    assert same_answers(found, evaluate(load_model(workdir, image_size=16), dataset, (16, 16)))
    assert not same_answers(found, evaluate_checkpoint(workdir, device="cpu"))


@pytest.mark.usefixtures("pretrained")
def test_checkpoint_of_other_classes(workdir: Path, tmp_path: Path) -> None:
    for split, name, number in [(s, c, i) for s in ("train", "test") for c in ("ant", "bee", "fly") for i in (0, 1)]:
        (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / split / name / f"{number}.png")
    message = r"knows the classes 0, 1, 2 and folder:.* has ant, bee, fly; test it on data with its own classes, or"
    with pytest.raises(ValueError, match=message):
        evaluate_checkpoint(workdir, f"folder:{tmp_path}", device="cpu")


@pytest.mark.usefixtures("pretrained")
def test_checkpoint_that_names_no_data(workdir: Path, tmp_path: Path) -> None:
    write_google(load_model(workdir), tmp_path / "vit.npz")
    with pytest.raises(ValueError, match="does not say what it was trained on; name a data set with --dataset"):
        evaluate_checkpoint(tmp_path / "vit.npz", device="cpu")
    with pytest.raises(ValueError, match="answers with 3 classes and digits has 10"):
        evaluate_checkpoint(tmp_path / "vit.npz", "digits", device="cpu")


@pytest.mark.usefixtures("pretrained")
def test_checkpoint_without_a_head(workdir: Path, tmp_path: Path) -> None:
    save_model(load_model(workdir, num_classes=0), tmp_path / "headless")
    with pytest.raises(ValueError, match=r"has no head, so it has no answers; fine-tune it first"):
        evaluate_checkpoint(tmp_path / "headless", "digits", device="cpu")


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device("cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="device 'cuda' was asked for and torch sees 0 GPUs; `vitlab doctor`"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == torch.device("cuda")
    assert choose_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(ValueError, match="device 'cuda:2' was asked for and torch sees 2 GPUs"):
        choose_device("cuda:2")
    for unknown in ("quantum", "", "gpu", "meta"):
        with pytest.raises(ValueError, match=rf"device '{unknown}' is (unknown|not supported); give auto, cpu, cuda"):
            choose_device(unknown)


@pytest.mark.usefixtures("pretrained")
def test_folder_of_its_own_data_is_not_that_of_others(workdir: Path, tmp_path: Path) -> None:
    """A card's `root` is where the run's own data set lies; another data set is not looked for there."""
    card = {"dataset": "digits", "root": "/nowhere", "class_indices": [0, 1, 2], "classes": ["3", "4", "5"]}
    save_model(load_model(workdir), tmp_path / "moved", extra=card)
    for name in ("3", "4", "5"):
        (tmp_path / "mine" / name).mkdir(parents=True)
        for i in range(12):
            Image.new("RGB", (8, 8), (i, i, i)).save(tmp_path / "mine" / name / f"{i}.png")
    found = evaluate_checkpoint(tmp_path / "moved", f"folder:{tmp_path / 'mine'}", device="cpu")
    assert found.classes == ("3", "4", "5")
