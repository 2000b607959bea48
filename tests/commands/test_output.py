"""What commands print, for people and for programs."""

import json
from pathlib import Path

import pytest
from program import SMALL, answer, call, without_torch

from vitlab.commands import COMMANDS, print_note, print_result


def test_a_finished_run_is_printed_again(run: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For people, and for programs: nothing but the answer on the standard output."""
    again = ["pretrain", "tiny-digits", "--workdir", str(run), "--steps", "3", *SMALL]
    code, out, _ = call(capsys, *again)
    assert code == 0
    assert out.splitlines()[0].split() == ["class", "images", "recall", "precision"]
    assert str(run / "model") in out
    pretrained = answer(capsys, *again)
    assert pretrained == json.loads((run / "result.json").read_text())
    source = {"checkpoint": str(run), "dataset": None, "split": "test"}
    assert answer(capsys, "evaluate", str(run), "--device", "cpu") == source | pretrained["test"]
    predicted = answer(capsys, "predict", str(run), str(image), "--top", "2", "--device", "cpu")
    assert (predicted["path"], predicted["error"], len(predicted["top"])) == (str(image), None, 2)


BEGINNINGS = {
    "demo": ("demo", "training on handwritten digits"),
    "pretrain": ("pretrain tiny-digits", "reading digits"),
    "finetune": ("finetune there --dataset digits", "loading there"),
    "vtab": ("vtab there", "loading there"),
    "evaluate": ("evaluate there", "loading there"),
    "fewshot": ("fewshot there --dataset digits", "loading there"),
    "probe": ("probe there --dataset digits", "loading there"),
    "features": ("features there --dataset digits", "loading there"),
    "predict": ("predict there a.png", "loading there"),
    "inspect": ("inspect there", "loading there"),
    "paper": ("paper eq1", "showing eq1"),
    "app": ("app there", "loading there"),
    "study": ("study positions", "planning the study positions at scale small"),
    "bench": ("bench ViT-B/16", "measuring ViT-B/16"),
    "plan": ("plan jft", "planning jft"),
    "duplicates": ("duplicates digits folder:x", "reading digits and folder:x"),
    "shard": ("shard folder:nowhere out", "reading folder:nowhere"),  # which needs no torch, and ends at once
    "convert": ("convert there out --to timm", "loading there"),
    "export": ("export there --to onnx", "loading there"),
    "doctor": ("doctor", "measuring this machine"),
}


def test_a_command_says_what_it_does_before_it_imports_torch() -> None:
    """Which takes seconds; only names are listed in a moment. Here torch cannot be imported: nothing comes after."""
    assert set(BEGINNINGS) == set(COMMANDS) - {"list"}
    lines = without_torch([words for words, _ in BEGINNINGS.values()], ("no torch", "2"))
    begun = [line for line in lines if line.endswith(" ...")]
    assert begun == [f"vitlab: {text} ..." for _, text in BEGINNINGS.values()]


def test_only_rank_0_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "10":
        monkeypatch.setenv("RANK", rank)
        print_note(f"reading as {rank}")
    assert capsys.readouterr().err == "vitlab: reading as 0\n"


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_result({"a": [float("nan"), 1.5], "b": {"c": float("-inf")}}, as_json=True, text="")
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"a": [None, 1.5], "b": {"c": None}}
