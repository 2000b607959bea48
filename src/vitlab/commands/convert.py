"""The commands that write what others read: shards of images, checkpoints, exported models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from tyro.conf import Positional

from vitlab.commands.output import Checkpoint, PositionInterpolation, answer, begin, progress_bar
from vitlab.errors import UserError
from vitlab.models.config import ImageSize


@dataclass(frozen=True)
class Shard:
    """Write any data set as WebDataset tars (`shards:FOLDER`): shuffled, balanced, checksummed, at training's size."""

    source: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """A name of `vitlab list datasets`, `folder:PATH`, `shards:PATH` or `hub:OWNER/NAME`."""
    destination: Annotated[Positional[Path | None], tyro.conf.arg(metavar="DESTINATION")] = None
    """A new folder. With --check there is none."""
    split: Literal["train", "val", "test", "all"] = "all"
    """The splits to write; `all` are three, cut from train where the source lacks one."""
    size: int | None = None
    """Shorter side in pixels to which larger images are brought, as JPEG; every byte stays as it is unless given."""
    quality: int = 90
    """Of these JPEGs."""
    records: int | None = None
    """Most images in a tar."""
    megabytes: float | None = None
    """About so much in a tar; 100 unless given."""
    seed: int = 0
    """Of the shuffling."""
    root: str | None = None
    """Folder that holds a named data set."""
    on_error: Literal["raise", "skip"] = "raise"
    """What an unreadable image does: end the command, or be left out, named and counted."""
    check: bool = False
    """Write nothing, but compare the files of SOURCE, `shards:PATH`, with the checksums in its index.json."""
    json: bool = False

    def run(self) -> int:
        begin(f"reading {self.source}")
        from vitlab.data import shard_index
        from vitlab.data.write_shards import ShardSettings, write_shards

        if self.check:
            kind, _, path = self.source.partition(":")
            if self != Shard(self.source, root=self.root, check=True, json=self.json) or kind != "shards":
                raise UserError("--check takes SOURCE alone, as shards:PATH; leave out all else.")
            with progress_bar("bytes checked") as report:
                found = shard_index.check_shards(Path(self.root or "", Path(path).expanduser()), report)
            answer(found, self.json, shard_index.check_as_text(found))
            return 1 if found["wrong"] else 0
        if self.destination is None:
            raise UserError("give a DESTINATION, a new folder for the shards.")
        splits = ("train", "val", "test") if self.split == "all" else (self.split,)
        settings = ShardSettings(self.size, self.quality, self.records, self.megabytes, self.seed)
        with progress_bar("images written") as report:
            made = write_shards(
                self.source, self.destination, settings, splits=splits, root=self.root, on_error=self.on_error,
                report=report,
            )  # fmt: skip
        answer(made, self.json, shard_index.summary_as_text(made))
        return 1 if any(each["unreadable"] for each in made["splits"].values()) else 0


@dataclass(frozen=True)
class Convert:
    """Write a checkpoint as Google's, timm's or Hugging Face's code reads it, or as ours; read it back and compare."""

    checkpoint: Checkpoint
    destination: Annotated[Positional[Path], tyro.conf.arg(metavar="DESTINATION")]
    """An .npz file for `google`, else a folder."""
    to: Literal["google", "timm", "huggingface", "vitlab"]
    """Whose format."""
    image_size: ImageSize | None = None
    """Side in pixels, or height and width: converts at another size, with interpolated position embeddings."""
    interpolation: PositionInterpolation = None
    json: bool = False

    def run(self) -> int:
        begin(f"loading {self.checkpoint}")
        from vitlab.weights import convert

        done = convert(
            self.checkpoint, self.destination, to=self.to, image_size=self.image_size, interpolation=self.interpolation
        )
        answer(done, self.json, f"{done['path']}: {done['parameters']:,} parameters in {self.to}'s format; read back, "
                f"the answers differ by {done['difference']:.1e}.")  # fmt: skip
        return 0


@dataclass(frozen=True)
class Export:
    """Write a checkpoint as a program that runs without vitlab: ONNX or torch.export, any batch size, checked."""

    checkpoint: Checkpoint
    to: Literal["onnx", "torch-export"]
    """Format of the program."""
    out: Path | None = None
    """File to write; `model.onnx` or `model.pt2` unless given."""
    image_size: ImageSize | None = None
    """Side in pixels, or height and width; as the checkpoint's preprocessing says unless given. Position embeddings are
    interpolated for it."""
    interpolation: PositionInterpolation = None
    json: bool = False

    def run(self) -> int:
        begin(f"loading {self.checkpoint}")
        from vitlab.weights.export import export_checkpoint

        out = self.out or Path("model.onnx" if self.to == "onnx" else "model.pt2")
        report = export_checkpoint(
            self.checkpoint, out, to=self.to, image_size=self.image_size, interpolation=self.interpolation
        )
        answer(report, self.json, "\n".join(f"{name}: {value}" for name, value in report.items()))
        return 0
