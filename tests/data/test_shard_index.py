"""What is written of places is read again, what is damaged is seen, and names in a list stay in their folder."""

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
    Places,
    ShardIndex,
    check_as_text,
    check_shards,
    class_names,
    parse_index,
    read_places,
    write_places,
)

ROWS = st.tuples(st.integers(0, 2**40), st.integers(0, 2**30), st.text("añ/.€", max_size=9))
ROWS = st.lists(st.tuples(ROWS, st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3)), min_size=1, max_size=9)


def places_of(rows: list[Any], records: list[int]) -> tuple[Places, Labels]:
    members = [(name, offset, size) for (offset, size, name), _ in rows]
    starts = np.cumsum([0, *records])
    parts = [
        Places.of_shard(f"train-{i}.tar", members[start : start + n])
        for i, (start, n) in enumerate(zip(starts, records, strict=False))
    ]
    return Places.joined(parts), Labels.of_lists([row[1] for row in rows])


def told(places: Places, labels: Labels) -> list[tuple[Any, ...]]:
    return [
        (places.shards[places.shard[i]], int(places.offset[i]), int(places.size[i]), places.member(i), [*labels.of(i)])
        for i in range(len(places))
    ]


@given(ROWS, ROWS, st.data())
@settings(max_examples=25)
def test_places_are_kept_and_joined(
    tmp_path_factory: pytest.TempPathFactory, one: list[Any], two: list[Any], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(one)))
    first, second = places_of(one, [cut, len(one) - cut]), places_of(two, [len(two)])
    path = tmp_path_factory.getbasetemp() / "places.npz"
    write_places(path, *first, stamps=np.arange(3))
    found = read_places(path, "stamps")
    assert found is not None
    assert told(*found[:2]) == told(*first)
    assert [row[1:4] for row in told(*first)] == [row[0] for row in one]
    assert first[0].records.tolist() == [cut, len(one) - cut]
    assert found[2][0].tolist() == [0, 1, 2]
    both = Places.joined([first[0], second[0]]), first[1].join(second[1])
    assert told(*both) == told(*first) + told(*second)


def test_damage_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "places.npz"
    assert read_places(path) is None
    rows = [((512, 10, "a.png"), [3]), ((2048, 20, "b.png"), [1])]
    write_places(path, *places_of(rows, [2]))
    whole = path.read_bytes()
    assert read_places(path) is not None
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        found = read_places(path)  # a name or a time in the archive itself may change without harm
        assert found is None or told(*found[:2]) == told(*places_of(rows, [2]))
    with np.load(path) if path.write_bytes(whole) else path.open() as arrays:
        contents = dict(arrays)  # pyright: ignore[reportArgumentType, reportCallIssue]
    for name, wrong in (
        ("records", [3]),
        ("labels", [1, 2, 3]),
        ("lengths", [5, 6]),
        ("size", [1]),
        ("counts", [0, 2]),
    ):
        np.savez(path, **{**contents, name: np.array(wrong)})
        assert read_places(path) is None, name


SHARD_INDEX = ShardIndex(
    {"train": (File("train-000000.tar", 2048, "0" * 64, 2),), "test": ()},
    (File("classes.json", 9, "1" * 64),),
    {"train": 1},
    {"size": 256},
)


def test_a_listing_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "index.json"
    SHARD_INDEX.write(path)
    assert parse_index(path.read_bytes(), "it") == SHARD_INDEX
    assert [file.file for file in SHARD_INDEX.files] == ["train-000000.tar", "classes.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: [], "it is not an index of shards"),
        (lambda c: {**c, "format": "else"}, "its format is 'else', not 'vitlab-shards-1'"),
        (lambda c: {k: v for k, v in c.items() if k != "shards"}, "KeyError: 'shards'"),
        (
            lambda c: {**c, "shards": {"train": [{**c["shards"]["train"][0], "file": "../up.tar"}]}},
            "'../up.tar' is not",
        ),
        (lambda c: {**c, "beside": [{**c["beside"][0], "file": ".hidden"}]}, "'.hidden' is not a plain file name"),
        (lambda c: {**c, "beside": [{**c["beside"][0], "bytes": "many"}]}, "invalid literal"),
    ],
)
def test_other_content_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    SHARD_INDEX.write(tmp_path / "index.json")
    content = change(json.loads((tmp_path / "index.json").read_bytes()))
    with pytest.raises(ValueError, match=message):
        parse_index(json.dumps(content).encode(), "it")
    with pytest.raises(ValueError, match="it is not an index of shards"):
        parse_index(b"<html>", "it")


def test_check_shards(tmp_path: Path) -> None:
    names = ("train-000000.tar", "train-000001.tar", "test-000000.tar", "test-000001.tar")
    for name in names:
        (tmp_path / name).write_bytes(b"what is in it")
    files = [File.of(tmp_path / name, 1) for name in names]
    with pytest.raises(ValueError, match=r"has no index.json: give a folder that `vitlab shard` wrote"):
        check_shards(tmp_path)
    ShardIndex({"train": tuple(files[:2]), "test": tuple(files[2:])}, (), {}, {}).write(tmp_path / "index.json")
    heard = []
    found = check_shards(tmp_path, lambda *words: heard.append(words))
    assert found == {"folder": str(tmp_path), "files": 4, "bytes": 52, "wrong": {}}
    assert heard == [(13, 52), (26, 52), (39, 52), (52, 52)]
    assert check_as_text(found) == f"all 4 files of {tmp_path} match index.json"
    (tmp_path / names[0]).write_bytes(b"what is in It")
    (tmp_path / names[1]).write_bytes(b"what is")
    (tmp_path / names[2]).unlink()
    (tmp_path / "train-000002.tar").write_bytes(b"")
    found = check_shards(tmp_path)
    assert f"{names[2]} is missing\n" in check_as_text(found)
    wrong = found["wrong"]
    assert wrong.keys() == {*names[:3], "train-000002.tar"}
    assert wrong[names[0]] == f"has the sha256 {File.of(tmp_path / names[0]).sha256}, expected {files[0].sha256}"
    assert wrong[names[1]] == "has 7 bytes, expected 13"
    assert (wrong[names[2]], wrong["train-000002.tar"]) == ("is missing", "is not listed")


def test_class_names(tmp_path: Path) -> None:
    assert class_names(tmp_path / "classes.json") == ()
    (tmp_path / "classes.json").write_text('["Żółw", "cat"]')
    assert class_names(tmp_path / "classes.json") == ("Żółw", "cat")
