"""The checkpoints that the page lets one choose among, loaded when they are first asked for."""

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

from vitlab.data.transforms import EvalTransform
from vitlab.errors import UserError
from vitlab.evaluate.load import choose_device
from vitlab.models.vit import Model
from vitlab.weights import READABLE, class_names, load_card, load_checkpoint

KEPT = 2
"""Models in memory at a time: enough to go to and fro between two."""


@dataclass(frozen=True, eq=False)
class Loaded:
    """A model in evaluation mode on its device, how images are brought to it, and what is known of it."""

    name: str
    model: Model
    classes: tuple[str, ...]
    """Names of the outputs; their numbers where the checkpoint has no names; empty without a head."""
    transform: EvalTransform
    source: str
    """Where the weights came from."""


def find_checkpoints(path: str | Path) -> dict[str, str]:
    """Name -> place of the checkpoint at `path`, or of all that lie directly in that folder, by name.

    Judged by their files alone, so a damaged one is among them and says so when it is loaded; pickles never are.
    Raises ValueError where there is none.
    """
    place = Path(path)
    if str(path).startswith(("hub:", "timm:")) or _looks_like_one(place):
        return {str(path) if ":" in str(path) else place.resolve().name: str(path)}
    if place.is_dir() and (found := [each for each in sorted(place.iterdir()) if _looks_like_one(each)]):
        return {each.name: str(each) for each in found}
    load_card(path)  # raises with the reason: nothing there, a pickle, a training that has not ended
    raise UserError(f"{path} holds no checkpoint; give one or a folder of them: {READABLE}.")


def _looks_like_one(place: Path) -> bool:
    if place.is_file():
        return place.suffix in (".npz", ".safetensors")
    if (place / "model" / "config.json").is_file():
        return True
    return (place / "config.json").is_file() and any(place.glob("*.safetensors*"))


class Shelf:
    """Checkpoints by name, of which the `KEPT` last used are in memory."""

    def __init__(self, path: str | Path, device: str = "auto") -> None:
        """Raises ValueError where there is no checkpoint, and where the only one cannot be loaded."""
        self.device = choose_device(device)
        self.places = find_checkpoints(path)
        self._loaded: OrderedDict[str, Loaded] = OrderedDict()
        if len(self.places) == 1:
            self.take(self.names[0])

    @property
    def names(self) -> list[str]:
        return list(self.places)

    def take(self, name: str) -> Loaded:
        """The checkpoint of that name. Raises ValueError where it cannot be loaded."""
        if name not in self.places:
            raise UserError(f"there is no checkpoint {name!r} here; choose one of {', '.join(self.places)}.")
        if name not in self._loaded:
            while len(self._loaded) >= KEPT:  # before the new one comes, not after
                self._loaded.popitem(last=False)
            self._loaded[name] = self._load(name)
        self._loaded.move_to_end(name)
        return self._loaded[name]

    def _load(self, name: str) -> Loaded:
        place = self.places[name]
        try:
            found = load_checkpoint(place)
            model, card = found.model.to(self.device), found.card
            return Loaded(
                name=name,
                model=model,
                classes=class_names(card, model.config.num_classes) if model.head is not None else (),
                transform=EvalTransform(model.config.image_hw, found.preprocessing),
                source=str(card.get("source", place)),
            )
        except (OSError, RuntimeError, KeyError, TypeError) as error:  # what damage can look like from below
            raise UserError(f"the checkpoint {place} cannot be loaded: {error}") from error
