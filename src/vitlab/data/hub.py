"""Data sets of the Hugging Face hub (`hub:OWNER/NAME`), read by `load_dataset` with the package `datasets`.

It stores a set as Arrow files, a table for each split, which are mapped into memory, so that images can be read in any
order. No code that comes with a set is run.
"""

import re
import urllib.parse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vitlab.data.classes import canonical, natural_order, numbered_classes
from vitlab.data.dataset import Dataset, Entries, Labels, SplitReader
from vitlab.data.decode import Entry, ImageError, read_bytes
from vitlab.data.folder import SPLIT_FOLDERS
from vitlab.errors import UserError, first_ten, quoted, warn_once
from vitlab.settings import nearest

if TYPE_CHECKING:
    import datasets  # pyright: ignore[reportMissingImports]  # of the extra `data`

CHOICES = ("image", "label", "config", "revision")
"""What can be chosen after a question mark: `OWNER/NAME?image=img&label=fine_label`."""


class HubEntry(Entry):
    """An image in a row of a table, as `HubEntries` makes it; `member` is its name in messages."""

    table: "datasets.Dataset"  # set after the tuple is made, as is `row`
    row: int

    @property
    def path(self) -> str:
        return self.member

    def data(self) -> bytes:
        (stored,) = self.table[self.row].values()  # "bytes", or the "path" of a file; None without an image
        stored = stored or {}
        if stored.get("bytes") is not None:
            return stored["bytes"]
        if stored.get("path") is None:
            raise ImageError(self.member, "the row holds no image")
        return read_bytes(stored["path"])


class HubEntries(Entries):
    """The images in the `rows`, int64 [N], of some named tables, whose only column is the image. Rows are numbered from
    the first table to the last."""

    def __init__(self, tables: "tuple[tuple[str, datasets.Dataset], ...]", rows: np.ndarray) -> None:
        self.tables, self.rows = tables, rows
        self.starts = np.cumsum([0, *(len(table) for _, table in tables)])  # the number of each table's first row

    def join(self, other: Entries) -> "HubEntries":
        assert isinstance(other, HubEntries)
        return HubEntries(self.tables + other.tables, np.concatenate([self.rows, other.rows + self.starts[-1]]))

    def __getitem__(self, index: int) -> HubEntry:
        table_index = int(np.searchsorted(self.starts, self.rows[index], side="right")) - 1
        name, table = self.tables[table_index]
        row = int(self.rows[index] - self.starts[table_index])
        # The Arrow file: `identity.exact_fingerprint` compares its size and time to see if the images are the same.
        file = table.cache_files[0]["filename"] if table.cache_files else name
        entry = HubEntry(file, f"{name}[{row}]")
        entry.table, entry.row = table, row
        return entry


def hub_splits(spec: str, name: str, root: Path | None, multi_label: bool = False) -> SplitReader:
    """The set `OWNER/NAME` of the hub, or one in a folder (of `save_to_disk`, or of images, Parquet, ...).

    `?image=COLUMN&label=COLUMN` says which columns hold the image and its class (or a list of classes), if there are
    several; `config=` and `revision=` choose a version. A class is a `ClassLabel`, a number or a string. root: the
    folder that holds, or receives, the set (default: Hugging Face's cache).
    """
    repository, _, query = spec.partition("?")
    chosen = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    if unknown := [choice for choice in chosen if choice not in CHOICES]:
        raise UserError(f"{name}: unknown {unknown[0]!r}; {nearest(unknown[0], CHOICES)}")
    tables = _load(repository, name, chosen.get("config"), chosen.get("revision"), root)
    table_names = _table_names(list(tables), name)
    # The classes are those in train, or without it in all splits.
    class_tables = [tables[table_names[split]] for split in (["train"] if "train" in table_names else table_names)]

    def read(split: str) -> Dataset:
        table_name = table_names[split]
        table, features = tables[table_name], class_tables[0].features
        image, label = _columns(class_tables[0], chosen, name)
        may_be_several = multi_label and hasattr(features[label], "feature")  # the column holds lists
        classes, labels, are_several = _read_labels(table, class_tables, label, name, table_name, may_be_several)
        image_type = type(features[image])  # `datasets.Image`, which is not imported here
        images = table.select_columns([image]).cast_column(image, image_type(decode=False))
        entries = HubEntries(((f"{name}/{table_name}", images),), np.arange(len(images)))
        sets, first = labels if are_several else None, labels.first_labels
        return Dataset(name, split, classes, first, entries=entries, label_sets=sets, folder=name)

    return list(table_names), read


def _table_names(tables: Sequence[str], name: str) -> dict[str, str]:
    """Split -> name of its table, such as "val" -> "validation". Tables of other names are logged."""
    table_names: dict[str, str] = {}
    for split, names in SPLIT_FOLDERS.items():
        for table in (table for table in tables if table in names):
            if table_names.setdefault(split, table) != table:
                raise UserError(
                    f"{name} has the splits {table_names[split]} and {table}, which are both {split}: save the set "
                    f"with one of them (`save_to_disk` of the package datasets), and give its folder as hub:PATH."
                )
    if not table_names:
        raise UserError(f"{name} has the splits {', '.join(tables)}; one must be called train, validation or test.")
    if others := [table for table in tables if table not in table_names.values()]:
        warn_once(
            f"{quoted(name)}: the splits {first_ten(others)} are not read, only {', '.join(table_names.values())}"
        )
    return table_names


def _load(repository: str, name: str, config: str | None, revision: str | None, root: Path | None) -> dict[str, Any]:
    """The tables by their names; a set that is not split is "train". Raises UserError for one that cannot be loaded."""
    folder = Path(root or "", Path(repository).expanduser())
    if not folder.is_dir() and not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):  # the package would ask the hub
        raise UserError(f"{name} is not a name on the hub, nor a folder ({folder}): write hub:OWNER/NAME or hub:PATH.")
    try:
        import datasets  # slow to import, and of the extra `data`
        from datasets.exceptions import DatasetsError
    except ModuleNotFoundError as error:
        raise UserError(f"{name} requires the package datasets: install vitlab's extra data.") from error
    tables: Any
    try:
        if any((folder / file).exists() for file in ("dataset_dict.json", "state.json")):
            tables = datasets.load_from_disk(str(folder))
        elif folder.is_dir():
            tables = datasets.load_dataset(str(folder), config)
        else:
            tables = datasets.load_dataset(repository, config, revision=revision, cache_dir=root and str(root))
    except (OSError, ValueError, RuntimeError, DatasetsError) as error:
        reason = next(iter(str(error).splitlines()), "").rstrip(".") or type(error).__name__
        raise UserError(
            f"cannot load {name}: {reason}. Check the name. If the set requires consent, give it on its page and log "
            f"in (`hf auth login`, or the variable HF_TOKEN). Without a network, give its folder, hub:PATH."
        ) from error
    return dict(tables) if isinstance(tables, dict) else {"train": tables}


def _columns(table: "datasets.Dataset", chosen: dict[str, str], name: str) -> tuple[str, str]:
    """The columns of the image and of its label: those `chosen`, or the only ones. Raises UserError."""
    kinds = {column: type(_inner(feature)).__name__ for column, feature in table.features.items()}
    images = [column for column, kind in kinds.items() if kind == "Image"]
    labels = [column for column, kind in kinds.items() if kind == "ClassLabel"]
    labels = labels or [column for column in ("label", "labels") if column in kinds]

    def choose(content: str, candidates: Sequence[str], valid: Collection[str]) -> str:
        column = chosen.get(content) or (candidates[0] if len(candidates) == 1 else "")
        if column in valid:
            return column
        problem = f"no {content} in a column {column!r}" if column else f"{len(candidates)} columns for the {content}"
        listed = ", ".join(f"{column} ({kind})" for column, kind in kinds.items())
        raise UserError(f"{name} has {problem}; choose by {name}?{content}=COLUMN: {listed}.")

    return choose("image", images, images), choose("label", labels, kinds)


def _inner(feature: Any) -> Any:
    """What a column's lists hold, or the column itself."""
    return getattr(feature, "feature", feature)


class _LabelColumn(NamedTuple):
    """The labels in a table as they are stored."""

    values: np.ndarray  # numbers or texts, the labels of one image after the other
    counts: np.ndarray  # the number of labels of each image
    is_complete: bool  # no cell is empty
    class_names: tuple[str, ...]  # of the numbers, if the table has them

    @classmethod
    def read(cls, table: "datasets.Dataset", column: str) -> "_LabelColumn":
        cells = table.select_columns([column]).with_format("arrow")[:][column].combine_chunks()
        # Of Arrow's types lists have a `value_type`, but dictionaries (repeated texts) have one too.
        has_lists = hasattr(cells.type, "value_type") and not hasattr(cells, "dictionary")
        inner = cells.flatten() if has_lists else cells
        counts = np.asarray(cells.value_lengths().fill_null(0)) if has_lists else np.ones(len(cells), np.int64)
        values = inner.drop_null().to_numpy(zero_copy_only=False)
        names = tuple(getattr(_inner(table.features[column]), "names", ()))
        return cls(values, counts, cells.null_count == inner.null_count == 0, names)


def _read_labels(
    table: "datasets.Dataset",
    class_tables: "list[datasets.Dataset]",
    column: str,
    name: str,
    split: str,
    may_be_several: bool,
) -> tuple[tuple[str, ...], Labels, bool]:
    """The classes of `class_tables`, the labels of the images of `table`, and whether images may have several labels or
    none: if `may_be_several`, or if any image of these tables has several. Raises UserError."""
    stored = _LabelColumn.read(table, column)
    known = [_LabelColumn.read(each, column) for each in class_tables]
    are_several = may_be_several or any(bool(each.counts.max(initial=0) > 1) for each in (stored, *known))
    if not len(stored.counts) or not stored.is_complete or not (are_several or stored.counts.all()):
        raise UserError(
            f"{name}: some images have no class in the column {column}; choose another column or set, or if its lists "
            f"may be empty give --loss sigmoid."
        )
    classes, indices = _number_labels(stored, known, column, name, split)
    offsets = np.concatenate([[0], np.cumsum(stored.counts, dtype=np.int64)])
    return classes, Labels(indices, offsets), are_several


def _number_labels(
    stored: _LabelColumn, known: Sequence[_LabelColumn], column: str, name: str, split: str
) -> tuple[tuple[str, ...], np.ndarray]:
    """The classes of a set, and the labels `stored` as indices into them, int64. The classes are their stored names,
    the texts in `known`, or the numbers up to the largest there. Raises UserError for any other label."""
    values, names = stored.values, known[0].class_names
    if stored.class_names and names and stored.class_names != names:
        raise UserError(f"{name}: {split} has other names of classes in the column {column}; choose another column.")
    known_values = np.concatenate([each.values for each in known])
    if values.dtype.kind in "OU":
        first_forms = {canonical(text): text for text in reversed(known_values.tolist())}  # of several Unicode forms
        classes = natural_order(first_forms.values())
        index_of = {canonical(label): i for i, label in enumerate(classes)}
        if unknown := sorted({text for text in values.tolist() if canonical(text) not in index_of}):
            raise UserError(f"{name}: {split} has classes that are missing in train: {unknown[:5]}.")
        return classes, np.array([index_of[canonical(text)] for text in values.tolist()], np.int64)
    if values.dtype.kind not in "iu":
        raise UserError(f"{name}: the column {column} holds {values.dtype}; a class is a number or a string.")
    classes = names or numbered_classes(int(known_values.max(initial=-1)), f"{name}, column {column},")
    if len(invalid := values[(values < 0) | (values >= len(classes))]):
        raise UserError(
            f"{name}: {split} has the label {invalid[0]} and classes from 0 to {len(classes) - 1}. (-1 is written "
            f"where labels are secret: take another split.)"
        )
    return classes, values.astype(np.int64)
