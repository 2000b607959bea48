"""The paper in miniature: what pre-training is worth on few images of other classes, at a higher resolution."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vitlab.data.transforms import to_range
from vitlab.finetuning.protocol import sweep_and_finetune
from vitlab.inspection.capture import capture
from vitlab.inspection.figures import distances, pairs
from vitlab.inspection.finished_run import Run
from vitlab.inspection.page import page
from vitlab.inspection.report import RunSection, make_embedding_figures
from vitlab.inspection.run_section import run_section
from vitlab.io import write_bytes
from vitlab.models.vit import ViT
from vitlab.recipes import tiny
from vitlab.runs.pretrain import pretrain
from vitlab.studies.spec import changed
from vitlab.studies.statistics import paired_difference
from vitlab.train.workdir import write_json
from vitlab.weights import load_model

TITLE = "What pre-training is worth"
SECTIONS = {
    "finetune": (
        "Pre-trained, then fine-tuned on 50 images of the digits 5 to 9 at twice the resolution",
        "The encoder has learned from the digits 0 to 4 and is fine-tuned on classes that it has not seen, with a new "
        "head that starts at zero and position embeddings interpolated from a grid of 4 x 4 to one of 8 x 8 patches "
        "(Sec. 3.2, Table 4).",
    ),
    "scratch": (
        "From scratch on the same 50 images",
        "The same model starts from random weights. It sees the same images for as many steps, with the optimizer of "
        "the pre-training.",
    ),
    "pretrain": (
        "The pre-training on the digits 0 to 4",
        "A small Vision Transformer learns from 720 images of 16 x 16 pixels. Each is cut into 16 patches of 4 x 4, "
        "which the encoder processes as a sequence (Eq. 1-4).",
    ),
}
"""Run -> its title and explanation on the page."""
STEPS = 100
"""Of fine-tuning and of the training from scratch."""


def demo(out: str | Path, *, seed: int = 0, shrink: int = 1) -> dict[str, Any]:
    """Compares a pre-trained ViT with one from scratch on 50 images of the digits 5-9, and writes `out`/index.html.

    Returns the test accuracies, their difference with its 95% interval over the test images, the sentence that says
    so, and the page's path (also in `out`/result.json). The same call resumes. shrink: divides the length of all runs.
    Torch has one thread from here on: such small steps gain nothing from a second one.
    """
    torch.set_num_threads(1)
    out = Path(out)
    easy, few = {"classes": (0, 1, 2, 3, 4)}, {"classes": (5, 6, 7, 8, 9), "subset_fraction": 0.07}
    common, steps = {"model": {"num_classes": 5}, "seed": seed}, STEPS // shrink
    first = changed(tiny.digits(), data=easy, epochs=100 / (3 * shrink), **common)  # enough for five easy classes
    second = changed(tiny.finetune_digits(), data=few, steps=steps, **common)
    scratch = changed(first, data=few | {"pad": 4}, model={"image_size": 32}, optim={"warmup_steps": 20})
    scratch = changed(scratch, epochs=None, steps=steps)
    pretrain(first, out / "pretrain")
    sweep_and_finetune(out / "pretrain", second, out / "finetune")
    pretrain(scratch, out / "scratch")
    result = _compare(out)
    top, *others = (_section(*texts, out / name) for name, texts in SECTIONS.items())
    runs = [replace(top, attention=None), *others]
    index = out / "index.html"
    text = page("demo.html.j2", TITLE, result["sentence"], attention=top.attention, runs=runs)
    write_bytes(index, text.encode())
    result |= {"page": str(index.resolve())}
    write_json(out / "result.json", result)
    return result


def _compare(out: Path) -> dict[str, Any]:
    """The accuracies of the finished runs in `out`, and the sentence on their difference."""
    tests = {name: Run.read(out / name).test for name in ("pretrain", "finetune", "scratch")}
    accuracies = {name: test.accuracy for name, test in tests.items()}
    difference = paired_difference(tests["finetune"].correct.astype(float) - tests["scratch"].correct)
    mean, low, high = (100 * value for value in (difference.mean, difference.low, difference.high))
    sentence = (
        f"Pre-trained on other digits and fine-tuned on 50 images, a Vision Transformer recognizes "
        f"{accuracies['finetune']:.1%} of {len(tests['finetune'].labels)} test images. From scratch on the same 50 "
        f"images it recognizes {accuracies['scratch']:.1%}. Pre-training is worth about {mean:.0f} points "
        f"(95% interval {low:.0f} to {high:.0f})."
    )
    return {
        **{f"{name}_accuracy": accuracy for name, accuracy in accuracies.items()},
        "difference": difference.mean,
        "interval": [difference.low, difference.high],
        "sentence": sentence,
    }


def _section(name: str, explanation: str, workdir: Path) -> RunSection:
    """A finished run for the page: its training, and the model from inside."""
    model, run = load_model(workdir), Run.read(workdir)
    assert isinstance(model, ViT)
    shown = list(run.preprocessed(run.one_per_class(10)).values())
    images = to_range(torch.from_numpy(np.stack(shown)).permute(0, 3, 1, 2).float())
    captured = capture(model, [images], keep=len(images))
    section = run_section(run, name, explanation)
    return replace(
        section,
        numbers={**section.numbers, "Parameters": f"{model.config.num_parameters:,}"},
        embedding_figures=[*make_embedding_figures(model), distances(captured.distances)],
        attention=pairs(captured, shown)[0],
    )
