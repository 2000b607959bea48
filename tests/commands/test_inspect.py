"""The commands to look with, and `vitlab paper`, as their users meet them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from program import answer, call

from vitlab.commands.inspect import Duplicates


@pytest.mark.usefixtures("unrendered")
def test_inspect_leaves_a_page(run: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.png").write_bytes(b"no image")
    code, out, err = call(capsys, "inspect", str(run), str(image), "broken.png", "--json", "--device", "cpu")
    assert code == 1  # in part
    result = json.loads(out)
    assert result["images"] == 1
    assert [image["path"] for image in result["unreadable"]] == ["broken.png"]
    assert result["page"] == str((run / "inspect/index.html").resolve())
    assert "images: " in err
    assert not Path("inspect").exists()


def test_app_says_where_it_is(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = {}

    def launch(path: str, *, announce: Callable[[str], object], **options: Any) -> None:
        arguments.update(options, path=path)
        announce("http://127.0.0.1:8000/")

    monkeypatch.setattr("vitlab.app.launch", launch)
    assert "http://127.0.0.1:8000/" in call(capsys, "app", str(run))[1]
    assert answer(capsys, "app", str(run), "--port", "8000") == {"url": "http://127.0.0.1:8000/"}
    assert arguments == {"path": str(run), "port": 8000, "device": "auto"}


def test_duplicates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed and left, and an exit code that says whether all could be compared."""
    from vitlab.data.dedup import THRESHOLD

    assert Duplicates("a", "b").threshold == THRESHOLD
    for split, seeds in (("train", range(6)), ("test", range(4, 8))):
        (tmp_path / "set" / split / "any").mkdir(parents=True)
        for seed in seeds:
            rough = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
            image = Image.fromarray(rough).resize((48, 48), Image.Resampling.BICUBIC)
            image.save(tmp_path / "set" / split / "any" / f"{seed}.png")
    argv = ["duplicates", "folder:set", "folder:set", "--train-split", "train", "--out", "found"]
    result = answer(capsys, *argv)
    assert (result["pairs"], result["unreadable"]) == (2, [])
    assert Path("found/exclude.txt").read_text() == "train/any/4.png\ntrain/any/5.png\n"
    (tmp_path / "set" / "test" / "any" / "8.png").write_bytes(b"no image")
    code, out, _ = call(capsys, *argv)
    assert code == 1
    assert all(words in out for words in ("Pairs: 2\n", "8.png: ", "found/report.html"))


def test_the_list_of_the_paper_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "paper")
    assert code == 0
    assert all(f"\n{name} " in out for name in ("eq1", "table9", "fig14", "sec4.5", "appd.10"))
    parts = json.loads(call(capsys, "paper", "--json")[1])
    assert {"key", "part", "text", "code", "run", "known"} == parts[0].keys()


def test_a_part_by_its_name_in_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "paper", "Table 1")
    assert code == 0
    assert "ViT-Huge" in out
    assert "632M" in out
    code, _, err = call(capsys, "paper", "fig2", "photo.png")
    assert (code, "no file or folder photo.png" in err) == (2, True)
    code, _, err = call(capsys, "paper", "fig99")
    assert code == 2
    assert "`vitlab paper` lists all" in err


def test_an_image_without_a_checkpoint(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "paper", "fig1", str(image))
    assert (code, "figure: paper/fig1.png" in out) == (0, True)
    code, _, err = call(capsys, "paper", "fig2", str(image))
    assert (code, f"fig2 shows no image; leave {image} out" in err) == (2, True)
