"""The commands as functions, for Python and notebooks, where their results show themselves.

```python
run = vitlab.finetune("timm:vit_small_patch16_224.augreg_in21k", "folder:flowers", budget="10m")
vitlab.predict(run, "photos")
vitlab.inspect(run, "photo.jpg")
```
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vitlab.commands import print_note
from vitlab.config import DataConfig
from vitlab.display import format_table, parse_duration, preformatted
from vitlab.errors import UserError
from vitlab.evaluation.accuracy import evaluate_checkpoint
from vitlab.evaluation.options import EvalOptions, ModelOptions
from vitlab.evaluation.predict import Prediction
from vitlab.evaluation.predict import predict as predict_images
from vitlab.evaluation.result import Evaluation
from vitlab.evaluation.sources import ImageSource
from vitlab.finetuning.protocol import default_workdir, sweep_and_finetune
from vitlab.finetuning.result import Finetuned
from vitlab.inspection.page import data_uri
from vitlab.inspection.write_pages import as_text, default_out, inspect_checkpoint
from vitlab.models.config import Pool
from vitlab.recipes import FINETUNE, OPEN, resolve
from vitlab.recipes.resolve import changes
from vitlab.settings import nearest
from vitlab.weights.recommended import DEFAULT

AnyCheckpoint = str | Path | Finetuned
"""A checkpoint in any form that `load_model` takes, or what `finetune` returned."""


def finetune(
    checkpoint: str | Path | None,
    dataset: str,
    *,
    budget: str | float | None = None,
    workdir: str | Path | None = None,
    recipe: str = "staged",
    data: DataConfig | None = None,
    image_size: int | None = None,
    layer: int | None = None,
    pool: Pool | None = None,
    device: str = "auto",
    log: Callable[[str], None] = print_note,
    **settings: Any,
) -> Finetuned:
    """Makes a classifier of the images in `dataset`, such as `folder:PATH` or `csv:PATH`, as `vitlab finetune` does.

    checkpoint: None is the default of `vitlab list checkpoints`. budget: seconds, or a text such as "10m", for the
    whole job. workdir: default `runs/finetune-NAME`; the same call resumes what is there. layer: number of blocks to
    keep. pool: what represents an image. By default the recipe `staged` chooses both. settings: fields of
    FinetuneConfig, such as `learning_rates=(3e-5, 1e-4)`, in place of the recipe's; with `optim` alone there is no
    sweep, and with both `optim.lr` is not used. data: settings of the images, in place of the recipe's; its name is
    `dataset`, and unreadable files of `folder:` and `csv:` are skipped. Raises UserError for bad settings or data.
    """
    if recipe not in FINETUNE:
        raise UserError(f"unknown recipe {recipe!r}; {nearest(recipe, FINETUNE)}.")
    config = FINETUNE[recipe]()
    given: dict[str, Any] = dict(settings)
    if (optim := given.pop("optim", None)) is not None:
        given |= {f"optim.{name}": value for name, value in vars(optim).items()}
        # Every field counts as given. `resolve` would refuse these two beside what replaces them.
        if settings.get("learning_rates"):
            del given["optim.lr"]
        if budget is not None:
            del given["optim.warmup_steps"]
    named = dataclasses.replace(data or config.data, name=config.data.name)  # of `data`, the name is not used
    given |= {f"data.{name}": value for name, value in changes(config.data, named)} | {"data.name": dataset}
    seconds = parse_duration(budget) if isinstance(budget, str) else budget
    resolved = resolve(config, given, OPEN.get(recipe, ()), budget=budget is not None)
    folder = default_workdir(dataset) if workdir is None else workdir
    options: dict[str, Any] = {
        "image_size": image_size,
        "layer": layer,
        "pool": pool,
        "budget": seconds,
        "device": device,
        "log": log,
    }
    options["open_settings"] = resolved.open_settings
    return sweep_and_finetune(checkpoint or DEFAULT, resolved.config, folder, **options)


def evaluate(
    checkpoint: AnyCheckpoint,
    dataset: str | None = None,
    split: Literal["train", "val", "test", "trainval", "all"] = "test",
    *,
    options: EvalOptions = EvalOptions(batch_size=256),
) -> Evaluation:
    """The accuracy of a checkpoint on a data set, by default its own, with its own preprocessing: `vitlab evaluate`."""
    return evaluate_checkpoint(_path(checkpoint), dataset, split, options)


class Predictions(tuple[Prediction, ...]):
    """The predictions for several images, in their order; a table in a notebook."""

    def _repr_html_(self) -> str:
        rows = [{"image": prediction.path, "classes": prediction.describe()} for prediction in self]
        return preformatted(format_table(rows))


def predict(
    checkpoint: AnyCheckpoint,
    images: ImageSource | Iterable[ImageSource],
    *,
    top: int = 5,
    reject_below: float | Literal["auto"] | None = None,
    coverage: float | None = None,
    options: ModelOptions = ModelOptions(),
) -> Predictions:
    """The most probable classes of images, one or several, in the order given.

    An image, in RGB, is the path of a file or a folder, a pattern such as `photos/*.jpg`, an address (https://...), or
    an encoded file as bytes or opened in binary mode; or a PIL image, uint8 pixels [H, W, 3] or gray [H, W], or a
    tensor [3, H, W], uint8 or of floats from 0 to 1. Arrays and tensors may have a batch dimension first. What cannot
    be read has its `error` in place of classes. `reject_below` and `coverage` are as in `vitlab predict`. Raises
    UserError for missing paths and for arrays of other types, shapes and ranges; in an iterator they have their
    `error`.
    """
    many = isinstance(images, Iterable) and not isinstance(images, get_args(ImageSource))
    sources: Any = images if many else [images]
    given: dict[str, Any] = {"top": top, "reject_below": reject_below, "coverage": coverage}
    return Predictions(predict_images(_path(checkpoint), sources, options, **given))


@dataclass(frozen=True)
class Inspected:
    """What `inspect` found, and the folder of the page and the figures; in a notebook the attention of the images."""

    result: Mapping[str, Any]
    """The content of result.json."""
    folder: Path

    def _repr_html_(self) -> str:
        names = [f"figures/{name}.png" for name in ("attention", "distances")]
        shown = [self.folder / name for name in names if (self.folder / name).is_file()]
        text = preformatted(as_text(dict(self.result)))
        return text + "".join(f'<img src="{data_uri(path.read_bytes())}">' for path in shown)


def inspect(
    checkpoint: AnyCheckpoint,
    images: str | Path | Sequence[str | Path] = (),
    out: str | Path | None = None,
    **options: Any,
) -> Inspected:
    """Attention, embeddings and training of a checkpoint, on images (files and folders) or a run's test images: a page
    with figures in `out` (default: `inspect` in a run's folder, else here). options: as in `inspect_checkpoint`."""
    sources = [images] if isinstance(images, (str, Path)) else images
    path = _path(checkpoint)
    out = Path(out) if out is not None else default_out(path)
    result = inspect_checkpoint(path, [str(source) for source in sources], out, **options)
    return Inspected(result, out)


def _path(checkpoint: AnyCheckpoint) -> str | Path:
    return checkpoint.workdir if isinstance(checkpoint, Finetuned) else checkpoint
