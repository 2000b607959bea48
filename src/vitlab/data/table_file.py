"""A table as it stands in a file (CSV, JSON lines, Parquet), and which of its columns hold what."""

import codecs
import csv
import io
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.errors import UserError, first_ten, quoted
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
MAX_TABLE_BYTES = 2**28
"""Largest table that is read: millions of images."""
_ROW_NUMBERS = re.compile(r"(unnamed: \d+)?")  # the name of a column that pandas or a spreadsheet has added
_LIST = re.compile(r"\[.*\]|[({]\s*['\"].*[)}]", re.DOTALL)  # of Python, NumPy or JSON
_QUOTED_ITEM = re.compile(r"'([^']*)'|\"([^\"]*)\"")
MISSING = {"nan", "NaN", "<NA>", "NaT", "null", "NULL", "#N/A"}
"""What programs write for an empty cell, and nobody calls a class. `None`, `none` and `NA` may be names."""
_ONES = {"1", "1.0", "true"}
_ZERO_NUMBERS = {"0", "0.0"}
_NEGATIVE = {"-1", "-1.0"}

Records = Sequence[tuple[int, dict[str, Any]]]
"""The number and the cells of each row."""


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
    if reason := _no_one_hot(rest, records):
        raise UserError(f"{listed} is named label, nor are the others one for each class, with 0 and 1: {reason}")
    return Columns(file, tuple(rest), one_hot=True, split=split, group=group)


def _no_one_hot(columns: Sequence[str], records: Records) -> str:
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
        raise UserError(f"{quoted(str(path))} requires the package pyarrow: pip install 'vitlab[data]'") from error
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
