"""The paper in miniature: pre-train, fine-tune on other classes at a higher resolution, test, inspect."""

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
from vitlab.studies.presets import changed
from vitlab.train.workdir import write_json
from vitlab.weights import load_model

LEAD = (
    "A Vision Transformer is pre-trained on one task, fine-tuned on another at a higher resolution, tested, and "
    "inspected: the main experiment of 'An Image is Worth 16x16 Words' (ICLR 2021), on scikit-learn's scanned digits."
)
PRETRAINING = (
    "Pre-training on the digits 0 to 4",
    "A small Vision Transformer learns from scratch: each image of 16 x 16 pixels is cut into 16 patches of 4 x 4, "
    "which the encoder processes as a sequence (Eq. 1-4).",
)
FINETUNING = (
    "Fine-tuning on the digits 5 to 9 at twice the resolution",
    "The pre-trained encoder is fine-tuned on classes that it has not seen, with a new head that starts at zero and "
    "position embeddings interpolated from a grid of 4 x 4 to one of 8 x 8 patches (Sec. 3.2, Table 4).",
)


def demo(out: str | Path, *, seed: int = 0, shrink: int = 1) -> dict[str, Any]:
    """Pre-trains on the digits 0-4 at 16 pixels, fine-tunes on 5-9 at 32, and writes `out`/index.html.

    Returns both test accuracies and the page's path (also in `out`/result.json). The same call resumes. shrink: divides
    the length of both runs. Torch has one thread from here on: such small steps gain nothing from a second one.
    """
    torch.set_num_threads(1)
    out = Path(out)
    first = changed(tiny.digits(), data={"classes": (0, 1, 2, 3, 4)}, model={"num_classes": 5}, seed=seed)
    first = replace(first, epochs=200 / (3 * shrink))  # enough for five easy classes
    second = changed(tiny.finetune_digits(), data={"classes": (5, 6, 7, 8, 9)}, model={"num_classes": 5}, seed=seed)
    second = replace(second, steps=200 // shrink)
    pretrained = pretrain(first, out / "pretrain")
    finetuned = sweep_and_finetune(out / "pretrain", second, out / "finetune")
    sections = [_section(*PRETRAINING, out / "pretrain"), _section(*FINETUNING, out / "finetune")]
    index = out / "index.html"
    write_bytes(index, page("runs.html.j2", "The paper in miniature", LEAD, runs=sections).encode())
    result = {
        "pretrain_accuracy": pretrained.result["test"]["accuracy"],
        "finetune_accuracy": finetuned.result["test"]["accuracy"],
        "page": str(index.resolve()),
    }
    write_json(out / "result.json", result)
    return result


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
