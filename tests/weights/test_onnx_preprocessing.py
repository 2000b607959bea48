"""Preprocessing inside an ONNX file, on photographs, beside our own transform."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from peers import photographs

from vitlab.data.transforms import EvalTransform, pair
from vitlab.preprocessing import Preprocessing
from vitlab.weights.onnx_preprocessing import check_expressible, preprocessed_inputs, preprocessing_graph


@pytest.mark.parametrize(
    ("how", "levels", "off"),
    [
        (Preprocessing(224), 1, 0.03),
        (Preprocessing(224, 256, interpolation="bicubic"), 1, 0.03),
        (Preprocessing((160, 225), 248, interpolation="bicubic", crop_offset="floor"), 1, 0.03),
        (Preprocessing((160, 224), 255, keep_aspect=False), 1, 0.03),
        (Preprocessing((224, 220), 248, crop_size=(230, 225)), 1, 0.03),
        (Preprocessing(224, crop_size=225), 1, 0.03),
        (Preprocessing.google(224), 0, 0.0),
        (Preprocessing((224, 128), 257, keep_aspect=False, antialias=False), 1, 0.01),
    ],
    ids=lambda value: value.describe() if isinstance(value, Preprocessing) else "",
)
def test_values_are_within_one_gray_level(how: Preprocessing, levels: int, off: float, shared: Path) -> None:
    assert how.image_size is not None
    graph = onnx.parser.parse_model(preprocessing_graph(how, pair(how.image_size), 20))
    onnx.checker.check_model(graph, full_check=True)
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    for image in photographs(shared)[::3]:
        images = [image, image[:, ::-1].copy()]
        ours = EvalTransform(how.image_size, how).apply(images)
        (theirs,) = session.run(None, {"images": np.stack(images)})
        error = (ours - torch.from_numpy(theirs)).abs() * 127.5
        assert (error > levels + 0.02).double().mean() <= 1e-4 * levels, image.shape
        assert (error > 0.5).double().mean() <= off, image.shape


def test_values_of_16_bits_are_scaled_to_the_range() -> None:
    how = Preprocessing(8, range=(-40, 61))
    graph = onnx.parser.parse_model(preprocessing_graph(how, (8, 8), 20))
    onnx.checker.check_model(graph, full_check=True)
    session = onnxruntime.InferenceSession(graph.SerializeToString(), providers=["CPUExecutionProvider"])
    given = preprocessed_inputs(how, (8, 8))
    for values in given["batches"]:
        assert (values.dtype, values.amin() < -40, values.amax() > 61) == (torch.int32, True, True)
        (prepared,) = session.run(None, {"images": values.numpy()})
        torch.testing.assert_close(torch.from_numpy(prepared), given["prepare"](values))


@pytest.mark.parametrize("how", [Preprocessing(interpolation="lanczos"), Preprocessing.google(224, 256)])
def test_a_resize_that_onnx_does_not_have_is_refused(how: Preprocessing) -> None:
    with pytest.raises(ValueError, match=f"interpolation='{how.interpolation}'.*'bilinear' and 'bicubic'.*Leave out"):
        check_expressible(how)
