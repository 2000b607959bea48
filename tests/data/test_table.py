"""Tables of images and labels: every row is read, or listed in a warning or an error."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F
from image_files import paths_of, put
from irregular import irregular
from PIL import Image

from vitlab.config import DataConfig, OptimConfig, ReadConfig, TrainConfig
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.exclude import image_id
from vitlab.data.registry import load_dataset
from vitlab.data.write_shards import ShardSettings, write_shards
from vitlab.errors import UserError
from vitlab.evaluation.accuracy import evaluate_checkpoint
from vitlab.evaluation.options import EvalOptions
from vitlab.evaluation.predict import predict
from vitlab.evaluation.predictions import read_predictions
from vitlab.inspection.write_pages import report
from vitlab.models.config import ViTConfig
from vitlab.runs.pretrain import pretrain
from vitlab.runs.run import PREDICTIONS
from vitlab.runs.splits import Splits, drop_unreadable


def table(folder: Path, text: str, *, name: str = "labels.csv", images: bool = True) -> str:
    """Writes a table, and the images that its rows name first, gray as many as the row."""
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8", newline="")
    for number, line in enumerate(text.splitlines()[1:], 1) if images else ():
        put(folder / line.split(",")[0], number)
    return f"csv:{folder / name}"


def label_lists(dataset: Dataset) -> list[list[str]]:
    labels = dataset.all_labels
    return [[dataset.classes[label] for label in labels.of_image(i)] for i in range(len(dataset))]


def grays(dataset: Dataset) -> list[int]:
    return [int(dataset.image(i).max()) for i in range(len(dataset))]


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_every_row_in_order(delimiter: str, end: str, tmp_path: Path) -> None:
    """As spreadsheets write it: with a byte order mark, quotes, blank lines and columns of other things."""
    rows = ["\ufeffFile_Name, label ,note", "b.png,dog,", '"deep, down/ä.png",cat,"two\nlines"', "", "c.png,cat,x"]
    text = end.join(rows).replace(",", delimiter).replace(f"deep{delimiter}", "deep,") + end
    for value, file in enumerate(("b.png", "deep, down/ä.png", "c.png"), 1):
        put(tmp_path / file, value)
    part = load_dataset(table(tmp_path, text, images=False), "all")
    assert (part.classes, part.labels.tolist()) == (("cat", "dog"), [1, 0, 0])
    assert grays(part) == [1, 2, 3]
    assert [image_id(part, i) for i in range(3)] == ["b.png", "deep, down/ä.png", "c.png"]
    assert (part.label_sets, part.multi_label) == (None, False)


def test_paths_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Absolute, upward, and with needless parts; a relative PATH starts at the root, or here."""
    for value, name in enumerate(("set/in.png", "out.png", "far/away.png"), 1):
        put(tmp_path / name, value)
    text = f"file,label\n.//in.png,a\n../out.png,b\n{tmp_path}/far/away.png,b\n"
    table(tmp_path / "set", text, images=False)
    monkeypatch.chdir(tmp_path / "set")
    for name, root in (("csv:set/labels.csv", tmp_path), ("csv:labels.csv", None)):
        part = load_dataset(name, "all", root=root)
        assert grays(part) == [1, 2, 3]
        assert image_id(part, 0) == "in.png"


def test_numbers_are_classes_in_their_order(tmp_path: Path) -> None:
    text = "file,label\na.png,10\nb.png,9\nc.png,0\n"
    assert load_dataset(table(tmp_path, text), "all").classes == ("0", "9", "10")
    (tmp_path / "labels.csv").write_text(text.replace("c.png,0", "c.png,x"))
    assert load_dataset(f"csv:{tmp_path}/labels.csv", "all").classes == ("9", "10", "x")


# ------------------------------------------------------------------------------------------------- splits


def test_without_splits_train_is_cut(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = table(tmp_path, "file,label\n" + "".join(f"{i}.png,{'ab'[i % 2]}\n" for i in range(40)))
    parts = {split: load_dataset(name, split) for split in ("train", "val", "test")}
    assert {split: len(part) for split, part in parts.items()} == {"train": 32, "val": 4, "test": 4}
    assert len({path for part in parts.values() for path in paths_of(part)}) == 40
    assert "has no test and no val split: cut from train" in caplog.text


@pytest.mark.parametrize("column", [True, False])
def test_splits_and_their_names(column: bool, tmp_path: Path) -> None:
    """In a column, or as the first folders of all paths."""
    names = ("Training", "dev", "TEST")
    rows = [f"{'' if column else f'{name}/'}{name}{c}.png,{c},{name}" for name in names for c in "ba"]
    text = "\n".join(["file,label,split", *rows])
    name = table(tmp_path, text if column else text.replace("split", "other"))
    assert {split: grays(load_dataset(name, split)) for split in ("train", "val", "test", "all")} == {
        "train": [1, 2],
        "val": [3, 4],
        "test": [5, 6],
        "all": [1, 2, 3, 4, 5, 6],
    }


def test_test_images_alone(tmp_path: Path) -> None:
    name = table(tmp_path, "file,label,split\na.png,a,test\nb.png,b,test\n")
    assert load_dataset(name, "test").classes == ("a", "b")
    with pytest.raises(UserError, match="has no train split, and no train to cut it from; give one of test, all"):
        load_dataset(name, "train")


def test_some_folders_called_like_splits_are_no_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [f"{folder}/{i}.png,{folder}\n" for folder in ("test", "car") for i in range(20)]
    name = table(tmp_path, "file,label\n" + "".join(rows))
    assert (len(load_dataset(name, "train")), len(load_dataset(name, "test"))) == (32, 4)
    assert f"20 of the 40 files are in none of them, first {tmp_path / 'car/0.png'}" in caplog.text


# ------------------------------------------------------------------------------------------ several labels


SEVERAL = "file,label,split\n" + "".join(
    f"{split}{i}.png,{labels},{split}\n"
    for split in ("train", "val", "test")
    for i, labels in enumerate(("b|a", "a", " c | b |", "c|c") if split == "train" else ("a", "b", "c"))
)


def test_several_labels(tmp_path: Path) -> None:
    """In all splits of a table, also in one where every image has one."""
    name = table(tmp_path, SEVERAL)
    train, test = (load_dataset(name, split) for split in ("train", "test"))
    assert label_lists(train) == [["b", "a"], ["a"], ["c", "b"], ["c"]]
    assert train.labels.tolist() == [1, 0, 2, 2]
    assert test.label_sets is not None
    assert train.multi_label
    assert test.multi_label
    part = load_dataset(name, "train", classes=(2, 0))
    assert label_lists(part) == [["a"], ["a"], ["c"], ["c"]]
    assert part.multi_label


def test_an_image_may_have_none_where_others_have_several(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = table(tmp_path, SEVERAL + "none.png,,train\n")
    train = load_dataset(name, "train")
    assert label_lists(train)[-1] == []
    assert "1 images have no label, and are taken for images without any class" in caplog.text
    assert label_lists(load_dataset(name, "train", classes=(0, 1, 2))) == label_lists(train)[:-1]


def test_shards_hold_several_labels(tmp_path: Path) -> None:
    name = table(tmp_path, SEVERAL + "none.png,,train\n")
    write_shards(name, tmp_path / "out", ShardSettings())
    source, copy = load_dataset(name, "train"), load_dataset(f"shards:{tmp_path / 'out'}", "train")
    assert copy.classes == source.classes
    assert copy.multi_label
    expected, written = (dict(zip(grays(part), label_lists(part), strict=True)) for part in (source, copy))
    assert written == expected


def test_a_run_on_several_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It learns all of them: images are red, green, both or neither."""
    rows, random = [], np.random.default_rng(0)
    for i in range(60):
        labels = (["red"], ["green"], ["red", "green"], [])[i % 4]
        pixels = random.integers(0, 60, (8, 8, 3), np.uint8)
        pixels += np.array([190 * (color in labels) for color in ("red", "green", "blue")], np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,{'|'.join(labels)},{'test' if i < 15 else 'train'}")
    name = table(tmp_path, "\n".join(["file,label,split", *rows]), images=False)
    model = ViTConfig(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_dim=32, num_classes=2)
    config = TrainConfig(
        model=model,
        data=DataConfig(name),
        optim=OptimConfig(lr=0.01),
        batch_size=15,
        epochs=None,
        steps=60,
        loss="sigmoid",
    )
    finished = pretrain(config, tmp_path / "run", device="cpu", tensorboard=False)
    record = finished.result["test"]
    assert record["mean_average_precision"] > 0.95
    shown = capsys.readouterr().err
    assert "top label right" in shown
    assert "val_mean_average_precision" in shown
    assert "acc" not in shown
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("val_mean_average_precision" in line for line in lines)
    again = evaluate_checkpoint(tmp_path / "run", name, options=EvalOptions(batch_size=4, device="cpu"))
    assert again.record()["mean_average_precision"] == pytest.approx(record["mean_average_precision"])
    stored, _ = read_predictions(tmp_path / "run" / PREDICTIONS, ("green", "red"))
    lists = [stored.all_labels.of_image(i).tolist() for i in range(15)]
    assert lists == [[[1], [0], [1, 0], []][i % 4] for i in stored.indices]
    assert again.scores is not None
    scores, hot = torch.from_numpy(again.scores), torch.tensor([[c in labels for c in range(2)] for labels in lists])
    losses = F.binary_cross_entropy_with_logits(scores, hot.float(), reduction="none").sum(dim=1)
    np.testing.assert_allclose(stored.losses, losses, rtol=1e-4, atol=1e-6)
    predictions = list(predict(tmp_path / "run", [tmp_path / f"{i}.png" for i in range(4)]))
    probabilities = [dict(prediction.top) for prediction in predictions]
    assert [{c for c, p in row.items() if p > 0.5} for row in probabilities] == [
        {"red"},
        {"green"},
        {"red", "green"},
        set(),
    ]
    card = report(tmp_path / "run", device="cpu")["card"]
    text = f"{record['mean_average_precision']:.2%}"
    assert f"| mean average precision | {text} of 15 images |" in Path(card).read_text()
    page = (tmp_path / "run" / "report" / "index.html").read_text()
    assert "Mean average precision" in page
    assert "Balanced accuracy" not in page


def test_the_model_says_that_labels_are_several(tmp_path: Path) -> None:
    """Of a table where each image has one or none, which alone is ambiguous, or each one."""
    name = table(tmp_path, "file,label,split\na.png,x,train\nb.png,y,train\nc.png,,train\nd.png,y,test\n")
    with pytest.raises(UserError, match=r"no label for 1 images: .*c.png; .* give --loss sigmoid"):
        load_dataset(name, "train")
    train = load_dataset(name, "train", multi_label=True, whole_train=True)
    assert (label_lists(train), train.multi_label) == ([["x"], ["y"], []], True)
    assert load_dataset(name, "test", multi_label=True).multi_label
    single = table(tmp_path / "single", "file,label\na.png,x\nb.png,y\n")
    assert load_dataset(single, "all", multi_label=True).multi_label
    assert not load_dataset(single, "all").multi_label


# ------------------------------------------------------------------------------------------ as people write them


@pytest.mark.parametrize(
    ("cells", "separator", "classes", "message"),
    [
        (["\"['cat', 'big']\"", "['cat']", "[]"], None, ("big", "cat"), "such as ['cat', 'big'] are read as lists"),
        (['"cat,big"', "cat", "dog"], None, ("cat", "cat,big", "dog"), "give --data.label-separator ','"),
        (["cat;big", "cat", "dog"], None, ("cat", "cat;big", "dog"), "give --data.label-separator ';'"),
        (["haze primary", "primary", "haze"], None, ("haze", "haze primary", "primary"), "label-separator ' '"),
        (['"cat,big"', "cat", "dog"], ",", ("big", "cat", "dog"), ""),
        (['"tench, fish"', "cat", "dog"], "|", ("cat", "dog", "tench, fish"), ""),
        (["golden dog", "red dog", "cat"], None, ("cat", "golden dog", "red dog"), ""),
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


@pytest.mark.parametrize("cell", ["nan", "NaN", "<NA>", "null", "NULL", "#N/A", "['nan']"])
def test_what_pandas_writes_for_a_missing_label_is_no_class(
    cell: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = f"file,label,group\na.png,x,1\nb.png,y,nan\nc.png,{cell},nan\n"
    with pytest.raises(UserError, match=r"no label for 1 images: .*c.png"):
        load_dataset(table(tmp_path, text), "all")
    assert ("is read as an empty cell; rename it if it is a class" in caplog.text) == (cell[0] != "[")
    part = load_dataset(table(tmp_path, text.replace(",x,", ",x|y,")), "all")
    assert (part.classes, label_lists(part)) == (("x", "y"), [["x", "y"], ["y"], []])
    assert part.groups is not None
    assert len(set(part.groups)) == 3


@pytest.mark.parametrize("cell", ["None", "none", "NA", "n/a"])
def test_a_class_that_may_mean_none_is_said(cell: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    part = load_dataset(table(tmp_path, f"file,label\na.png,x\nb.png,{cell}\n"), "all")
    assert set(part.classes) == {"x", cell}
    assert f"the label {cell} is a class; leave the cells empty" in caplog.text


def test_whole_numbers_with_a_point_are_those_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As pandas writes a column of integers with a gap."""
    part = load_dataset(table(tmp_path, "file,label\na.png,0.0\nb.png,10.0\nc.png,2\nd.png,2.0\n"), "all")
    assert (part.classes, part.labels.tolist()) == (("0", "2", "10"), [0, 2, 1, 1])
    assert "labels such as 0.0 are read as whole numbers" in caplog.text
    part = load_dataset(table(tmp_path, "file,label\na.png,0.0\nb.png,v2.0\n"), "all")
    assert part.classes == ("0.0", "v2.0")


@pytest.mark.parametrize(("encoding", "mark"), [("utf-16-le", "\ufeff"), ("utf-16-be", "\ufeff"), ("utf-16", "")])
def test_unicode_text_of_spreadsheets(encoding: str, mark: str, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes(f"{mark}file\tlabel\r\na.png\tÜbung\r\n".encode(encoding))
    put(tmp_path / "a.png")
    assert load_dataset(f"csv:{tmp_path}/labels.txt", "all").classes == ("Übung",)


def test_a_column_for_each_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = table(tmp_path, "file,Cat,dog,cow\na.png,1,1,0\nb.png,0,1,0\nc.png,0,0,0\n")
    part = load_dataset(name, "all")
    assert (part.classes, label_lists(part)) == (("Cat", "dog"), [["Cat", "dog"], ["dog"], []])
    assert "the classes are the columns Cat, dog, cow" in caplog.text
    assert "no image has a 1 in cow" in caplog.text


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
    column: str,
    values: str,
    fold: int | None,
    expected: dict[str, list[int]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [f"{i}.png,x,{value}\n" for i, value in enumerate(values.split())]
    name, read = table(tmp_path, f"file,label,{column}\n" + "".join(rows)), ReadConfig(test_fold=fold)
    assert {split: grays(load_dataset(name, split, read=read, whole_train=True)) for split in expected} == expected
    assert ("--data.test-fold chooses another" in caplog.text) == (values == "2 1 2 3")
    wrong = "test_fold=9 is not in .* which has" if values[0] in "02" else "test_fold=9 has no effect"
    with pytest.raises(UserError, match=wrong):
        load_dataset(name, "train", read=ReadConfig(test_fold=9))


@pytest.mark.parametrize("written", ["{0}", "{0}.png", "photos\\{0}.png", "/kaggle/input/{0}.png"])
def test_files_are_found_by_name(written: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As Kaggle's tables name them: without suffix or folder; of another machine or system."""
    for value, file in enumerate(("train/a.png", "deep/photos/b.png", "c/photos/a/other.png"), 1):
        put(tmp_path / file, value)
    files = [written.format(stem) for stem in "ab"] if "photos" not in written else [written.format("b")]
    name = table(tmp_path, "id,breed\n" + "".join(f"{file},x\n" for file in files), images=False)
    assert grays(load_dataset(name, "all")) == ([1, 2] if len(files) == 2 else [2])
    assert "are found by their names below the folder" in caplog.text
    put(tmp_path / "again/photos/b.jpg")
    put(tmp_path / "again/photos/b.png")
    with pytest.raises(UserError, match=r"several files have the name .*again/photos/b.*write the path"):
        load_dataset(name, "all")


# -------------------------------------------------------------------------------------- what is wrong with rows


def test_missing_files_are_listed_and_errors_when_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = table(tmp_path, "file,label\n" + "".join(f"{i}.png,{'ab'[i % 2]}\n" for i in range(60)))
    missing = [tmp_path / f"{i}.png" for i in range(12)]
    for path in missing:
        path.unlink()
    with pytest.raises(ImageError, match="No such file or directory"):
        load_dataset(name, "all")
    assert f"12 of the 60 files of train do not exist: {missing[0]}" in caplog.text
    assert f"{missing[9]}, ... (12)" in caplog.text
    assert str(missing[10]) not in caplog.text
    train, val, test = (load_dataset(name, split, on_error="skip") for split in ("train", "val", "test"))
    readable = drop_unreadable(Splits(train, val, test))
    assert sum(map(len, (readable.train, readable.val, readable.test))) == 48
    reason = "No such file or directory"
    assert readable.unreadable == [{"path": path, "reason": reason} for path in sorted(map(str, missing))]
    assert len([message for message in caplog.messages if "do not exist" in message]) == 1


def test_repeated_rows_are_listed_and_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = f"file,label\na.png,x|y\nb.png,y\n./a.png,y|x\n../{tmp_path.name}/b.png,y\n"
    name = table(tmp_path, text, images=False)
    for file in ("a", "b"):
        put(tmp_path / f"{file}.png")
    assert [Path(path).name for path in paths_of(load_dataset(name, "all"))] == ["a.png", "b.png"]
    assert f"lists 2 images again, which are read once: {tmp_path / 'a.png'}" in caplog.text


def test_a_file_of_two_splits_however_it_is_spelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table(tmp_path, f"file,label,split\na.png,x,train\n{tmp_path}/a.png,x,test\n", images=False)
    with pytest.raises(UserError, match=r"\(x in train and x in test\)"):
        load_dataset("csv:labels.csv", "train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has the columns ; none of them is named as a column of image files: name it file"),
        ("photo,label\na.png,x\n", "has the columns photo, label; none of them is named .*: name it file"),
        ("file\na.png\n", "has the columns file; none of them has the labels: add a column label"),
        ("file,kind,size\na.png,x,3\n", "none of them is named label, .* with 0 and 1: kind, size hold other values"),
        ("file,cat,dog\na.png,-1,0\n", "they hold 1, 0 and -1"),
        ("file,file_name,label\na.png,a.png,x\n", "file, file_name for one thing; rename or remove all but one"),
        ("file,label,label\na.png,x,y\n", "has several columns called label; rename them"),
        ("file,label\na.png,0.5\nb.png,1\n", "as labels, such as 0.5: vitlab classifies, .* regression target. Make"),
        ("file,label,is_valid\na.png,x,True\nb.png,x,maybe\n", "line 3 has the is_valid 'maybe' .*, not True or False"),
        ("file,label,fold\na.png,x,0\nb.png,x,one\n", "line 3 has the fold 'one' .*, not a whole number"),
        ("file,label\n", "labels.csv: lists no image"),
        ("file,label\na.png,x\n,y\n", "line 3 has no file"),
        ("file,label\na.png\nb.png,x,y\n", "line 2 has not 2 fields, line 3 has not 2 fields"),
        (
            "file,label\na.png,x\nb.png, \nc.png,|\n",
            r"has no label for 2 images: .*b.png, .*c.png; remove these rows, or .*--loss sigmoid",
        ),
        ("file,label\n" + "".join(f"{i}.png,\n" for i in range(12)), r"has no label for 12 images.*9.png, ... \(12\)"),
        ("file,label\nhttps://host/a.png,x\n", "line 2 has no local path"),
        ("file,label\na\0.png,x\n", "line 2 has no local path|is not CSV"),
        (
            "file,label,split\na.png,x,train\nb.png,x,\nc.png,x,extra\n",
            "line 3 has the split '' .*line 4 has .*'extra'",
        ),
        ('file,label\n"a.png,x\n', "is not CSV: unexpected end of data"),
        ('file,label\n"a"b.png,x\n', "line 2, is not CSV"),
        (
            "file,label\na.png,x\na.png,y\n",
            r"with different labels or splits: .*a.png \(x in train and y in train\); keep",
        ),
        ("file,label,split\na.png,x,train\na.png,x,test\n", r"\(x in train and x in test\)"),
        ("file,label,split\na.png,x,train\nb.png,y|z,test\n", "labels that are missing in train: y, z"),
    ],
)
def test_invalid_tables(text: str, message: str, tmp_path: Path) -> None:
    name = table(tmp_path, text, images=False)
    with pytest.raises(UserError, match=message):
        load_dataset(name, "train")


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "latin.csv").write_bytes("file,label\na.png,é\n".encode("latin-1"))
    irregular("pipe", tmp_path / "pipe.csv", tmp_path)
    for file, message in (
        ("latin", "it is not text in UTF-8: save it as CSV"),
        ("pipe", "named pipe"),
        ("no", "no.csv does not exist"),
    ):
        with pytest.raises(UserError, match=message):
            load_dataset(f"csv:{tmp_path / file}.csv", "train")


# ------------------------------------------------------------------------------------- Hugging Face's imagefolder


def json_lines(*records: object) -> str:
    return "\n".join(map(json.dumps, records)) + "\n"


def test_metadata_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for value, file in enumerate(("a.png", "more/b.png", "c.png", "d.png"), 1):
        put(tmp_path / file, value)
    records = (
        {"file_name": "a.png", "label": 10},
        {"file_name": "more/b.png", "label": 2},
        {"file_name": "c.png", "label": 2},
    )
    (tmp_path / "metadata.jsonl").write_text(json_lines(*records))
    part = load_dataset(f"folder:{tmp_path}", "all")
    assert (part.classes, part.labels.tolist(), grays(part)) == (("2", "10"), [1, 0, 0], [1, 2, 3])
    assert part.label_sets is None
    assert f"lists no label of 1 images: {tmp_path / 'd.png'}" in caplog.text
    (tmp_path / "metadata.csv").write_text("file_name,label\na.png,x\n")
    with pytest.raises(UserError, match=r"has metadata.csv and metadata.jsonl; remove one"):
        load_dataset(f"folder:{tmp_path}", "all")


@pytest.mark.parametrize("lists", [True, False])
def test_metadata_of_splits(lists: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    labels = {"train": [["a", "b"], ["c"]], "Validation": [["b"]], "test": [["c", "a"]]}
    for split, sets in labels.items():
        cells = [several if lists else "|".join(several) for several in sets]
        records = [{"file_name": f"{i}.png", "labels": cell} for i, cell in enumerate(cells)]
        for i in range(len(sets)):
            put(tmp_path / split / f"{i}.png", 7 * i)
        (tmp_path / split / "metadata.jsonl").write_text(json_lines(*records))
    name = f"folder:{tmp_path}"
    for split, ours in zip(labels, ("train", "val", "test"), strict=True):
        part = load_dataset(name, ours)
        assert label_lists(part) == labels[split]
        assert (part.classes, part.multi_label) == (("a", "b", "c"), True)
    assert not [message for message in caplog.messages if "fewer than two" not in message]
    (tmp_path / "test" / "metadata.jsonl").unlink()
    with pytest.raises(UserError, match="test has no metadata with file_name and label, as other"):
        load_dataset(name, "train")


def test_a_column_that_the_first_line_lacks(tmp_path: Path) -> None:
    for value, file in enumerate(("a.png", "b.png"), 1):
        put(tmp_path / file, value)
    records = ({"file_name": "a.png"}, {"file_name": "b.png", "labels": ["x", "y"]})
    (tmp_path / "metadata.jsonl").write_text(json_lines(*records))
    assert label_lists(load_dataset(f"folder:{tmp_path}", "all")) == [[], ["x", "y"]]


def test_metadata_before_class_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If it has labels; metadata of other things changes nothing."""
    for name in "ab":
        for i in range(3):
            put(tmp_path / name / f"{i}.png")
    (tmp_path / "metadata.csv").write_text("file_name,text\na/0.png,an image of x\n")
    assert load_dataset(f"folder:{tmp_path}", "all").classes == ("a", "b")
    rows = [f"{name}/{i}.png,{label}\n" for name, label in zip("ab", "xy", strict=True) for i in range(3)]
    (tmp_path / "metadata.csv").write_text("file_name,label\n" + "".join(rows))
    assert load_dataset(f"folder:{tmp_path}", "all").classes == ("x", "y")
    assert "metadata.csv; the folders a, b are not read as classes" in caplog.text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"file_name": "a.png", "label": 0.5}', "numbers as labels, such as 0.5: vitlab classifies"),
        ('{"file_name": "a.png", "label": null}', "has no label for 1 images"),
        ('{"file_name": "a.png", "label": ["x", {}]}', "line 1 has the label"),
        ('{"file_name": "a.png", "label": "x"}\n{"label": "x"}', "line 2 has no file"),
        ('{"file_name": 3.5, "label": "x"}', "line 1 has no file"),
        ('{"file_name": "a.png", "label": "\\ud800"}', "no valid UTF-8"),
        ('{"file_name": "a.png", "label": "x"}\n[1]', "line 2, is not an object"),
        ('{"file_name": "a.png", "label": "x"}\n{', "line 2, is not valid JSON"),
        ('{"file_name": "a.png"}', "has no class folders: expected .*, or metadata.csv with file_name and label"),
    ],
)
def test_invalid_metadata(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "metadata.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        load_dataset(f"folder:{tmp_path}", "train")


def test_metadata_in_class_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in Hugging Face's imagefolder; without a column of labels the folders are the classes."""
    for folder, value in (("one", 1), ("two", 2)):
        put(tmp_path / folder / "a.png", value)
        (tmp_path / folder / "metadata.csv").write_text(f"file_name,text\na.png,{folder}\n")
    assert load_dataset(f"folder:{tmp_path}", "all").classes == ("one", "two")
    (tmp_path / "one" / "metadata.csv").write_text("file_name,label\na.png,x\n")
    with pytest.raises(UserError, match="two has no metadata with file_name and label, as others have"):
        load_dataset(f"folder:{tmp_path}", "all")
    (tmp_path / "two" / "metadata.csv").write_text("file_name,label\na.png,y\n")
    part = load_dataset(f"folder:{tmp_path}", "all")
    assert (part.classes, grays(part), label_lists(part)) == (("x", "y"), [1, 2], [["x"], ["y"]])
    assert "the names of the folders are not read as classes" in caplog.text


def test_metadata_in_parquet(tmp_path: Path) -> None:
    for value, file in enumerate("ab", 1):
        put(tmp_path / f"{file}.png", value)
    rows = pyarrow.table({"file_name": ["a.png", "b.png"], "label": ["y", "x"]})
    pyarrow.parquet.write_table(rows, tmp_path / "metadata.parquet")
    part = load_dataset(f"folder:{tmp_path}", "all")
    assert (part.classes, label_lists(part), grays(part)) == (("x", "y"), [["y"], ["x"]], [1, 2])
