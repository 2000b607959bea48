"""The sections of a finished run's page: what the run computed, or what is missing."""

import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab.inspection.run_section
from vitlab.data.transforms import to_range
from vitlab.evaluation.suspects import Suspect, write_suspects
from vitlab.inspection.capture import capture
from vitlab.inspection.figures import fit, masked
from vitlab.inspection.finished_run import Run
from vitlab.inspection.run_section import data_section, run_section
from vitlab.train.run_files import SUSPECTS
from vitlab.weights import load_model


def test_phase_holds_what_the_run_computed(run: Path) -> None:
    section = run_section(Run.read(run))
    result = json.loads((run / "result.json").read_text())["test"]
    numbers = section.numbers.values()
    for name in ("accuracy", "balanced_accuracy"):
        assert f"{result[name]:.1%}" in numbers
    low, high = result["accuracy_interval"]
    assert f"{low:.1%} to {high:.1%}" in numbers
    assert f"{json.loads((run / 'config.json').read_text())['examples']:,}" in numbers
    assert section.calibration is not None
    assert section.calibration[0].sum() == result["images"]
    assert [record["step"] for record in section.records] == [1, 2, 3, 3]  # the last is the evaluation
    assert (list(section.classes), section.per_class) == (["0", "1", "2"], result["per_class"])
    assert section.confusion is not None
    assert np.trace(section.confusion) == round(result["accuracy"] * result["images"])
    assert section.mistakes is not None
    assert 0 < len(section.mistakes) <= 24
    captions = [image.caption for image in section.mistakes]
    assert not [caption for caption in captions if re.match(r"predicted (.)\n.*\nlabel \1", caption)]


def test_the_most_confident_mistakes_come_first(run: Path) -> None:
    read = Run.read(run)
    confidences = np.linspace(0, 1, len(read.test.labels), dtype=np.float32)
    mistakes = run_section(replace(read, test=replace(read.test, confidences=confidences))).mistakes
    assert mistakes is not None
    shown = [re.findall(r"([\d.]+%) sure", image.caption)[0] for image in mistakes]
    assert shown == [f"{c:.1%}" for c in sorted(confidences[~read.test.correct].tolist(), reverse=True)[:24]]


def test_mistakes_beside_their_attention(run: Path) -> None:
    """On the left the image, on the right the same under its own rollout."""
    plain, attended = run_section(Run.read(run)), run_section(Run.read(run), device=torch.device("cpu"))
    assert (plain.attended, attended.attended) == (False, True)
    assert plain.mistakes is not None
    assert attended.mistakes is not None
    assert [image.caption for image in attended.mistakes] == [image.caption for image in plain.mistakes]
    model = load_model(run)
    for one, two in zip(plain.mistakes, attended.mistakes, strict=True):
        small = np.array(Image.open(io.BytesIO(one.data)).convert("RGB"))
        pixels = np.array(Image.open(io.BytesIO(two.data)).convert("RGB"), np.int64)
        rollout = capture(model, [to_range(torch.from_numpy(small).permute(2, 0, 1)[None].float())]).rollout[0]
        large = fit(small, 224, enlarge=True)
        assert pixels.shape == (224, 2 * 224 + 8, 3)
        assert np.abs(pixels[:, :224] - large).mean() < 4  # WebP is not exact
        assert np.abs(pixels[:, 232:] - masked(large, rollout)).mean() < 4


def test_numbers_of_a_calibrated_model(folder_run: Path) -> None:
    result = json.loads((folder_run / "result.json").read_text())
    coverage = {"expected": 0.9, "measured": 0.915, "mean_size": 1.26}
    result["test"] |= {"uncalibrated_error": 0.081, "coverage": coverage}
    (folder_run / "result.json").write_text(json.dumps(result))
    numbers = run_section(Run.read(folder_run)).numbers
    assert numbers["The same without the temperature"] == "8.1%"
    assert (numbers["Labels in their 90% prediction sets"], numbers["Classes in the 90% prediction sets"]) == (
        "91.5%",
        "1.3",
    )


def test_near_duplicates_of_the_test(folder_run: Path) -> None:
    """A mirrored copy of a test image in train."""
    section = data_section(Run.read(folder_run))
    assert (section.numbers["Pairs"], section.pairs, section.unreadable) == ("0", [], None)
    folder = folder_run.parent / "set"
    copy = Image.open(folder / "test/dark/1.png").transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    copy.save(folder / "train/bright/copy.png")
    result = json.loads((folder_run / "result.json").read_text())
    (folder_run / "result.json").write_text(json.dumps(result | {"unreadable": [{"path": "a", "reason": "b"}]}))
    section = data_section(Run.read(folder_run))
    assert section.numbers["Test images with a duplicate"] == "1 of 6 (16.7%)"
    assert section.numbers["Pairs with conflicting labels"] == "1"
    assert "train/bright/copy.png" in section.pairs[0].caption
    assert section.unreadable == [("a", "b")]


def test_labels_to_check(folder_run: Path) -> None:
    """The training images of `suspects.csv`, without those that are gone."""
    names = ["dark/0.png", "bright/1.png", "dark/gone.png"]
    suspects = [Suspect(0, 0, 1, 0.1, 0.8), Suspect(1, 1, 0, 0.1, 0.7, copy=0), Suspect(2, 0, 1, 0.2, 0.6)]
    write_suspects(folder_run / SUSPECTS, suspects, [f"train/{name}" for name in names], ("dark", "bright"))
    section = data_section(Run.read(folder_run), search=False)
    assert section.suspect_count == 3
    first, second = section.suspects
    assert first.caption == "label dark\nlooks like bright (80%)\ntrain/dark/0.png"
    assert "same as train/dark/0.png" in second.caption
    shutil.rmtree(folder_run.parent / "set")
    assert data_section(Run.read(folder_run), search=False).suspects == ()


def test_what_is_not_searched(run: Path, folder_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would take long, tiny images, and lost data: the page says why not."""
    folder = folder_run.parent / "set"
    shutil.copy(folder / "test/dark/1.png", folder / "train/dark/3.png")
    for name, most, reason in (("MAX_COMPARED", 11, "there are 12 training"), ("MAX_CANDIDATES", 0, "1 pairs")):
        with monkeypatch.context() as patch:
            patch.setattr(vitlab.inspection.run_section, name, most)
            section = data_section(Run.read(folder_run))
        assert reason in section.explanation
        assert f"`vitlab duplicates folder:{folder} folder:{folder} --train-split train`" in section.explanation
        assert not section.numbers
    assert "fewer than 32 pixels" in data_section(Run.read(run)).explanation
    shutil.rmtree(folder)
    assert not data_section(Run.read(folder_run)).numbers


def test_a_data_set_that_has_gone(folder_run: Path) -> None:
    shutil.rmtree(folder_run.parent / "set")
    section = run_section(Run.read(folder_run), "A name", "A sentence.")
    assert section.name == "A name"
    assert section.explanation.startswith("A sentence.\n\n")
    assert (section.mistakes, section.confusion is None) == (None, False)
