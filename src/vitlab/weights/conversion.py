"""`convert`: a checkpoint, or the weights in a pickle, in another format, read back and compared. Imports no torch."""

import contextlib
import logging
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from vitlab.errors import UserError
from vitlab.io import open_regular, replacing_folder, resolved, sync, temporary_folder
from vitlab.models.config import ImageSize
from vitlab.models.variant import Interpolation
from vitlab.weights.checkpoint import MODULES, format_function, load_metadata, load_model, without_stale_classes
from vitlab.weights.detect import HUBS, Format, find_checkpoint, is_pickle
from vitlab.weights.parity import check_parity

if typing.TYPE_CHECKING:
    from vitlab.models.vit import Model

logger = logging.getLogger(__name__)


def convert(
    source: Path | str,
    destination: Path | str,
    *,
    to: Format = "vitlab",
    image_size: ImageSize | None = None,
    interpolation: Interpolation | None = None,
    pre_logits: Literal["keep", "drop"] = "keep",
    pool: Literal["token"] | None = None,
    key: str | None = None,
    assume: Mapping[str, Any] | None = None,
    log: Callable[[str], None] = logger.info,
) -> dict[str, Any]:
    """Writes a checkpoint in another format, reads it back, and compares; `destination` is replaced after that.

    `destination` is a file for `google`, a folder otherwise. `classes` and preprocessing are written where the format
    has them; rates of dropout and stochastic depth only by `vitlab`. The folders of `timm` and `huggingface` get a
    README.md, the model card of the Hugging Face hub. `image_size`, `interpolation`, `pool` and `assume` are as in
    `load_model`; `pre_logits="drop"` leaves out that layer and its head. `source` may be a pickle, which nothing else
    opens (`vitlab.weights.pickled`): `key` chooses the weights in it, and `log` receives what is in it.

    Returns `format`, `path`, `parameters`, and the `difference` of `check_parity`. Raises UserError for a model that
    the format cannot represent, and where a file would be destroyed; ParityError where the outputs differ.
    """
    if to not in MODULES:
        raise UserError(f"to is {to!r}; allowed: {', '.join(map(repr, MODULES))}.")
    destination = Path(destination)
    is_on_hub = str(source).startswith(HUBS)
    is_pickled = not is_on_hub and Path(source).is_file() and is_pickle(Path(source))
    if key is not None and not is_pickled:
        raise UserError(f"key={key!r} chooses the weights in a pickle, and {source} is none; leave it out.")
    _check_destination(Path(source) if is_pickled else find_checkpoint(source)[1], source, destination, to)
    final = destination if to == "google" else resolved(destination)  # so that "." has a name
    with _unpickled(Path(source), final, key, log) if is_pickled else contextlib.nullcontext(source) as readable:
        model = load_model(
            readable,
            image_size=image_size,
            num_classes=0 if pre_logits == "drop" else None,
            pre_logits=pre_logits,
            interpolation=interpolation,
            pool=pool,
            assume=assume,
            display_name=str(source) if is_pickled else "",
        )
        metadata = without_stale_classes(load_metadata(readable, image_size=image_size, assume=assume), model)
    if is_on_hub or not str(metadata.get("source")).startswith(HUBS):
        metadata["source"] = str(source)  # else it is a copy of what is on a hub
    if to != "vitlab" and (levels := metadata["preprocessing"]["range"]):
        logger.warning(
            "%s is without the range of the images (black at %d, white at %d of a file's values), which the format of "
            "%s cannot say: give it images with values from 0 to 255, scaled so, or use --to vitlab",
            *(destination, *levels, to),
        )
    report = {"format": to, "path": str(destination), "parameters": model.config.num_parameters}
    return report | {"difference": _write_compared(model, metadata, final, destination, to)}


@contextlib.contextmanager
def _unpickled(source: Path, final: Path, key: str | None, log: Callable[[str], None]) -> Iterator[Path]:
    """The weights in a pickle, in a temporary folder beside the destination. Errors name `source` instead."""
    from vitlab.weights.pickled import unpickle

    with temporary_folder(final, source.stat().st_size) as folder:
        copy = folder / "unpickled"
        opened = unpickle(source, copy, key, log)
        try:
            yield opened
        except UserError as error:
            text = str(error).replace(str(copy / "model.safetensors"), str(source)).replace(str(copy), str(source))
            raise UserError(text) from error


def _write_compared(model: "Model", metadata: dict[str, Any], final: Path, destination: Path, to: Format) -> float:
    """Writes to `final` what is read back as the same model; returns the difference of the outputs."""
    from vitlab.weights.folder import check_replaceable

    with temporary_folder(final, 4 * model.config.num_parameters) as folder:
        new = folder / final.name  # model cards have the name of their folder
        format_function("write", to)(model, new, metadata)
        if new.is_dir():
            check_replaceable(final, {file.name for file in new.iterdir()})
        copy = load_model(new, image_size=model.config.image_size)
        difference = check_parity(model, copy, f"{destination} (not written)")
        if new.is_dir():
            with replacing_folder(final) as replacement:
                for file in new.iterdir():
                    file.replace(replacement / file.name)
        else:
            new.replace(final)
            sync(final.parent)
    return difference


def _check_destination(local: Path, source: Path | str, destination: Path, to: Format) -> None:
    """Raises UserError where writing would destroy the source, or a file that is not a checkpoint."""
    if destination.exists() and resolved(destination) in (resolved(local), resolved(Path(source))):
        raise UserError(f"{destination} is the source; give another destination.")
    if to != "google" or not destination.exists():
        return
    if destination.is_dir():
        raise UserError(f"{destination} is a folder, and Google's format is one file; give a name such as model.npz.")
    with open_regular(destination) as file:
        if file.read(2) != b"PK":
            raise UserError(f"{destination} exists and is not an .npz; give another name.")
