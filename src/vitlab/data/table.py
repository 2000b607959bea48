"""Images and labels that a table lists: `csv:PATH`, and the metadata of Hugging Face's imagefolder in `folder:PATH`.

table_file.py reads and checks the rows.
"""

import collections
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from vitlab.config.data import ReadConfig
from vitlab.data.classes import canonical, natural_order
from vitlab.data.contents import images_below, subfolders
from vitlab.data.dataset import Dataset, Labels, SplitReader
from vitlab.data.decode import Entry
from vitlab.data.folder import SPLIT_FOLDERS, SPLIT_OF
from vitlab.data.table_file import FILE, LABEL, Row, read_rows, read_table, rename_labels
from vitlab.errors import UserError, first_ten, quoted, warn_once

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def csv_splits(path: Path, name: str, read: ReadConfig = ReadConfig(), multi_label: bool = False) -> SplitReader:
    """The images that a table lists: CSV in UTF-8 with commas, semicolons or tabs, or `.jsonl` or `.parquet`.

    - file: a path relative to the table's folder. If no file exists at its path, files are found by name below it.
    - label: several labels are a list, or joined by `label_separator`. If any image has several, or the model has
      (`multi_label`), an image may have none.
    - split: train, val or test, or another name of `SPLIT_FOLDERS`. Without this column the first folders of the paths
      are the splits, if all are named so, else every image is in train.
    - For other columns see `table_file`: one column of 0 and 1 per class, `is_valid`, `fold`, `group`.

    Missing files are logged, and errors when they are read. Raises UserError for any invalid row.
    """
    return _splits(_located_rows(path, "", read), path.parent, name, multi_label)


def metadata_splits(
    path: Path, name: str, read: ReadConfig = ReadConfig(), multi_label: bool = False
) -> SplitReader | None:
    """The images that Hugging Face's `metadata.csv`, `.jsonl` or `.parquet` lists, as `csv_splits` reads them.

    The metadata is in PATH, or in each of `train/`, `val/` and `test/`, or in each class folder; its columns are
    `file_name` and `label`. Class folders and unlisted images are then logged and not read. None if no metadata has a
    label: class folders are read.
    """
    folders = _metadata_folders(path)
    tables = {folder: table for _, folder in folders if (table := _labeled_metadata(folder))}
    if not tables:
        return None
    if missing := [str(folder) for _, folder in folders if folder not in tables]:
        raise UserError(f"{first_ten(missing)} has no metadata with file_name and label, as others have")
    rows = [row for split, folder in folders for row in _located_rows(tables[folder], split, read)]
    _warn_of_unread(tables, rows)
    return _splits(rows, path, name, multi_label)


def _metadata_folders(path: Path) -> list[tuple[str, Path]]:
    """Split, or "" if the metadata may say it, and folder of each metadata that has to be there.

    PATH/metadata.csv             "", PATH
    PATH/train/metadata.csv       train, PATH/train
    PATH/rose/metadata.csv        "", PATH/rose
    PATH/train/rose/metadata.csv  train, PATH/train/rose
    """
    named = [] if _labeled_metadata(path) else [folder for folder in subfolders(path) if folder.lower() in SPLIT_OF]
    roots = [(SPLIT_OF[folder.lower()], path / folder) for folder in named] or [("", path)]
    return [(split, folder) for split, root in roots for folder in _folders_with_metadata(root)]


def _warn_of_unread(tables: Mapping[Path, Path], rows: Sequence[Row]) -> None:
    """Logs class folders and images that the metadata of their folder does not list; `tables`: folder -> metadata."""
    listed = {os.path.abspath(row.file) for row in rows}  # noqa: PTH100
    for folder, table in tables.items():
        file = quoted(str(table))
        classes = [inner for inner in subfolders(folder) if inner.lower() not in SPLIT_OF]
        if len(classes) > 1:
            warn_once(f"the labels are from {file}; the folders {first_ten(classes)} are not read as classes")
        if unlisted := [f for f in images_below(folder) if os.path.abspath(f) not in listed]:  # noqa: PTH100
            warn_once(f"{file} lists no label of {len(unlisted)} images: {first_ten(unlisted)}")


def _folders_with_metadata(root: Path) -> list[Path]:
    """A folder, or its folders of images, where any of these has metadata with labels and it has none itself."""
    below = [] if _labeled_metadata(root) else [root / folder for folder in subfolders(root)]
    if not any(map(_labeled_metadata, below)):
        return [root]
    tables = first_ten([str(folder) for folder in below if _labeled_metadata(folder)])
    warn_once(f"the labels are from the metadata in {tables}; the names of the folders are not read as classes")
    return [folder for folder in below if images_below(folder)]


def _labeled_metadata(folder: Path) -> Path | None:
    """The metadata of a folder, if it names files and labels."""
    tables = [folder / name for name in METADATA if (folder / name).exists()]
    if len(tables) > 1:
        raise UserError(f"{quoted(str(folder))} has {' and '.join(table.name for table in tables)}; remove one")
    columns = {column.lower() for column in read_table(tables[0])[0]} if tables else set()
    return tables[0] if columns & set(FILE[0]) and columns & set(LABEL[0]) else None


def _located_rows(path: Path, split: str, read: ReadConfig) -> list[Row]:
    """The rows of a table, as `read_rows` reads them, with their files found and a split each."""
    where = quoted(str(path))
    rows = _find_files(read_rows(path, split, read), path.parent, where)
    if not rows[0].split:
        rows = _split_by_folder(rows, path.parent, where)
    return [row._replace(file=str(Path(path.parent, row.file))) for row in rows]


def _split_by_folder(rows: Sequence[Row], folder: Path, where: str) -> list[Row]:
    """`rows` in the splits that the first folders of their paths name; all in train if any path has none."""
    rows = [row._replace(split=SPLIT_OF.get("".join(Path(row.file).parts[:1]).lower(), "")) for row in rows]
    outside = [row.file for row in rows if not row.split]
    if 0 < len(outside) < len(rows):
        warn_once(
            f"{where}: the folders train, val and test are not taken for splits, as {len(outside)} of the {len(rows)} "
            f"files are in none of them, first {quoted(str(folder / outside[0]))}; add a column split"
        )
    return [row._replace(split="train") for row in rows] if outside else rows


def _find_files(rows: Sequence[Row], folder: Path, where: str) -> Sequence[Row]:
    """`rows`; if none of their files is where it should be, with files of the same name below the folder. The name may
    lack the folder or the suffix, as in the tables of Kaggle. Raises UserError where several files fit."""
    rows = _in_the_form_on_disk(rows, folder)
    if any(os.path.exists(os.path.join(folder, row.file)) for row in rows):  # noqa: PTH110, PTH118
        return rows
    files_by_end = _files_by_end(folder)
    matches = []
    for row in rows:
        wanted = row.file.replace("\\", "/").removeprefix("./")
        if wanted.startswith("/") or ":" in wanted:  # of an absolute path, which another machine had
            wanted = Path(wanted).name
        matches.append((row, sorted(files_by_end.get(wanted, ()))))
    if ambiguous := [f"{row.file} ({' and '.join(files[:3])})" for row, files in matches if len(files) > 1]:
        raise UserError(f"{where}: several files have the name in {first_ten(ambiguous)}; write the path of each file")
    if moved := [f"{row.file} is {files[0]}" for row, files in matches if files and files[0] != row.file]:
        warn_once(f"{where}: {len(moved)} files are found by their names below the folder, {first_ten(moved[:1])}")
    return [row._replace(file=files[0]) if files else row for row, files in matches]


def _files_by_end(folder: Path) -> Mapping[str, set[str]]:
    """The images below a folder by the ends of their paths: for a/b/c.png c.png, b/c.png, a/b/c.png, c, b/c, a/b/c."""
    files_by_end = collections.defaultdict[str, set[str]](set)
    for path in images_below(folder):
        file = os.path.relpath(path, folder)
        for parts in (Path(file).parts, Path(file).with_suffix("").parts):
            for start in range(len(parts)):
                files_by_end["/".join(parts[start:])].add(file)
    return files_by_end


def _in_the_form_on_disk(rows: Sequence[Row], folder: Path) -> Sequence[Row]:
    """`rows`, where files whose names are on the disk in another Unicode form (macOS writes NFD) have those names."""
    names = {row.file for row in rows if not row.file.isascii()}
    if not (missing := {name for name in names if not (folder / name).exists()}):
        return rows
    below = {canonical(file): file for file in (os.path.relpath(path, folder) for path in images_below(folder))}
    form = {name: below.get(canonical(os.path.normpath(name)), name) for name in missing}
    return [row._replace(file=form.get(row.file, row.file)) for row in rows]


def _splits(rows: Sequence[Row], folder: Path, name: str, multi_label: bool) -> SplitReader:
    """The splits of these images. Their classes are the labels in train, or all labels without train."""
    first_forms: dict[str, str] = {}  # of labels that are written in several Unicode forms
    forms = {label: first_forms.setdefault(canonical(label), label) for row in rows for label in row.labels}
    rows = _without_repetitions(rename_labels(rows, forms), name)
    present = [split for split in SPLIT_FOLDERS if any(row.split == split for row in rows)]
    class_rows = [row for row in rows if row.split == "train"] or rows
    classes = natural_order({label for row in class_rows for label in row.labels})
    index = {label: i for i, label in enumerate(classes)}
    if unknown := sorted({label for row in rows for label in row.labels if label not in index}):
        raise UserError(f"{quoted(name)} has labels that are missing in train: {first_ten(unknown)}")
    multi_label = multi_label or any(len(row.labels) > 1 for row in rows)
    unlabeled = [row.file for row in rows if not row.labels]
    if unlabeled and not multi_label:
        raise UserError(
            f"{quoted(name)} has no label for {len(unlabeled)} images: {first_ten(unlabeled)}; remove these rows, or "
            f"where an image may have several classes or none, give --loss sigmoid"
        )
    if unlabeled:
        warn_once(f"{quoted(name)}: {len(unlabeled)} images have no label, and are treated as images without a class")
    has_groups = any(row.group for row in rows)

    def read(split: str) -> Dataset:
        part = [row for row in rows if row.split == split]
        if missing := [row.file for row in part if not os.path.exists(row.file)]:  # noqa: PTH110  (a Path is slow)
            count = f"{len(missing)} of the {len(part)} files of {split} do not exist"
            warn_once(f"{quoted(name)}: {count}: {first_ten(missing)}")
        labels = Labels.of_lists([[index[label] for label in row.labels] for row in part])
        sets, first = labels if multi_label else None, labels.first_labels
        groups = np.array([row.group or row.file for row in part], dtype=object) if has_groups else None
        entries = [Entry(row.file) for row in part]
        return Dataset(name, split, classes, first, entries=entries, label_sets=sets, folder=str(folder), groups=groups)

    return present, read


def _without_repetitions(rows: Sequence[Row], name: str) -> list[Row]:
    """The first row of each file; rows that repeat it are logged. Raises UserError for those that contradict it."""
    first_rows: dict[str, Row] = {}
    repeated, contradictory = [], []
    for row in rows:
        first = first_rows.setdefault(os.path.abspath(row.file), row)  # noqa: PTH100  (of x/../a.jpg and a.jpg)
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
    return list(first_rows.values())
