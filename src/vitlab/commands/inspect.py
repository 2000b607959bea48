"""The commands that inspect models, data and the paper: inspect, paper, app, duplicates."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from vitlab.commands import (
    CHECKPOINTS,
    IMAGES,
    Checkpoint,
    Device,
    Json,
    PositionInterpolation,
    print_note,
    print_result,
    read_names,
)
from vitlab.commands.check import check_inputs
from vitlab.io import check_output


@dataclass(frozen=True)
class Inspect:
    """Show a checkpoint's attention, embeddings, attention distance and training curves on one page (Fig. 6, 7, 10)."""

    checkpoint: Checkpoint
    sources: Annotated[
        Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="IMAGE ...", help=f"{IMAGES} Default: the test images of the run."),
    ] = ()
    out: Path | None = None
    """Folder for index.html, figures/ (PNG, SVG and the arrays behind them) and result.json; default: `inspect` in the
    folder of a run, or for other checkpoints in the current folder."""
    shown: int = 16
    """Images on the page; attention distances are means over all images."""
    top: int = 5
    """Predictions for each image."""
    batch_size: int = 16
    """Images at once."""
    image_size: int | None = None
    """Image side in pixels; default: as the checkpoint's preprocessing."""
    interpolation: PositionInterpolation = None
    device: Device = "auto"
    json: Json = False

    def run(self) -> int:
        print_note(f"loading {self.checkpoint} ...")
        check_inputs(self.checkpoint, images=(images := read_names(self.sources)))
        from vitlab.inspection.write_pages import as_text, default_out, inspect_checkpoint

        check_output(out := self.out or default_out(self.checkpoint))
        options: dict[str, Any] = {"shown": self.shown, "top": self.top, "batch_size": self.batch_size}
        options |= {"image_size": self.image_size, "interpolation": self.interpolation, "device": self.device}
        result = inspect_checkpoint(self.checkpoint, images, out, **options, log=print_note)
        print_result(result, self.json, as_text(result))
        return 1 if result["unreadable"] else 0


@dataclass(frozen=True)
class Paper:
    """Show an equation, a table or a figure of the paper, with its code and what is known about it here."""

    part: Annotated[Positional[str], tyro.conf.arg(metavar="PART")] = ""
    """`eq1` to `eq8`, `table1` to `table9`, `fig1` to `fig14`, or a section: `sec4.5`. Without it, all are listed."""
    checkpoint: Annotated[
        Positional[str | None],
        tyro.conf.arg(
            metavar="CHECKPOINT",
            help=f"For equations and for figures of a model (6, 7, 10, 11, 14). {CHECKPOINTS} Default: a small ViT, "
            "also where images are given alone.",
        ),
    ] = None
    images: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGE ...", help=IMAGES)] = ()
    out: Path = Path("paper")
    """Folder for figures."""
    device: Device = "auto"
    json: Json = False

    def run(self) -> int:
        from vitlab.paper.parts import find_parts, list_text, read_groups

        if not self.part:
            parts = [{"key": part.key, **vars(part)} for group in read_groups() for part in group.parts]
            print_result(parts, self.json, list_text())
            return 0
        key = find_parts(self.part)[0].key
        print_note(f"showing {key} ...")
        from vitlab.data.decode import IMAGE_SUFFIXES

        checkpoint, images = self.checkpoint, self.images
        if checkpoint and ("://" in checkpoint or Path(checkpoint).suffix.lower() in IMAGE_SUFFIXES):
            checkpoint, images = None, (checkpoint, *images)
        check_inputs(checkpoint, images=images)
        from vitlab.paper.figures import Request
        from vitlab.paper.show import show

        request = Request(checkpoint, images, self.out, self.device, log=print_note)
        shown = show(key, request)
        print_result(shown.as_dict(), self.json, shown.as_text())
        return 0


@dataclass(frozen=True)
class App:
    """Serve a page on this machine: drop an image, see predictions and attention."""

    checkpoint: Annotated[
        Positional[str],
        tyro.conf.arg(metavar="CHECKPOINT", help=f"{CHECKPOINTS} Or a folder of them, to choose among."),
    ]
    port: int | None = None
    """Port on 127.0.0.1; default: the first free one from 7860."""
    device: Device = "auto"
    json: Json = False

    def run(self) -> int:
        print_note(f"loading {self.checkpoint} ...")
        check_inputs(None if Path(self.checkpoint).is_dir() else self.checkpoint)  # a folder may hold several
        from vitlab.app import launch

        def announce(url: str) -> None:
            print_result({"url": url}, self.json, f"{url} (Ctrl-C ends it)", lines=True)

        launch(self.checkpoint, port=self.port, device=self.device, announce=announce)
        return 0


@dataclass(frozen=True)
class Duplicates:
    """Find near-duplicates of test images in a training set; writes an exclusion list and a page of the pairs."""

    train: Annotated[Positional[str], tyro.conf.arg(metavar="TRAIN")]
    """Training set: a name of `vitlab list datasets`, `folder:PATH`, `csv:PATH` or `shards:PATH`."""
    test: Annotated[Positional[str], tyro.conf.arg(metavar="TEST")]
    """Test set, in the same form."""
    out: Path = Path("duplicates")
    """Folder for duplicates.jsonl, exclude.txt, report.html and result.json."""
    train_split: Literal["train", "val", "test", "trainval", "all"] = "trainval"
    """Default: all but the test split; `all` is every image once."""
    test_split: Literal["train", "val", "test", "trainval", "all"] = "test"
    """Split whose images are looked for in the training set."""
    train_root: str | None = None
    """Folder that holds a named training set."""
    test_root: str | None = None
    """Folder that holds a named test set."""
    threshold: float = 0.25
    """Largest distance of a pair, at most 0.5: 0 is identical, 1.41 unrelated."""
    json: Json = False

    def run(self) -> int:
        print_note(f"reading {self.train} and {self.test} ...")
        check_inputs(None, self.train, root=self.train_root)
        check_inputs(None, self.test, root=self.test_root)
        from vitlab.inspection.duplicates import SplitSpec, as_text, duplicates

        result = duplicates(
            SplitSpec(self.train, self.train_split, self.train_root),
            SplitSpec(self.test, self.test_split, self.test_root),
            self.out,
            threshold=self.threshold,
        )
        print_result(result, self.json, as_text(result, self.out))
        return 1 if result["unreadable"] else 0
