"""The commands that evaluate a checkpoint, as their users meet them."""

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from program import answer, call

from vitlab.cli import main
from vitlab.commands import read_names
from vitlab.evaluation.predict import Prediction
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_model, save_model


def test_few_shots_and_probes(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    argv = ["fewshot", str(run), "--dataset", "digits", "--shots", "5", "--device", "cpu", "--cache", "cache"]
    result = answer(capsys, *argv, "--out", "few.json")
    assert result == json.loads(Path("few.json").read_text())
    assert [row["shots"] for row in result["rows"]] == [5]
    code, out, _ = call(capsys, *argv)
    assert code == 0
    assert out.splitlines()[1].split()[:4] == ["digits", "5", "1024", f"{result['rows'][0]['mean']:.2%}"]
    probe = ["probe", str(run), "--dataset", "digits", "--cache", "cache", "--device", "cpu"]
    assert list(answer(capsys, *probe, "--k", "3")["accuracies"]) == ["3"]
    assert len(list(Path("cache").iterdir())) == 3  # few of train, test, all of train
    assert not Path("elsewhere").exists()
    half = ["--precision", "bfloat16"]
    evaluated = answer(capsys, "evaluate", str(run), "--device", "cpu", *half)
    few, probed = answer(capsys, *argv, *half), answer(capsys, *probe, "--k", "1", *half)
    assert evaluated["computed_in"] == few["settings"]["computed_in"] == probed["computed_in"] == "bfloat16"


def test_predict_counts_what_it_could_not_read(run: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.png").touch()
    code, out, err = call(capsys, "predict", str(run), "empty.png", str(image), "--device", "cpu")
    assert code == 1
    unread, read = out.splitlines()
    assert unread.startswith("empty.png: cannot be read: ")
    assert read.startswith(f"{image}: ")
    assert "1 images could not be read" in err


def test_predict_writes_a_table(run: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And says which image it is not sure of."""
    argv = ["predict", str(run), str(image), "--device", "cpu", "--top", "2", "--csv", "out.csv"]
    code, out, _ = call(capsys, *argv, "--reject-below", "1")
    assert (code, out.startswith(f"{image}: not sure (")) == (0, True)
    head, row = [line.split(",") for line in Path("out.csv").read_text().splitlines()]
    assert head == ["image", "class_1", "probability_1", "class_2", "probability_2", "rejected", "error"]
    assert (row[0], row[-2:]) == (str(image), ["1", ""])
    assert answer(capsys, *argv)["rejected"] is False
    assert "has no threshold `reject_below`" in call(capsys, *argv, "--reject-below", "auto")[2]
    Path("folder").mkdir()
    assert "--csv folder is a folder" in call(capsys, *argv, "--csv", "folder")[2]


def predicted(count: int, end: BaseException | None = None) -> Any:
    """In place of `predict`: so many images, then the end."""

    def predict(*_: Any, **__: Any) -> Iterator[Prediction]:
        yield Prediction("broken.png", error="cut off")
        for number in range(count):
            yield Prediction(f"{number}.png", (("=1+1", 0.75), ("Übung", 0.25)))
        if end is not None:
            raise end

    return predict


def test_an_interrupted_table_keeps_what_is_done(
    run: Path, image: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In place of an earlier table, which an error before the first image leaves alone."""
    Path("p.csv").write_text("old\n")
    call(capsys, "predict", "nowhere", "a.png", "--csv", "p.csv")
    assert Path("p.csv").read_text() == "old\n"
    assert call(capsys, "predict", "nowhere", "a.png", "--csv", "new.csv")[0] == 2
    assert not Path("new.csv").exists()
    monkeypatch.setattr("vitlab.evaluation.predict.predict", predicted(3, KeyboardInterrupt()))
    code, _, err = call(capsys, "predict", str(run), str(image), "--csv", "p.csv")
    assert code == 130
    assert "4 images were done and are in p.csv" in err
    head, broken, *rows = Path("p.csv").read_text().splitlines()
    assert head == "image,class_1,probability_1,class_2,probability_2,rejected,error"
    assert broken == "broken.png,,,,,0,cut off"
    assert rows == [f"{number}.png,'=1+1,0.75,Übung,0.25,0," for number in range(3)]


def test_a_table_is_completed_when_the_reader_of_the_output_ends(
    run: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `| head -1`: rows are written as they come, and all of them."""
    monkeypatch.setattr("vitlab.evaluation.predict.predict", predicted(50))
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as closed, monkeypatch.context() as patch:  # noqa: PTH123
        patch.setattr("sys.stdout", closed)
        with pytest.raises(SystemExit) as ended:
            main(["predict", str(run), str(image), "--csv", "p.csv"])
    assert ended.value.code == 1  # of the broken image
    assert len(Path("p.csv").read_text().splitlines()) == 52


@pytest.mark.parametrize("names", [b"a.png\nb c.png\r\n\n", b"a.png\0b c.png\0"])
def test_names_on_the_standard_input(names: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(names)))
    assert read_names(("first.png", "-")) == ["first.png", "a.png", "b c.png"]


@pytest.mark.usefixtures("unrendered")
def test_every_command_says_how_images_are_prepared(run: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint's own way, at its size or at the given one."""
    prepared = Preprocessing(8, 10, interpolation="bicubic")
    save_model(load_model(run), "own", extra={"preprocessing": prepared.to_metadata(), "classes": list("012")})
    data, options = ["--dataset", "digits", "--cache", "cache"], ["--device", "cpu"]
    few = ["fewshot", "own", *data, "--shots", "1", "--test-images", "9"]
    for argv in (
        [*few, "--image-size", "16", "--interpolation", "bicubic"],
        ["probe", "own", *data, "--k", "1"],
        ["predict", "own", str(image), "--image-size", "16"],
        ["inspect", "own", str(image)],
    ):
        code, _, err = call(capsys, *argv, *options)
        assert code == 0, err
        expected = prepared.at(16) if "16" in argv else prepared
        assert f"vitlab: images: {expected.describe()}" in err
