"""How the columns and cells of a table are read; test_table.py has whole tables."""

from pathlib import Path

import pytest
from image_files import grays, label_lists, put, table

from vitlab.config import ReadConfig
from vitlab.data.registry import load_dataset
from vitlab.data.table_file import list_in
from vitlab.errors import UserError


@pytest.mark.parametrize(
    ("column", "values", "fold", "expected"),
    [
        ("is_valid", "True False 1 0", None, {"train": [2, 4], "val": [1, 3]}),
        ("fold", "2 1 2 3", None, {"train": [1, 3, 4], "test": [2]}),
        ("fold", "0 1.0 0 -1", 1, {"train": [1, 3, 4], "test": [2]}),
        ("fold", "train test train val", None, {"train": [1, 3], "test": [2], "val": [4]}),
    ],
)
def test_other_columns_of_splits(
    column: str, values: str, fold: int | None, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    rows = [f"{i}.png,x,{value}\n" for i, value in enumerate(values.split())]
    name, read = table(tmp_path, f"file,label,{column}\n" + "".join(rows)), ReadConfig(test_fold=fold)
    assert {split: grays(load_dataset(name, split, read=read, whole_train=True)) for split in expected} == expected
    with pytest.raises(UserError, match="test_fold=9"):
        load_dataset(name, "train", read=ReadConfig(test_fold=9))


@pytest.mark.parametrize(
    ("cells", "separator", "classes", "message"),
    [
        (["\"['cat', 'big']\"", "['cat']", "[]"], None, ("big", "cat"), "read as lists"),
        (['"cat,big"', "cat", "dog"], None, ("cat", "cat,big", "dog"), "label-separator ','"),
        (["cat;big", "cat", "dog"], None, ("cat", "cat;big", "dog"), "label-separator ';'"),
        (["haze primary", "primary", "haze"], None, ("haze", "haze primary", "primary"), "label-separator ' '"),
        (['"cat,big"', "cat", "dog"], ",", ("big", "cat", "dog"), ""),
        (['"tench, fish"', "cat", "dog"], "|", ("cat", "dog", "tench, fish"), ""),
        (["golden dog", "red dog", "cat"], None, ("cat", "golden dog", "red dog"), ""),
        (["(unknown)", "cat", "cat"], None, ("(unknown)", "cat"), ""),
    ],
)
def test_no_combination_of_labels_is_a_class_in_silence(
    cells: list[str],
    separator: str | None,
    classes: tuple[str, ...],
    message: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = "file,label\n" + "".join(f"{i}.png,{cell}\n" for i, cell in enumerate(cells))
    part = load_dataset(table(tmp_path, text), "all", read=ReadConfig(label_separator=separator))
    assert (part.classes, part.multi_label) == (classes, "big" in classes)
    assert message in caplog.text
    assert bool(message) == ("labels such as" in caplog.text)


@pytest.mark.parametrize("cell", ["nan", "<NA>", "NULL", "#N/A", "['nan']"])
def test_what_pandas_writes_for_a_missing_label_is_no_class(cell: str, tmp_path: Path) -> None:
    text = f"file,label,group\na.png,x,1\nb.png,y,nan\nc.png,{cell},nan\n"
    with pytest.raises(UserError, match=r"c\.png"):
        load_dataset(table(tmp_path, text), "all")
    part = load_dataset(table(tmp_path, text.replace(",x,", ",x|y,")), "all")
    assert (part.classes, label_lists(part)) == (("x", "y"), [["x", "y"], ["y"], []])
    assert part.groups is not None
    assert len(set(part.groups)) == 3


@pytest.mark.parametrize(
    ("labels", "classes", "said"),
    [
        ("10 9 0", ("0", "9", "10"), ""),
        ("10 9 x", ("9", "10", "x"), ""),
        ("0.0 10.0 2 2.0", ("0", "2", "10"), "0.0"),  # as pandas writes a column of integers with a gap
        ("0.0 v2.0", ("0.0", "v2.0"), ""),
        ("x None", ("None", "x"), "None"),
        ("x n/a", ("n/a", "x"), "n/a"),
    ],
)
def test_numbers_and_names_that_may_mean_none(
    labels: str, classes: tuple[str, ...], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = "".join(f"{i}.png,{label}\n" for i, label in enumerate(labels.split()))
    part = load_dataset(table(tmp_path, f"file,label\n{rows}"), "all")
    expected = labels.replace(".0", "") if said == "0.0" else labels
    assert (part.classes, [part.classes[label] for label in part.labels]) == (classes, expected.split())
    assert not said or f" {said} " in caplog.text


@pytest.mark.parametrize("off", ["0", "-1", "0.0"])
def test_a_column_for_each_class(off: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = table(tmp_path, "file,Unnamed: 0,Cat,dog,cow\na.png,0,1,1,0\nb.png,1,0,1,0\nc.png,2,0,0,0\n")
    (tmp_path / "labels.csv").write_text((tmp_path / "labels.csv").read_text().replace(",0", f",{off}"))
    part = load_dataset(name, "all")
    assert (part.classes, label_lists(part)) == (("Cat", "dog"), [["Cat", "dog"], ["dog"], []])
    assert "no image has a 1 in cow" in caplog.text


@pytest.mark.parametrize("written", ["{0}", "{0}.png", "photos\\{0}.png", "/kaggle/input/{0}.png"])
def test_files_are_found_by_name(written: str, tmp_path: Path) -> None:
    """As Kaggle's tables name them: without suffix or folder; of another machine or system."""
    for value, file in enumerate(("train/a.png", "deep/photos/b.png", "c/photos/a/other.png"), 1):
        put(tmp_path / file, value)
    files = [written.format(stem) for stem in "ab"] if "photos" not in written else [written.format("b")]
    name = table(tmp_path, "id,breed\n" + "".join(f"{file},x\n" for file in files), images=False)
    assert grays(load_dataset(name, "all")) == ([1, 2] if len(files) == 2 else [2])
    put(tmp_path / "again/photos/b.jpg")
    put(tmp_path / "again/photos/b.png")
    with pytest.raises(UserError, match=r"again/photos/b"):
        load_dataset(name, "all")


def test_lists_written_as_text() -> None:
    items: dict[object, list[str] | None] = {
        "['cat', 'big']": ["cat", "big"],
        "['cat' 'big']": ["cat", "big"],  # NumPy's
        "{'cat'}": ["cat"],
        "('red car', 'big')": ["red car", "big"],
        '["Alzheimer\'s", "x"]': ["Alzheimer's", "x"],
        "[1 2]": ["1", "2"],
        "[red car, big]": ["red car", " big"],
        "[]": [""],
        "(unknown)": None,
        3: None,
    }
    assert {cell: list_in(cell) for cell in items} == items
