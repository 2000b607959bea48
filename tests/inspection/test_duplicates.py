"""The search as users start it: what it writes, and that the list works in training."""

import base64
import io
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from copies import photograph
from irregular import irregular
from markup import check
from PIL import Image

from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.inspection.duplicates import SplitSpec, as_text, duplicates


def image(seed: int) -> Image.Image:
    return Image.fromarray(photograph(seed, 60, 80))


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`web` and `exam`, with copies in train of four test images: one mirrored, one under another class."""
    root = tmp_path_factory.mktemp("sets")
    for kind, first in (("web/train", 0), ("exam/train", 500), ("exam/test", 100)):
        for label, name in enumerate(("cat", "<b>dog")):
            folder = root / kind / name
            folder.mkdir(parents=True)
            for i in range(8):
                image(first + 50 * label + i).save(folder / f"{i}.png")
    image(100).save(root / "web/train/cat/copy.jpg", quality=60)
    image(101).resize((40, 30)).save(root / "web/train/cat/small.png")
    image(102).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(root / "web/train/cat/mirror.png")
    image(150).crop((2, 2, 80, 59)).save(root / "web/train/cat/cut.png")
    (root / "web/train/<b>dog/broken.png").write_bytes(b"\x89PNG")
    return root


@pytest.fixture(scope="module")
def result(sets: Path) -> dict[str, Any]:
    return search(sets, sets / "out")


def search(sets: Path, out: Path, **options: Any) -> dict[str, Any]:
    return duplicates(
        SplitSpec(f"folder:{sets}/web", "trainval"), SplitSpec(f"folder:{sets}/exam", "test"), out, **options
    )


def test_the_list_of_pairs(sets: Path, result: dict[str, Any]) -> None:
    lines = [json.loads(line) for line in (sets / "out/duplicates.jsonl").read_text().splitlines()]
    rows = {row["train"]: row for row in lines}
    assert {name: row["test"] for name, row in rows.items()} == {
        "train/cat/copy.jpg": "test/cat/0.png",
        "train/cat/small.png": "test/cat/1.png",
        "train/cat/mirror.png": "test/cat/2.png",
        "train/cat/cut.png": "test/<b>dog/0.png",
    }
    assert [name for name, row in rows.items() if row["flipped"]] == ["train/cat/mirror.png"]
    assert [name for name, row in rows.items() if row["conflict"]] == ["train/cat/cut.png"]
    assert (rows["train/cat/cut.png"]["test_label"], rows["train/cat/cut.png"]["train_label"]) == ("<b>dog", "cat")
    assert all(0 <= row["distance"] < 0.15 and row["hash_distance"] <= 14 for row in lines)
    assert [row["distance"] for row in lines] == sorted(row["distance"] for row in lines)
    assert sorted((sets / "out/exclude.txt").read_text().splitlines()) == sorted(rows)
    assert json.loads((sets / "out/result.json").read_text()) == result
    names = ("pairs", "test_images", "train_images", "mirrored_pairs", "conflicting_pairs")
    assert [result[name] for name in names] == [4, 4, 4, 1, 1]
    assert (result["train"]["images"], result["test"]["images"]) == (19, 16)  # two of the 21 are its own test part
    assert [Path(row["path"]).name for row in result["unreadable"]] == ["broken.png"]
    assert f"--data.exclude {sets / 'out' / 'exclude.txt'}" in as_text(result, sets / "out")


def test_the_page(sets: Path, result: dict[str, Any]) -> None:
    page = (sets / "out/report.html").read_text()
    check(page)
    assert all(words in page for words in ("test/cat/2.png", "4 of 16 (25.0%)", "broken.png"))
    assert "<b>dog" not in page
    pairs = re.findall(r'src="data:image/\w+;base64,([^"]+)" alt="([^"]+)"', page)
    assert len(pairs) == 5  # one of them under the conflicting labels as well
    (data,) = (data for data, alt in pairs if "copy.jpg" in alt)
    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"), float)
    assert pixels.shape == (60, 2 * 80 + 5, 3)
    assert np.abs(pixels[:, :80] - pixels[:, 85:]).mean() < 10  # side by side


def test_the_list_works_in_training(sets: Path, result: dict[str, Any]) -> None:
    name = f"folder:{sets}/web"
    before = load_dataset(name, "train", on_error="skip")
    remaining = load_dataset(name, "train", on_error="skip", exclude=sets / "out/exclude.txt")
    copies = {"copy.jpg", "small.png", "mirror.png", "cut.png"}
    expected = [p for p in map(before.path, range(len(before))) if Path(p).name not in copies]
    assert [remaining.path(i) for i in range(len(remaining))] == expected


def test_a_stricter_threshold(sets: Path, result: dict[str, Any], tmp_path: Path) -> None:
    lines = (sets / "out/duplicates.jsonl").read_text().splitlines()
    largest = max(json.loads(line)["distance"] for line in lines)
    assert search(sets, tmp_path / "out", threshold=largest - 1e-6)["pairs"] == 3
    exam = f"folder:{sets}/exam"
    assert duplicates(SplitSpec(exam, "train"), SplitSpec(exam, "test"), tmp_path / "none")["pairs"] == 0


def test_invalid_settings(sets: Path, tmp_path: Path) -> None:
    exam = SplitSpec(f"folder:{sets}/exam", "test")
    with pytest.raises(UserError, match="given twice"):
        duplicates(exam, exam, tmp_path)
    for threshold in (0.0, 0.6, float("nan")):
        with pytest.raises(UserError, match="threshold is"):
            search(sets, tmp_path, threshold=threshold)
    with pytest.raises(UserError, match="16 of the 16 test images"):
        duplicates(SplitSpec(exam.name, "all"), exam, tmp_path / "out")


def test_the_output_may_lie_among_the_class_folders(sets: Path, tmp_path: Path) -> None:
    """An empty folder that is created before the images are read would be a class without images."""
    shutil.copytree(sets / "exam" / "train", tmp_path / "pets")
    name = f"folder:{tmp_path}/pets"
    for _ in range(2):
        duplicates(SplitSpec(name, "train"), SplitSpec(name, "test"), tmp_path / "pets" / "out")
    assert (tmp_path / "pets/out/result.json").exists()


def test_a_pipe_and_a_name_that_is_not_utf_8(sets: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        shutil.copytree(sets / "exam" / split, tmp_path / "set" / split)
    shutil.copy(tmp_path / "set/test/cat/1.png", tmp_path / "set/train/cat" / os.fsdecode(b"\xff.png"))
    irregular("pipe", tmp_path / "set" / "train" / "cat" / "x\ny.jpg", tmp_path)
    name = f"folder:{tmp_path}/set"
    result = duplicates(SplitSpec(name, "trainval"), SplitSpec(name, "test"), tmp_path / "out")
    assert (tmp_path / "out/exclude.txt").read_bytes() == b"train/cat/\xff.png\n"
    (row,) = result["unreadable"]
    assert Path(row["path"]).name == "x\ny.jpg"
    assert r"x\ny.jpg': " in as_text(result, tmp_path)
