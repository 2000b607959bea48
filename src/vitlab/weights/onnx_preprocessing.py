"""A checkpoint's `Preprocessing` as nodes of ONNX, in front of an exported model.

ONNX's Resize on uint8 with `antialias` and `exclude_outside` computes what Pillow does. Onnxruntime rounds ties the
other way: at most 3% of a photograph's values differ, by one gray level; fewer than one in 10,000 by two, where rows
and columns both tie.
"""

import typing
from typing import Any

import torch

from vitlab.data.transforms import EvalTransform, pair
from vitlab.errors import UserError
from vitlab.preprocessing import Preprocessing
from vitlab.weights.parity import PARITY_BATCHES

if typing.TYPE_CHECKING:
    import onnx_ir

MODES = {"bilinear": 'mode = "linear"', "bicubic": 'mode = "cubic", cubic_coeff_a = -0.5'}
"""Interpolation -> attributes of ONNX's Resize."""
FLOAT, UINT8, INT64 = 1, 2, 7
"""ONNX's numbers of types."""


def check_expressible(how: Preprocessing) -> None:
    """Raises UserError for a resize that ONNX does not have."""
    if how.interpolation not in MODES:
        raise UserError(
            f"the checkpoint's images are resized with interpolation={how.interpolation!r}, which ONNX does not have; "
            f"it has {' and '.join(map(repr, MODES))}. Leave out --with-preprocessing and resize before the model, or "
            f"save the model with another preprocessing in its metadata."
        )


def preprocessing_graph(how: Preprocessing, image_hw: tuple[int, int], opset: int) -> str:
    """An ONNX model in text form: uint8 `images` [batch, height, width, 3] to float32 [batch, 3, H, W] in [-1, 1],
    resized and cropped to `image_hw` as `EvalTransform` does; from int32 `images`, the values in a file, where the
    checkpoint has a range of them. `how` has passed `check_expressible`."""
    (h, w), crop = image_hw, pair(how.crop_size or image_hw)
    levels = "images" if how.range is None else "gray_levels"
    resize = f"{MODES[how.interpolation]}, antialias = {int(how.antialias)}, exclude_outside = {int(how.antialias)}"
    return f"""<ir_version: 10, opset_import: ["" : {opset}]>
        preprocessing ({"uint8" if how.range is None else "int32"}[batch, height, width, 3] images)
          => (float[batch, 3, {h}, {w}] prepared) {{
          {"" if how.range is None else _scale_range(*how.range)}
          planes = Transpose <perm = [0, 3, 1, 2]> ({levels})
          pixels = Cast <to = {UINT8 if how.antialias else FLOAT}> (planes)
          {_resized_size(how, crop)}
          batch = Shape <start = 0, end = 2> (planes)
          sizes = Concat <axis = 0> (batch, full)
          resized = Resize <{resize}> (pixels, , , sizes)
          crop = Constant <value_ints = [{crop[0]}, {crop[1]}]> ()
          rest = Sub (full, crop)
          half = Constant <value_float = 0.5> ()
          rest_float = Cast <to = {FLOAT}> (rest)
          halved = Mul (rest_float, half)
          rounded = {"Round" if how.crop_offset == "round" else "Floor"} (halved)
          start = Cast <to = {INT64}> (rounded)
          size = Constant <value_ints = [{h}, {w}]> ()
          stop = Add (start, size)
          axes = Constant <value_ints = [2, 3]> ()
          window = Slice (resized, start, stop, axes)
          gray = Cast <to = {FLOAT}> (window)
          whole = {"Identity" if how.resize is None else "Floor"} (gray)
          middle = Constant <value_float = 127.5> ()
          centered = Sub (whole, middle)
          prepared = Div (centered, middle)
        }}"""


def _scale_range(low: int, high: int) -> str:
    """`gray_levels`, uint8: 255 (images - low) / (high - low), rounded half up, with images clipped to the range."""
    return f"""black = Constant <value_int = {low}> ()
          span = Constant <value_int = {high - low}> ()
          none = Constant <value_int = 0> ()
          most = Constant <value_int = 255> ()
          round_up = Constant <value_int = {(high - low) // 2}> ()
          long = Cast <to = {INT64}> (images)
          above = Sub (long, black)
          inside = Clip (above, none, span)
          scaled_up = Mul (inside, most)
          half_up = Add (scaled_up, round_up)
          whole_levels = Div (half_up, span)
          gray_levels = Cast <to = {UINT8}> (whole_levels)"""


def _resized_size(how: Preprocessing, crop: tuple[int, int]) -> str:
    """`full`, int64: height and width of the image before the crop."""
    if how.resize is None:
        return f"full = Constant <value_ints = [{crop[0]}, {crop[1]}]> ()"
    if not how.keep_aspect:
        return f"full = Constant <value_ints = [{how.resize}, {how.resize}]> ()"
    return f"""sides = Shape <start = 1, end = 3> (images)
          short = ReduceMin <keepdims = 0> (sides)
          wanted = Constant <value_int = {how.resize}> ()
          scaled = Mul (sides, wanted)
          full = Div (scaled, short)"""


def prepend_preprocessing(model: "onnx_ir.Model", how: Preprocessing, image_hw: tuple[int, int]) -> None:
    """Puts the nodes of `preprocessing_graph` in front of the model, in place: its input becomes theirs."""
    import onnx_ir

    graph = model.graph
    prepare = onnx_ir.from_onnx_text(preprocessing_graph(how, image_hw, model.opset_imports[""])).graph
    for value in (value for node in prepare for value in node.outputs):
        value.name = f"preprocessing.{value.name}"
    (images,), (prepared,) = prepare.inputs, prepare.outputs
    nodes = list(prepare)
    prepare.outputs.clear()
    prepare.inputs.clear()
    prepare.remove(nodes)
    graph.insert_before(graph[0], nodes)
    onnx_ir.convenience.replace_all_uses_with(graph.inputs[0], prepared)
    graph.inputs[0] = images


def preprocessed_inputs(how: Preprocessing, image_hw: tuple[int, int]) -> dict[str, Any]:
    """`batches` and `prepare` for `check_parity`: random images, uint8 or a file's int32 values, that are cropped and
    not resized, so that the rounding of gray levels does not affect the difference."""
    height, width = pair(how.crop_size or image_hw)
    if how.resize:
        height, width = how.resize, how.resize * (2 if how.keep_aspect else 1)
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, height, width, 3) for batch in PARITY_BATCHES]
    batches = [torch.randint(256, shape, dtype=torch.uint8, generator=generator) for shape in shapes]
    prepare = EvalTransform(image_hw, how).apply
    if how.range is None:
        return {"batches": batches, "prepare": prepare}
    low, high = how.range
    values = [(low + (batch.long() - 16) * (high - low) // 224).int() for batch in batches]  # some are outside

    def prepare_values(images: torch.Tensor) -> torch.Tensor:  # as `decode_image` scales them
        above = (images.long() - low).clamp(0, high - low)
        return prepare(((255 * above + (high - low) // 2) // (high - low)).to(torch.uint8))

    return {"batches": values, "prepare": prepare_values}
