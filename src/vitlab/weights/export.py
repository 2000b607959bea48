"""A model as one file that other programs run: ONNX, or an exported program of torch. `vitlab export` calls
`export_checkpoint`; docs/howto/deploy.md says how to use the files.

Both take `images` [batch, C, H, W] and return `logits` [batch, K] (`features` where the model has no head), or what
`export_outputs` lists. ONNX puts weights of more than 2 GB into PATH.onnx.data. An archive of torch.export may hold
pickles, so load only files that you trust; what is written here has none. Metadata are JSON: the checkpoint's own,
`image_size` (height, width) of its images, `value_range` of `images`, `mean` and `std` that bring values of [0, 1] to
the model's, `outputs`, and how many `prefix_tokens` come before the patches.
"""

import contextlib
import importlib
import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.io import sync, temporary_folder
from vitlab.models.config import ImageSize, ViTConfig, check_rgb
from vitlab.models.variant import Interpolation, all_settings
from vitlab.models.vit import Model, ViT
from vitlab.preprocessing import Preprocessing, pair
from vitlab.weights.checkpoint import Checkpoint, load_checkpoint, load_model, save_model
from vitlab.weights.export_outputs import Output, check_outputs, with_outputs
from vitlab.weights.folder import to_json
from vitlab.weights.onnx_preprocessing import check_expressible, prepend_preprocessing, preprocessed_inputs
from vitlab.weights.parity import PARITY_BATCHES, check_parity

Format = Literal["onnx", "torch-export"]
SUFFIX: dict[Format, str] = {"onnx": ".onnx", "torch-export": ".pt2"}
TOLERANCE = {"vit": 1e-4, "resnet": 1e-3}
"""Largest difference of the outputs, of their root mean square, by kind of model. Rounding alone takes a deep ResNet
with random weights past 1e-4, and a hybrid has one as its stem."""
OPSETS = range(17, 24)
"""Versions of ONNX's operators to choose from: what torch writes or converts, and onnxruntime 1.22 runs."""


@dataclass(frozen=True)
class Export:
    """What is written into a file."""

    module: Any
    """The model, which returns `outputs`."""
    outputs: tuple[Output, ...]
    preprocessing: Preprocessing | None
    """What the file does to images before the model, if anything."""
    metadata: dict[str, str]
    dynamic: bool
    """Whether the file takes images of any size."""
    sizes: list[tuple[int, int]]
    """Sizes of the images on which outputs are compared; the model is traced with the last."""


def export_checkpoint(
    checkpoint: Path | str | nn.Module,
    path: Path,
    *,
    to: Format,
    image_size: ImageSize | None = None,
    interpolation: Interpolation | None = None,
    with_preprocessing: bool = False,
    dynamic_image_size: bool | None = None,
    outputs: Sequence[Output] = (),
    opset: int | None = None,
) -> dict[str, Any]:
    """Writes a checkpoint's model, or a module that `save_model` takes, to `path`; reads it back to compare outputs.

    The file replaces `path` only after it has passed. `image_size` and `interpolation` are as in `load_checkpoint`.

    - `with_preprocessing`: an ONNX file takes uint8 images of any size and prepares them as the checkpoint says.
    - `dynamic_image_size`: None is the checkpoint's, unless it gets one size.
    - `outputs` are names of `export_outputs`, by default what the model returns.
    - `opset` is one of OPSETS, by default torch's.

    The report has `format`, `path`, `files` (their names), `bytes`, `opset` (None for torch-export), `outputs`, and of
    the comparison `batches`, `sizes` and the `difference` of `check_parity`. Raises UserError for invalid arguments,
    for a model or a resize that cannot be exported, and if ONNX's packages are missing; ParityError if outputs differ.
    """
    _check_request(path, to, with_preprocessing, bool(dynamic_image_size), opset)
    with _saved(checkpoint) as source:
        dynamic = dynamic_image_size
        if dynamic is None:
            has_one_size = image_size is not None or with_preprocessing
            dynamic = not has_one_size and getattr(load_model(source).config, "dynamic_image_size", False)
        loaded = load_checkpoint(
            source, image_size=image_size, interpolation=interpolation, dynamic_image_size=dynamic or None
        )
        export = _prepare(loaded, with_preprocessing, dynamic, outputs, opset)
        with temporary_folder(path, 4 * export.module.config.num_parameters) as folder:
            written_opset = _write(export, folder / path.name, to, opset)
            models: Iterable[Model] = [loaded.model]
            if dynamic:  # the exported model would repeat its own mistakes, such as positions that are resampled twice
                models = (load_model(source, image_size=hw, interpolation=interpolation) for hw in export.sizes)
            references = (with_outputs(model, outputs) for model in models)
            difference = _compare(export, references, folder / path.name, f"the {to} file for {path} (not written)")
            bytes_of_files = _move_files(folder, path.parent)
    written = {"files": sorted(bytes_of_files), "bytes": sum(bytes_of_files.values()), "opset": written_opset}
    compared = {"batches": list(PARITY_BATCHES), "sizes": [list(hw) for hw in export.sizes], "difference": difference}
    return {"format": to, "path": str(path), **written, "outputs": list(export.outputs), **compared}


def _check_request(path: Path, to: Format, with_preprocessing: bool, dynamic: bool, opset: int | None) -> None:
    """Raises UserError for arguments that are invalid whatever the checkpoint is."""
    if to not in SUFFIX:
        raise UserError(f"to is {to!r}; allowed: {', '.join(map(repr, SUFFIX))}.")
    if path.suffix != SUFFIX[to] or path.is_dir():
        raise UserError(f"{path} cannot be the name of the file; for {to} give one that ends with {SUFFIX[to]}.")
    if with_preprocessing and to != "onnx":
        raise UserError(f"preprocessing is written into ONNX files alone, not to {to}; give to='onnx'.")
    if with_preprocessing and dynamic:
        raise UserError("with_preprocessing brings images to one size, not to a dynamic one; leave out one of the two.")
    if opset is not None and (to != "onnx" or opset not in OPSETS):
        raise UserError(f"opset={opset} with to={to!r}; allowed: {OPSETS[0]} to {OPSETS[-1]}, and only with to='onnx'.")
    try:
        for package in ("onnx", "onnx_ir", "onnxruntime", "onnxscript") if to == "onnx" else ():
            importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise UserError(
            f"export to onnx requires the package {error.name}, which is not installed: install "
            f"vitlab's extra export. --to torch-export requires none."
        ) from error


@contextlib.contextmanager
def _saved(checkpoint: Path | str | nn.Module) -> Iterator[Path | str]:
    """A checkpoint as it is; a module as a checkpoint in a temporary folder."""
    if isinstance(checkpoint, nn.Module):
        with tempfile.TemporaryDirectory() as folder:
            save_model(checkpoint, Path(folder) / "model")
            yield Path(folder) / "model"
    else:
        yield checkpoint


def _prepare(
    loaded: Checkpoint, with_preprocessing: bool, dynamic: bool, outputs: Sequence[Output], opset: int | None
) -> Export:
    """What is written for a checkpoint. Raises UserError for a model that cannot be written so."""
    model = loaded.model.requires_grad_(False)
    preprocessing = loaded.preprocessing if with_preprocessing else None
    _check_model(model, preprocessing, dynamic, opset)
    names = check_outputs(model, outputs)
    return Export(
        module=with_outputs(model, outputs),
        outputs=names,
        preprocessing=preprocessing,
        metadata=_metadata(loaded, preprocessing, names),
        dynamic=dynamic,
        sizes=_sizes(model, loaded.preprocessing) if dynamic else [model.config.image_hw],
    )


def _check_model(model: Model, preprocessing: Preprocessing | None, dynamic: bool, opset: int | None) -> None:
    """Raises UserError for what the format, or this version of its operators, cannot represent."""
    resnet = not isinstance(model, ViT) or model.stem is not None
    antialias = dynamic and all_settings(model.config).get("position_interpolation") == "bicubic_antialias"
    if opset == 17 and (resnet or antialias or (preprocessing is not None and preprocessing.antialias)):
        raise UserError("opset 17 has no antialiased resizing and no padding as in ResNets; give 18 or more.")
    if preprocessing is not None:
        check_expressible(preprocessing)
        check_rgb(model.config)
    if dynamic and isinstance(model, ViT) and (model.stem is not None or model.config.position == "relative"):
        raise UserError(
            "hybrids and relative positions are not exported with a dynamic size; load the model with "
            "dynamic_image_size=False, at the image_size that is needed."
        )


def _metadata(loaded: Checkpoint, preprocessing: Preprocessing | None, outputs: Sequence[Output]) -> dict[str, str]:
    """What a file says of itself, as JSON: the checkpoint's metadata, how its images are given, and what it returns."""
    model = loaded.model
    own = {
        "image_size": pair(loaded.preprocessing.image_size or model.config.image_size),
        "value_range": (preprocessing.range or (0, 255)) if preprocessing else (-1.0, 1.0),
        "mean": (0.5,) * model.config.in_chans,
        "std": (0.5,) * model.config.in_chans,
        "outputs": outputs,
        "prefix_tokens": model.config.num_prefix_tokens if isinstance(model, ViT) else 0,
    }
    extra = loaded.metadata | {"preprocessing": loaded.preprocessing.to_metadata()} | own
    return {key: to_json(value) for key, value in extra.items()}


def _sizes(model: Model, preprocessing: Preprocessing) -> list[tuple[int, int]]:
    """Sizes of the images on which outputs are compared: the checkpoint's for evaluation and its position embeddings',
    where they have two rows and two columns; and one that resamples the embeddings in both directions."""
    assert isinstance(model, ViT)
    rows, columns = model.config.grid
    stride = model.config.stride
    own = [pair(preprocessing.image_size or model.config.image_size), model.config.image_hw]
    other = (max(rows // 2, 2) * stride, (max(rows, columns) + 3) * stride)
    return [*dict.fromkeys(size for size in own if min(size) >= 2 * stride and size != other), other]


def _write(export: Export, path: Path, to: Format, opset: int | None) -> int | None:
    """Writes the file and returns its opset, if any."""
    axes: dict[int, Any] = {0: torch.export.Dim("batch", min=1)}  # those of the images that may change
    for axis, name in ((2, "rows"), (3, "columns")) if export.dynamic else ():  # one row would be taken for a constant
        axes[axis] = export.module.config.stride * torch.export.Dim(name, min=2)
    traced = _trace(export.module, export.sizes[-1], axes)
    if to == "onnx":
        return _write_onnx(traced, path, export, axes, opset)
    traced.example_inputs = None  # or they are written, as a pickle
    archive = io.BytesIO()  # if the disk is full, torch's own writer aborts the process
    torch.export.save(traced, archive, extra_files=export.metadata)
    path.write_bytes(archive.getbuffer())
    return None


def _trace(module: nn.Module, size: tuple[int, int], axes: dict[int, Any]) -> torch.export.ExportedProgram:
    """The module's graph, without the lines of our source that its nodes come from. With a dynamic size, `size` differs
    from the position embeddings', which would be taken for the only one without resampling."""
    config: Any = module.config
    images = torch.zeros(2, config.in_chans, *size)  # a batch of 1 would be taken for a constant
    with torch.no_grad():
        traced = torch.export.export(module, (images,), dynamic_shapes=(axes,))
    for node in traced.graph.nodes:
        node.meta.pop("stack_trace", None)
    return traced


def _write_onnx(
    traced: torch.export.ExportedProgram, path: Path, export: Export, axes: dict[int, Any], opset: int | None
) -> int:
    """Writes the file and returns the version of ONNX's operators that it uses."""
    written = torch.onnx.export(
        traced,
        dynamo=True,
        verbose=False,
        input_names=["images"],
        output_names=list(export.outputs),
        dynamic_shapes=(axes,),
        opset_version=opset and max(opset, 18),  # ONNX's own conversion to 17 fails at means
    )
    assert written is not None
    if opset == 17:
        _lower_to_opset_17(written)
    _name_axes_of_padding(written)
    if export.preprocessing is not None:
        height, width = json.loads(export.metadata["image_size"])
        prepend_preprocessing(written.model, export.preprocessing, (height, width))
    for node in written.model.graph.all_nodes():
        node.metadata_props.clear()  # which line of which module each came from
    written.model.metadata_props.update(export.metadata)
    written.save(path)
    return written.model.opset_imports[""]


def _lower_to_opset_17(written: torch.onnx.ONNXProgram) -> None:
    """Writes what 18 has changed as in 17: the axes of a mean are an attribute, and parts are equal without saying so.
    Raises UserError for any other operator that differs."""
    import onnx
    import onnx_ir

    for node in written.model.graph.all_nodes():
        old, new = (onnx.defs.get_schema(node.op_type, version).since_version for version in (17, 18))
        if node.op_type == "ReduceMean":
            axes: Any = node.inputs[1]
            node.attributes["axes"] = onnx_ir.AttrInt64s("axes", axes.const_value.numpy().tolist())
            node.attributes.pop("noop_with_empty_axes", None)
            node.resize_inputs(1)
        elif node.op_type == "Split":
            node.attributes.pop("num_outputs", None)
        elif old != new and not (node.op_type == "Pad" and len(node.inputs) < 4):  # the fourth are its axes
            raise UserError(f"this model cannot be written with opset 17, whose {node.op_type} differs; give 18.")
    written.model.opset_imports[""] = 17


def _name_axes_of_padding(written: torch.onnx.ONNXProgram) -> None:
    """Names the axes of the Pad before a MaxPool, so that onnxruntime leaves it there: its optimizer moves others into
    the MaxPool, which pads with -inf. BiT's pooling is padded with zeros, and its input may be negative."""
    import onnx_ir

    graph = written.model.graph
    axes = onnx_ir.Value(name="padded_axes", const_value=onnx_ir.tensor([0, 1, 2, 3]))
    for node in graph:
        if node.op_type == "Pad" and any(use.node.op_type == "MaxPool" for use in node.outputs[0].uses()):
            graph.register_initializer(axes)
            node.resize_inputs(4)
            node.replace_input_with(3, axes)


def _compare(export: Export, references: Iterable[Any], path: Path, what: str) -> float:
    """The largest difference of a file's outputs from those of `references`, for images of their sizes."""
    run = _load_onnx(path) if path.suffix == SUFFIX["onnx"] else torch.export.load(path).module()
    is_plain = isinstance(export.module.config, ViTConfig) and export.module.config.stem is None
    differences = []
    for module in references:
        inputs = preprocessed_inputs(export.preprocessing, module.config.image_hw) if export.preprocessing else {}
        differences.append(check_parity(module, run, what, TOLERANCE["vit" if is_plain else "resnet"], **inputs))
    return max(differences)


def _load_onnx(path: Path) -> Callable[[Tensor], Any]:
    """The file as a function that returns what the module does from which it was made."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]

    def run(images: Tensor) -> Any:
        arrays = [torch.from_numpy(array) for array in session.run(None, {"images": images.numpy()})]
        return arrays[0] if len(arrays) == 1 else dict(zip(names, arrays, strict=True))

    return run


def _move_files(folder: Path, destination: Path) -> dict[str, int]:
    """Moves what was written to its place; returns name -> bytes of each file."""
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    for name in sorted(sizes, reverse=True):  # NAME.data before NAME, which refers to it
        sync(folder / name)
        (folder / name).replace(destination / name)
    sync(destination)
    return sizes
