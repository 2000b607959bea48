"""Images and labels that a table lists: `csv:PATH`, and the metadata of Hugging Face's imagefolder."""

import collections
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitlab.config.data import ReadConfig
from vitlab.data.classes import canonical, natural_order
from vitlab.data.contents import images_below, subfolders
from vitlab.data.dataset import Dataset, Labels, SplitReader
from vitlab.data.decode import Entry
from vitlab.data.folder import SPLIT_FOLDERS, SPLIT_OF
from vitlab.data.splits import warn_once
from vitlab.data.table_file import FILE, LABEL, MISSING, Columns, choose_columns, list_in, lowered, read_table
from vitlab.errors import UserError, first_ten, quoted

METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
_SPLIT_OF_IS_VALID = {"1": "val", "1.0": "val", "true": "val", "0": "train", "0.0": "train", "false": "train"}
_NOT_TEXT = re.compile(r"[\x00\ud800-\udfff]")  # a zero is in no path; half a character cannot be written


class Row(NamedTuple):
    """An image: the path of its file, its labels, its split, and its group ("" for one of its own)."""

    file: str
    labels: tuple[str, ...]
    split: str
    group: str


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
    return _splits(_read_rows(path, "", read), path.parent, name, multi_label)


def metadata_splits(
    path: Path, name: str, read: ReadConfig = ReadConfig(), multi_label: bool = False
) -> SplitReader | None:
    """The images that Hugging Face's `metadata.csv`, `.jsonl` or `.parquet` lists, as `csv_splits` reads them.

    The metadata is in PATH, or in each of `train/`, `val/` and `test/`, or in each class folder; its columns are
    `file_name` and `label`. Class folders are not read then; they and unlisted images are logged. None where no
    metadata has a label: class folders are read.
    """
    named = [] if _labeled_metadata(path) else [folder for folder in subfolders(path) if folder.lower() in SPLIT_OF]
    roots = [(SPLIT_OF[folder.lower()], path / folder) for folder in named] or [("", path)]
    folders = [(split, folder) for split, root in roots for folder in _folders_with_metadata(root)]
    tables = {folder: table for _, folder in folders if (table := _labeled_metadata(folder))}
    if not tables:
        return None
    if missing := [str(folder) for _, folder in folders if folder not in tables]:
        raise UserError(f"{first_ten(missing)} has no metadata with file_name and label, as others have")
    rows = [row for split, folder in folders for row in _read_rows(tables[folder], split, read)]
    _warn_of_unread(tables, rows)
    return _splits(rows, path, name, multi_label)


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
    """A folder, or its folders of images where these have metadata with labels and it has none itself."""
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


def _splits(rows: Sequence[Row], folder: Path, name: str, multi_label: bool) -> SplitReader:
    """The splits of these images. Their classes are the labels in train, or all labels without train."""
    rows = _without_repetitions(_in_one_form(rows), name)
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

    def read(split: str) -> Dataset:
        part = [row for row in rows if row.split == split]
        if missing := [row.file for row in part if not os.path.exists(row.file)]:  # noqa: PTH110  (a Path is slow)
            count = f"{len(missing)} of the {len(part)} files of {split} do not exist"
            warn_once(f"{quoted(name)}: {count}: {first_ten(missing)}")
        labels = Labels.of_lists([[index[label] for label in row.labels] for row in part])
        groups = np.array([row.group or row.file for row in part], dtype=object)
        return Dataset(
            name,
            split,
            classes,
            labels.first_labels,
            entries=[Entry(row.file) for row in part],
            label_sets=labels if multi_label else None,
            folder=str(folder),
            groups=groups if any(row.group for row in rows) else None,
        )

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


def _read_rows(path: Path, split: str, read: ReadConfig) -> list[Row]:
    """The images of a table; `split` is the split of all, or "" if the table says it. Raises UserError."""
    names, records = read_table(path)
    where = quoted(str(path))
    columns = choose_columns(names, records, where)
    written_splits = {lowered(record.get(columns.split)) for _, record in records if record}
    split_of = _splits_by_value(columns.split, written_splits, read.test_fold, where)
    if split or not columns.split:
        split_of = dict.fromkeys(written_splits, split)
    parsed = [(line, _parse_row(record, columns, split_of, read.label_separator or "|")) for line, record in records]
    rows = [row for _, row in parsed if isinstance(row, Row)]
    if len(rows) < len(parsed) or not rows:
        invalid = [f"line {line} {problem}" for line, problem in parsed if isinstance(problem, str)]
        raise UserError(f"{where}: {first_ten(invalid) or 'lists no image'}")
    cells = [record.get(columns.labels[0]) for _, record in records]
    for remark in _remarks(rows, cells, columns, read):
        warn_once(f"{where}: {remark}")
    rows = _find_files(_with_whole_numbers(rows, where), path.parent, where)
    if not columns.split and not split:
        rows = _split_by_folder(rows, path.parent, where)
    return [row._replace(file=str(Path(path.parent, row.file))) for row in rows]


def _parse_row(record: dict[str, Any], columns: Columns, split_of: Mapping[str, str], separator: str) -> Row | str:
    """The image of a row, or what is invalid in it. split_of: the split that each value of the column `split` means."""
    if not record:
        return "does not have the fields of the header"
    file = record.get(columns.file)
    file = str(file) if isinstance(file, int) else file
    if not isinstance(file, str) or not file:
        return "has no file"
    labels = columns.labels_of(record, separator)
    if labels is None:
        return f"has the label {record[columns.labels[0]]!r} ({file}), not a text or number"
    if "://" in file or _NOT_TEXT.search(file + "".join(labels)):
        return f"has no local path or no valid UTF-8 ({file[:80]!r})"
    split = lowered(record.get(columns.split))
    if split not in split_of:
        allowed = {"is_valid": "True or False", "fold": "a whole number"}
        wanted = allowed.get(columns.split.lower(), "train, val or test")
        return f"has the {columns.split} {split!r} ({file}), not {wanted}"
    group = str(record.get(columns.group) or "").strip() if columns.group else ""
    return Row(file, labels, split_of[split], "" if group in MISSING else group)


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


def _splits_by_value(column: str, values: Collection[str], test_fold: int | None, where: str) -> Mapping[str, str]:
    """The split that each value of the column means. Raises UserError for a `test_fold` that is not there."""
    if column.lower() != "fold" or all(value in SPLIT_OF for value in values):
        if test_fold is not None:
            raise UserError(f"test_fold={test_fold} has no effect: {where} has no column fold, or one of splits")
        return _SPLIT_OF_IS_VALID if column.lower() == "is_valid" else SPLIT_OF
    folds = {value: int(float(value)) for value in values if re.fullmatch(r"-?\d{1,9}(\.0)?", value)}
    test = min((fold for fold in folds.values() if fold >= 0), default=None) if test_fold is None else test_fold
    present = ", ".join(map(str, sorted(set(folds.values()))))
    if test not in folds.values():
        raise UserError(f"test_fold={test} is not in the column fold of {where}, which has {present}; give one of them")
    if test_fold is None:
        warn_once(f"{where}: fold {test} of {present} is the test split; --data.test-fold chooses another")
    return {value: "test" if fold == test else "train" for value, fold in folds.items()}


def _remarks(rows: Sequence[Row], cells: Sequence[Any], columns: Columns, read: ReadConfig) -> Iterator[str]:
    """Which columns are read, and how, where they may mean something else; `cells` are the label's."""
    labels = {label for row in rows for label in row.labels}
    if columns.one_hot or columns.file.lower() not in FILE[0] or columns.labels[0].lower() not in LABEL[0]:
        kind = "the classes are the columns" if columns.one_hot else "the labels are in the column"
        yield f"the files are in the column {columns.file}, {kind} {first_ten(columns.labels)}"
    if columns.group:
        count = len({row.group for row in rows})
        yield f"images of the same {columns.group} ({count:,}) stay together where a split is drawn"
    if columns.one_hot:
        if empty := [column for column in columns.labels if column not in labels]:
            yield f"no image has a 1 in {first_ten(empty)}; these are not classes"
    else:
        if missing := sorted(MISSING.intersection(str(cell).strip() for cell in cells)):
            yield f"the label {first_ten(missing)} is read as an empty cell; rename it if it is a class"
        if written_list := next((cell for cell in cells if list_in(cell) is not None), None):
            yield f"labels such as {written_list} are read as lists, each item as a label"
    if none_names := sorted(label for label in labels if label.lower() in ("none", "na", "n/a")):
        yield f"the label {first_ten(none_names)} is a class; leave the cells empty if it means none"
    if read.label_separator is None and (separator := _likely_separator(labels)):
        joined = sorted(label for label in labels if separator in label)
        yield (
            f"labels such as {first_ten(list(map(repr, joined[:3])))} are one class each ({len(labels)} in all). If "
            f"they are several labels of an image, give --data.label-separator '{separator}'; '|' says that they are "
            f"names."
        )


def _with_whole_numbers(rows: Sequence[Row], where: str) -> Sequence[Row]:
    """`rows`, with the labels `0.0` and `1.0`, as a column of numbers with gaps has them, as `0` and `1`. Raises
    UserError if all labels are numbers and some have decimals."""
    labels = {label for row in rows for label in row.labels}
    all_numbers = all(re.fullmatch(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", label, re.IGNORECASE) for label in labels)
    if all_numbers and (decimals := sorted(label for label in labels if float(label) % 1)):
        raise UserError(
            f"{where} has numbers as labels, such as {first_ten(decimals[:3])}: vitlab classifies, and these look like "
            f"a regression target. Make classes of them, by ranges with names, such as low and high."
        )
    with_point = sorted(label for label in labels if "." in label)
    if not with_point or not all(re.fullmatch(r"[-+]?\d+(\.0*)?", label) for label in labels):
        return rows
    warn_once(f"{where}: labels such as {with_point[0]} are read as whole numbers")
    return _rename_labels(rows, {label: label.partition(".")[0] for label in labels})


def _rename_labels(rows: Sequence[Row], names: Mapping[str, str]) -> list[Row]:
    """`rows` with other names for their labels, each once."""
    return [row._replace(labels=tuple(dict.fromkeys(names[label] for label in row.labels))) for row in rows]


def _in_one_form(rows: Sequence[Row]) -> list[Row]:
    """`rows`, with a label that is written in several Unicode forms in its first one."""
    first_forms: dict[str, str] = {}
    forms = {label: first_forms.setdefault(canonical(label), label) for row in rows for label in row.labels}
    return _rename_labels(rows, forms)


def _likely_separator(labels: Collection[str]) -> str:
    """What may separate several labels in a text, or ""; a space only if there are fewer words than texts."""
    for separator in ",;":
        if any(separator in label for label in labels):
            return separator
    words = {word for label in labels for word in label.split()}
    return " " if len(words) < len(labels) else ""


def _find_files(rows: Sequence[Row], folder: Path, where: str) -> Sequence[Row]:
    """`rows`; if none of their files is where it should be, with files of the same name below the folder. The name may
    lack the folder or the suffix, as in the tables of Kaggle. Raises UserError where several files fit."""
    rows = _in_the_form_on_disk(rows, folder)
    if any(os.path.exists(os.path.join(folder, row.file)) for row in rows):  # noqa: PTH110, PTH118
        return rows
    files_of = _files_by_end(folder)
    located, moved, ambiguous = [], [], []
    for row in rows:
        wanted = row.file.replace("\\", "/").removeprefix("./")
        is_absolute = wanted.startswith("/") or ":" in wanted
        matches = sorted(files_of.get(Path(wanted).name if is_absolute else wanted, ()))
        if len(matches) > 1:
            ambiguous.append(f"{row.file} ({' and '.join(matches[:3])})")
        elif matches and matches[0] != row.file:
            moved.append(f"{row.file} is {matches[0]}")
        located.append(row._replace(file=matches[0]) if matches else row)
    if ambiguous:
        raise UserError(f"{where}: several files have the name in {first_ten(ambiguous)}; write the path of each file")
    if moved:
        warn_once(f"{where}: {len(moved)} files are found by their names below the folder, {first_ten(moved[:1])}")
    return located


def _files_by_end(folder: Path) -> Mapping[str, set[str]]:
    """The images below a folder by the ends of their paths: for a/b/c.png c.png, b/c.png, a/b/c.png, c, b/c, a/b/c."""
    files_of = collections.defaultdict[str, set[str]](set)
    for path in images_below(folder):
        file = os.path.relpath(path, folder)
        for parts in (Path(file).parts, Path(file).with_suffix("").parts):
            for start in range(len(parts)):
                files_of["/".join(parts[start:])].add(file)
    return files_of


def _in_the_form_on_disk(rows: Sequence[Row], folder: Path) -> Sequence[Row]:
    """`rows`, where files whose names are on the disk in another Unicode form (macOS writes NFD) have those names."""
    names = {row.file for row in rows if not row.file.isascii()}
    if not (missing := {name for name in names if not (folder / name).exists()}):
        return rows
    below = {canonical(file): file for file in (os.path.relpath(path, folder) for path in images_below(folder))}
    form = {name: below.get(canonical(os.path.normpath(name)), name) for name in missing}
    return [row._replace(file=form.get(row.file, row.file)) for row in rows]
