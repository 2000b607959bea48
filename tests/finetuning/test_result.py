"""The result of a fine-tuning job, as text and in a notebook."""

from pathlib import Path
from typing import Any

from vitlab.config import FinetuneConfig
from vitlab.finetuning.result import Finetuned
from vitlab.models import ViTConfig
from vitlab.train.run_files import PAGE

CLASSES = [{"class": name, "images": 10, "recall": 0.8, "precision": 0.8} for name in "ab"]
TEST = {"accuracy": 0.8, "images": 20, "loss": 0.5, "accuracy_interval": [0.6, 0.9], "per_class": CLASSES}
RESULT: dict[str, Any] = {
    "test": TEST,
    "sweep": [
        {"learning_rate": 0.01, "accuracy": 0.5, "images": 10, "loss": 1.0},
        {"learning_rate": 0.1, "accuracy": None},
    ],
    "learning_rate": 0.01,
    "runs": [{"accuracy": 0.8}, {"accuracy": 0.6}],
    "accuracy_mean": 0.7,
    "accuracy_sd": 0.1,
    "unreadable": [{"path": "cats/1.png", "reason": "cut off"}],
}


def test_summary_and_notebook(tmp_path: Path) -> None:
    done = Finetuned(FinetuneConfig(model=ViTConfig(), steps=1), RESULT, tmp_path)
    lines = done.summary().splitlines()
    assert [line for line in lines if "<- chosen" in line] == [line for line in lines if "rate 0.01" in line] != []
    assert any("70.00% +- 10.00%" in line and "80.00%, 60.00%" in line for line in lines)
    assert "  cats/1.png: cut off" in lines
    assert PAGE not in lines[-1]
    (tmp_path / PAGE).parent.mkdir()
    (tmp_path / PAGE).touch()
    assert str(tmp_path / PAGE) in done.summary()
    assert "<img" not in done._repr_html_()
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.0}\n')
    assert "<img" in done._repr_html_()
