"""The commands that write other formats: shard, convert, export."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional

from vitlab.commands import Checkpoint, Json, PositionInterpolation, print_note, print_result
from vitlab.commands.check import check_inputs
from vitlab.config.data import ReadConfig
from vitlab.display import ProgressDisplay
from vitlab.errors import UserError
from vitlab.io import check_output
from vitlab.models.config import ImageSize
from vitlab.weights.assumptions import Assumptions


@dataclass(frozen=True)
class Shard:
    """Write a data set as WebDataset tars (`shards:FOLDER`), shuffled, with checksums, optionally resized."""

    source: Annotated[Positional[str], tyro.conf.arg(metavar="SOURCE")]
    """A name of `vitlab list datasets`, `folder:PATH`, `csv:PATH`, `shards:PATH` or `hub:OWNER/NAME`."""
    destination: Annotated[Positional[Path], tyro.conf.arg(metavar="DESTINATION")]
    """A new folder."""
    split: Literal["train", "val", "test", "all"] = "all"
    """Splits to write; `all` is train, val and test; a missing one is held out from train."""
    size: int | None = None
    """Resize larger images to this shorter side in pixels, as JPEG; default: files are copied byte for byte."""
    quality: int = 90
    """JPEG quality of resized images."""
    records: int = 1000
    """Images of each tar at most."""
    seed: int = 0
    """Seed of the shuffle."""
    root: str | None = None
    """Folder that holds a named data set."""
    on_error: Literal["raise", "skip"] = "raise"
    """Unreadable images: `raise` ends the command, `skip` leaves them out and lists them."""
    read: Annotated[ReadConfig, tyro.conf.arg(name="")] = ReadConfig()
    json: Json = False

    def run(self) -> int:
        print_note(f"reading {self.source} ...")
        from vitlab.data.write_shards import ShardSettings, summary_as_text, write_shards

        splits = ("train", "val", "test") if self.split == "all" else (self.split,)
        settings = ShardSettings(self.size, self.quality, self.records, self.seed)
        with ProgressDisplay("writing", 0) as display:
            index = write_shards(
                self.source,
                self.destination,
                settings,
                splits=splits,
                root=self.root,
                on_error=self.on_error,
                read=self.read,
                report=lambda done, total: display.update(done, total=total),
            )
        print_result(index, self.json, summary_as_text(index))
        return 1 if any(part["unreadable"] for part in index["splits"].values()) else 0


@dataclass(frozen=True)
class Convert:
    """Write a checkpoint in the format of Google's code, timm, Hugging Face or vitlab; read it back and compare.

    It alone opens pickles (.pth, .pt, .bin, .ckpt), for their tensors; no code in them is run.
    """

    checkpoint: Checkpoint
    destination: Annotated[Positional[Path], tyro.conf.arg(metavar="DESTINATION")]
    """An .npz file for `google`, else a folder."""
    to: Literal["google", "timm", "huggingface", "vitlab"] = "vitlab"
    """Format to write."""
    key: str | None = None
    """In a pickle: the key of the weights (`model`, `model_ema`, `state_dict`), with dots between levels; default: the
    only one, or averaged weights before others."""
    pre_logits: Literal["keep", "drop"] = "keep"
    """`drop` leaves out the hidden layer before the head, which timm and Hugging Face do not have, and the head."""
    pool: Literal["token"] | None = None
    """`token`: take the class token where a headless model averages its patches (timm's DINOv3, for Hugging Face)."""
    image_size: ImageSize | None = None
    """Side in pixels, or height and width; another size interpolates the position embeddings."""
    interpolation: PositionInterpolation = None
    assume: Assumptions = field(default_factory=Assumptions)
    json: Json = False

    def run(self) -> int:
        print_note(f"loading {self.checkpoint} ...")
        from vitlab.weights import convert

        result = convert(
            self.checkpoint,
            self.destination,
            to=self.to,
            image_size=self.image_size,
            interpolation=self.interpolation,
            pre_logits=self.pre_logits,
            pool=self.pool,
            key=self.key,
            log=print_note,
            assume=self.assume.given(),
        )
        text = f"{result['path']}: {result['parameters']:,} parameters in the format of {self.to}; read back, "
        print_result(result, self.json, f"{text}the logits differ by {result['difference']:.1e}.")
        return 0


@dataclass(frozen=True)
class Export:
    """Write a checkpoint as ONNX or torch.export program, for any batch size, and check its outputs."""

    checkpoint: Checkpoint
    to: Literal["onnx", "torch-export"]
    """Format of the program."""
    out: Path | None = None
    """File to write; default: `model.onnx` or `model.pt2`."""
    image_size: ImageSize | None = None
    """Side in pixels, or height and width; default: as the checkpoint's preprocessing."""
    interpolation: PositionInterpolation = None
    with_preprocessing: bool = False
    """ONNX: the program takes uint8 images [batch, height, width, 3] of any size, and resizes, crops and normalizes
    them as the checkpoint's own library does."""
    dynamic_size: tyro.conf.FlagCreatePairsOff[bool] = False
    """The program takes images of any size that patches divide, and interpolates the position embeddings."""
    no_dynamic_size: tyro.conf.FlagCreatePairsOff[bool] = False
    """It takes one size, also of a checkpoint that says that it takes any."""
    outputs: tuple[Literal["logits", "features", "tokens", "attention"], ...] = ()
    """What the program returns, each by its name: `features` are the input of the head, `tokens` [batch, tokens,
    width] those after the last LayerNorm, `attention` [batch, layers, heads, tokens, tokens]; default: logits."""
    opset: int | None = None
    """ONNX: version of its operators, 17 to 23; default: torch's."""
    json: Json = False

    def run(self) -> int:
        print_note(f"loading {self.checkpoint} ...")
        check_inputs(self.checkpoint)
        if self.dynamic_size and self.no_dynamic_size:
            raise UserError("--dynamic-size and --no-dynamic-size exclude each other; leave out one.")
        check_output(out := self.out or Path("model.onnx" if self.to == "onnx" else "model.pt2"))
        from vitlab.weights.export import export_checkpoint

        print_note(f"writing {out} and comparing its outputs ...")
        report = export_checkpoint(
            self.checkpoint,
            out,
            to=self.to,
            image_size=self.image_size,
            interpolation=self.interpolation,
            with_preprocessing=self.with_preprocessing,
            dynamic_image_size=False if self.no_dynamic_size else self.dynamic_size or None,
            outputs=self.outputs,
            opset=self.opset,
        )
        print_result(report, self.json, export_as_text(report))
        return 0


def export_as_text(report: Mapping[str, Any]) -> str:
    """The report of an export: the files, their outputs, and how far these are from the checkpoint's."""
    sizes = ", ".join(f"{height}x{width}" for height, width in report["sizes"])
    compared = f"of images {sizes} in batches of {' and '.join(map(str, report['batches']))}"
    opset = f", opset {report['opset']}" if report["opset"] else ""
    return "\n".join(
        [
            f"{', '.join(report['files'])}: {report['bytes'] / 2**20:,.1f} MiB{opset}",
            f"outputs: {', '.join(report['outputs'])}",
            f"largest difference from the checkpoint's outputs: {report['difference']:.1e} of their rms, {compared}",
        ]
    )
