"""The commands to look with, as their users meet them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from program import answer, call

from vitlab.commands.inspect import Duplicates


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
    result = f"vitlab: loading {run} ..."
    assert call(capsys, "app", str(run)) == (0, "http://127.0.0.1:8000/ (Ctrl-C ends it)\n", result)
    url = json.dumps({"url": "http://127.0.0.1:8000/"})
    assert call(capsys, "app", str(run), "--port", "8000", "--json") == (0, f"{url}\n", result)
    assert arguments == {"path": str(run), "port": 8000, "device": "auto"}


def test_duplicates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed and left, and an exit code that says whether all could be compared."""
    from vitlab.data.dedup import THRESHOLD

    assert Duplicates("a", "b").threshold == THRESHOLD
    random = np.random.default_rng(0)
    for split, seeds in (("train", range(6)), ("test", range(4, 8))):
        (tmp_path / "set" / split / "any").mkdir(parents=True)
        for seed in seeds:
            rough = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
            image = Image.fromarray(rough).resize((48, 48), Image.Resampling.BICUBIC)
            image.save(tmp_path / "set" / split / "any" / f"{seed}.png")
    result = answer(capsys, "duplicates", "folder:set", "folder:set", "--train-split", "train", "--out", "found")
    assert (result["pairs"], result["unreadable"]) == (2, [])
    assert Path("found/exclude.txt").read_text() == "train/any/4.png\ntrain/any/5.png\n"
    (tmp_path / "set" / "test" / "any" / "8.png").write_bytes(random.bytes(50))
    code, out, err = call(capsys, "duplicates", "folder:set", "folder:set", "--train-split", "train", "--out", "found")
    assert code == 1
    assert "Pairs: 2\n" in out
    assert "8.png: not an image" in out
    assert out.splitlines()[-1].endswith("to look at: found/report.html")
    assert err.startswith("vitlab: reading folder:set and folder:set ...")
