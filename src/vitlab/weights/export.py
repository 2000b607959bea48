"""A model as one file that other programs run: ONNX, or torch's own exported program.

    PATH.onnx   for onnxruntime and the like. Weights of more than 2 GB, which the format cannot hold, lie beside it
                in PATH.onnx.data; the two go together.
    PATH.pt2    a zip archive of torch.export: the graph as JSON, the weights as plain bytes. `torch.export.load` reads
                it without this package. Load only files that you trust, for such an archive may also hold pickles; in
                what is written here there is none.

Both take `images` [batch, 3, H, W], float32 in [-1, 1], with any batch, and answer `logits` [batch, K] (`features`
where the model has no head). Their metadata say, as JSON: `image_size` (height, width), `value_range`, and whatever
stands in `extra`, such as `classes`. In ONNX these are metadata properties, in the archive extra files.
"""

import copy
import json
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from vitlab.errors import UserError
from vitlab.io import sync
from vitlab.models.config import ImageSize, Interpolation
from vitlab.models.resnet import ResNet
from vitlab.models.vit import ViT
from vitlab.weights import ParityError, load_checkpoint
from vitlab.weights.folder import check_classes

Format = Literal["onnx", "torch-export"]
SUFFIX: dict[Format, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
BATCHES = (1, 3)
"""Sizes of the batches with which a written file is tried; it is traced with another, 2."""
TOLERANCE = 1e-4
"""Largest difference to the model, over the root mean square of the model's answer."""
ROUNDINGS = 4
"""Times the model's own rounding error, if that is more: in a deep ResNet with random weights it passes 1e-4."""
PROTOBUF_LIMIT = 2_000_000_000
"""Bytes of weights that one ONNX file takes; the format ends at 2 GiB, the graph included."""

Run = Callable[[Float[Tensor, "B 3 H W"]], Float[Tensor, "B K"]]


def export_model(model: ViT | ResNet, path: Path, *, to: Format, extra: dict[str, Any] | None = None) -> dict[str, Any]:
    """Writes `model` to `path`, and loads the file back to compare its answers with the model's.

    The file takes the place of `path` only after it has passed: all or nothing. `extra` is the model's card
    (`load_card`). The report has `format`, `path`, `files` (their names), `bytes`, `opset` (None for torch-export),
    `batches` (sizes tried) and `difference` (the largest, over the root mean square of the model's answer).

    Raises ValueError for a format, a name or an `extra` that cannot be, and where ONNX's packages are missing;
    ParityError where the answers differ by more than `TOLERANCE` and `ROUNDINGS` allow, or are no numbers.
    """
    _check_request(path, to)
    traced = copy.deepcopy(model).cpu().float().eval().requires_grad_(False)
    metadata = _metadata(traced, extra or {})
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        aside = Path(folder) / path.name
        opset = _write_onnx(traced, aside, metadata) if to == "onnx" else _write_torch(traced, aside, metadata)
        difference = _difference(traced, _load_onnx(aside) if to == "onnx" else _load_torch(aside))
        if not difference <= (allowed := _allowed(traced, difference)):
            raise ParityError(
                f"the {to} file answers otherwise than the model: they differ by {difference:.1e} of the root mean "
                f"square, and {allowed:.0e} is allowed. {path} is not written. Try --to "
                f"{'torch-export' if to == 'onnx' else 'onnx'}, or other versions of torch and onnxruntime."
            )
        files = sorted(Path(folder).iterdir(), reverse=True)  # NAME.data before NAME, which needs it
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
        "batches": list(BATCHES),
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
    """`export_model` for what lies at `checkpoint`, with its card; the sizes are as in `load_checkpoint`."""
    _check_request(path, to)
    found = load_checkpoint(checkpoint, image_size=image_size, interpolation=interpolation)
    card = found.card | {"preprocessing": found.preprocessing.to_card()}
    return export_model(found.model, path, to=to, extra=card)


def _check_request(path: Path, to: Format) -> None:
    if to not in get_args(Format):
        raise UserError(f"to={to!r} is no format for export; allowed: {', '.join(get_args(Format))}.")
    if path.suffix != SUFFIX[to] or path.is_dir():
        raise UserError(f"{path} cannot be the name of the file; for {to} give one that ends with {SUFFIX[to]}.")
    if to == "onnx":
        try:
            import onnx  # noqa: F401
            import onnx_ir  # noqa: F401
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
        except ModuleNotFoundError as error:
            raise UserError(
                f"export to onnx needs the package {error.name}, which is not installed: pip install 'vitlab[export]'. "
                f"--to torch-export needs none."
            ) from error


def _metadata(model: ViT | ResNet, extra: dict[str, Any]) -> dict[str, str]:
    check_classes(extra, model.config)
    told = {**extra, "image_size": model.config.image_hw, "value_range": (-1.0, 1.0)}
    try:
        return {key: json.dumps(value, allow_nan=False) for key, value in told.items()}
    except (TypeError, ValueError) as error:
        raise UserError(f"extra can only hold what JSON can say: {error}") from error


def _trace(model: ViT | ResNet) -> torch.export.ExportedProgram:
    """The model's graph for any batch, without the places in our source that each node comes from."""
    images = torch.zeros(2, 3, *model.config.image_hw)  # a batch of 1 would be taken for a constant
    with torch.no_grad():
        program = torch.export.export(model, (images,), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    return program


def _write_torch(model: ViT | ResNet, path: Path, metadata: dict[str, str]) -> None:
    program = _trace(model)
    program.example_inputs = None  # or they are written, as a pickle
    torch.export.save(program, path, extra_files=metadata)


def _load_torch(path: Path) -> Run:
    return torch.export.load(path).module()


def _write_onnx(model: ViT | ResNet, path: Path, metadata: dict[str, str]) -> int:
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
    _keep_zeros_around_pooling(written)
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()  # which line of which module each came from
    written.model.metadata_props.update(metadata)
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    written.save(path, external_data=size > PROTOBUF_LIMIT)
    return written.model.opset_imports[""]


def _keep_zeros_around_pooling(written: torch.onnx.ONNXProgram) -> None:
    """Rewrites every Pad before a MaxPool so that onnxruntime leaves it there.

    BiT's zeros around its pooling matter, for what is pooled may be negative. Onnxruntime's optimizer moves such
    padding into the MaxPool, which pads with -inf; a Pad that names its axes it lets be.
    """
    import onnx_ir

    graph = written.model.graph
    for node in list(graph):
        pad = node.inputs[0].producer() if node.op_type == "MaxPool" and node.inputs[0] else None
        if pad is None or pad.op_type != "Pad" or len(pad.inputs) > 3:
            continue
        data, pads, *rest = pad.inputs
        assert data is not None
        assert pads is not None
        assert pads.const_value is not None
        axes = onnx_ir.Value(name=f"{pads.name}_axes", const_value=onnx_ir.tensor(list(range(4))))
        graph.register_initializer(axes)
        zero = rest[0] if rest else None
        named = onnx_ir.node("Pad", [data, pads, zero, axes], attributes={"mode": "constant"})
        graph.insert_before(node, named)
        node.replace_input_with(0, named.outputs[0])
        if not pad.outputs[0].uses():
            graph.remove(pad, safe=True)


def _load_onnx(path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


def _allowed(model: ViT | ResNet, difference: float) -> float:
    """The model is asked in float64 only where that matters: it takes time and twice the memory."""
    if difference <= TOLERANCE:
        return TOLERANCE
    return max(TOLERANCE, ROUNDINGS * _difference(copy.deepcopy(model).double(), model))


def _difference(model: ViT | ResNet, run: Run) -> float:
    """The largest between both answers to the same random images, over the root mean square of the model's."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for batch in BATCHES:
        images = torch.rand(batch, 3, *model.config.image_hw, generator=generator) * 2 - 1
        with torch.no_grad():
            ours, theirs = model(images), run(images)
        if ours.shape != theirs.shape:
            return math.inf
        error, rms = (theirs - ours).abs().max(), ours.square().mean().sqrt()
        found.append(
            torch.where(error == 0, error, error / rms)
        )  # an untrained head answers zero, and so must the file
    return torch.stack(found).max().item()  # which is NaN if one is
