"""A model as one file that other programs run: ONNX, or an exported program of torch.

    PATH.onnx   for onnxruntime and the like. Weights too large for the format (2 GB) are in PATH.onnx.data, in the same
                folder.
    PATH.pt2    a zip archive of torch.export: the graph as JSON, the weights as plain bytes. `torch.export.load` reads
                it without this package. Load only files that you trust, for such an archive may also hold pickles; in
                what is written here there is none.

Both take `images` [batch, 3, H, W], float32 in [-1, 1], with any batch, and return `logits` [batch, K] (`features`
where the model has no head). Their metadata hold, as JSON: `image_size` (height, width), `value_range`, and the model's
card, such as `classes`. In ONNX these are metadata properties, in the archive extra files.
"""

import copy
import importlib
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.io import sync
from vitlab.models.config import ImageSize, Interpolation
from vitlab.models.vit import Model, ViT
from vitlab.weights.checkpoint import PARITY_BATCHES, check_parity, load_checkpoint
from vitlab.weights.folder import check_classes, to_json

Format = Literal["onnx", "torch-export"]
SUFFIX: dict[Format, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
TOLERANCE = {"vit": 1e-4, "resnet": 1e-3}
"""Largest difference of the outputs, of their root mean square, by kind of model. Rounding alone takes a deep ResNet
with random weights past 1e-4, and a hybrid has one as its stem."""


def export_model(model: Model, path: Path, *, to: Format, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """Writes `model` to `path`, and loads the file back to compare its outputs with the model's.

    The file replaces `path` only after it has passed: all or nothing. `extra` is the model's card (`load_card`). The
    report has `format`, `path`, `files` (their names), `bytes`, `opset` (None for torch-export), `batches` (sizes
    compared) and the `difference` of `check_parity`.

    Raises ValueError for an invalid format, name or `extra`, and where ONNX's packages are missing; ParityError where
    the outputs differ.
    """
    _check_request(path, to)
    traced = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    check_classes(extra or {}, model.config)
    content = {**(extra or {}), "image_size": model.config.image_hw, "value_range": (-1.0, 1.0)}
    metadata = {key: to_json(value) for key, value in content.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        new = Path(folder) / path.name
        opset = _write_onnx(traced, new, metadata) if to == "onnx" else _write_torch(traced, new, metadata)
        run = _load_onnx(new) if to == "onnx" else torch.export.load(new).module()
        kind = "vit" if isinstance(model, ViT) and model.stem is None else "resnet"
        difference = check_parity(traced, run, f"the {to} file for {path}, which is not written", TOLERANCE[kind])
        files = sorted(Path(folder).iterdir(), reverse=True)  # NAME.data before NAME, which refers to it
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


def export_checkpoint(
    checkpoint: Path | str,
    path: Path,
    *,
    to: Format,
    image_size: ImageSize | None = None,
    interpolation: Interpolation | None = None,
) -> dict[str, Any]:
    """`export_model` of a checkpoint, with its card; the sizes are as in `load_checkpoint`."""
    _check_request(path, to)
    loaded = load_checkpoint(checkpoint, image_size=image_size, interpolation=interpolation)
    card = loaded.card | {"preprocessing": loaded.preprocessing.to_card()}
    return export_model(loaded.model, path, to=to, extra=card)


def _check_request(path: Path, to: Format) -> None:
    if to not in SUFFIX:
        raise UserError(f"to is {to!r}; allowed: {', '.join(map(repr, SUFFIX))}.")
    if path.suffix != SUFFIX[to] or path.is_dir():
        raise UserError(f"{path} cannot be the name of the file; for {to} give one that ends with {SUFFIX[to]}.")
    try:
        for package in ("onnx", "onnx_ir", "onnxruntime", "onnxscript") if to == "onnx" else ():
            importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UserError(
            f"export to onnx requires the package {error.name}, which is not installed: pip install "
            f"'vitlab[export]'. --to torch-export requires none."
        ) from error


def _trace(model: Model) -> torch.export.ExportedProgram:
    """The model's graph for any batch, without the lines of our source that its nodes come from."""
    images = torch.zeros(2, 3, *model.config.image_hw)  # a batch of 1 would be taken for a constant
    with torch.no_grad():
        program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def _write_torch(model: Model, path: Path, metadata: dict[str, str]) -> None:
    program = _trace(model)
    program.example_inputs = None  # or they are written, as a pickle
    torch.export.save(program, path, extra_files=metadata)


def _write_onnx(model: Model, path: Path, metadata: dict[str, str]) -> int:
    """Writes the file and returns the version of ONNX's operators that it uses."""
    written = torch.onnx.export(
        _trace(model),
        dynamo=True,
        input_names=["images"],
        output_names=["logits" if model.config.num_classes else "features"],
        dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        verbose=False,
    )
    assert written is not None
    _name_axes_of_padding(written)
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
