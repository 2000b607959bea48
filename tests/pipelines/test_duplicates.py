"""The search as users start it: what it writes, what it resumes, and that the list works in training."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from irregular import irregular
from PIL import Image

from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.pipelines.duplicates import as_text, duplicates


def photograph(seed: int) -> Image.Image:
    """Soft shapes, as photographs have them."""
    random = np.random.default_rng(seed)
    layers = [
        np.asarray(Image.fromarray(random.integers(0, 256, (n, n, 3), dtype=np.uint8)).resize((80, 60), 3), float) / n
        for n in (3, 6, 12)
    ]
    total = np.sum(layers, axis=0)
    return Image.fromarray(np.interp(total, (total.min(), total.max()), (0, 255)).astype(np.uint8))


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`train` and `test`, with copies in train of four test images: one mirrored, one under another class."""
    place = tmp_path_factory.mktemp("sets")
    for kind, first in (("web/train", 0), ("exam/train", 500), ("exam/test", 100)):
        for label, name in enumerate(("cat", "dog")):
            folder = place / kind / name
            folder.mkdir(parents=True)
            for i in range(8):
                photograph(first + 50 * label + i).save(folder / f"{i}.png")
    photograph(100).save(place / "web/train/cat/copy.jpg", quality=60)
    photograph(101).resize((40, 30)).save(place / "web/train/cat/small.png")
    photograph(102).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(place / "web/train/cat/mirror.png")
    photograph(150).crop((2, 2, 80, 59)).save(place / "web/train/cat/cut.png")
    (place / "web/train/dog/broken.png").write_bytes(b"\x89PNG")
    return place


@pytest.fixture(scope="module")
def found(sets: Path) -> dict[str, Any]:
    return duplicates(f"folder:{sets}/web", f"folder:{sets}/exam", sets / "out")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_is_written(sets: Path, found: dict[str, Any]) -> None:
    rows = {row["train"]: row for row in lines(sets / "out/duplicates.jsonl")}
    assert {name: row["test"] for name, row in rows.items()} == {
        "train/cat/copy.jpg": "test/cat/0.png",
        "train/cat/small.png": "test/cat/1.png",
        "train/cat/mirror.png": "test/cat/2.png",
        "train/cat/cut.png": "test/dog/0.png",
    }
    assert [name for name, row in rows.items() if row["flipped"]] == ["train/cat/mirror.png"]
    assert [name for name, row in rows.items() if row["conflict"]] == ["train/cat/cut.png"]
    assert (rows["train/cat/cut.png"]["test_label"], rows["train/cat/cut.png"]["train_label"]) == ("dog", "cat")
    assert all(0 <= row["distance"] < 0.15 and row["hash_distance"] <= 14 for row in rows.values())
    distances = [row["distance"] for row in lines(sets / "out/duplicates.jsonl")]
    assert distances == sorted(distances)
    assert sorted((sets / "out/exclude.txt").read_text().splitlines()) == sorted(rows)
    assert json.loads((sets / "out/result.json").read_text()) == found
    page = (sets / "out/report.html").read_text()
    for said in ("test/cat/2.png", "LABELS CONFLICT", "mirrored", "4 of 16 (25.00%)", "broken.png"):
        assert said in page


def test_the_numbers(sets: Path, found: dict[str, Any]) -> None:
    counts = {name: found[name] for name in ("pairs", "test_images", "train_images", "mirrored_pairs")}
    assert counts == {"pairs": 4, "test_images": 4, "train_images": 4, "mirrored_pairs": 1}
    assert found["conflicting_pairs"] == 1
    assert (found["train"]["images"], found["test"]["images"]) == (19, 16)  # two of the 21 are its own test part
    assert [Path(each["path"]).name for each in found["unreadable"]] == ["broken.png"]
    text = as_text(found, sets / "out")
    for said in ("4 of 16 (25.00%)", "broken.png: ", f"--data.exclude {sets / 'out' / 'exclude.txt'}"):
        assert said in text


def test_the_list_works_in_training(sets: Path, found: dict[str, Any]) -> None:
    name = f"folder:{sets}/web"
    before = load_dataset(name, "train", on_error="skip")
    left = load_dataset(name, "train", on_error="skip", exclude=sets / "out/exclude.txt")
    copies = {"copy.jpg", "small.png", "mirror.png", "cut.png"}
    expected = [p for p in map(before.path, range(len(before))) if Path(p).name not in copies]
    assert [left.path(i) for i in range(len(left))] == expected
    assert found["train_images"] >= len(before) - len(left) > 0


def test_again_reads_no_image_but_those_shown(
    sets: Path, found: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitlab.data import dedup

    before = {path.name: path.read_bytes() for path in (sets / "out").iterdir() if path.is_file()}
    monkeypatch.setattr(dedup, "thumbnail", lambda image: pytest.fail("read again"))
    assert duplicates(f"folder:{sets}/web", f"folder:{sets}/exam", sets / "out") == found
    assert {path.name: path.read_bytes() for path in (sets / "out").iterdir() if path.is_file()} == before


def test_a_stricter_threshold_finds_fewer(sets: Path, found: dict[str, Any], tmp_path: Path) -> None:
    nearest = lines(sets / "out/duplicates.jsonl")[1]["distance"]
    strict = duplicates(f"folder:{sets}/web", f"folder:{sets}/exam", tmp_path / "out", threshold=nearest + 1e-6)
    assert (strict["pairs"], found["pairs"]) == (2, 4)
    assert "Just beyond the threshold" not in (sets / "out/report.html").read_text()


def test_bad_input(sets: Path, tmp_path: Path) -> None:
    name = f"folder:{sets}/exam"
    with pytest.raises(ValueError, match="given twice"):
        duplicates(name, name, tmp_path, train_split="test")
    for threshold in (0.0, 0.6, float("nan")):
        with pytest.raises(ValueError, match=r"threshold is .*at most 0\.5"):
            duplicates(name, name, tmp_path, threshold=threshold)
    with pytest.raises(ValueError, match="workers is -1"):
        duplicates(name, name, tmp_path, workers=-1)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file; give a folder"):
        duplicates(name, name, tmp_path / "file")


def test_what_is_no_regular_file_is_unreadable(sets: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        shutil.copytree(sets / "exam" / split, tmp_path / "set" / split)
    irregular("pipe", tmp_path / "set" / "train" / "cat" / "x\ny.jpg", tmp_path)
    found = duplicates(f"folder:{tmp_path}/set", f"folder:{tmp_path}/set", tmp_path / "out")
    (left,) = found["unreadable"]
    assert Path(left["path"]).name == "x\ny.jpg"
    assert left["reason"].startswith("it is a named pipe")
    assert r"x\ny.jpg': it is a named pipe" in as_text(found, tmp_path)


def test_splits_that_share_images(sets: Path, tmp_path: Path) -> None:
    name = f"folder:{sets}/exam"
    with pytest.raises(UserError, match=r"16 of the 16 test images of .* \(all and test\)"):
        duplicates(name, name, tmp_path / "out", train_split="all")
    found = duplicates(f"folder:{sets}/web", name, tmp_path / "out", train_split="all", test_split="all")
    assert (found["train"]["images"], found["test"]["images"]) == (21, 32)
