"""The table of the data sets that have a name, `DATASETS`, from `datasets.toml`; no reader is imported."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vitlab.data.vtab.sources import SOURCES


@dataclass(frozen=True)
class DatasetInfo:
    """A row of `DATASETS`.

    reader: "MODULE:FUNCTION" of `vitlab.data` that takes (name, root, download) and returns `SplitReader`; "" for the
    kinds of the user's data sets. num_classes: None if it varies. image_size: (H, W) in pixels, None for any size.
    splits: numbers of images. held_out: splits missing from the source, with the fraction of train held out for them.
    eval_resize: (shorter side, center) in pixels if the set is evaluated at another proportion than the model's.
    """

    source: str
    license: str
    reader: str = ""
    num_classes: int | None = None
    image_size: tuple[int, int] | None = None
    splits: Mapping[str, int] = field(default_factory=dict)
    held_out: Mapping[str, float] = field(default_factory=dict)
    eval_resize: tuple[int, int] | None = None


def _read_table() -> dict[str, DatasetInfo]:
    """`datasets.toml`; rows without a source are filled from `vtab/sources.toml`."""
    rows = tomllib.loads((Path(__file__).parent / "datasets.toml").read_text())
    for name, row in rows.items():
        if "source" not in row:
            source = SOURCES[name]
            access = "download, or" if source.access == "automatic" else "by hand:"
            row |= {
                "reader": "vtab.tasks:published_splits",
                "source": f"{source.page}; {access} a folder as published",
                "license": source.license,
                "num_classes": source.classes,
                "splits": {split.removesuffix("idation"): count for split, count in source.sizes.items()},
            }
        row |= {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return {name: DatasetInfo(**row) for name, row in rows.items()}


DATASETS = _read_table()
