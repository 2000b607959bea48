"""An index is read as it was written; tests/test_bombs.py and test_write_shards.py have those that are refused."""

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitlab.data.dataset import Labels
from vitlab.data.shard_index import Locations, read_locations, write_locations

MEMBERS = st.tuples(st.text("añ/.€", max_size=9), st.integers(0, 2**40), st.integers(0, 2**30))
ROWS = st.lists(st.tuples(MEMBERS, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3)), min_size=1, max_size=9)


def locations_of(rows: list[Any], records: list[int]) -> tuple[Locations, Labels]:
    members = iter([member for member, _ in rows])
    shards = [Locations.of_shard(f"train-{i}.tar", list(itertools.islice(members, n))) for i, n in enumerate(records)]
    return Locations.joined(shards), Labels.of_lists([labels for _, labels in rows])


def rows_of(locations: Locations, labels: Labels) -> list[Any]:
    members = ((locations.member(i), int(locations.offset[i]), int(locations.size[i])) for i in range(len(locations)))
    return [(member, labels.of_image(i).tolist()) for i, member in enumerate(members)]


@given(ROWS, ROWS, st.data())
@settings(max_examples=20)
def test_locations_are_stored_and_joined(
    tmp_path_factory: pytest.TempPathFactory, one: list[Any], two: list[Any], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(one)))
    first, second = locations_of(one, [cut, len(one) - cut]), locations_of(two, [len(two)])
    path = tmp_path_factory.getbasetemp() / "locations.npz"
    write_locations(path, *first)
    stored = read_locations(path, ["train-0.tar", "train-1.tar"])
    assert rows_of(*stored) == one
    assert stored[0].shard.tolist() == [0] * cut + [1] * (len(one) - cut)
    assert rows_of(Locations.joined([first[0], second[0]]), first[1].join(second[1])) == one + two
