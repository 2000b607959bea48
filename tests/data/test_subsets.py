"""Parts of a split lie one in the other, keep every class, and do not depend on what else is left out."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitlab.data.dataset import Dataset, Labels
from vitlab.data.registry import load_dataset
from vitlab.data.subsets import part_of

SHARES = (0.01, 0.03, 0.1, 0.3, 0.7, 1.0)


def ids(dataset: Dataset) -> list[str]:
    return [dataset.path(i) for i in range(len(dataset))]


def made(labels: list[int]) -> Dataset:
    """A set whose images tell their place."""
    pixels = np.zeros((len(labels), 1, 1, 3), np.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = np.divmod(np.arange(len(labels)), 256)
    return Dataset("made", "train", tuple("abcdef"), np.array(labels), pixels)


def places(dataset: Dataset) -> list[int]:
    assert dataset.pixels is not None
    return (256 * dataset.pixels[:, 0, 0, 0].astype(int) + dataset.pixels[:, 0, 0, 1]).tolist()


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=300),
    st.floats(1e-3, 1),
    st.floats(1e-3, 1),
    st.integers(0, 2**63 - 1),
)
def test_nested_and_stratified(labels: list[int], share: float, other: float, seed: int) -> None:
    whole = made(labels)
    small, large = (part_of(whole, each, seed) for each in sorted((share, other)))
    assert set(places(small)) <= set(places(large))
    for part, each in zip((small, large), sorted((share, other)), strict=True):
        assert places(part) == sorted(places(part))
        assert [labels[i] for i in places(part)] == part.labels.tolist()
        for label in set(labels):
            assert part.labels.tolist().count(label) == max(1, round(each * labels.count(label)))
    assert places(part_of(whole, 1.0, seed)) == list(range(len(labels)))


def test_every_share_of_the_digits() -> None:
    whole = load_dataset("digits", "train")
    for seed in range(3):
        parts = [load_dataset("digits", "train", part=share, part_seed=seed) for share in SHARES]
        for small, large in itertools.pairwise(parts):
            assert set(ids(small)) < set(ids(large))
        assert ids(parts[-1]) == ids(whole)
        assert [len(part) for part in parts] == pytest.approx([share * len(whole) for share in SHARES], abs=5)
        assert np.bincount(parts[0].labels).tolist() == [1] * 10  # 1 % of 126
        place = ids(whole).index(parts[2].path(7))
        np.testing.assert_array_equal(parts[2].image(7), whole.image(place))


def test_seed_decides_and_chance_is_fair() -> None:
    """Each image of a class is in a part of 30 % as often as any other."""
    whole = made([0] * 50 + [1] * 50)
    seen = np.zeros(100)
    for seed in range(400):
        seen[places(part_of(whole, 0.3, seed))] += 1
    assert seen.sum() == 400 * 30
    assert abs(seen / 400 - 0.3).max() < 0.1  # over 4 standard deviations
    assert places(part_of(whole, 0.3, 5)) == places(part_of(whole, 0.3, 5))


def test_a_draw_depends_on_the_place_alone() -> None:
    """Images that follow, of another class, change nothing for those before."""
    labels = np.random.default_rng(0).integers(0, 3, 200).tolist()
    alone, more = (part_of(made(each), 0.2, 1) for each in (labels, [*labels, *[4] * 90]))
    assert [place for place in places(more) if place < 200] == places(alone)


def test_classes_are_those_of_the_part() -> None:
    part = load_dataset("digits", "train", part=0.1)
    some = load_dataset("digits", "train", part=0.1, classes=(7, 2))
    assert some.classes == ("7", "2")
    assert ids(some) == [name for name, label in zip(ids(part), part.labels, strict=True) if label in (7, 2)]


def test_list_takes_images_out_and_brings_none_in(tmp_path: Path) -> None:
    whole = load_dataset("digits", "train")
    gone = ids(whole)[::3]
    listed = tmp_path / "exclude.txt"
    listed.write_text("\n".join(gone))
    for share in (0.03, 0.1, 1.0):
        part = load_dataset("digits", "train", part=share)
        rest = load_dataset("digits", "train", part=share, exclude=listed)
        assert 0 < len(rest) < len(part)
        assert ids(rest) == [name for name in ids(part) if name not in set(gone)]


def test_first_of_several_labels_counts() -> None:
    firsts = [0] * 40 + [1] * 20
    sets = Labels.of_lists([[first, 2, 1 - first] for first in firsts])
    whole = made(firsts)
    whole.label_sets = sets
    part = part_of(whole, 0.1, 0)
    assert np.bincount(part.labels).tolist() == [4, 2]
    assert part.label_sets is not None
    assert [part.label_sets.of(i).tolist() for i in range(6)] == [sets.of(i).tolist() for i in places(part)]
    assert places(part) == places(part_of(made(firsts), 0.1, 0))


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_share_that_is_none(share: float) -> None:
    with pytest.raises(ValueError, match=rf"part is {share}; it is a share of each class of the split, in \(0, 1\]"):
        load_dataset("digits", "train", part=share)
