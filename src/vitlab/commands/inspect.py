"""The commands to look with: into a checkpoint, by hand on a page, and for images that two sets share."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from vitlab.commands.output import (
    CHECKPOINTS,
    Checkpoint,
    EvaluationSize,
    PositionInterpolation,
    answer,
    begin,
    say,
)


@dataclass(frozen=True)
class Inspect:
    """Look inside a checkpoint: where it looks, what its embeddings have learned, how its training went. One page."""

    checkpoint: Checkpoint
    sources: Annotated[Positional[tuple[str, ...]], tyro.conf.arg(metavar="IMAGE ...")] = ()
    """Images, folders of images, or -; of a finished run its own test images unless given."""
    out: Path = Path("inspect")
    """Folder for index.html, figures/ (PNG, SVG and the arrays behind them) and result.json."""
    shown: int = 16
    """Images on the page; the attention distances are over all."""
    top: int = 5
    batch_size: int = 16
    image_size: EvaluationSize = None
    interpolation: PositionInterpolation = None
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        begin(f"loading {self.checkpoint}")
        from vitlab.pipelines.inspect import as_text, inspect_checkpoint

        found = inspect_checkpoint(
            self.checkpoint, self.sources, self.out, shown=self.shown, top=self.top, batch_size=self.batch_size,
            image_size=self.image_size, interpolation=self.interpolation, device=self.device, say=say,
        )  # fmt: skip
        answer(found, self.json, as_text(found))
        return 1 if found["unreadable"] else 0


@dataclass(frozen=True)
class App:
    """A web page on this machine: drop a image, see the answers and where they look. Needs `vitlab[app]`."""

    checkpoint: Annotated[
        Positional[str],
        tyro.conf.arg(metavar="CHECKPOINT", help=f"{CHECKPOINTS} Or a folder of them, to choose among."),
    ]
    port: int | None = None
    """Port on 127.0.0.1; the first free from 7860 unless given."""
    max_megapixels: float = 50.0
    """Largest image, in millions of pixels."""
    max_upload_mb: float = 20.0
    """Largest file, in megabytes."""
    open_browser: bool = False
    device: str = "auto"
    json: bool = False

    def run(self) -> int:
        begin(f"loading {self.checkpoint}")
        from vitlab.app import launch

        launch(
            self.checkpoint, port=self.port, max_megapixels=self.max_megapixels, max_upload_mb=self.max_upload_mb,
            open_browser=self.open_browser, device=self.device,
            announce=lambda url: answer({"url": url}, self.json, f"{url} (Ctrl-C ends it)", lines=True),
        )  # fmt: skip
        return 0


@dataclass(frozen=True)
class Duplicates:
    """Find near-duplicates of test images in a training set: a list to leave out, and a page to look at."""

    train: Annotated[Positional[str], tyro.conf.arg(metavar="TRAIN")]
    """Training set: a name of `vitlab list datasets`, `folder:PATH` or `shards:PATH`."""
    test: Annotated[Positional[str], tyro.conf.arg(metavar="TEST")]
    """Test set, likewise."""
    out: Path = Path("duplicates")
    """Folder for duplicates.jsonl, exclude.txt, report.html, result.json and the thumbnails."""
    train_split: Literal["train", "val", "test", "trainval", "all"] = "trainval"
    """All but the test split unless given; `all` is every image once."""
    test_split: Literal["train", "val", "test", "trainval", "all"] = "test"
    train_root: str | None = None
    """Folder that holds a named training set."""
    test_root: str | None = None
    """Folder that holds a named test set."""
    threshold: float = 0.25
    """Largest distance of a pair: 0 is the same, 1.41 unrelated; at most 0.5."""
    workers: int = 0
    """Threads that read images."""
    json: bool = False

    def run(self) -> int:
        begin(f"reading {self.train} and {self.test}")
        from vitlab.pipelines.duplicates import as_text, duplicates

        found = duplicates(
            self.train, self.test, self.out, train_split=self.train_split, test_split=self.test_split,
            train_root=self.train_root, test_root=self.test_root, threshold=self.threshold, workers=self.workers,
        )  # fmt: skip
        answer(found, self.json, as_text(found, self.out))
        return 1 if found["unreadable"] else 0
