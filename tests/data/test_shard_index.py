"""An index is read as it was written, corrupt ones are refused, and file names stay in their folder."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitlab.data.dataset import Labels
from vitlab.data.shard_index import (
    File,
    Locations,
    ShardIndex,
    class_names,
    parse_index,
    read_locations,
    write_locations,
)
from vitlab.errors import UserError

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


def test_corrupt_locations_are_refused(tmp_path: Path) -> None:
    """Even where the index has their checksum."""
    path, rows = tmp_path / "locations.npz", [(("a.png", 512, 10), [3]), (("b.png", 2048, 20), [1])]
    write_locations(path, *locations_of(rows, [2]))
    with pytest.raises(UserError, match="it lists other shards"):
        read_locations(path, ["../train-0.tar"])
    with np.load(path) as arrays:
        contents = dict(arrays)
    wrong = {"records": [3], "labels": [1, 2, 3], "lengths": [5, 6], "size": [1], "counts": [0, 1]}
    wrong |= {"offset": [1.0], "letters": [97]}
    for name, values in wrong.items():
        np.savez(path, **{**contents, name: np.array(values)})
        with pytest.raises(UserError, match="get or write the data set again"):
            read_locations(path, ["train-0.tar"])
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(UserError, match="get or write the data set again"):
        read_locations(path, ["train-0.tar"])


INDEX = ShardIndex(
    {"train": (File("train-000000.tar", 2048, "0" * 64, 2),), "test": ()},
    (File("classes.json", 9, "1" * 64),),
    {"train": 1},
    {"size": 256},
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: [], "it is not an index of shards"),
        (lambda c: {**c, "format": "else"}, "its format is 'else', not 'vitlab-shards-1'"),
        (lambda c: {k: v for k, v in c.items() if k != "shards"}, "KeyError: 'shards'"),
        (lambda c: {**c, "beside": [{**c["beside"][0], "file": "../up.tar"}]}, "'../up.tar' is not a plain file name"),
        (lambda c: {**c, "beside": [{**c["beside"][0], "file": ".hidden"}]}, "'.hidden' is not a plain file name"),
        (lambda c: {**c, "beside": [{**c["beside"][0], "bytes": "many"}]}, "bytes is 'many'; allowed: int >= 0"),
    ],
)
def test_the_index(tmp_path: Path, change: Any, message: str) -> None:
    INDEX.write(tmp_path / "index.json")
    data = (tmp_path / "index.json").read_bytes()
    assert parse_index(data, "it") == INDEX
    with pytest.raises(ValueError, match=message):
        parse_index(json.dumps(change(json.loads(data))).encode(), "it")
    with pytest.raises(ValueError, match="it is not an index of shards"):
        parse_index(b"<html>", "it")


def test_class_names(tmp_path: Path) -> None:
    path = tmp_path / "classes.json"
    assert class_names(path) == ()
    path.write_text('["Żółw", "cat"]')
    assert class_names(path) == ("Żółw", "cat")
    for text in ("{", "{}", "[1, 2]", "[]"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"classes\.json"):
            class_names(path)
