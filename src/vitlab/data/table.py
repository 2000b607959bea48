"""Images and labels that a table lists: `csv:PATH`, and the metadata of Hugging Face's imagefolder."""

import csv
import io
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.data.classes import canonical, natural_order
from vitlab.data.contents import images_below, subfolders
from vitlab.data.dataset import Dataset, Labels, SplitReader
from vitlab.data.decode import Entry
from vitlab.data.folder import SPLIT_FOLDERS
from vitlab.data.registry import warn_once
from vitlab.errors import UserError, first_ten, quoted
from vitlab.io import parse_json, read_regular

COLUMNS = {"file": ("file", "file_name"), "label": ("label", "labels"), "split": ("split",)}
"""The names of each column; `split` may be missing."""
METADATA = ("metadata.csv", "metadata.jsonl")
MAX_TABLE_BYTES = 2**28
"""Largest table that is read: millions of images."""
_SPLITS = {name: split for split, names in SPLIT_FOLDERS.items() for name in names}
_NOT_TEXT = re.compile(r"[\x00\ud800-\udfff]")  # in no path; half a character cannot be written


class Row(NamedTuple):
    """An image: the path of its file, its labels, its split."""

    file: str
    labels: tuple[str, ...]
    split: str


def csv_splits(path: Path, name: str) -> SplitReader:
    """The images that a CSV file lists: `file`, a path relative to the table's folder, `label`, and `split` if any.

    UTF-8, with commas, semicolons or tabs. Several labels of an image are joined by |, which is in no label then; where
    any has several, an image may have none. A split is train, val or test, or has another name of `SPLIT_FOLDERS`;
    without that column the first folders of the paths are the splits, where all are named so, else every image is
    train's. Missing files are logged, and errors when they are read. Raises UserError for any invalid row.
    """
    return _splits(_read_rows(path, ""), path.parent, name)


def metadata_splits(path: Path, name: str) -> SplitReader | None:
    """The images of `PATH/metadata.csv` or `.jsonl`, or of those in `train/`, `val/` and `test/` (Hugging Face).

    As `csv_splits`; in `.jsonl` the labels may be a list. Class folders are not read then, which is logged, as are
    images that are not listed. None where no metadata has a label: class folders are read.
    """
    roots = [("", path)]
    if not _labeled(path):
        roots = [(_SPLITS[name.lower()], path / name) for name in subfolders(path) if name.lower() in _SPLITS]
    tables = {root: table for _, root in roots if (table := _labeled(root))}
    if not tables:
        return None
    if missing := [str(root) for _, root in roots if root not in tables]:
        raise UserError(f"{first_ten(missing)} has no metadata.csv or .jsonl with file_name and label, as others have")
    rows = [row for split, root in roots for row in _read_rows(tables[root], split)]
    listed = {os.path.abspath(row.file) for row in rows}  # noqa: PTH100
    for root in tables:
        classes = [folder for folder in subfolders(root) if folder.lower() not in _SPLITS]
        if len(classes) > 1:
            file = quoted(str(tables[root]))
            warn_once(f"the labels are those of {file}; the folders {first_ten(classes)} are not read as classes")
        if extra := [f for f in images_below(root) if os.path.abspath(f) not in listed]:  # noqa: PTH100
            warn_once(f"{quoted(str(tables[root]))} lists no label of {len(extra)} images: {first_ten(extra)}")
    return _splits(rows, path, name)


def _splits(rows: Sequence[Row], folder: Path, name: str) -> SplitReader:
    forms: dict[str, str] = {}  # of a label in several Unicode forms, the first
    same = (dict.fromkeys(forms.setdefault(canonical(label), label) for label in row.labels) for row in rows)
    rows = [row._replace(labels=tuple(labels)) for row, labels in zip(rows, same, strict=True)]
    rows = _without_repetitions(rows, name)
    present = [split for split in SPLIT_FOLDERS if any(row.split == split for row in rows)]
    known = {label for row in rows if row.split == present[0] or "train" not in present for label in row.labels}
    if unknown := sorted({label for row in rows for label in row.labels} - known):
        raise UserError(f"{quoted(name)} has labels that are missing in train: {first_ten(unknown)}")
    classes = natural_order(known)
    index = {label: i for i, label in enumerate(classes)}
    several = any(len(row.labels) > 1 for row in rows)
    if (unlabeled := [row.file for row in rows if not row.labels]) and not several:
        raise UserError(f"{quoted(name)} has no label for {len(unlabeled)} images: {first_ten(unlabeled)}")
    if unlabeled:
        warn_once(f"{quoted(name)}: {len(unlabeled)} images have no label, and are taken for images without any class")

    def read(split: str) -> Dataset:
        part = [row for row in rows if row.split == split]
        if missing := [row.file for row in part if not os.path.exists(row.file)]:  # noqa: PTH110  (a Path is slow)
            count = f"{len(missing)} of the {len(part)} files of {split} do not exist"
            warn_once(f"{quoted(name)}: {count}: {first_ten(missing)}")
        labels = Labels.of_lists([[index[label] for label in row.labels] for row in part])
        entries = [Entry(row.file) for row in part]
        sets = labels if several else None
        return Dataset(name, split, classes, labels.firsts, entries=entries, label_sets=sets, folder=str(folder))

    return present, read


def _without_repetitions(rows: Sequence[Row], name: str) -> list[Row]:
    """The first row of each file; rows that repeat it are logged. Raises UserError for those that contradict it."""
    firsts: dict[str, Row] = {}
    repeated, contradictory = [], []
    for row in rows:
        first = firsts.setdefault(os.path.abspath(row.file), row)  # noqa: PTH100  (of x/../a.jpg and a.jpg)
        if first is not row and (set(first.labels), first.split) == (set(row.labels), row.split):
            repeated.append(row.file)
        elif first is not row:
            both = " and ".join(f"{'|'.join(each.labels)} in {each.split}" for each in (first, row))
            contradictory.append(f"{row.file} ({both})")
    if contradictory:
        raise UserError(
            f"{quoted(name)} lists files twice, with different labels or splits: {first_ten(contradictory)}; keep one "
            f"row of each file, with several labels joined by |"
        )
    if repeated:
        warn_once(f"{quoted(name)} lists {len(repeated)} images again, which are read once: {first_ten(repeated)}")
    return list(firsts.values())


def _labeled(folder: Path) -> Path | None:
    """The metadata of a folder, if it names files and labels."""
    tables = [folder / name for name in METADATA if (folder / name).exists()]
    if len(tables) > 1:
        raise UserError(f"{quoted(str(folder))} has {' and '.join(METADATA)}; remove one")
    columns = _read(tables[0])[0] if tables else ()
    return tables[0] if all(set(columns) & set(COLUMNS[kind]) for kind in ("file", "label")) else None


def _read_rows(path: Path, split: str) -> list[Row]:
    """The images of a table; `split` is that of all, or "" if the table says it. Raises UserError."""
    columns, records = _read(path)
    where = quoted(str(path))
    found = {kind: [column for column in columns if column in names] for kind, names in COLUMNS.items()}
    if not len(found["file"]) == len(found["label"]) == 1 or len(found["split"]) > 1:
        raise UserError(
            f"{where} has the columns {first_ten(columns)}; expected one file (or file_name), one label (or labels) "
            f"and, for several splits, one split"
        )
    (file_column,), (label_column,), split_column = found["file"], found["label"], "".join(found["split"])
    rows, invalid = [], []
    for line, record in records:
        file, labels = record.get(file_column), _labels(record.get(label_column))
        named = str(record.get(split_column) or "").strip().lower()
        if not record:
            invalid.append(f"line {line} has not {len(columns)} fields")
        elif not isinstance(file, str) or not file:
            invalid.append(f"line {line} has no file")
        elif labels is None:
            invalid.append(f"line {line} has the label {record[label_column]!r} ({file}), not a text or whole number")
        elif "://" in file or _NOT_TEXT.search(file + "".join(labels)):
            invalid.append(f"line {line} has no local path or no valid UTF-8 ({file[:80]!r})")
        elif split_column and not split and named not in _SPLITS:
            invalid.append(f"line {line} has the split {named!r} ({file}), not train, val or test")
        else:
            named = named if split_column else "".join(Path(file).parts[:1]).lower()
            rows.append(Row(str(Path(path.parent, file)), labels, split or _SPLITS.get(named, "")))
    if invalid or not rows:
        raise UserError(f"{where}: {first_ten(invalid) or 'lists no image'}")
    outside = [row.file for row in rows if not row.split]
    if 0 < len(outside) < len(rows):
        warn_once(
            f"{where}: the folders train, val and test are not taken for splits, as {len(outside)} of the {len(rows)} "
            f"files are in none of them, first {quoted(outside[0])}; add a column split"
        )
    return [row._replace(split="train") for row in rows] if outside else rows


def _labels(cell: Any) -> tuple[str, ...] | None:
    """The labels in a cell, each once; None if it holds anything but texts and whole numbers."""
    values = cell if isinstance(cell, list) else [] if cell is None else [cell]
    if not all(isinstance(value, str | int) for value in values):
        return None
    labels = (label.strip() for value in values for label in str(value).split("|"))
    return tuple(dict.fromkeys(label for label in labels if label))


def _read(path: Path) -> tuple[list[str], Iterator[tuple[int, dict[str, Any]]]]:
    """The columns of a table (of `.jsonl`, those of all its lines); and the number and the cells of each line."""
    try:
        text = read_regular(path, MAX_TABLE_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8, as which it must be saved"
        raise UserError(f"cannot read the table {quoted(str(path))}: {reason}") from error
    if path.suffix == ".jsonl":
        records = list(_json_lines(text, path))
        return list(dict.fromkeys(column for _, record in records for column in record)), iter(records)
    lines = _csv_lines(text, path)
    columns = [column.strip().lower() for column in next(lines, (1, []))[1]]
    fits = ((line, cells if len(cells) == len(columns) else []) for line, cells in lines)
    return columns, ((line, dict(zip(columns, cells, strict=False))) for line, cells in fits)


def _csv_lines(text: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    try:
        yield from ((reader.line_num, cells) for cells in reader if cells)
    except csv.Error as error:
        raise UserError(f"{quoted(str(path))}, line {reader.line_num}, is not CSV: {error}") from error


def _json_lines(text: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            record = parse_json(line, f"{path}, line {number},")
            if not isinstance(record, dict):
                raise UserError(f"{quoted(str(path))}, line {number}, is not an object with file_name and label")
            yield number, record
