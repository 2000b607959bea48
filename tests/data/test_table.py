"""Tables of images and labels: every row is read, or listed in a warning or an error."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from image_files import grays, label_lists, paths_of, put, table
from irregular import irregular
from PIL import Image

from vitlab.config import DataConfig, OptimConfig, TrainConfig
from vitlab.data import table_file
from vitlab.data.decode import ImageError
from vitlab.data.exclude import image_id
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.evaluation.predict import predict
from vitlab.evaluation.predictions import read_predictions
from vitlab.models.config import ViTConfig
from vitlab.runs.pretrain import pretrain
from vitlab.runs.run import PREDICTIONS


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


@pytest.mark.parametrize(("encoding", "mark"), [("utf-16-le", "\ufeff"), ("utf-16-be", "\ufeff"), ("utf-16", "")])
def test_unicode_text_of_spreadsheets(encoding: str, mark: str, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_bytes(f"{mark}file\tlabel\r\na.png\tÜbung\r\n".encode(encoding))
    put(tmp_path / "a.png")
    assert load_dataset(f"csv:{tmp_path}/labels.txt", "all").classes == ("Übung",)


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


@pytest.mark.parametrize("column", [True, False])
def test_splits_and_their_names(column: bool, tmp_path: Path) -> None:
    """In a column, or as the first folders of all paths."""
    names = ("Training", "dev", "TEST")
    rows = [f"{'' if column else f'{name}/'}{name}{c}.png,{c},{name}" for name in names for c in "ba"]
    text = "\n".join(["file,label,split", *rows])
    name = table(tmp_path, text if column else text.replace("split", "other"))
    parts = [grays(load_dataset(name, split)) for split in ("train", "val", "test", "all")]
    assert parts == [[1, 2], [3, 4], [5, 6], [1, 2, 3, 4, 5, 6]]


def test_some_folders_called_like_splits_are_no_splits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Val and test are cut from the rows."""
    rows = [f"{folder}/{i}.png,{folder}\n" for folder in ("test", "car") for i in range(20)]
    name = table(tmp_path, "file,label\n" + "".join(rows))
    parts = [load_dataset(name, split) for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [32, 4, 4]
    assert len({path for part in parts for path in paths_of(part)}) == 40
    assert str(tmp_path / "car/0.png") in caplog.text


def test_several_labels(tmp_path: Path) -> None:
    """In all splits of a table, also in one where every image has one; an image may have none."""
    split_rows = {"train": ("b|a", "a", " c | b |", "c|c", ""), "val": ("a", "b", "c"), "test": ("a", "b", "c")}
    rows = [f"{split}{i}.png,{cell},{split}" for split, cells in split_rows.items() for i, cell in enumerate(cells)]
    name = table(tmp_path, "\n".join(["file,label,split", *rows]))
    train = load_dataset(name, "train")
    assert label_lists(train) == [["b", "a"], ["a"], ["c", "b"], ["c"], []]
    assert train.labels.tolist()[:4] == [1, 0, 2, 2]
    assert train.multi_label
    assert load_dataset(name, "test").multi_label
    part = load_dataset(name, "train", classes=(2, 0))
    assert (label_lists(part), part.multi_label) == ([["a"], ["a"], ["c"], ["c"]], True)


def test_a_run_on_several_labels(tmp_path: Path) -> None:
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
    options: dict = {"batch_size": 15, "epochs": None, "steps": 60, "loss": "sigmoid"}
    config = TrainConfig(model=model, data=DataConfig(name), optim=OptimConfig(lr=0.01), **options)
    test = pretrain(config, tmp_path / "run", device="cpu", tensorboard=False).result["test"]
    assert test["mean_average_precision"] > 0.95
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("val_mean_average_precision" in line for line in lines)
    stored, _ = read_predictions(tmp_path / "run" / PREDICTIONS, ("green", "red"))
    lists = [stored.all_labels.of_image(i).tolist() for i in range(15)]
    assert lists == [[[1], [0], [1, 0], []][i % 4] for i in stored.indices]
    predictions = predict(tmp_path / "run", [tmp_path / f"{i}.png" for i in range(4)])
    likely = [{c for c, p in prediction.top if p > 0.5} for prediction in predictions]
    assert likely == [{"red"}, {"green"}, {"red", "green"}, set()]


def test_the_model_says_that_labels_are_several(tmp_path: Path) -> None:
    """Of a table where each image has one or none, which alone is ambiguous, or each one."""
    name = table(tmp_path, "file,label,split\na.png,x,train\nb.png,y,train\nc.png,,train\nd.png,y,test\n")
    with pytest.raises(UserError, match=r"c\.png; .*--loss sigmoid"):
        load_dataset(name, "train")
    train = load_dataset(name, "train", multi_label=True, whole_train=True)
    assert (label_lists(train), train.multi_label) == ([["x"], ["y"], []], True)
    assert load_dataset(name, "test", multi_label=True).multi_label


def test_missing_files_are_listed_and_errors_when_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    name = table(tmp_path, "file,label\n" + "".join(f"{i}.png,{'ab'[i % 2]}\n" for i in range(60)))
    missing = [tmp_path / f"{i}.png" for i in range(12)]
    for path in missing:
        path.unlink()
    with pytest.raises(ImageError, match="No such file"):
        load_dataset(name, "all")
    assert [str(path) in caplog.text for path in missing] == [True] * 10 + [False] * 2
    assert len(load_dataset(name, "all", on_error="skip").failures) == 12
    assert len([message for message in caplog.messages if "do not exist" in message]) == 1


def test_repeated_rows_are_listed_and_read_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = f"file,label\na.png,x|y\nb.png,y\n./a.png,y|x\n../{tmp_path.name}/b.png,y\n"
    name = table(tmp_path, text, images=False)
    for file in ("a", "b"):
        put(tmp_path / f"{file}.png")
    assert [Path(path).name for path in paths_of(load_dataset(name, "all"))] == ["a.png", "b.png"]
    assert str(tmp_path / "a.png") in caplog.text
    table(tmp_path, f"file,label,split\na.png,x,train\n{tmp_path}/a.png,x,test\n", images=False)
    with pytest.raises(UserError, match="x in train and x in test"):
        load_dataset(name, "train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "name it file"),
        ("photo,label\na.png,x\n", "photo, label; .*name it file"),
        ("file\na.png\n", "add a column label"),
        ("file,cat,dog\na.png,-1,0\n", "they hold 1, 0 and -1"),
        ("file,cat,age\na.png,1,30\n", "age hold other values"),
        ("file,class,category\na.png,x,y\n", "class, category"),
        ("file,label,label\na.png,x,y\n", "several columns called label"),
        ("file,label\na.png,0.5\nb.png,1\n", "such as 0.5"),
        ("file,label,is_valid\na.png,x,True\nb.png,x,maybe\n", "line 3 has the is_valid 'maybe'"),
        ("file,label,fold\na.png,x,0\nb.png,x,one\n", "line 3 has the fold 'one'"),
        ("file,label\n", "lists no image"),
        ("file,label\na.png,x\n,y\n", "line 3 has no file"),
        ("file,label\na.png\nb.png,x,y\n", "line 2 does not have the fields .*, line 3 does not have"),
        ("file,label\na.png,x\nb.png, \nc.png,|\n", r"2 images: .*b.png, .*c.png; .*--loss sigmoid"),
        ("file,label\nhttps://host/a.png,x\n", "line 2 has no local path"),
        ("file,label\na\0.png,x\n", "line 2 has no local path|is not CSV"),
        ("file,label,split\na.png,x,train\nb.png,x,\nc.png,x,extra\n", "line 3 has the split '' .*line 4 .*'extra'"),
        ('file,label\n"a"b.png,x\n', "line 2, is not CSV"),
        ("file,label\na.png,x\na.png,y\n", r"a.png \(x in train and y in train\)"),
        ("file,label,split\na.png,x,train\nb.png,y|z,test\n", "missing in train: y, z"),
    ],
)
def test_invalid_tables(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_dataset(table(tmp_path, text, images=False), "train")


def test_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "a.png")
    columns = pyarrow.table({"file": ["a.png"], "labels": [["x", "y"]], "note": ["z" * 5000]})
    pyarrow.parquet.write_table(columns, tmp_path / "whole.parquet")
    assert label_lists(load_dataset(f"csv:{tmp_path}/whole.parquet", "all")) == [["x", "y"]]
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "whole.parquet").read_bytes()[:-9])
    (tmp_path / "latin.csv").write_bytes("file,label\na.png,é\n".encode("latin-1"))
    irregular("pipe", tmp_path / "pipe.csv", tmp_path)
    monkeypatch.setattr(table_file, "MAX_TABLE_BYTES", 4000)
    for file, message in (
        ("latin.csv", "UTF-8"),
        ("pipe.csv", "named pipe"),
        ("no.csv", "no.csv does not exist"),
        ("cut.parquet", "cannot read the table"),
        ("whole.parquet", "at most"),
    ):
        with pytest.raises(UserError, match=message):
            load_dataset(f"csv:{tmp_path / file}", "train")


def json_lines(*records: object) -> str:
    return "\n".join(map(json.dumps, records)) + "\n"


def test_metadata_of_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As JSON lines, whose first may lack a column, and as Parquet; images that it does not list are named."""
    files = ("a.png", "more/b.png", "c.png", "d.png")
    for value, file in enumerate(files, 1):
        put(tmp_path / file, value)
    lines, whole = tmp_path / "metadata.jsonl", f"folder:{tmp_path}"
    rows = [{"file_name": file, "label": label} for file, label in zip(files, (10, 2, 2), strict=False)]
    lines.write_text(json_lines(*rows))
    part = load_dataset(whole, "all")
    assert (part.classes, part.labels.tolist(), grays(part)) == (("2", "10"), [1, 0, 0], [1, 2, 3])
    assert str(tmp_path / "d.png") in caplog.text
    lines.write_text(json_lines({"file_name": "a.png"}, {"file_name": "c.png", "labels": ["x", "y"]}))
    assert label_lists(load_dataset(whole, "all")) == [[], ["x", "y"]]
    columns = pyarrow.table({"file_name": ["a.png", "c.png"], "label": ["y", "x"]})
    pyarrow.parquet.write_table(columns, tmp_path / "metadata.parquet")
    with pytest.raises(UserError, match=r"metadata.jsonl and metadata.parquet; remove one"):
        load_dataset(whole, "all")
    lines.unlink()
    part = load_dataset(whole, "all")
    assert (part.classes, label_lists(part), grays(part)) == (("x", "y"), [["y"], ["x"]], [1, 3])


def test_metadata_of_splits(tmp_path: Path) -> None:
    labels = {"train": [["a", "b"], ["c"]], "Validation": [["b"]], "test": [["c", "a"]]}
    for split, sets in labels.items():
        records = [{"file_name": f"{i}.png", "labels": several} for i, several in enumerate(sets)]
        for i in range(len(sets)):
            put(tmp_path / split / f"{i}.png", 7 * i)
        (tmp_path / split / "metadata.jsonl").write_text(json_lines(*records))
    for split, ours in zip(labels, ("train", "val", "test"), strict=True):
        part = load_dataset(f"folder:{tmp_path}", ours)
        assert label_lists(part) == labels[split]
        assert (part.classes, part.multi_label) == (("a", "b", "c"), True)
    (tmp_path / "test" / "metadata.jsonl").unlink()
    with pytest.raises(UserError, match="test has no metadata"):
        load_dataset(f"folder:{tmp_path}", "train")


def test_metadata_of_class_folders(tmp_path: Path) -> None:
    """Beside them or in each, as in Hugging Face's imagefolder. Without labels in it the folders are the classes."""
    for value, name in enumerate("ab", 1):
        put(tmp_path / name / "0.png", value)
        (tmp_path / name / "metadata.csv").write_text(f"file_name,text\n0.png,an image of {name}\n")
    assert load_dataset(f"folder:{tmp_path}", "all").classes == ("a", "b")
    (tmp_path / "a" / "metadata.csv").write_text("file_name,label\n0.png,y\n")
    with pytest.raises(UserError, match="b has no metadata"):
        load_dataset(f"folder:{tmp_path}", "all")
    (tmp_path / "b" / "metadata.csv").write_text("file_name,label\n0.png,x\n")
    part = load_dataset(f"folder:{tmp_path}", "all")
    assert (part.classes, grays(part), label_lists(part)) == (("x", "y"), [1, 2], [["y"], ["x"]])
    for name in "ab":
        (tmp_path / name / "metadata.csv").unlink()
    (tmp_path / "metadata.csv").write_text("file_name,label\na/0.png,v\nb/0.png,u\n")
    assert label_lists(load_dataset(f"folder:{tmp_path}", "all")) == [["v"], ["u"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"file_name": "a.png", "label": 0.5}', "such as 0.5"),
        ('{"file_name": "a.png", "label": null}', "no label for 1 images"),
        ('{"file_name": "a.png", "label": ["x", {}]}', "line 1 has the label"),
        ('{"file_name": "a.png", "label": "x"}\n{"label": "x"}', "line 2 has no file"),
        ('{"file_name": 3.5, "label": "x"}', "line 1 has no file"),
        ('{"file_name": "a.png", "label": "\\ud800"}', "UTF-8"),
        ('{"file_name": "a.png", "label": "x"}\n[1]', "line 2, is not an object"),
        ('{"file_name": "a.png", "label": "x"}\n{', "line 2, is not valid JSON"),
        ('{"file_name": "a.png"}', "has no class folders"),
    ],
)
def test_invalid_metadata(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "metadata.jsonl").write_text(text)
    with pytest.raises(UserError, match=message):
        load_dataset(f"folder:{tmp_path}", "train")
