"""The commands that evaluate a checkpoint, as their users meet them."""

import io
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from program import answer, call

from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_model, save_model


def test_few_shots_and_probes(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the same features, cached in the given folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    argv = ["fewshot", str(run), "--dataset", "digits", "--shots", "5", "--device", "cpu", "--cache", "cache"]
    result = answer(capsys, *argv, "--out", "few.json")
    assert result == json.loads(Path("few.json").read_text())
    assert [row["shots"] for row in result["rows"]] == [5]
    code, out, _ = call(capsys, *argv)
    assert code == 0
    assert out.splitlines()[1].split()[:4] == ["digits", "5", "1024", f"{result['rows'][0]['mean']:.2%}"]
    probed = answer(capsys, "probe", str(run), "--dataset", "digits", "--k", "3", "--cache", "cache", "--device", "cpu")
    assert list(probed["weighted"]) == ["3"]
    assert len(list(Path("cache").iterdir())) == 3  # few of train, test, all of train
    assert not Path("elsewhere").exists()


def test_precision_reaches_every_command(run: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    half, options = ["--precision", "bfloat16"], ["--device", "cpu"]
    evaluated = answer(capsys, "evaluate", str(run), *options, *half)
    few = answer(
        capsys, "fewshot", str(run), "--dataset", "digits", "--shots", "1", "--cache", "cache", *options, *half
    )
    probed = answer(capsys, "probe", str(run), "--dataset", "digits", "--k", "1", "--cache", "cache", *options, *half)
    assert evaluated["computed_in"] == few["settings"]["computed_in"] == probed["computed_in"] == "bfloat16"
    assert "computed_in" not in answer(capsys, "evaluate", str(run), *options)
    model = load_model(run)
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight)  # three steps have made it sure of nothing
    save_model(model, "sure")
    exact, rounded = (answer(capsys, "predict", "sure", str(image), *options, *more)["top"] for more in ([], half))
    assert exact != rounded
    for (_, share), (_, other) in zip(sorted(exact), sorted(rounded), strict=True):
        assert share == pytest.approx(other, abs=0.02)


def test_every_image_of_a_folder_is_evaluated(run: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "012":
        Path("own", name).mkdir(parents=True)
        for i in range(5):
            Path("own", name, f"{i}.png").write_bytes(image.read_bytes())
    argv = ["evaluate", str(run), "--dataset", "folder:own", "--device", "cpu"]
    assert answer(capsys, *argv, "--split", "all")["images"] == 15


def test_predict_counts_what_it_could_not_read(
    run: Path, image: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.png").touch()
    code, out, err = call(capsys, "predict", str(run), "empty.png", str(image), "--device", "cpu")
    assert code == 1
    lines = out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("empty.png: cannot be read: ")
    assert lines[1].startswith(f"{image}: ")
    prepared = "vitlab: images: squash to 8x8 (bilinear, no antialias)"
    assert err == f"vitlab: loading {run} ... {prepared} vitlab: 1 images could not be read (named above)."


def test_predict_from_the_standard_input(
    run: Path, image: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(image.read_bytes())))
    code, out, _ = call(capsys, "predict", str(run), "-", "--top", "1", "--device", "cpu")
    assert code == 0
    assert re.fullmatch(r"<stdin>: [012] \d+\.\d%\n", out)


def test_probe_and_few_shots_learn_from_all_of_train(
    run: Path, image: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """20 images: 2 are the test's, none is held out for a val split. Of named sets train is as published."""
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    for name in "01":
        Path("own", name).mkdir(parents=True)
        for i in range(10):
            Path("own", name, f"{i}.png").write_bytes(image.read_bytes())
    probe = ["probe", str(run), "--k", "1", "--device", "cpu", "--dataset"]
    assert answer(capsys, *probe, "folder:own")["train_images"] == 18
    assert answer(capsys, *probe, "folder:own", "--train-split", "train")["train_images"] == 16
    assert answer(capsys, *probe, "digits")["train_images"] == 1259
    few = ["fewshot", str(run), "--shots", "9", "--device", "cpu", "--dataset", "folder:own"]
    assert answer(capsys, *few)["rows"][0]["train_images"] == 18
    assert answer(capsys, *few, "--train-split", "train")["rows"][0]["train_images"] == 16
    code, _, err = call(capsys, *probe, "folder:own", "--train-split", "test")
    assert code == 2
    assert "2 of the 2 test images of folder:own are also those to learn from" in err


def test_every_command_says_how_images_are_prepared(run: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint's own way, at its size or at the given one."""
    prepared = Preprocessing(8, 10, interpolation="bicubic")
    save_model(load_model(run), "own", extra={"preprocessing": prepared.to_card(), "classes": list("012")})
    data, options = ["--dataset", "digits", "--cache", "cache"], ["--device", "cpu"]
    few = ["fewshot", "own", *data, "--shots", "1", "--test-images", "9"]
    for argv in (
        few, [*few, "--image-size", "16", "--interpolation", "bicubic"], ["probe", "own", *data, "--k", "1"],
        ["predict", "own", str(image)], ["predict", "own", str(image), "--image-size", "16"],
        ["inspect", "own", str(image)],
    ):  # fmt: skip
        code, _, err = call(capsys, *argv, *options)
        assert code == 0, err
        expected = prepared.at(16) if "16" in argv else prepared
        assert f"vitlab: images: {expected.describe()}" in err
