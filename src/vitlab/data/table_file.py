"""What a table says about images: its rows (CSV, JSON lines, Parquet), which columns hold what, what a cell means.

Readings that the author of a table may not have meant are logged. table.py finds the files.
"""

import codecs
import csv
import io
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.config.data import ReadConfig
from vitlab.data.folder import SPLIT_OF
from vitlab.errors import UserError, first_ten, quoted, warn_once
from vitlab.io import parse_json, read_regular

# Names of columns, in any case, in order of preference: a table has at most one column of each group of names.
FILE = (
    ("file", "file_name"),
    ("filename", "filepath", "file_path", "path", "image", "image_path", "image_name", "img"),
    ("image_id", "id"),
)
LABEL = (("label", "labels"), ("class", "category", "target", "tag", "tags"))
SPLIT = (("split",), ("is_valid",), ("fold",))
GROUP = (("group", "group_id"), ("patient", "patient_id", "subject", "subject_id"))
MAX_TABLE_BYTES = 2**28  # largest table that is read: millions of images
_ROW_NUMBERS = re.compile(r"(unnamed: \d+)?")  # the name of a column that pandas or a spreadsheet has added
_LIST = re.compile(r"\[.*\]|[({]\s*['\"].*[)}]", re.DOTALL)  # of Python, NumPy or JSON
_QUOTED_ITEM = re.compile(r"'([^']*)'|\"([^\"]*)\"")
MISSING = {"nan", "NaN", "<NA>", "NaT", "null", "NULL", "#N/A"}
"""What programs write for an empty cell, and nobody calls a class. `None`, `none` and `NA` may be names."""
_NOT_TEXT = re.compile(r"[\x00\ud800-\udfff]")  # a zero is in no path; half a character cannot be written
_ONES = {"1", "1.0", "true"}
_ZERO_NUMBERS = {"0", "0.0"}
_NEGATIVE = {"-1", "-1.0"}
_SPLIT_OF_IS_VALID = dict.fromkeys(_ONES, "val") | dict.fromkeys({*_ZERO_NUMBERS, "false"}, "train")

Records = Sequence[tuple[int, dict[str, Any]]]  # the number and the cells of each row


class Columns(NamedTuple):
    """The names of a table's columns; "" for a missing one."""

    file: str
    labels: tuple[str, ...]
    """The column of the labels; with `one_hot` a column for each class, with 1 for the images that have it."""
    one_hot: bool
    split: str
    group: str

    def labels_of(self, record: dict[str, Any], separator: str) -> tuple[str, ...] | None:
        """The labels of a row, each once; None if a cell holds anything but texts and numbers."""
        if self.one_hot:
            return tuple(column for column in self.labels if lowered(record.get(column)) in _ONES)
        cell = record.get(self.labels[0])
        values = cell if isinstance(cell, list) else list_in(cell) or [cell]
        if not all(value is None or isinstance(value, str | int | float) for value in values):
            return None
        labels = (label.strip() for value in values for label in _number_or_text(value).split(separator))
        return tuple(dict.fromkeys(label for label in labels if label and label not in MISSING))


def list_in(cell: Any) -> list[str] | None:
    """The items of a list that is written as text, as `['cat', 'big']`, `[1 2]` or `["cat"]`; of `[]` one empty item.
    None of other cells."""
    if not isinstance(cell, str) or not _LIST.fullmatch(text := cell.strip()):
        return None
    inner = text[1:-1]
    if quoted_items := [first or second for first, second in _QUOTED_ITEM.findall(inner)]:
        return quoted_items
    return inner.split(",") if "," in inner else inner.split() or [""]


def lowered(cell: Any) -> str:
    """A cell as text in lower case, "" for a missing one."""
    return str("" if cell is None else cell).strip().lower()


def _number_or_text(cell: Any) -> str:
    """A cell as text: "" for a missing one; `1.0` as `1`."""
    if isinstance(cell, float):
        return "" if math.isnan(cell) else str(int(cell)) if cell.is_integer() else str(cell)
    return "" if cell is None else str(cell)


def choose_columns(columns: Sequence[str], records: Records, where: str) -> Columns:
    """Which columns hold what. Without one that is named as a label, the only other column holds the label, or the
    others hold 0 and 1 for each class. Raises UserError where that is ambiguous."""
    file, label, group, split = (_column_named(columns, names, where) for names in (FILE, LABEL, GROUP, SPLIT))
    used = {file, label, group, *(c for c in columns if (c.lower(),) in SPLIT)}  # all of SPLIT, though one is read
    rest = [column for column in columns if column not in used and not _ROW_NUMBERS.fullmatch(column.lower())]
    listed = f"{where} has the columns {first_ten(columns)}; none of them"
    if not file:
        raise UserError(f"{listed} is named as a column of image files: name it file")
    if label or len(rest) == 1:
        return Columns(file, (label or rest[0],), one_hot=False, split=split, group=group)
    if not rest:
        raise UserError(f"{listed} has the labels: add a column label")
    if reason := _why_not_one_hot(rest, records):
        raise UserError(f"{listed} is named label, nor are the others one for each class, with 0 and 1: {reason}")
    return Columns(file, tuple(rest), one_hot=True, split=split, group=group)


def _why_not_one_hot(columns: Sequence[str], records: Records) -> str:
    """Why these columns are not one for each class, with 1 and 0, or 1 and -1; "" if they are."""
    values = {c: {lowered(record.get(c)) for _, record in records} - {""} for c in columns}
    if mixed := [c for c in columns if not values[c] <= {*_ONES, *_ZERO_NUMBERS, "false", *_NEGATIVE}]:
        return f"{first_ten(mixed)} hold other values"
    has_zero, has_negative = (any(numbers & v for v in values.values()) for numbers in (_ZERO_NUMBERS, _NEGATIVE))
    return "they hold 1, 0 and -1" if has_zero and has_negative else ""


def _column_named(columns: Sequence[str], preference: Iterable[Sequence[str]], where: str) -> str:
    """The column that has a name of the first group of names that any has, or ""."""
    for names in preference:
        matching = [column for column in columns if column.lower() in names]
        if len(matching) > 1:
            raise UserError(f"{where} has {first_ten(matching)} for one thing; rename or remove all but one column")
        if matching:
            return matching[0]
    return ""


def read_table(path: Path) -> tuple[list[str], Records]:
    """The columns of a table (of `.jsonl`, of all its lines) and its rows. Raises UserError."""
    if path.suffix == ".parquet":
        return _read_parquet(path)
    try:
        data = read_regular(path, MAX_TABLE_BYTES)
        text = data.decode("utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text in UTF-8: save it as CSV in UTF-8"
        raise UserError(f"cannot read the table {quoted(str(path))}: {reason}") from error
    if path.suffix == ".jsonl":
        records = list(_json_lines(text, path))
        return list(dict.fromkeys(column for _, record in records for column in record)), records
    lines = _csv_lines(text, path)
    columns = [column.strip() for column in next(lines, (1, []))[1]]
    if repeated := [column for column in set(columns) - {""} if columns.count(column) > 1]:
        raise UserError(f"{quoted(str(path))} has several columns called {first_ten(sorted(repeated))}; rename them")
    # A line with more or fewer cells than columns has an empty record: it is an invalid row.
    rows = ((line, cells if len(cells) == len(columns) else []) for line, cells in lines)
    return columns, [(line, dict(zip(columns, cells, strict=False))) for line, cells in rows]


def _read_parquet(path: Path) -> tuple[list[str], Records]:
    try:
        import pyarrow  # slow to import, and of the extra `data`
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise UserError(f"{quoted(str(path))} requires the package pyarrow: install vitlab's extra data") from error
    try:
        with pyarrow.parquet.ParquetFile(io.BytesIO(read_regular(path, MAX_TABLE_BYTES))) as file:
            groups = (file.metadata.row_group(i).total_byte_size for i in range(file.metadata.num_row_groups))
            if (size := sum(groups)) > MAX_TABLE_BYTES:
                raise UserError(f"{quoted(str(path))} holds {size:,} bytes; a table of labels has at most 2^28")
            table = file.read()
    except (OSError, pyarrow.ArrowException) as error:
        raise UserError(f"cannot read the table {quoted(str(path))}: {error}") from error
    return table.column_names, list(enumerate(table.to_pylist(), 1))


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


class Row(NamedTuple):
    """An image of a table."""

    file: str  # its path
    labels: tuple[str, ...]
    split: str  # "" where neither the table nor its folder says it
    group: str  # "" for a group of its own


def read_rows(path: Path, split: str, read: ReadConfig) -> list[Row]:
    """The rows of a table; `split` is the split of all, or "" if the table says it. Raises UserError."""
    names, records = read_table(path)
    where = quoted(str(path))
    columns = choose_columns(names, records, where)
    values = {lowered(record.get(columns.split)) for _, record in records if record}
    split_of = _splits_by_value(columns.split, values, read.test_fold, where)  # checks `test_fold` in any case
    if split or not columns.split:  # no column counts: every row is in `split`, or in "" until table.py decides
        split_of = dict.fromkeys(values, split)
    rows = _parse_rows(records, columns, split_of, read.label_separator or "|", where)
    for remark in _remarks(rows, records, columns, read.label_separator):
        warn_once(f"{where}: {remark}")
    return _with_whole_numbers(rows, where)


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
        flags = "--data.test-fold, or --test-fold of `evaluate` and the like,"
        warn_once(f"{where}: fold {test} of {present} is the test split; {flags} chooses another")
    return {value: "test" if fold == test else "train" for value, fold in folds.items()}


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
            f"they are several labels of an image, give --data.label-separator '{likely}' (`evaluate` and the like: "
            f"--label-separator); '|' says that they are names."
        )


def _likely_separator(labels: Collection[str]) -> str:
    """What may separate several labels in a text, or ""; a space only if there are fewer words than texts."""
    for separator in ",;":
        if any(separator in label for label in labels):
            return separator
    words = {word for label in labels for word in label.split()}
    return " " if len(words) < len(labels) else ""


def _with_whole_numbers(rows: list[Row], where: str) -> list[Row]:
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
    return rename_labels(rows, {label: label.partition(".")[0] for label in labels})


def rename_labels(rows: Sequence[Row], names: Mapping[str, str]) -> list[Row]:
    """`rows` with other names for their labels, each once."""
    return [row._replace(labels=tuple(dict.fromkeys(names[label] for label in row.labels))) for row in rows]
