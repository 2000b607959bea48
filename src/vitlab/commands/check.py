"""What is wrong with the arguments of a command, found before torch is imported, which takes seconds."""

import glob
import itertools
import os
from collections.abc import Iterable
from pathlib import Path

from vitlab.errors import UserError, quoted
from vitlab.ranks import world_size


def check_inputs(
    checkpoint: str | None, *datasets: str | None, root: str | None = None, images: Iterable[str] = ()
) -> None:
    """Raises UserError for a checkpoint, data set, table or image that is missing or invalid; None passes."""
    from vitlab.data.folder import folder_splits
    from vitlab.data.registry import check_source
    from vitlab.data.table_file import choose_columns, read_table
    from vitlab.weights.detect import find_checkpoint

    if world_size() > 1:  # they find it out together, later
        return
    if checkpoint is not None:
        find_checkpoint(checkpoint)
    for name in filter(None, datasets):
        check_source(name, root)
        kind, _, path = name.partition(":")
        place = Path(root or "").expanduser() / Path(path).expanduser()
        if kind == "csv":
            choose_columns(*read_table(place), quoted(str(place)))
        elif kind == "folder" and not any(itertools.chain(place.glob("metadata.*"), place.glob("*/metadata.*"))):
            folder_splits(place, name)
    for image in images:
        if not ("://" in image or os.path.lexists(image) or glob.has_magic(image)):
            raise UserError(f"there is no file or folder {quoted(image)}; give images, folders or a pattern in quotes.")
