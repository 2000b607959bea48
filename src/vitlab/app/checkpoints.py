"""The checkpoints that the page offers, loaded when they are chosen."""

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

    Only file names are compared, so a corrupt checkpoint is included and raises when it is loaded; pickles are not.
    Raises UserError where there is none.
    """
    folder = Path(path)
    if str(path).startswith(("hub:", "timm:")):
        return {str(path): str(path)}
    if _is_checkpoint(folder):
        return {folder.resolve().name: str(path)}
    if folder.is_dir() and (entries := [entry for entry in sorted(folder.iterdir()) if _is_checkpoint(entry)]):
        return {entry.name: str(entry) for entry in entries}
    load_card(path)  # raises with the reason: missing, a pickle, a training that has not ended
    raise UserError(f"{path} holds no checkpoint; give one or a folder of them: {READABLE}.")


def _is_checkpoint(path: Path) -> bool:
    if path.is_file():
        return path.suffix in (".npz", ".safetensors")
    saved = (path / "config.json").is_file() and any(path.glob("*.safetensors*"))
    return saved or (path / "model" / "config.json").is_file()


class ModelCache:
    """Checkpoints by name, of which the `CACHED` last used are in memory."""

    def __init__(self, path: str | Path, device: str = "auto") -> None:
        """Raises UserError where there is no checkpoint, or where the only one cannot be loaded."""
        self.device = choose_device(device)
        self.paths = find_checkpoints(path)
        self._loaded: dict[str, Loaded] = {}
        """The last used is the last."""
        if len(self.paths) == 1:
            self.get(next(iter(self.paths)))

    def get(self, name: str) -> Loaded:
        """The checkpoint of that name. Raises UserError where it cannot be loaded."""
        if name not in self.paths:
            raise UserError(f"there is no checkpoint {name!r} here; choose one of {', '.join(self.paths)}.")
        loaded = self._loaded.pop(name, None)
        if loaded is None:
            while len(self._loaded) >= CACHED:  # frees memory before loading
                del self._loaded[next(iter(self._loaded))]
            loaded = self._load(name)
        self._loaded[name] = loaded
        return loaded

    def _load(self, name: str) -> Loaded:
        path = self.paths[name]
        try:
            checkpoint = load_checkpoint(path)
        except (OSError, RuntimeError, KeyError, TypeError) as error:  # raised for some corrupt files
            raise UserError(f"the checkpoint {path} cannot be loaded: {error}") from error
        model, card = checkpoint.model.to(self.device), checkpoint.card
        classes = class_names(card, model.config.num_classes) if model.head is not None else ()
        transform = EvalTransform(model.config.image_hw, checkpoint.preprocessing)
        return Loaded(name, model, classes, transform, str(card.get("source", path)))
