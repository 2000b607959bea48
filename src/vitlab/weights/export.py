"""A model as one file that other programs run: ONNX, or an exported program of torch. docs/guide.md says how to use it.

Both take `images` [batch, C, H, W] and return `logits` [batch, K] (`features` where the model has no head). ONNX puts
weights of more than 2 GB into PATH.onnx.data. An archive of torch.export may hold pickles, so load only files that you
trust; what is written here has none. Metadata are JSON: the checkpoint's own, `image_size` (height, width) of the
model, `value_range` of `images`, and `mean` and `std` that bring values of [0, 1] to the model's.
"""

import importlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Literal

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.io import sync, temporary_folder
from vitlab.models.config import ImageSize, Interpolation, ModelConfig, check_rgb
from vitlab.models.vit import Model, ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights.checkpoint import PARITY_BATCHES, Checkpoint, check_parity, load_checkpoint
from vitlab.weights.folder import to_json
from vitlab.weights.onnx_preprocessing import check_expressible, prepend_preprocessing, preprocessed_inputs

Format = Literal["onnx", "torch-export"]
SUFFIX: dict[Format, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
TOLERANCE = {"vit": 1e-4, "resnet": 1e-3}
"""Largest difference of the outputs, of their root mean square, by kind of model. Rounding alone takes a deep ResNet
with random weights past 1e-4, and a hybrid has one as its stem."""


def export_checkpoint(
    checkpoint: Path | str,
    path: Path,
    *,
    to: Format,
    image_size: ImageSize | None = None,
    interpolation: Interpolation | None = None,
    with_preprocessing: bool = False,
    dynamic_image_size: bool | None = None,
) -> dict[str, Any]:
    """Writes a checkpoint's model to `path`, and loads the file back to compare its outputs with the model's.

    The file replaces `path` only after it has passed: all or nothing. Sizes are as in `load_checkpoint`. An ONNX file
    `with_preprocessing` takes uint8 images of any size, and prepares them as the checkpoint says. The report has
    `format`, `path`, `files` (their names), `bytes`, `opset` (None for torch-export), `batches` (sizes compared) and
    the `difference` of `check_parity`.

    Raises ValueError for invalid arguments, for a model or a resize that cannot be exported, and where ONNX's packages
    are missing; ParityError where the outputs differ.
    """
    _check_request(path, to, with_preprocessing, bool(dynamic_image_size))
    loaded = load_checkpoint(
        checkpoint, image_size=image_size, interpolation=interpolation, dynamic_image_size=dynamic_image_size
    )
    model, preprocessing = loaded.model.requires_grad_(False), loaded.preprocessing if with_preprocessing else None
    dynamic = preprocessing is None and getattr(model.config, "dynamic_image_size", False)
    _check_model(model, preprocessing, dynamic)
    metadata = _metadata(model.config, loaded, preprocessing)
    with temporary_folder(path, 4 * model.config.num_parameters) as folder:
        new = folder / path.name
        if to == "onnx":
            opset, run = _write_onnx(model, new, metadata, preprocessing, dynamic), _load_onnx(new)
        else:
            opset, run = _write_torch(model, new, metadata, dynamic), torch.export.load(new).module()
        kind = "vit" if isinstance(model, ViT) and model.stem is None else "resnet"
        inputs: Any = preprocessed_inputs(preprocessing, model.config.image_hw) if preprocessing else {}
        inputs = {"batches": _images_of_three_sizes(model)} if dynamic else inputs
        difference = check_parity(model, run, f"the {to} file for {path} (not written)", TOLERANCE[kind], **inputs)
        files = sorted(folder.iterdir(), reverse=True)  # NAME.data before NAME, which refers to it
        size = sum(file.stat().st_size for file in files)
        for file in files:
            sync(file)
            file.replace(path.parent / file.name)
        sync(path.parent)
    return {
        "format": to,
        "path": str(path),
        "files": sorted(file.name for file in files),
        "bytes": size,
        "opset": opset,
        "batches": list(PARITY_BATCHES),
        "difference": difference,
    }


def _metadata(config: ModelConfig, loaded: Checkpoint, preprocessing: Preprocessing | None) -> dict[str, str]:
    """What a file says of itself, as JSON: the checkpoint's metadata, and how its images are given."""
    half = (0.5,) * config.in_chans
    images = {"image_size": config.image_hw, "value_range": (0, 255) if preprocessing else (-1.0, 1.0)}
    extra = loaded.metadata | {"preprocessing": loaded.preprocessing.to_metadata()}
    return {key: to_json(value) for key, value in {**extra, **images, "mean": half, "std": half}.items()}


def _check_request(path: Path, to: Format, with_preprocessing: bool, dynamic: bool) -> None:
    if to not in SUFFIX:
        raise UserError(f"to is {to!r}; allowed: {', '.join(map(repr, SUFFIX))}.")
    if path.suffix != SUFFIX[to] or path.is_dir():
        raise UserError(f"{path} cannot be the name of the file; for {to} give one that ends with {SUFFIX[to]}.")
    if with_preprocessing and to != "onnx":
        raise UserError(f"preprocessing is written into ONNX files alone, not to {to}; give to='onnx'.")
    if with_preprocessing and dynamic:
        raise UserError("with_preprocessing brings every image to one size; leave out one of it and the dynamic size.")
    try:
        for package in ("onnx", "onnx_ir", "onnxruntime", "onnxscript") if to == "onnx" else ():
            importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UserError(
            f"export to onnx requires the package {error.name}, which is not installed: pip install "
            f"'vitlab[export]'. --to torch-export requires none."
        ) from error


def _check_model(model: Model, preprocessing: Preprocessing | None, dynamic: bool) -> None:
    if preprocessing is not None:
        check_expressible(preprocessing)
        check_rgb(model.config)
    if dynamic and isinstance(model, ViT) and (model.stem is not None or model.config.position == "relative"):
        raise UserError(
            "hybrids and relative positions are not exported with a dynamic size; load the model with "
            "dynamic_image_size=False, at the image_size that is needed."
        )


def _dynamic_shapes(model: Model, dynamic: bool) -> tuple[dict[int, Any]]:
    """Which axes of the images may change: the batch and, if `dynamic`, height and width."""
    shapes: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}
    if dynamic and isinstance(model, ViT):
        for axis, name in ((2, "rows"), (3, "columns")):  # one row would be taken for a constant
            shapes[axis] = model.config.stride * torch.export.Dim(name, min=2)
    return (shapes,)


def _images_of_three_sizes(model: Model) -> list[Tensor]:
    """Random ones: larger and smaller than the model's, and its own."""
    assert isinstance(model, ViT)
    (rows, columns), stride = model.config.grid, model.config.stride
    grids = ((rows + 2, 2 * columns + 3), (max(rows // 2, 2), max(columns - 1, 2)), (max(rows, 2), max(columns, 2)))
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(2, model.config.in_chans, h * stride, w * stride, generator=generator) * 2 - 1 for h, w in grids]


def _trace(model: Model, dynamic: bool) -> torch.export.ExportedProgram:
    """The model's graph for any batch, without the lines of our source that its nodes come from."""
    # A batch of 1 would be taken for a constant, and the model's own size for the only one without resampling.
    images = (
        _images_of_three_sizes(model)[0] if dynamic else torch.zeros(2, model.config.in_chans, *model.config.image_hw)
    )
    with torch.no_grad():
        program = torch.export.export(model, (images,), dynamic_shapes=_dynamic_shapes(model, dynamic))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def _write_torch(model: Model, path: Path, metadata: dict[str, str], dynamic: bool) -> None:
    program = _trace(model, dynamic)
    program.example_inputs = None  # or they are written, as a pickle
    with path.open("xb") as file:
        archive: Any = _Archive(file)
        torch.export.save(program, archive, extra_files=metadata)
    if archive.error is not None:
        raise archive.error


class _Archive(io.BufferedIOBase):
    """A file for torch's writer, which aborts the process where a write fails: the first `error` is kept instead."""

    def __init__(self, file: BinaryIO) -> None:
        self.error: OSError | None = None
        self._file = file

    def write(self, data: Any) -> int:
        if self.error is None:
            try:
                self._file.write(data)
            except OSError as error:
                self.error = error
        return len(data)

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _write_onnx(
    model: Model, path: Path, metadata: dict[str, str], preprocessing: Preprocessing | None, dynamic: bool
) -> int:
    """Writes the file and returns the version of ONNX's operators that it uses."""
    written = torch.onnx.export(
        _trace(model, dynamic),
        dynamo=True,
        input_names=["images"],
        output_names=["logits" if model.config.num_classes else "features"],
        dynamic_shapes=_dynamic_shapes(model, dynamic),
        verbose=False,
    )
    assert written is not None
    _name_axes_of_padding(written)
    if preprocessing is not None:
        prepend_preprocessing(written.model, preprocessing, model.config.image_hw)
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()  # which line of which module each came from
    written.model.metadata_props.update(metadata)
    written.save(path)
    return written.model.opset_imports[""]


def _name_axes_of_padding(written: torch.onnx.ONNXProgram) -> None:
    """Names the axes of the Pad before a MaxPool, so that onnxruntime leaves it there.

    BiT's pooling is padded with zeros, which matters because its input may be negative. Onnxruntime's optimizer moves
    such padding into the MaxPool, which pads with -inf; it leaves a Pad that names its axes.
    """
    import onnx_ir

    graph = written.model.graph
    axes = onnx_ir.Value(name="padded_axes", const_value=onnx_ir.tensor([0, 1, 2, 3]))
    for node in graph:
        if node.op_type == "Pad" and any(use.node.op_type == "MaxPool" for use in node.outputs[0].uses()):
            graph.register_initializer(axes)
            node.resize_inputs(4)
            node.replace_input_with(3, axes)


def _load_onnx(path: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])
