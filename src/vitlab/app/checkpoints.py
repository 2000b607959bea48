"""The checkpoints that the page offers, loaded when they are chosen."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from vitlab.data.transforms import EvalTransform
from vitlab.errors import UserError
from vitlab.evaluate.load import choose_device
from vitlab.models.vit import Model
from vitlab.weights import READABLE, class_names, load_card, load_checkpoint

CACHED = 2
"""Models in memory at a time: enough to compare two."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model on its device, in evaluation mode, with its preprocessing."""

    name: str
    model: Model
    classes: tuple[str, ...]
    """Class names, or numbers where the checkpoint has no names; empty without a head."""
    transform: EvalTransform
    source: str
    """Where the weights came from."""


def find_checkpoints(path: str | Path) -> dict[str, str]:
    """Name -> location of the checkpoint at `path`, or of all directly in that folder, by name.

    Only file names are looked at, so a corrupt checkpoint is included and raises when it is loaded; pickles are not.
    Raises UserError where there is none.
    """
    place = Path(path)
    if str(path).startswith(("hub:", "timm:")) or _is_checkpoint(place):
        return {str(path) if ":" in str(path) else place.resolve().name: str(path)}
    if place.is_dir() and (entries := [entry for entry in sorted(place.iterdir()) if _is_checkpoint(entry)]):
        return {entry.name: str(entry) for entry in entries}
    load_card(path)  # raises with the reason: missing, a pickle, a training that has not ended
    raise UserError(f"{path} holds no checkpoint; give one or a folder of them: {READABLE}.")


def _is_checkpoint(place: Path) -> bool:
    if place.is_file():
        return place.suffix in (".npz", ".safetensors")
    if (place / "model" / "config.json").is_file():
        return True
    return (place / "config.json").is_file() and any(place.glob("*.safetensors*"))


class ModelCache:
    """Checkpoints by name, of which the `CACHED` last used are in memory."""

    def __init__(self, path: str | Path, device: str = "auto") -> None:
        """Raises UserError where there is no checkpoint, or where the only one cannot be loaded."""
        self.device = choose_device(device)
        self.places = find_checkpoints(path)
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()
        if len(self.places) == 1:
            self.get(self.names[0])

    @property
    def names(self) -> list[str]:
        return list(self.places)

    def get(self, name: str) -> Loaded:
        """The checkpoint of that name. Raises UserError where it cannot be loaded."""
        if name not in self.places:
            raise UserError(f"there is no checkpoint {name!r} here; choose one of {', '.join(self.places)}.")
        if name not in self._loaded:
            while len(self._loaded) >= CACHED:  # make room before loading
                self._loaded.popitem(last=False)
            self._loaded[name] = self._load(name)
        self._loaded.move_to_end(name)
        return self._loaded[name]

    def _load(self, name: str) -> Loaded:
        place = self.places[name]
        try:
            checkpoint = load_checkpoint(place)
            model, card = checkpoint.model.to(self.device), checkpoint.card
            classes = class_names(card, model.config.num_classes) if model.head is not None else ()
            transform = EvalTransform(model.config.image_hw, checkpoint.preprocessing)
            return Loaded(name, model, classes, transform, str(card.get("source", place)))
        except (OSError, RuntimeError, KeyError, TypeError) as error:  # what a corrupt file can raise
            raise UserError(f"the checkpoint {place} cannot be loaded: {error}") from error
