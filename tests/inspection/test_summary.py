"""The head of a run's page: what the verdict says, and what it does not say of too few images."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vitlab.inspection.finished_run import Run
from vitlab.inspection.summary import MIN_CONFUSED, summarize
from vitlab.train.workdir import Workdir

BALANCE = {"images": [3, 120], "accuracy": {"off": 0.97, "on": 0.95}, "balanced_accuracy": {"off": 0.45, "on": 0.62}}


def with_test(run: Path, labels: list[int], predictions: list[int], classes: tuple[str, ...] = ("a", "b", "c")) -> Run:
    """The run with another test."""
    read, n = Run.read(run), len(labels)
    test = replace(
        read.test,
        classes=classes,
        indices=np.arange(n),
        labels=np.array(labels),
        predictions=np.array(predictions),
        confidences=np.ones(n, np.float32),
        losses=np.zeros(n, np.float32),
        correct=np.array(labels) == np.array(predictions),
        in_top5=np.ones(n, bool),
    )
    return replace(read, test=test)


def test_the_accuracy_its_interval_and_whether_it_tells(run: Path) -> None:
    few = summarize(with_test(run, [0] * 6, [0] * 5 + [1]), run).verdict
    assert few.startswith("5 of 6 test images are right: 83.3% (95% interval 43.6% to 97.0%).")
    assert "too few" in few
    assert "too few" not in summarize(with_test(run, [0] * 600, [0] * 500 + [1] * 100), run).verdict


def test_the_title_names_classes_or_counts_them(run: Path) -> None:
    assert summarize(with_test(run, [0], [0]), run).title == "digits: a, b, c"
    assert summarize(with_test(run, [0], [0], ("long name",) * 5), run).title == "digits: 5 classes"


def test_the_most_confused_pair_is_named_from_enough_mistakes(run: Path) -> None:
    def verdict(mistakes: int) -> str:
        labels, predictions = [0, 1, 2, 2] + [0] * mistakes + [1], [0, 1, 2, 0] + [1] * mistakes + [0]
        return summarize(with_test(run, labels, predictions), run).verdict

    assert f"a and b, {MIN_CONFUSED} of {MIN_CONFUSED + 2} images" in verdict(MIN_CONFUSED - 1)
    assert "Confused" not in verdict(MIN_CONFUSED - 2)


@pytest.mark.parametrize(
    ("result", "plan", "expected"),
    [
        ({}, [], "would"),
        ({}, ["left out: fine-tuning after the least-squares head"], "not fine-tuned, because of the time budget."),
        ({"sweep": [{"learning_rate": 0.1}]}, [], "did not lower the loss"),
        (
            {"linear": {"balance": BALANCE}},
            [],
            "accuracy is 62.0% with it and 45.0% without, its accuracy 95.0%",
        ),
        (
            {"chosen": "run-0", "linear": {"accuracy": 0.5}},
            [],
            "fine-tuned; accuracy of its least-squares head alone: 50.0%",
        ),
    ],
)
def test_whether_it_was_fine_tuned(
    run: Path, tmp_path: Path, result: dict[str, Any], plan: list[str], expected: str
) -> None:
    """Of a job, which stands in the folder above its runs."""
    folder = tmp_path / result.get("chosen", "linear")
    shutil.copytree(run, folder)
    includes = ["left out: fine-tuning after the least-squares head; --budget 5m includes it"]
    files = {
        "config.json": {"reasons": [["runs", 0, "the time budget"]]},
        "result.json": {"chosen": "linear", "sweep": [], "linear": None} | result,
        "plan.json": {"left_out": plan or includes},
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    verdict = summarize(Run.read(folder), tmp_path).verdict
    assert expected in verdict
    assert ("`--budget 5m`" in verdict) == (not plan and not result.get("sweep") and "chosen" not in result)


def test_the_command_of_the_program_is_kept(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a run"
    shutil.copytree(run, folder)
    assert "Command" not in summarize(Run.read(folder), folder).facts
    monkeypatch.setattr(sys, "argv", ["/usr/bin/vitlab", "pretrain", "tiny-digits", "--workdir", str(folder)])
    with Workdir(folder, json.loads((folder / "config.json").read_text()), tensorboard=False) as opened:
        opened.write_runtime({"microbatch": 1})
    facts = summarize(Run.read(folder), folder).facts
    assert facts["Command"] == f"`vitlab pretrain tiny-digits --workdir '{folder}'`"
    assert facts["Next: predict"] == f"`vitlab predict '{folder}' IMAGE.jpg`"
    assert "from scratch" in facts["Base checkpoint"]
