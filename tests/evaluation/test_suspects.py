"""Wrong labels: against a plain loop of confident learning, and flips that are found."""

import csv
from pathlib import Path

import numpy as np
import pytest

from vitlab.data.exclude import read_exclusion
from vitlab.errors import UserError
from vitlab.evaluation.linear_head import leave_one_out
from vitlab.evaluation.suspects import Suspect, find_suspects, rank_suspects, read_suspects, write_suspects


def made(images: int = 300, classes: int = 4) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Representations, labels of which 20 are wrong, and the rows of these."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, classes, images)
    x = (rng.normal(size=(images, 32)) + 4 * np.eye(classes, 32)[labels]).astype(np.float32)
    wrong = rng.choice(images, 20, replace=False)
    labels[wrong] = (labels[wrong] + rng.integers(1, classes, 20)) % classes
    return x, labels, wrong


def probabilities_of(x: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return leave_one_out(x, labels, 4, every=True).logits.softmax(dim=1).numpy()


def test_confident_learning_by_a_loop() -> None:
    x, labels, _ = made()
    probabilities = probabilities_of(x, labels)
    means = [probabilities[labels == k, k].mean() for k in range(4)]
    joint, own = np.zeros((4, 4)), probabilities[np.arange(300), labels]
    for row, label in enumerate(labels.tolist()):
        reached = {k: p for k, p in enumerate(probabilities[row]) if p >= means[k]}
        if reached:
            joint[label, max(reached, key=lambda k: reached[k])] += 1
    joint *= (np.bincount(labels) / joint.sum(axis=1))[:, None]
    order, count = rank_suspects(probabilities, labels)
    wrong = int((probabilities.argmax(axis=1) != labels).sum())
    assert count == min(round(joint.sum() - np.trace(joint)), wrong)
    assert sorted(order.tolist()) == list(range(300))
    assert all(np.all(np.diff(own[part]) >= 0) for part in (order[:wrong], order[wrong:]))
    assert np.all(probabilities.argmax(axis=1)[order[:wrong]] != labels[order[:wrong]])


def test_flipped_labels_are_found() -> None:
    x, labels, wrong = made()
    suspects = find_suspects(probabilities_of(x, labels), labels)
    assert len(set(wrong.tolist()) & {suspect.row for suspect in suspects}) >= 16
    assert len(suspects) < 30
    for suspect in suspects:
        assert suspect.suggested != suspect.label == labels[suspect.row]
        assert suspect.copy is None


def test_copies_with_different_labels_come_first() -> None:
    """Both of two; a copy with the same label is none, nor is an image that only the model takes for one."""
    x, labels, _ = made()
    x, labels = np.concatenate([x, x[:2] * 1.001]), np.append(labels, [(labels[0] + 1) % 4, labels[1]])
    rng = np.random.default_rng(2)
    images = [rng.integers(0, 256, (12, 10, 3), np.uint8) for _ in range(300)]
    images += [images[0] // 2 + 30, images[1]]
    suspects = find_suspects(probabilities_of(x, labels), labels, x, images.__getitem__)
    assert {(suspect.row, suspect.copy) for suspect in suspects[:2]} == {(0, 300), (300, 0)}
    assert all(suspect.suggested == labels[suspect.copy] for suspect in suspects[:2])
    assert all(suspect.copy is None for suspect in suspects[2:])
    assert len({suspect.row for suspect in suspects}) == len(suspects)
    images[300] = images[5]
    assert all(each.copy is None for each in find_suspects(probabilities_of(x, labels), labels, x, images.__getitem__))
    flat = [np.full((4, 4, 3), 7, np.uint8)] * len(x)
    assert all(each.copy is None for each in find_suspects(probabilities_of(x, labels), labels, x, flat.__getitem__))


def test_a_class_without_images() -> None:
    probabilities = np.full((4, 3), 1 / 3)
    order, count = rank_suspects(probabilities, np.array([0, 0, 1, 1]))
    assert (order.tolist(), count) == ([0, 1, 2, 3], 0)


def test_the_table_is_a_list_to_exclude(tmp_path: Path) -> None:
    """Names that look like formulas, and those with commas, come back."""
    path = tmp_path / "suspects.csv"
    names = ["=a/1.png", 'b, "c"/2.png', "d\udcff/3.png"]
    write_suspects(path, [Suspect(1, 0, 1, 0.1, 0.8), Suspect(0, 1, 0, 0.2, 0.7, copy=2)], names, ("x", "-y"))
    first, second = read_suspects(path)
    assert first == {
        "image": names[1],
        "label": "x",
        "looks_like": "-y",
        "label_probability": "0.1000",
        "looks_like_probability": "0.8000",
        "same_as": "",
    }
    assert (second["image"], second["same_as"]) == (names[0], names[2])
    assert read_exclusion(path) == [names[1], names[0]]
    with path.open("w") as file:
        csv.writer(file).writerow(["file", "label"])
    for read in (read_suspects, read_exclusion):
        with pytest.raises(UserError, match="column"):
            read(path)
