"""The commands that tell what there is."""

from pathlib import Path
from typing import Any

import pytest
from program import answer, call


def test_json_of_demo_and_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Their own tests are elsewhere; here, that they are called and their answers printed."""
    import vitlab.cost.doctor
    from vitlab.studies import demo

    result = {"pretrain_accuracy": 0.985, "finetune_accuracy": 0.97, "page": "out/index.html"}
    seen: list[Any] = []
    monkeypatch.setattr(demo, "demo", lambda out, seed: seen.append((out, seed)) or result)
    assert answer(capsys, "demo", "--out", "there", "--seed", "5") == result
    assert seen == [(Path("there"), 5)]
    _, out, _ = call(capsys, "demo")
    assert "98.5%" in out
    assert out.splitlines()[-1] == "out/index.html"
    monkeypatch.setattr(vitlab.cost.doctor, "diagnose", lambda path: {"path": str(path)})
    monkeypatch.setattr(vitlab.cost.doctor, "format_diagnosis", str)
    assert answer(capsys, "doctor", "--path", "there") == {"path": "there"}


def test_list_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "list", "models", "ViT-B/*")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["model", "ViT-B/8", "ViT-B/14", "ViT-B/16", "ViT-B/32"]
    assert "86,567,656" in out
