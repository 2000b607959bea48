"""Which columns of a table hold what, and lists of labels in its cells."""

from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from vitlab.data import table_file
from vitlab.data.table_file import Columns, choose_columns, list_in, read_table
from vitlab.errors import UserError


@pytest.mark.parametrize(
    ("names", "rows", "expected"),
    [
        ("file,label,split", [], Columns("file", ("label",), False, "split", "")),
        ("image_id,label", [], Columns("image_id", ("label",), False, "", "")),
        ("id,breed", [], Columns("id", ("breed",), False, "", "")),
        ("Unnamed: 0,fname,class,Patient_ID", [], "name it file"),
        ("filename,tags,is_valid", [], Columns("filename", ("tags",), False, "is_valid", "")),
        ("image,species,fold,group", [], Columns("image", ("species",), False, "fold", "group")),
        ("image_id,image,label", [], Columns("image", ("label",), False, "", "")),
        ("File,label,target,split,fold", [], Columns("File", ("label",), False, "split", "")),
        ("file,Cat,Dog", ["a,1,0", "b,0,0"], Columns("file", ("Cat", "Dog"), True, "", "")),
        ("Unnamed: 0,file,cat,dog", ["0,a,1.0,0.0"], Columns("file", ("cat", "dog"), True, "", "")),
        ("image_id,smile,hat", ["a,-1,1", "b,1,-1"], Columns("image_id", ("smile", "hat"), True, "", "")),
        ("image_id,smile,hat", ["a,-1,0"], "hold 1, 0 and -1"),
        ("file,cat,age", ["a,1,30"], "age hold other values"),
        ("file,class,category", [], "class, category for one thing"),
    ],
)
def test_columns(names: str, rows: list[str], expected: Columns | str) -> None:
    columns = names.split(",")
    records = [(i, dict(zip(columns, row.split(","), strict=True))) for i, row in enumerate(rows)]
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            choose_columns(columns, records, "t")
    else:
        assert choose_columns(columns, records, "t") == expected


@pytest.mark.parametrize(
    ("cell", "items"),
    [
        ("['cat', 'big']", ["cat", "big"]),
        ('["cat"]', ["cat"]),
        ("['cat' 'big']", ["cat", "big"]),  # NumPy's
        ("{'cat'}", ["cat"]),
        ("('red car', 'big')", ["red car", "big"]),
        ('["Alzheimer\'s", "x"]', ["Alzheimer's", "x"]),
        ("[1 2]", ["1", "2"]),
        ("[red car, big]", ["red car", " big"]),
        ("[]", [""]),
        ("cat", None),
        ("(unknown)", None),
        (3, None),
    ],
)
def test_lists_written_as_text(cell: object, items: list[str] | None) -> None:
    assert list_in(cell) == items


def test_cells() -> None:
    one = Columns("file", ("label",), False, "", "")
    for cell, labels in (
        ("b|a|b", ("b", "a")),
        (["x", 2, None], ("x", "2")),
        ("['x', 'y']", ("x", "y")),
        ("[]", ()),
        (2.0, ("2",)),
        (float("nan"), ()),
        (None, ()),
        ({}, None),
    ):
        assert one.labels_of({"label": cell}, "|") == labels
    assert one.labels_of({"label": "a, b|c"}, ",") == ("a", "b|c")
    hot = Columns("file", ("a", "b", "c"), True, "", "")
    assert hot.labels_of({"a": "1", "b": True, "c": "0"}, "|") == ("a", "b")


def test_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"file": ["a", "b"], "labels": [["x", "y"], []]}), path)
    assert read_table(path) == (
        ["file", "labels"],
        [(1, {"file": "a", "labels": ["x", "y"]}), (2, {"file": "b", "labels": []})],
    )
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="cannot read the table"):
        read_table(path)
    pyarrow.parquet.write_table(pyarrow.table({"file": ["a" * 5000]}), path)
    monkeypatch.setattr(table_file, "MAX_TABLE_BYTES", 4000)
    with pytest.raises(UserError, match="at most"):
        read_table(path)
