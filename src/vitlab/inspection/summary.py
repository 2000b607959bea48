"""The head of a finished run's page: the task, a verdict of facts, what to type next, and where the model is from."""

import re
import shlex
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitlab.evaluation.calibration import accuracy_interval
from vitlab.evaluation.result import Evaluation
from vitlab.inspection.finished_run import Run
from vitlab.io import read_json
from vitlab.train.run_files import PLAN, RUNTIME

MAX_INTERVAL = 0.2
"""Width of the 95% interval of an accuracy above which the test images are too few to tell."""
MIN_CONFUSED = 5
"""From so many mistakes between two classes on, the summary names the two."""
MAX_CHARACTERS = 40
"""Longer lists of classes are not in the title, but their number."""


class Summary(NamedTuple):
    """Text with code in backticks."""

    title: str
    """Data set and classes."""
    verdict: str
    """How well the model predicts, whether it was fine-tuned, and which classes are confused most."""
    facts: dict[str, str]
    """What to type next; the run's date, checkpoint and command."""


def summarize(run: Run, checkpoint: str | Path) -> Summary:
    """The summary of a run or of a job's first run. checkpoint: its folder, as commands are to name it."""
    classes = ", ".join(run.test.classes)
    if len(classes) > MAX_CHARACTERS:
        classes = f"{len(run.test.classes):,} {'labels' if run.metadata.get('multi_label') else 'classes'}"
    folder = shlex.quote(str(checkpoint))
    finished = time.localtime((run.job / "result.json").stat().st_mtime)
    facts = {
        "Next: predict": f"`vitlab predict {folder} IMAGE.jpg`",
        "Next: export": f"`vitlab export {folder} --to onnx`",
        "Finished": time.strftime("%Y-%m-%d", finished),
        "Base checkpoint": run.settings["start"] or "none: trained from scratch",
    }
    if command := (_read(run.job / RUNTIME) or _read(run.folder / RUNTIME)).get("command"):
        facts["Command"] = f"`{command}`"
    sentences = [_describe_test(run), _describe_finetuning(run), _most_confused(run.test), _describe_balance(run)]
    return Summary(f"{run.dataset}: {classes}", " ".join(filter(None, sentences)), facts)


def _describe_test(run: Run) -> str:
    images, correct = len(run.test.labels), int(run.test.correct.sum())
    if (precision := run.metadata.get("test_mean_average_precision")) is not None:
        return f"The mean average precision on {images:,} test images is {precision:.1%}."
    low, high = accuracy_interval(correct, images)
    text = f"{correct:,} of {images:,} test images are right: {correct / images:.1%} "
    text += f"(95% interval {low:.1%} to {high:.1%})."
    if high - low > MAX_INTERVAL:
        text += f" These are too few to tell: the interval is wider than {100 * MAX_INTERVAL:.0f} points."
    return text


def _describe_finetuning(run: Run) -> str:
    """Whether the model that a job has chosen was fine-tuned, or is the least-squares head; empty for other runs."""
    result = _read(run.job / "result.json")
    if result.get("chosen") != run.folder.name:
        return ""
    if result["chosen"] == "linear":
        return _why_linear(run.job, result)
    linear = result.get("linear")
    if not linear:
        return "It was fine-tuned."
    metric = "mean_average_precision" if "mean_average_precision" in linear else "accuracy"
    alone = f"{metric.replace('_', ' ')} of its least-squares head alone: {linear[metric]:.1%}"
    return f"It was fine-tuned; {alone}."


def _describe_balance(run: Run) -> str:
    """What `--balance` changes, where classes differ much in size."""
    balance = (_read(run.job / "result.json").get("linear") or {}).get("balance")
    if not balance:
        return ""
    (fewest, most), recalls, hits = balance["images"], balance["balanced_accuracy"], balance["accuracy"]
    return (
        f"Classes have {fewest:,} to {most:,} training images. `--balance` counts all classes the same: on images left "
        f"out, the head's balanced accuracy is {recalls['on']:.1%} with it and {recalls['off']:.1%} without, its "
        f"accuracy {hits['on']:.1%} and {hits['off']:.1%}."
    )


def _why_linear(job: Path, result: dict[str, Any]) -> str:
    """Why the model of a job is its least-squares head alone."""
    if result["sweep"]:
        return "Fine-tuning did not lower the loss of held-out images: the model is the least-squares head."
    for line in _read(job / PLAN).get("left_out", ()):
        if budget := re.search(r"fine-tuning.*(--budget \w+)", line):
            return f"It was not fine-tuned: `{budget[1]}`, with another `--workdir`, would."
    reasons = _read(job / "config.json").get("reasons", ())
    why = next((f", because of {why}" for name, _, why in reasons if name == "runs"), "")
    return f"It was not fine-tuned{why}."


def _most_confused(test: Evaluation) -> str:
    """The two of several classes with most mistakes between them, if these are at least MIN_CONFUSED; else empty."""
    if test.label_sets is not None or len(test.classes) < 3:
        return ""
    mistakes = np.triu(test.confusion + test.confusion.T, 1)
    pair = np.unravel_index(mistakes.argmax(), mistakes.shape)
    if mistakes[pair] < MIN_CONFUSED:
        return ""
    first, second = (test.classes[index] for index in pair)
    return f"Confused most: {first} and {second}, {mistakes[pair]} of {np.isin(test.labels, pair).sum():,} images."


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
