"""What a fine-tuning job says of itself."""

from pathlib import Path
from typing import Any

from vitlab.config import FinetuneConfig
from vitlab.finetuning.result import Finetuned
from vitlab.recipes.finetune import custom

TEST = {"accuracy": 0.75, "images": 8, "skipped": 0, "loss": 0.6, "top5": 1.0, "accuracy_interval": [0.4, 0.93]}


def finetuned(workdir: Path, config: FinetuneConfig | None = None, **result: Any) -> Finetuned:
    return Finetuned(config or custom(), {"learning_rate": 0.003, "test": {**TEST, "per_class": []}, **result}, workdir)


def test_the_chosen_rate_is_marked(tmp_path: Path) -> None:
    score = {"images": 5, "accuracy": 0.6, "loss": 1.0}
    scores = [{**score, "learning_rate": 0.003}, {"learning_rate": 0.03, "accuracy": None}]
    lines = finetuned(tmp_path, sweep=scores).summary().splitlines()
    assert [("<- chosen" in line, "diverged" in line) for line in lines[:2]] == [(True, False), (False, True)]
    assert lines[-1] == f"model: {tmp_path / 'model'}"


def test_unreadable_files_and_several_runs(tmp_path: Path) -> None:
    runs = [{"seed": 0, "accuracy": 0.7}, {"seed": 1, "accuracy": 0.8}]
    result = {"runs": runs, "accuracy_mean": 0.75, "accuracy_sd": 0.07}
    text = finetuned(tmp_path, unreadable=[{"path": "a\x1b.png", "reason": "truncated"}], **result).summary()
    assert "75.00% +- 7.00%" in text
    assert "1 files could not be read" in text
    assert "\x1b" not in text
