"""The commands that judge a checkpoint, as their users meet them."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
from program import answer, call


def test_few_shots_and_probes(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the same features, kept where the user says."""
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    argv = ["fewshot", str(run), "--dataset", "digits", "--shots", "5", "--device", "cpu", "--cache", "kept"]
    found = answer(capsys, *argv, "--out", "few.json")
    assert found == json.loads(Path("few.json").read_text())
    assert [row["shots"] for row in found["rows"]] == [5]
    code, out, _ = call(capsys, *argv)
    assert code == 0
    assert out.splitlines()[1].split()[:4] == ["digits", "5", "1024", f"{found['rows'][0]['mean']:.2%}"]
    probed = answer(capsys, "probe", str(run), "--dataset", "digits", "--k", "3", "--cache", "kept", "--device", "cpu")
    assert list(probed["weighted"]) == ["3"]
    assert len(list(Path("kept").iterdir())) == 3  # few of train, test, all of train
    assert not Path("elsewhere").exists()


def test_predict_counts_what_it_could_not_read(
    run: Path, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.png").touch()
    code, out, err = call(capsys, "predict", str(run), "empty.png", str(picture), "--device", "cpu")
    assert code == 1
    lines = out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("empty.png: cannot be read: ")
    assert lines[1].startswith(f"{picture}: ")
    assert err == "vitlab: 1 pictures could not be read (named above)."


def test_predict_from_the_standard_input(
    run: Path, picture: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(picture.read_bytes())))
    code, out, _ = call(capsys, "predict", str(run), "-", "--top", "1", "--device", "cpu")
    assert code == 0
    assert re.fullmatch(r"<stdin>: [012] \d+\.\d%\n", out)
