"""Every figure of the paper is drawn to files."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.paper import figures
from vitlab.paper.figures import PAPER_FIGURES, Request
from vitlab.paper.sections import SECTIONS
from vitlab.paper.show import OF_A_MODEL, show


@pytest.mark.parametrize("name", [*PAPER_FIGURES, "sec3.1"])
def test_a_figure_is_written(name: str, request_of: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.paper.show.svg", lambda _: b"")
    shown = show(name, request_of if name in {*OF_A_MODEL, *SECTIONS} else Request(out=request_of.out))
    for path in shown.files:
        if path.suffix == ".png":
            pixels = np.asarray(Image.open(path).convert("L"))
            assert min(pixels.shape) > 100
            assert pixels.std() > 5
    assert json.loads(json.dumps(shown.as_dict()))["files"]


def test_trainings_are_compared_without_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of Fig. 10, a ViT and a hybrid of Fig. 11; the ViT is trained once."""
    monkeypatch.setattr(figures, "DIGITS_EPOCHS", 0.1)
    request = Request(out=tmp_path)
    assert {*figures.fig10(request)} == {"fig10-left", "fig10-center", "fig10-right"}
    assert {*figures.fig11(request)} == {"fig11-left", "fig11-right"}
    runs = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/config.json")}
    assert {*runs} == {"digits", "digits-left", "digits-center", "digits-hybrid"}
    assert runs["digits-left"]["optim"]["lr"] == runs["digits"]["optim"]["lr"] / 2
    assert runs["digits-left"]["epochs"] == runs["digits-center"]["epochs"] == runs["digits"]["epochs"] / 2
    assert runs["digits-hybrid"]["model"]["stem"] is not None
