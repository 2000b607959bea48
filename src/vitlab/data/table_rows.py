"""The rows of one table of images, checked and with their files found: `read_rows`, which table.py calls. table_file.py
reads the cells. What may be read otherwise than it was meant is logged."""

import collections
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.config.data import ReadConfig
from vitlab.data.class_names import canonical
from vitlab.data.contents import images_below
from vitlab.data.folder import SPLIT_OF
from vitlab.data.table_file import FILE, LABEL, MISSING, Columns, Records, choose_columns, list_in, lowered, read_table
from vitlab.errors import UserError, first_ten, quoted, warn_once

_SPLIT_OF_IS_VALID = {"1": "val", "1.0": "val", "true": "val", "0": "train", "0.0": "train", "false": "train"}
_NOT_TEXT = re.compile(r"[\x00\ud800-\udfff]")  # a zero is in no path; half a character cannot be written


class Row(NamedTuple):
    """An image of a table."""

    file: str  # its path
    labels: tuple[str, ...]
    split: str
    group: str  # "" for a group of its own


def read_rows(path: Path, split: str, read: ReadConfig) -> list[Row]:
    """The images of a table; `split` is the split of all, or "" if the table says it. Raises UserError."""
    names, records = read_table(path)
    where = quoted(str(path))
    columns = choose_columns(names, records, where)
    values = {lowered(record.get(columns.split)) for _, record in records if record}
    split_of = _splits_by_value(columns.split, values, read.test_fold, where)  # checks `test_fold` in any case
    by_folder = not split and not columns.split
    if split or by_folder:  # no column of splits is read: `split` for every row, "" until `_split_by_folder`
        split_of = dict.fromkeys(values, split)
    rows = _parse_rows(records, columns, split_of, read.label_separator or "|", where)
    for remark in _remarks(rows, records, columns, read.label_separator):
        warn_once(f"{where}: {remark}")
    rows = _find_files(_with_whole_numbers(rows, where), path.parent, where)
    if by_folder:
        rows = _split_by_folder(rows, path.parent, where)
    return [row._replace(file=str(Path(path.parent, row.file))) for row in rows]


def _parse_rows(
    records: Records, columns: Columns, split_of: Mapping[str, str], separator: str, where: str
) -> list[Row]:
    """The images of all rows. Raises UserError with the lines that are invalid, or if there is none."""
    rows, problems = [], []
    for line, record in records:
        row = _parse_row(record, columns, split_of, separator)
        if isinstance(row, Row):
            rows.append(row)
        else:
            problems.append(f"line {line} {row}")
    if problems or not rows:
        raise UserError(f"{where}: {first_ten(problems) or 'lists no image'}")
    return rows


def _parse_row(record: dict[str, Any], columns: Columns, split_of: Mapping[str, str], separator: str) -> Row | str:
    """The image of a row; if it is invalid, what is wrong. split_of: value of the column `split` -> its split."""
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


def _splits_by_value(column: str, values: Collection[str], test_fold: int | None, where: str) -> Mapping[str, str]:
    """The split that each value of the column means. Raises UserError for a `test_fold` that is not there.

    split     the split of this name (`SPLIT_OF`)
    is_valid  val or train
    fold      test for `test_fold`, by default the lowest from 0 on; train for the others. Or names, as in split
    """
    has_folds = column.lower() == "fold" and not all(value in SPLIT_OF for value in values)
    if not has_folds:
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


def _remarks(rows: Sequence[Row], records: Records, columns: Columns, separator: str | None) -> Iterator[str]:
    """How the columns and labels are read, where something else may be meant."""
    labels = {label for row in rows for label in row.labels}
    if columns.one_hot or columns.file.lower() not in FILE[0] or columns.labels[0].lower() not in LABEL[0]:
        kind = "the classes are the columns" if columns.one_hot else "the labels are in the column"
        yield f"the files are in the column {columns.file}, {kind} {first_ten(columns.labels)}"
    if columns.group:
        count = len({row.group for row in rows})
        yield f"images of the same {columns.group} ({count:,}) stay together where a split is drawn"
    if empty := [column for column in columns.labels if columns.one_hot and column not in labels]:
        yield f"no image has a 1 in {first_ten(empty)}; these are not classes"
    cells = [] if columns.one_hot else [record.get(columns.labels[0]) for _, record in records]
    yield from _remarks_on_labels(labels, cells, separator)


def _remarks_on_labels(labels: Collection[str], cells: Sequence[Any], separator: str | None) -> Iterator[str]:
    """Cells of the label that are not read as they are written, and labels that may mean none or several.

    separator: what separates several labels, if the user says it.
    """
    if missing := sorted(MISSING.intersection(str(cell).strip() for cell in cells)):
        yield f"the label {first_ten(missing)} is read as an empty cell; rename it if it is a class"
    if written_list := next((cell for cell in cells if list_in(cell) is not None), None):
        yield f"labels such as {written_list} are read as lists, each item as a label"
    if none_names := sorted(label for label in labels if label.lower() in ("none", "na", "n/a")):
        yield f"the label {first_ten(none_names)} is a class; leave the cells empty if it means none"
    if separator is None and (likely := _likely_separator(labels)):
        joined = sorted(label for label in labels if likely in label)
        yield (
            f"labels such as {first_ten(list(map(repr, joined[:3])))} are one class each ({len(labels)} in all). If "
            f"they are several labels of an image, give --data.label-separator '{likely}'; '|' says that they are "
            f"names."
        )


def _likely_separator(labels: Collection[str]) -> str:
    """What may separate several labels in a text, or ""; a space only if there are fewer words than texts."""
    for separator in ",;":
        if any(separator in label for label in labels):
            return separator
    words = {word for label in labels for word in label.split()}
    return " " if len(words) < len(labels) else ""


def _with_whole_numbers(rows: Sequence[Row], where: str) -> Sequence[Row]:
    """`rows`, with the labels `0.0` and `1.0`, as a column of numbers with gaps has them, as `0` and `1`."""
    labels = {label for row in rows for label in row.labels}
    _require_classes(labels, where)
    with_point = sorted(label for label in labels if "." in label)
    if not with_point or not all(re.fullmatch(r"[-+]?\d+(\.0*)?", label) for label in labels):
        return rows
    warn_once(f"{where}: labels such as {with_point[0]} are read as whole numbers")
    return rename_labels(rows, {label: label.partition(".")[0] for label in labels})


def _require_classes(labels: Collection[str], where: str) -> None:
    """Raises UserError if all labels are numbers and some have decimals."""
    all_numbers = all(re.fullmatch(r"[-+]?\d*\.?\d+(e[-+]?\d+)?", label, re.IGNORECASE) for label in labels)
    if all_numbers and (decimals := sorted(label for label in labels if float(label) % 1)):
        raise UserError(
            f"{where} has numbers as labels, such as {first_ten(decimals[:3])}: vitlab classifies, and these look like "
            f"a regression target. Make classes of them, by ranges with names, such as low and high."
        )


def rename_labels(rows: Sequence[Row], names: Mapping[str, str]) -> list[Row]:
    """`rows` with other names for their labels, each once."""
    return [row._replace(labels=tuple(dict.fromkeys(names[label] for label in row.labels))) for row in rows]


def _find_files(rows: Sequence[Row], folder: Path, where: str) -> Sequence[Row]:
    """`rows`; if none of their files is where it should be, with files of the same name below the folder. The name may
    lack the folder or the suffix, as in the tables of Kaggle. Raises UserError where several files fit."""
    rows = _in_the_form_on_disk(rows, folder)
    if any(os.path.exists(os.path.join(folder, row.file)) for row in rows):  # noqa: PTH110, PTH118
        return rows
    files_by_end = _files_by_end(folder)
    matches = [(row, _matching_files(row.file, files_by_end)) for row in rows]
    if ambiguous := [f"{row.file} ({' and '.join(files[:3])})" for row, files in matches if len(files) > 1]:
        raise UserError(f"{where}: several files have the name in {first_ten(ambiguous)}; write the path of each file")
    if moved := [f"{row.file} is {files[0]}" for row, files in matches if files and files[0] != row.file]:
        warn_once(f"{where}: {len(moved)} files are found by their names below the folder, {first_ten(moved[:1])}")
    return [row._replace(file=files[0]) if files else row for row, files in matches]


def _matching_files(file: str, files_by_end: Mapping[str, set[str]]) -> list[str]:
    """The files that a table means by `file`. Of an absolute path, which another machine had, only the name counts."""
    wanted = file.replace("\\", "/").removeprefix("./")
    is_absolute = wanted.startswith("/") or ":" in wanted
    return sorted(files_by_end.get(Path(wanted).name if is_absolute else wanted, ()))


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
