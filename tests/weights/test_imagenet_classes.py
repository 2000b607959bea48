"""The names of ImageNet's classes."""

import pytest

from vitlab.weights import class_names
from vitlab.weights.imagenet_classes import LISTS, imagenet_names


@pytest.mark.parametrize("outputs", LISTS)
def test_every_list(outputs: int) -> None:
    names = imagenet_names(outputs)
    assert len(names) == len(set(names)) == outputs
    assert all(name.strip() and not name[0].isdigit() for name in names)


def test_the_order_of_published_heads() -> None:
    """Indices that the documentation of Google's, timm's and Hugging Face's checkpoints shows."""
    names = imagenet_names(1000)
    assert [names[i] for i in (0, 207, 281, 285, 817, 999)] == [
        *("tench", "golden retriever", "tabby", "Egyptian cat", "sports car", "toilet tissue")
    ]
    assert imagenet_names(21_843)[0] == "organism"
    assert {"crane (n02012849)", "crane (n03126707)"} <= set(names)  # bird and machine


@pytest.mark.parametrize(
    ("metadata", "first"),
    [
        ({}, "tench"),
        ({"dataset": "imagenet", "classes": [*map(str, range(1000))]}, "tench"),
        ({"dataset": "folder:mine"}, "0"),
        ({"classes": ["mine"] * 1000}, "mine"),
    ],
)
def test_a_checkpoint_without_names(metadata: dict, first: str) -> None:
    assert class_names(metadata, 1000)[0] == first


def test_other_numbers_of_outputs() -> None:
    assert class_names({}, 999)[0] == "0"
