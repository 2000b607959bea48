"""What commands print, for people and for programs."""

import json
from pathlib import Path

import pytest
from program import SMALL, answer, call


def test_pretrain_says_what_it_did(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Called again on its finished folder it only tests: the answer is the same."""
    code, out, err = call(capsys, "pretrain", "tiny-digits", "--workdir", str(run), "--steps", "3", *SMALL)
    assert code == 0
    assert out.splitlines()[0].split() == ["class", "pictures", "recall", "precision"]
    assert out.splitlines()[-1] == f"model: {run / 'model'} · curves: {run / 'metrics.jsonl'}"
    assert f"settings (kept in {run / 'config.json'}):" in err
    for setting in ("model.width = 8", "model.num_classes = 3", "optim.beta2 = 0.999", "steps = 3"):
        assert setting in err
    settings = json.loads((run / "config.json").read_text())
    assert (settings["model"]["num_classes"], settings["optim"]["lr"]) == (3, 0.002)


def test_json_for_programs(run: Path, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but the answer on the standard output."""
    again = ["pretrain", "tiny-digits", "--workdir", str(run), "--steps", "3", *SMALL]
    pretrained = answer(capsys, *again)
    assert pretrained == json.loads((run / "result.json").read_text())
    assert answer(capsys, "evaluate", str(run), "--device", "cpu") == pretrained["test"]
    small = ["--batch-size", "8", "--steps", "1", "--device", "cpu"]
    tuned = answer(capsys, "finetune", str(run), "--recipe", "tiny-digits", "--image-size", "16", *small)
    assert len(tuned["test"]["per_class"]) == 10
    assert json.loads(Path("runs/finetune-tiny-digits/result.json").read_text()) == tuned
    said = answer(capsys, "predict", str(run), str(picture), "--top", "2", "--device", "cpu")
    assert (said["path"], said["error"]) == (str(picture), None)
    assert len(said["top"]) == 2
    for what in ("models", "datasets", "recipes", "studies", "vtab"):
        assert answer(capsys, "list", what)
