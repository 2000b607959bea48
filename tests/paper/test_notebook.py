"""docs/paper/paper.ipynb runs from its first cell to its last, and shows what it stores."""

import json
from pathlib import Path
from typing import Any

import matplotlib
import pytest
import torch

SHORTER = "epochs=3.0, mixup=0.0, average_decay=0.9, optim=vitlab.OptimConfig(lr=2e-3, warmup_steps=10)"
"""Of the training, which has 15 epochs in the notebook."""
NOTEBOOK = Path(__file__).parents[2] / "docs" / "paper" / "paper.ipynb"


@pytest.fixture
def _gradients() -> Any:
    yield
    torch.set_grad_enabled(True)  # which the cells turn off


@pytest.mark.usefixtures("_gradients", "unchecked", "unrendered")
def test_every_cell_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """The cells compare each equation with the model themselves."""
    matplotlib.use("agg")
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert sum("check(" in "".join(cell["source"]) for cell in cells) >= 4
    names: dict[str, Any] = {}
    for cell in cells:
        capsys.readouterr()
        exec(compile("".join(cell["source"]).replace("epochs=15.0", SHORTER), "cell", "exec"), names)
        stored = ["".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout"]
        if stored and "pretrain" not in stored[0]:
            assert capsys.readouterr().out.split("\n")[0].split()[0] == stored[0].split()[0]
    assert names["run"].result["test"]["accuracy"] > 0.5  # after fewer epochs than in the notebook
