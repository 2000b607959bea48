"""CONTRIBUTING.md, whose worked diffs apply to this source, and CITATION.cff."""

import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
CODE = """
import json, sys
from vitlab.data.registry import DATASETS, load_dataset
from vitlab.models import MODELS

data = load_dataset("kmnist", "test", root=sys.argv[1], download=False)
row = [DATASETS["kmnist"].license, len(data), data.classes[data.labels[1]]]
print(json.dumps([MODELS["ViT-g/14"].num_parameters, *row]))
"""


@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the diffs")
def test_the_diffs_apply(tmp_path: Path) -> None:
    diffs = re.findall(r"^```diff\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(diffs) == 2
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for diff in diffs:
        apply = ["git", "apply", "--whitespace=error", "-"]
        subprocess.run(apply, input=diff, text=True, cwd=tmp_path, check=True)
    for content, array in (("images-idx3", np.zeros((2, 28, 28))), ("labels-idx1", np.array([0, 9]))):
        sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
        data = bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()
        (tmp_path / f"t10k-{content}-ubyte.gz").write_bytes(gzip.compress(data))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    parameters = re.search(r'\+ +"ViT-g/14": ([\d_]+),', diffs[1])
    assert parameters
    assert json.loads(ended.stdout) == [int(parameters[1]), "CC BY-SA 4.0", 2, "wo"]


def test_the_citation_is_of_this_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = (ROOT / "CITATION.cff").read_text().splitlines()
    assert {f"version: {project['version']}", f"license: {project['license']}"} <= set(lines)
