"""What lies beside the images: of the system, of the program, broken links, files of kinds that are not read."""

import re
from pathlib import Path

import numpy as np
import pytest
from image_files import put

from vitlab.data.contents import images_below, subfolders
from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.io import write_arrays


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        for i in range(3):
            put(tmp_path / "pets" / name / f"{i}.png")
    return tmp_path / "pets"


def touch(*files: Path) -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()


RUN = ("config.json", "metrics.jsonl", "model/model.safetensors", "model/config.json", "report/index.html")
WRITTEN = {
    "run": ("out/finetune-pets", RUN),
    "runs": ("runs", [f"{name}/{file}" for name in ("a", "b") for file in RUN]),
    "run that has begun": ("runs", ["finetune-pets/.lock"]),
    "model": ("teacher", ["model.safetensors", "config.json"]),
    "report": ("report", ["index.html", "result.json"]),
    "duplicates": ("duplicates", ["duplicates.jsonl", "exclude.txt", "report.html", "result.json"]),
    "study": ("study", ["study.json", "report.md", "points/x/config.json", "points/x/result.json"]),
    "shards": ("shards", ["index.json", "classes.json", "SHA256SUMS", "train-000000.tar", "train.index.npz"]),
    "exports": ("exported", ["pets.onnx", "notes.txt"]),
    "environment": ("venv", ["pyvenv.cfg", "lib/x.py"]),
}


@pytest.mark.parametrize("kind", WRITTEN)
def test_what_commands_have_written_is_not_data(kind: str, pets: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Beside the class folders, and in one; the folders hold figures, which would be images of a class."""
    folder, files = WRITTEN[kind]
    for place in (pets, pets / "cat"):
        caplog.clear()
        touch(*(place / folder / file for file in files))
        if any("/" in file or "index" in file for file in files) and "begun" not in kind:
            put((place / folder / files[-1]).parent / "figures" / "attention.png")
        if kind == "study":
            put(place / folder / "figure.png")
        data = load_dataset(f"folder:{pets}", "all")
        assert (data.classes, len(data)) == (("cat", "dog"), 6)
        assert folder.split("/")[0] in "".join(m for m in caplog.messages if "is skipped: it is not data" in m)


def test_features_are_told_from_arrays_of_images(pets: Path) -> None:
    (pets / "features").mkdir()
    write_arrays(pets / "features" / "pets.npz", {"features": np.zeros((1, 2)), "labels": np.zeros(1)})
    assert subfolders(pets) == ["cat", "dog"]
    (pets / "scans").mkdir()
    write_arrays(pets / "scans" / "a.npz", {"pixels": np.zeros((1, 2))})
    with pytest.raises(UserError, match=r"scans holds no images .*\.npz 1 \(arrays: write each image as PNG\)"):
        load_dataset(f"folder:{pets}", "all")


def test_a_class_that_holds_a_config_or_a_run_is_still_read(pets: Path) -> None:
    touch(*(pets / "cat" / file for file in ("config.json", "runs/a/config.json", "runs/a/metrics.jsonl")))
    put(pets / "dog" / "patient" / "1.png")
    assert len(load_dataset(f"folder:{pets}", "all")) == 7


def test_files_and_folders_of_systems_are_foreign(pets: Path, caplog: pytest.LogCaptureFixture) -> None:
    folders = ["@eaDir", "__MACOSX", ".ipynb_checkpoints", "lost+found", "System Volume Information", "$RECYCLE.BIN"]
    for folder in folders:
        put(pets / folder / "1.png")
        put(pets / "cat" / folder / "SYNOPHOTO_THUMB_M.jpg")
    touch(*(pets / "dog" / name for name in ("Thumbs.db", "desktop.ini", ".DS_Store", "._0.png")))
    data = load_dataset(f"folder:{pets}", "all")
    assert (data.classes, len(data)) == (("cat", "dog"), 6)
    assert "4 files are not images and are skipped (hidden 4)" in caplog.text


@pytest.mark.parametrize("link", ["bird", "cat/3.png", "dog/more"])
def test_a_link_to_nothing_is_an_error(link: str, pets: Path) -> None:
    """A class that is a dead link would vanish."""
    (pets / link).symlink_to("/mnt/disk/away")
    (pets / "dog" / ".#0.png").symlink_to("an editor's lock")
    with pytest.raises(UserError, match=f"1 broken links: .*{link} -> /mnt/disk/away; mount"):
        load_dataset(f"folder:{pets}", "all")
    assert str(pets / link) in images_below((pets / link).parent)  # to predict: reading it says so


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (["1.HEIC", "2.heic", "3.dng"], r"\.dng 1 .*\.heic 2 \(.*pillow-heif"),
        (["clip.MP4", "photos.zip", "IMG_1", "IMG_2"], r"\.mp4 1 .*ffmpeg.*unpack.*without a suffix 2"),
        ([], "remove it"),
    ],
)
def test_a_class_of_files_that_are_not_read(
    files: list[str], advice: str, pets: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error; beside images a warning."""
    monkeypatch.setattr("vitlab.data.contents.IMAGE_SUFFIXES", {".png"})  # whatever can be read here
    (pets / "bird").mkdir()
    touch(*(pets / "bird" / file for file in files))
    with pytest.raises(UserError, match=f"bird holds no images .*{advice}"):
        load_dataset(f"folder:{pets}", "all")
    put(pets / "bird" / "1.png")
    assert len(load_dataset(f"folder:{pets}", "all")) == 7
    assert not files or re.search(advice, caplog.text)
