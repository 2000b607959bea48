"""The names of ImageNet's classes."""

import pytest

from vitlab.weights import class_names
from vitlab.weights.imagenet_classes import LISTS, imagenet_names


def test_every_list() -> None:
    """The order is that of published heads: indices that the documentation of checkpoints shows."""
    for outputs in LISTS:
        names = imagenet_names(outputs)
        assert len(names) == len(set(names)) == outputs
        assert all(name.strip() and not name[0].isdigit() for name in names)
    names = imagenet_names(1000)
    assert [names[i] for i in (0, 207, 281, 285, 817, 999)] == [
        *("tench", "golden retriever", "tabby", "Egyptian cat", "sports car", "toilet tissue")
    ]
    assert imagenet_names(21_843)[0] == "organism"
    assert {"crane (n02012849)", "crane (n03126707)"} <= set(names)  # bird and machine


@pytest.mark.parametrize(
    ("metadata", "outputs", "first"),
    [
        ({}, 1000, "tench"),
        ({}, 999, "0"),
        ({"dataset": "imagenet", "classes": [*map(str, range(1000))]}, 1000, "tench"),
        ({"dataset": "folder:mine"}, 1000, "0"),
        ({"classes": ["mine"] * 1000}, 1000, "mine"),
    ],
)
def test_a_checkpoint_without_names(metadata: dict, outputs: int, first: str) -> None:
    assert class_names(metadata, outputs)[0] == first
