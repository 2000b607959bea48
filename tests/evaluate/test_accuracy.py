"""Figures against plain loops over hand-made answers, and the judging of a checkpoint."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from vitlab.config import TrainConfig
from vitlab.data.dataset import Dataset, Labels
from vitlab.data.decode import Entry, ImageError
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.evaluate.accuracy import Evaluation, answers, choose_device, evaluate, evaluate_checkpoint, table
from vitlab.models import ViTConfig
from vitlab.models.vit import ViT
from vitlab.pipelines.pretrain import Outcome, pretrain
from vitlab.preprocessing import Preprocessing
from vitlab.train.distributed import RankError, init_distributed
from vitlab.weights import load_card, load_model, save_model
from vitlab.weights.google import write_google

N, K = 23, 7


class Table(nn.Module):
    """Answers the image whose every pixel is i with row i, and keeps count of what it was asked."""

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


def images(count: int = N, classes: int = K) -> Dataset:
    pixels = np.broadcast_to(np.arange(count, dtype=np.uint8)[:, None, None, None], (count, 4, 4, 3)).copy()
    labels = np.arange(count, dtype=np.int64) % (classes - 1)  # the last class has no image
    return Dataset("made", "test", tuple(f"class {i}" for i in range(classes)), labels, pixels)


@pytest.fixture
def logits() -> Tensor:
    return 2 * torch.randn(N, K)


def test_every_image_once_in_order(logits: Tensor) -> None:
    model = Table(logits)
    found = evaluate(model, images(), (4, 4), batch_size=5)
    assert [len(rows) for rows in model.asked] == [5, 5, 5, 5, 3]
    assert list(itertools.chain(*model.asked)) == list(range(N))
    assert found.indices.tolist() == list(range(N))
    assert found.labels.tolist() == images().labels.tolist()
    assert found.skipped == 0
    other = evaluate(model, images(), (4, 4), batch_size=256)
    for field in ("predictions", "confidences", "losses", "in_top5"):
        np.testing.assert_array_equal(getattr(found, field), getattr(other, field))


def test_figures_against_a_plain_loop(logits: Tensor) -> None:
    found = evaluate(Table(logits), images(), (4, 4), batch_size=5)
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
    assert found.record()["images"] == N
    for k, row in enumerate(found.per_class()):
        own, said = sum(confusion[k]), sum(line[k] for line in confusion)
        assert row["class"] == f"class {k}"
        assert row["images"] == own
        assert row["recall"] == (pytest.approx(confusion[k][k] / own) if own else None)
        assert row["precision"] == (pytest.approx(confusion[k][k] / said) if said else None)


def test_table_of_known_answers() -> None:
    """Four images of a, two of b, none of c: a is found three times, b never, c is said twice, b once."""
    said = torch.eye(3)[[0, 0, 0, 1, 2, 2]] * 20
    dataset = dataclasses.replace(images(6, 3), labels=np.array([0, 0, 0, 0, 1, 1]), classes=("a", "b", "c"))
    found = evaluate(Table(said), dataset, (4, 4))
    assert found.accuracy == 0.5
    assert found.figures().keys() == {"accuracy", "loss"}  # top-5 of three classes says nothing
    assert found.as_table().splitlines() == [
        "class  images  recall  precision",
        "a             4   75.0%     100.0%",
        "b             2    0.0%       0.0%",
        "c             0       -       0.0%",
        "6 images of 2 of the 3 classes · accuracy 50.00% · loss 10.0000",
    ]


def test_table_of_a_loss_that_json_could_not_hold() -> None:
    dataset = dataclasses.replace(images(2, 2), labels=np.array([0, 1]))
    record = evaluate(Table(torch.tensor([[9.0, 0.0]] * 2)), dataset, (4, 4)).record()
    assert table(record | {"loss": None}).splitlines()[-1] == "2 images · accuracy 50.00%"


def test_class_that_is_never_said() -> None:
    dataset = dataclasses.replace(images(2, 2), labels=np.array([0, 1]))
    found = evaluate(Table(torch.tensor([[9.0, 0.0]] * 2)), dataset, (4, 4))
    assert found.per_class()[1] == {"class": "class 1", "images": 1, "recall": 0.0, "precision": None}


def test_unreadable_images_are_left_out_and_counted(logits: Tensor) -> None:
    broken = {i: ImageError(f"image {i}", "zero bytes") for i in (3, 22)}
    dataset = dataclasses.replace(images(), failures=broken)
    found = evaluate(Table(logits), dataset, (4, 4), batch_size=5, on_error="skip")
    assert found.indices.tolist() == [i for i in range(N) if i not in broken]
    assert found.skipped == found.record()["skipped"] == 2
    assert found.as_table().endswith(" · 2 could not be read")
    with pytest.raises(ImageError, match="cannot read the image image 3: zero bytes"):
        evaluate(Table(logits), dataset, (4, 4), batch_size=5)


def test_nothing_readable(logits: Tensor) -> None:
    dataset = dataclasses.replace(images(), failures={i: ImageError("x", "broken") for i in range(N)})
    with pytest.raises(ValueError, match=r"none of the 23 images of made \(test\) could be read"):
        evaluate(Table(logits), dataset, (4, 4), on_error="skip")


# -------------------------------------------------------------------------- several labels, padding, ranks


def with_sets(dataset: Dataset, lists: list[list[int]]) -> Dataset:
    sets = Labels.of_lists(lists)
    return dataclasses.replace(dataset, labels=sets.firsts, label_sets=sets)


def test_any_of_several_labels_is_right(logits: Tensor) -> None:
    lists = [sorted({i % K, (3 * i + 1) % K, i % 2}, reverse=True) for i in range(N)]
    found = evaluate(Table(logits), dataclasses.replace(with_sets(images(), lists), left_out=4), (4, 4), batch_size=5)
    right = top5 = 0
    loss = 0.0
    for i, labels in enumerate(lists):
        answer = logits[i].tolist()
        order = sorted(range(K), key=lambda k: -answer[k])
        total = sum(map(math.exp, answer))
        right += order[0] in labels
        top5 += bool(set(order[:5]) & set(labels))
        loss -= sum(math.log(math.exp(answer[k]) / total) for k in labels) / len(labels)
        assert found.right[i] == (order[0] in labels)
    assert 0 < right < N
    assert found.figures() == pytest.approx({"accuracy": right / N, "loss": loss / N, "top5": top5 / N})
    assert found.labels.tolist() == [labels[0] for labels in lists]
    assert found.record()["left_out"] == 4
    assert found.as_table().endswith(" · 4 have no label here")
    for k, row in enumerate(found.per_class()):
        own = [i for i in range(N) if k in lists[i]]
        said = [i for i in range(N) if logits[i].argmax() == k]
        good = sum(int(logits[i].argmax()) in lists[i] for i in own)
        assert row == {
            "class": f"class {k}",
            "images": len(own),
            "accuracy": pytest.approx(good / len(own)) if own else None,
            "precision": pytest.approx(sum(k in lists[i] for i in said) / len(said)) if said else None,
        }
    with pytest.raises(ValueError, match="images with several labels have no confusion matrix"):
        _ = found.confusion


def test_table_of_several_labels() -> None:
    """Cats and dogs on one image: either answer is right, for both classes. Nothing is said of gnus."""
    said = torch.eye(4)[[0, 1, 2]] * 20
    dataset = dataclasses.replace(with_sets(images(3, 4), [[0, 1], [0], [0, 1]]), classes=("cat", "dog", "elk", "gnu"))
    assert evaluate(Table(said), dataset, (4, 4)).as_table().splitlines()[:4] == [
        "class  images  accuracy  precision",
        "cat           3     33.3%     100.0%",
        "dog           2     50.0%       0.0%",
        "elk           0         -       0.0%",
    ]


def test_sets_of_one_label_are_judged_as_labels(logits: Tensor) -> None:
    plain = evaluate(Table(logits), images(), (4, 4))
    sets = evaluate(Table(logits), with_sets(images(), [[label] for label in images().labels.tolist()]), (4, 4))
    assert plain.figures() == pytest.approx(sets.figures())
    for one, two in zip(plain.per_class(), sets.per_class(), strict=True):
        assert one.pop("recall") == two.pop("accuracy")
        assert one == two


def test_padding_shows_one_shape_and_changes_nothing(logits: Tensor) -> None:
    model = Table(torch.cat([logits, 9 * torch.randn(120, K)]))  # answers to the gray filling as well
    dataset = dataclasses.replace(images(), failures={3: ImageError("3", "broken")})
    padded = evaluate(model, dataset, (4, 4), batch_size=5, pad=True, on_error="skip")
    assert {len(rows) for rows in model.asked} == {5}
    plain = evaluate(model, dataset, (4, 4), batch_size=5, on_error="skip")
    same(padded, plain)
    assert len(padded.indices) == N - 1


def same(one: Evaluation, two: Evaluation) -> None:
    """To the bit, in the same order."""
    for field in dataclasses.fields(Evaluation):
        a, b = getattr(one, field.name), getattr(two, field.name)
        if isinstance(a, Labels):
            np.testing.assert_array_equal(a.values, b.values)
            np.testing.assert_array_equal(a.offsets, b.offsets)
        else:
            np.testing.assert_array_equal(a, b, err_msg=field.name)


@pytest.fixture
def on_disk(tmp_path: Path) -> Dataset:
    """Thirteen images with one to three labels each; number 4 is empty."""
    rng = np.random.default_rng(0)
    entries = []
    for i in range(13):
        path = tmp_path / f"{i:02}.png"
        Image.fromarray(rng.integers(0, 256, (10 + i, 20 - i, 3)).astype(np.uint8)).save(path)
        entries.append(Entry(str(path)))
    (tmp_path / "04.png").write_bytes(b"")
    made = Dataset("disk", "test", tuple("abcdefg"), np.zeros(13, np.int64), entries=entries)
    return with_sets(made, [[i % 7, (i + 3) % 7, 6][: 1 + i % 3] for i in range(13)])


def small_vit() -> ViT:
    model = ViT(ViTConfig(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_dim=16, num_classes=7))
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight)
    return model


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("batch_size", [2, 20])
def test_several_ranks_find_what_one_finds(
    count: int, batch_size: int, on_disk: Dataset, in_ranks: Callable[[int, Callable[[], Any]], list[Any]]
) -> None:
    """On every rank; 13 images, of which one cannot be read, are shared neither by 2 nor by 3."""
    model = small_vit()
    alone = evaluate(model, on_disk, (8, 8), batch_size=batch_size, pad=True, on_error="skip")
    assert alone.indices.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12]
    assert alone.skipped == 1

    def job() -> Evaluation:
        with init_distributed() as world:
            return evaluate(model, on_disk, (8, 8), batch_size=batch_size, pad=True, on_error="skip", world=world)

    answers = in_ranks(count, job)
    assert len(answers) == count
    for found in answers:
        same(found, alone)


def test_ranks_without_a_image(on_disk: Dataset, in_ranks: Callable[[int, Callable[[], Any]], list[Any]]) -> None:
    """Two images for three ranks, and one of them is broken."""
    model, two = small_vit(), on_disk.take(np.array([4, 5]))

    def job() -> Evaluation:
        with init_distributed() as world:
            return evaluate(model, two, (8, 8), on_error="skip", world=world)

    for found in in_ranks(3, job):
        same(found, evaluate(model, two, (8, 8), on_error="skip"))


def test_broken_image_ends_every_rank(
    on_disk: Dataset, in_ranks: Callable[[int, Callable[[], Any]], list[Any]]
) -> None:
    model = small_vit()

    def job() -> Evaluation:
        with init_distributed() as world:
            return evaluate(model, on_disk, (8, 8), batch_size=2, world=world)

    first, second = in_ranks(2, job)  # number 4 belongs to the first
    assert isinstance(first, ImageError)
    assert isinstance(second, RankError)


def test_in_evaluation_mode_and_back(logits: Tensor) -> None:
    model = Table(logits)
    for training in (True, False):
        evaluate(model.train(training), images(), (4, 4))
        assert model.training == training
    assert model.was_training == {False}


def test_back_in_training_mode_after_an_error(logits: Tensor) -> None:
    model = Table(logits[:, :-1]).train()
    with pytest.raises(ValueError, match="answers with"):
        evaluate(model, images(), (4, 4))
    assert model.was_training == {False}
    assert model.training


def test_model_of_other_classes(logits: Tensor) -> None:
    with pytest.raises(ValueError, match=r"answers with 7 classes and made has 9; fine-tune it .*`vitlab finetune`"):
        evaluate(Table(logits), images(N, 9), (4, 4))


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
    assert same_answers(evaluate_checkpoint(tmp_path, image_size=8, device="cpu"), outcome.test)
    larger = evaluate(
        load_model(tmp_path, image_size=12), dataset, (12, 12), preprocessing=Preprocessing.google(12, 21)
    )
    assert same_answers(evaluate_checkpoint(tmp_path, image_size=12, device="cpu"), larger)
    own = evaluate(outcome.model, dataset, (8, 8), preprocessing=Preprocessing.google(8, 9))
    assert same_answers(evaluate_checkpoint(tmp_path, image_size=8, resize=9, device="cpu"), own)


def test_with_mirror_images(pretrained: Outcome, workdir: Path) -> None:
    """Each image's probabilities are the mean of two; the loss is that of the mean."""
    model = load_model(workdir).eval()
    images = torch.randn(3, 3, *model.config.image_hw)
    with torch.inference_mode():
        own, other, both = model(images), model(images.flip(-1)), answers(model, images, mirror=True)
        assert torch.equal(answers(model, images), own)
    torch.testing.assert_close(both.exp(), (own.softmax(1) + other.softmax(1)) / 2)
    assert not torch.allclose(both.exp(), own.softmax(1), atol=1e-3)

    found = evaluate_checkpoint(workdir, mirror=True, device="cpu")
    assert found.record()["mirror"] is True
    assert found.as_table().endswith("· with mirror images")
    alone = evaluate_checkpoint(workdir, device="cpu")
    assert "mirror" not in alone.record()
    assert "mirror" not in alone.as_table()
    assert not np.array_equal(found.losses, alone.losses)
    assert np.array_equal(found.labels, alone.labels)
    assert pretrained.test.accuracy == alone.accuracy


@pytest.mark.usefixtures("pretrained")
def test_checkpoint_at_another_size(workdir: Path) -> None:
    found = evaluate_checkpoint(workdir, image_size=16, device="cpu")
    dataset = load_dataset("digits", "test", classes=(0, 1, 2))
    assert same_answers(
        found, evaluate(load_model(workdir, image_size=16), dataset, (16, 16), preprocessing=Preprocessing.google())
    )
    assert not same_answers(found, evaluate_checkpoint(workdir, device="cpu"))


@pytest.mark.usefixtures("pretrained")
def test_checkpoint_of_other_classes(workdir: Path, tmp_path: Path) -> None:
    for split, name, number in [(s, c, i) for s in ("train", "test") for c in ("ant", "bee", "fly") for i in (0, 1)]:
        (tmp_path / split / name).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / split / name / f"{number}.png")
    message = (
        r"knows the classes 0, 1, 2 and not ant, bee, fly, which folder:.* has; test it on data with its own classes"
    )
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


@pytest.mark.usefixtures("pretrained")
def test_data_with_some_of_the_models_classes(workdir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Matched by name, not by number. Predictions are over all classes: 1 is wrong, for no digit here is a 1."""
    digits = load_dataset("digits", "test", classes=(2, 0))
    for i in range(len(digits)):
        folder = tmp_path / "some" / "test" / digits.classes[digits.labels[i]]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(digits.image(i)).save(folder / f"{i:03}.png")
    found = evaluate_checkpoint(workdir, f"folder:{tmp_path / 'some'}", device="cpu")
    whole = evaluate_checkpoint(workdir, device="cpu")
    assert found.classes == ("0", "1", "2")
    assert sorted(set(found.labels.tolist())) == [0, 2]
    assert found.accuracy == pytest.approx(whole.right[whole.labels != 1].mean())
    assert sorted(found.losses) == pytest.approx(sorted(whole.losses[whole.labels != 1]), rel=1e-5)
    assert "has 2 of the model's 3 classes; predictions are over all 3" in caplog.text
    assert "of 2 of the 3 classes" in found.as_table()
    # The same classes in another order are no subset, and need no word.
    extra = load_card(workdir) | {"classes": ["2", "0", "1"], "dataset": "folder:x"}
    save_model(load_model(workdir), tmp_path / "turned", extra=extra)
    (tmp_path / "some" / "test" / "1").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "some" / "test" / "1" / "0.png")
    caplog.clear()
    turned = evaluate_checkpoint(tmp_path / "turned", f"folder:{tmp_path / 'some'}", device="cpu")
    assert turned.classes == ("2", "0", "1")
    assert np.bincount(turned.labels).tolist() == [*np.bincount(digits.labels), 1]
    assert "predictions" not in caplog.text


@pytest.mark.usefixtures("pretrained")
def test_a_class_with_two_outputs(workdir: Path, tmp_path: Path) -> None:
    extra = {"classes": ["crane", "crane", "egret"], "dataset": "folder:x"}
    save_model(load_model(workdir), tmp_path / "model", extra=extra)
    for name in ("crane", "egret"):
        (tmp_path / "birds" / "test" / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "birds" / "test" / name / "0.png")
    with pytest.raises(UserError, match="has several outputs called crane"):
        evaluate_checkpoint(tmp_path / "model", f"folder:{tmp_path / 'birds'}", device="cpu")


def test_names_with_escapes_in_the_table() -> None:
    dataset = dataclasses.replace(images(2, 2), labels=np.array([0, 1]), classes=("a\nb", "\x1b[31mred"))
    found = evaluate(Table(torch.eye(2)), dataset, (4, 4))
    assert [line.split()[0] for line in found.as_table().splitlines()] == ["class", "'a\\nb'", "'\\x1b[31mred'", "2"]
    assert [row["class"] for row in found.record()["per_class"]] == ["a\nb", "\x1b[31mred"]


# ------------------------------------------------------------------------------- heads of ImageNet's classes


@pytest.fixture(scope="module")
def v2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ImageNet-V2 with one image of 20 x 14 pixels for each class."""
    root = tmp_path_factory.mktemp("v2")
    pixels = np.random.default_rng(0).integers(0, 256, (14, 20, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(root / "image.png")
    for c in range(1000):
        folder = root / "imagenetv2-matched-frequency-format-val" / str(c)
        folder.mkdir(parents=True)
        (folder / "0.png").hardlink_to(root / "image.png")
    return root


def thousand(**settings: Any) -> ViT:
    config = ViTConfig(image_size=12, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, num_classes=1000)
    model = ViT(dataclasses.replace(config, **settings))
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight)
    return model


def test_head_without_names_answers_imagenet(v2: Path, tmp_path: Path) -> None:
    """Google's checkpoints have no names of classes."""
    model = thousand()
    write_google(model, tmp_path / "vit.npz")
    found = evaluate_checkpoint(tmp_path / "vit.npz", "imagenet_v2", root=str(v2), device="cpu")
    dataset = load_dataset("imagenet_v2", "test", root=v2)
    assert dataset.labels.tolist() == list(range(1000))
    same(found, evaluate(model, dataset, (12, 12), preprocessing=Preprocessing.google()))
    resized = evaluate_checkpoint(tmp_path / "vit.npz", "imagenet_v2", root=str(v2), resize=13, device="cpu")
    same(resized, evaluate(model, dataset, (12, 12), preprocessing=Preprocessing.google(12, 13)))
    assert not np.array_equal(found.losses, resized.losses)


def test_names_come_from_the_checkpoint(v2: Path, tmp_path: Path) -> None:
    wnids = [f"n{2 * number:08}" for number in range(1000)]
    for card in ({"classes": wnids, "dataset": "imagenet"}, {"classes": wnids, "dataset": "folder:mine"}):
        save_model(thousand(), tmp_path / "named", extra=card)
        found = evaluate_checkpoint(tmp_path / "named", "imagenet_v2", root=str(v2), device="cpu")
        assert found.classes == tuple(wnids)


@pytest.mark.parametrize(
    ("card", "message"),
    [
        (
            {"classes": [f"bird {i}" for i in range(1000)], "dataset": "folder:birds"},
            "knows the classes bird 0, bird 1",
        ),
        ({"classes": [f"n{i:08}" for i in range(1000, 0, -1)], "dataset": "folder:x"}, "knows the classes n00001000"),
    ],
)
def test_thousand_classes_of_something_else(card: dict[str, Any], message: str, v2: Path, tmp_path: Path) -> None:
    save_model(thousand(), tmp_path / "other", extra=card)
    with pytest.raises(
        ValueError, match=f"{message}.* and not 0, 1, 2, 3, ... .1000., which imagenet_v2 has; test it on"
    ):
        evaluate_checkpoint(tmp_path / "other", "imagenet_v2", root=str(v2), device="cpu")


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (21_843, r"answers with 21,843 classes, as ImageNet-21k has them, and imagenet_v2 needs the 1,000 of ImageNet"),
        (10, r"answers with 10 classes, and imagenet_v2 needs the 1,000 of ImageNet: take a checkpoint that was"),
    ],
)
def test_head_of_other_size(classes: int, message: str, v2: Path, tmp_path: Path) -> None:
    write_google(thousand(num_classes=classes), tmp_path / "vit.npz")
    with pytest.raises(ValueError, match=message):
        evaluate_checkpoint(tmp_path / "vit.npz", "imagenet_v2", root=str(v2), device="cpu")
