"""Images on their way through a model: its mode, its device and the display."""

import contextlib

import numpy as np
import pytest
import torch
from torch import nn

from vitlab import display
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.evaluate.batches import evaluation_batches
from vitlab.evaluate.options import LoaderOptions

DATA = Dataset("made", "test", ("a",), np.zeros(7, np.int64), pixels=np.zeros((7, 4, 4, 3), np.uint8))
OPTIONS = LoaderOptions(2, on_error="skip")


@pytest.mark.parametrize("training", [False, True])
def test_mode_and_generators_are_left_alone(training: bool) -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Dropout()).train(training)
    model[1].train(not training)
    before = torch.get_rng_state()
    with contextlib.suppress(KeyError), evaluation_batches(model, DATA, (4, 4), None, OPTIONS) as batches:
        assert not any(module.training for module in model.modules())
        assert [len(batch.labels) for batch in batches] == [2, 2, 2, 1]
        raise KeyError
    assert [module.training for module in model.modules()] == [training, training, not training]
    assert torch.equal(torch.get_rng_state(), before)


def test_batches_without_a_readable_image_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(display, "FIRST_LINE", 0.0)
    monkeypatch.setattr(display, "NEXT_LINES", 0.0)
    data = DATA.take(np.arange(7))
    data.failures = {i: ImageError(str(i), "broken") for i in (2, 3, 4)}
    with evaluation_batches(nn.Identity(), data, (4, 4), None, OPTIONS, label="made test") as batches:
        assert [batch.indices.tolist() for batch in batches] == [[0, 1], [5], [6]]
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("made test: ")]
    assert "2 of 7 images" in lines[0]
    assert "7 of 7 images" in lines[-1]
