"""Parts of a split are nested, have every class, and do not depend on what else is left out."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_files import paths_of, pixels_of

from vitlab.data.dataset import Dataset, Labels
from vitlab.data.registry import load_dataset
from vitlab.data.subsets import part_of

SHARES = (0.01, 0.1, 0.7, 1.0)


def made(labels: list[int]) -> Dataset:
    """A set whose images hold their index."""
    pixels = np.zeros((len(labels), 1, 1, 3), np.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = np.divmod(np.arange(len(labels)), 256)
    return Dataset("made", "train", tuple("abcdef"), np.array(labels), pixels)


def indices(dataset: Dataset) -> list[int]:
    pixels = pixels_of(dataset)[:, 0, 0].astype(int)
    return (256 * pixels[:, 0] + pixels[:, 1]).tolist()


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=300),
    st.lists(st.floats(1e-3, 1), min_size=2, max_size=2),
    st.integers(0, 2**63 - 1),
)
def test_nested_and_stratified(labels: list[int], shares: list[float], seed: int) -> None:
    whole = made(labels)
    small, large = parts = [part_of(whole, share, seed) for share in sorted(shares)]
    assert set(indices(small)) <= set(indices(large))
    for part, share in zip(parts, sorted(shares), strict=True):
        assert indices(part) == sorted(indices(part))
        assert [labels[i] for i in indices(part)] == part.labels.tolist()
        for label in set(labels):
            assert part.labels.tolist().count(label) == max(1, round(share * labels.count(label)))
    assert indices(part_of(whole, 1.0, seed)) == list(range(len(labels)))


def test_parts_of_the_digits(tmp_path: Path) -> None:
    whole, exclude = load_dataset("digits", "train"), tmp_path / "exclude.txt"
    parts = [load_dataset("digits", "train", part=share, part_seed=1) for share in SHARES]
    for small, large in itertools.pairwise(parts):
        assert set(paths_of(small)) < set(paths_of(large))
    assert paths_of(parts[-1]) == paths_of(whole)
    assert [len(part) for part in parts] == pytest.approx([share * len(whole) for share in SHARES], abs=5)
    assert np.bincount(parts[0].labels).tolist() == [1] * 10  # 1 % of 126
    np.testing.assert_array_equal(parts[1].image(7), whole.image(paths_of(whole).index(parts[1].path(7))))
    # Classes and excluded images are taken from the part: they bring no others in.
    part, options = parts[1], dict[str, Any](part=SHARES[1], part_seed=1)
    some = load_dataset("digits", "train", classes=(7, 2), **options)
    assert paths_of(some) == [name for name, c in zip(paths_of(part), part.labels, strict=True) if c in (7, 2)]
    excluded = set(paths_of(whole)[::3])
    exclude.write_text("\n".join(excluded))
    rest = load_dataset("digits", "train", exclude=exclude, **options)
    assert 0 < len(rest) < len(part)
    assert paths_of(rest) == [name for name in paths_of(part) if name not in excluded]


def test_every_image_is_equally_likely() -> None:
    whole, counts = made([0] * 50 + [1] * 50), np.zeros(100)
    for seed in range(400):
        counts[indices(part_of(whole, 0.3, seed))] += 1
    assert counts.sum() == 400 * 30
    assert abs(counts / 400 - 0.3).max() < 0.1  # over 4 standard deviations


def test_a_draw_depends_on_the_index_alone() -> None:
    """Images that follow, of another class, change nothing for those before."""
    labels = np.random.default_rng(0).integers(0, 3, 200).tolist()
    alone, more = (part_of(made(several), 0.2, 1) for several in (labels, [*labels, *[4] * 90]))
    assert [index for index in indices(more) if index < 200] == indices(alone)


def test_the_first_of_several_labels_counts() -> None:
    firsts = [0] * 40 + [1] * 20
    whole = made(firsts)
    whole.label_sets = Labels.of_lists([[first, 2, 1 - first] for first in firsts])
    part = part_of(whole, 0.1, 0)
    assert np.bincount(part.labels).tolist() == [4, 2]
    assert part.label_sets is not None
    assert part.label_sets.values.tolist() == [c for i in indices(part) for c in (firsts[i], 2, 1 - firsts[i])]


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, float("nan")])
def test_invalid_shares(share: float) -> None:
    with pytest.raises(ValueError, match=rf"part is {share}"):
        load_dataset("digits", "train", part=share)
