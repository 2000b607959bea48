"""The commands that train, as their users meet them: what they print and what they leave."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from image_files import put
from program import answer, call
from shard_files import serving, write_folders

from vitlab.studies import demo


def test_finetune_searches_and_runs(run: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is left can be used as any other run, and the same command only reads it."""
    argv = ["finetune", str(run), "--dataset", "digits", "--steps", "2", "--runs", "2", "--device", "cpu"]
    argv += ["--recipe", "custom"]
    argv += ["--data.classes", "0", "1", "2", "--learning-rates", "0.1", "0.2"]
    tuned = answer(capsys, *argv)
    assert [score["learning_rate"] for score in tuned["sweep"]] == [0.1, 0.2]
    assert len(tuned["runs"]) == 2
    folder = Path("runs/finetune-digits")
    assert json.loads((folder / "result.json").read_text()) == tuned
    source = {"checkpoint": str(folder), "dataset": None, "split": "test"}
    assert answer(capsys, "evaluate", str(folder), "--device", "cpu") == source | tuned["test"]
    assert len(answer(capsys, "predict", str(folder), str(image), "--device", "cpu")["top"]) == 3
    code, out, err = call(capsys, *argv)
    assert code == 0
    assert "<- chosen" in out
    settings = json.loads((folder / "config.json").read_text())
    assert (settings["learning_rates"], settings["batch_size"], settings["held_out"]) == ([0.1, 0.2], 32, 0.1)
    assert settings["model"]["image_size"] == 8
    assert " step " not in err  # nothing was trained


@pytest.mark.usefixtures("unrendered")
def test_a_run_among_the_images_is_not_data(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The work folder is below the current folder, which holds the classes. The least-squares head alone, its report,
    its model card, and its threshold for `predict`."""
    for number in range(40):
        put(tmp_path / "pets" / ("cat", "dog")[number % 2] / f"{number}.png", 60 + 6 * number)
    monkeypatch.chdir(tmp_path / "pets")
    argv = ["finetune", str(run), "--dataset", "folder:.", "--runs", "0", "--device", "cpu"]
    first = answer(capsys, *argv)
    assert (first["chosen"], first["sweep"], first["runs"]) == ("linear", [], [])
    folder = Path("runs/finetune-pets")
    assert (folder / "report/figures").is_dir()
    assert "accuracy" in (folder / "model" / "README.md").read_text()
    assert answer(capsys, *argv) == first
    assert [row["class"] for row in first["test"]["per_class"]] == ["cat", "dog"]
    threshold = json.loads((folder / "model" / "config.json").read_text()).get("reject_below")
    assert threshold in (None, first["linear"]["reject_below"])
    code, _, err = call(capsys, "predict", str(folder), "cat/0.png", "--reject-below", "auto", "--device", "cpu")
    assert (code == 0) == (threshold is not None), err


def test_demo(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = {"sentence": "Pre-training is worth 6 points.", "page": "out/index.html"}
    calls: list[Any] = []
    monkeypatch.setattr(demo, "demo", lambda out, seed: calls.append((out, seed)) or result)
    assert answer(capsys, "demo", "--out", "there", "--seed", "5") == result
    assert calls == [(Path("there"), 5)]
    _, out, _ = call(capsys, "demo")
    assert result["sentence"] in out
    assert "out/index.html" in out


def test_vtab(run: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 19 tasks one is there; it is trained and tested, and there is no mean."""
    for name, count in {"train800": 800, "val200": 200, "train800val200": 1000, "test": 5}.items():
        Path("data/dmlab").mkdir(parents=True, exist_ok=True)
        Path(f"data/dmlab/{name}.txt").write_text(f"{image} 1\n" * count)
    rows = answer(capsys, "list", "vtab", "d*", "--root", "data")
    assert [row["task"] for row in rows if row["available"] == "lists"] == ["dmlab"]
    small = ["--steps", "2", "--batch-size", "4", "--image-size", "8", "--data.workers", "0", "--device", "cpu"]
    code, out, err = call(capsys, "vtab", str(run), "--root", "data", "--no-download", *small)
    assert code == 0
    assert "DMLab structured 5 100.00%" in " ".join(out.split())
    assert "1 of its 19 tasks are there" in " ".join(out.split())
    assert "dmlab: 100.00% of 5" in err
    result = answer(capsys, "vtab", str(run), "--root", "data", "--no-download", *small)
    assert result == json.loads(Path("runs/vtab/result.json").read_text())
    assert len(result["missing"]) == 18
    nothing = call(capsys, "vtab", str(run), "--root", "empty", "--out", "none", "--no-download", *small)
    assert nothing[0] == 1
    assert "0 of its 19 tasks are there" in " ".join(nothing[1].split())


def test_pretrain_from_a_web_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a process that reads images; and what is said where there is no server any more."""
    monkeypatch.setattr("vitlab.data.downloads.PAUSE", 0.0)
    write_folders(tmp_path / "pets", {"ant": 20, "bee": 20})
    assert call(capsys, "shard", "folder:pets", "out", "--records", "8")[0] == 0
    with serving(tmp_path / "out") as server:
        small = shlex.split("--batch-size 8 --model.image-size 8 --model.width 8 --model.depth 1 --model.heads 2")
        small += shlex.split("--model.mlp-dim 8 --steps 6 --log-every 1 --device cpu --data.root kept --workdir run")
        argv = ["pretrain", "tiny-digits", "--data.name", f"shards:{server.address}", "--data.workers", "1", *small]
        done = answer(capsys, *argv)
        assert done["test"]["images"] == 4
        assert len(list((tmp_path / "kept").rglob("*.tar"))) == 6
    code, _, err = call(capsys, "pretrain", "tiny-digits", "--data.name", f"shards:{server.address}", *small)
    assert code == 2
    assert f"cannot download {server.address}/index.json" in err
    assert "tried 6 times" in err
    assert "Traceback" not in err
