"""What identifies the images of a run."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import put

from vitlab.data import identity
from vitlab.data.dataset import Dataset
from vitlab.data.decode import Entry, ImageError
from vitlab.data.identity import class_list, exact_fingerprint, portable_fingerprints
from vitlab.data.registry import load_dataset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes whose files have the same names and sizes."""
    for label, value in (("cat", 10), ("dog", 200)):
        for number in range(5):
            put(tmp_path / "data" / label / f"{number}.bmp", value + number, (80, 80))
    return tmp_path / "data"


def identity_of(name: str) -> dict[str, Any]:
    return portable_fingerprints({"all": load_dataset(name, "all")})


def swap(folder: Path) -> None:
    (folder / "cat").rename(folder / "aside")
    (folder / "dog").rename(folder / "cat")
    (folder / "aside").rename(folder / "dog")


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (swap, {"cat", "dog"}),
        (lambda folder: put(folder / "dog" / "3.bmp", 0, (80, 80)), {"dog"}),
        (lambda folder: (folder / "dog" / "3.bmp").rename(folder / "dog" / "33.bmp"), {"dog"}),
        (lambda folder: (folder / "dog").rename(folder / "wolf"), {"dog", "wolf"}),
    ],
)
def test_classes_with_other_names_or_content(change: Callable[[Path], Any], changed: set[str], folder: Path) -> None:
    before = identity_of(f"folder:{folder}")
    change(folder)
    after = identity_of(f"folder:{folder}")
    was, now = before["images"]["all"], after["images"]["all"]
    assert {name for name in was.keys() | now.keys() if was.get(name) != now.get(name)} == changed
    assert was["cat"].startswith("5 images, ")
    if change is swap:
        assert (was["cat"], was["dog"]) == (now["dog"], now["cat"])


def test_the_same_images_elsewhere(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = identity_of(f"folder:{folder}")
    shutil.copytree(folder, tmp_path / "deep" / "moved")
    os.utime(tmp_path / "deep" / "moved" / "cat" / "1.bmp", (1, 1))
    rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in sorted(folder.glob("*/*"))]
    (folder / "table.csv").write_text("\n".join(["file,label", *rows]))
    (tmp_path / "absolute.csv").write_text("\n".join(["file,label", *(f"{folder}/{row}" for row in rows)]))
    monkeypatch.chdir(tmp_path)
    for name in ("folder:data", "folder:data/", "folder:./data", "folder:deep/moved", "csv:data/table.csv"):
        assert identity_of(name) == before, name
    assert identity_of("csv:absolute.csv") == before
    monkeypatch.chdir(folder)
    assert identity_of("folder:.") == before


def test_groups_and_the_val_of_the_user(folder: Path) -> None:
    """They decide what is held out, so that images of another group are another run."""
    data = load_dataset(f"folder:{folder}", "all")
    grouped = [dataclasses.replace(data, groups=np.array([f"patient {i // n}" for i in range(10)])) for n in (2, 5)]
    val = dataclasses.replace(data, from_val=np.arange(10) == 7)
    found = [portable_fingerprints({"all": each})["images"]["all"] for each in (data, *grouped, val)]
    assert len({each["cat"] for each in found}) == len({each["dog"] for each in found}) == 4


def test_many_images_and_classes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MAX_NAMES": 4, "MAX_READ": 2, "MAX_LISTED": 1}.items():
        monkeypatch.setattr(identity, name, value)
    before = identity_of(f"folder:{folder}")
    assert before["classes"].startswith("2 names, ")
    assert before["images"]["all"].keys() == {"all classes"}
    swap(folder)
    assert identity_of(f"folder:{folder}")["images"] != before["images"]
    assert class_list(["cat", "dog"]) != class_list(["dog", "cat"])


def test_a_published_set_is_identified_by_its_names() -> None:
    assert identity_of("digits")["images"]["all"]["3"].startswith("183 images, ")


def test_images_in_memory_are_identified_by_their_bytes() -> None:
    values = np.arange(3 * 4 * 4 * 3, dtype=np.uint8).reshape(3, 4, 4, 3)
    data = Dataset("made", "train", ("a", "b"), np.array([0, 1, 0]), values)
    before = exact_fingerprint("salt", data)
    assert exact_fingerprint("salt", dataclasses.replace(data, name="other", labels=data.labels[::-1])) == before
    assert exact_fingerprint("other", data) != before
    assert exact_fingerprint("salt", dataclasses.replace(data, failures={2: ImageError("x", "broken")})) != before
    values[2, 3, 3, 2] += 1
    assert exact_fingerprint("salt", data) != before


def test_images_in_files_are_identified_by_path_size_and_time(tmp_path: Path) -> None:
    path = tmp_path / "0.bin"
    path.write_bytes(b"1")
    data = Dataset("disk", "train", ("a",), np.zeros(1, np.int64), entries=[Entry(str(path))])
    digests = [exact_fingerprint("", data)]
    digests.append(exact_fingerprint("", dataclasses.replace(data, entries=[Entry(str(path), offset=1)])))
    os.utime(path, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns + 1))
    digests.append(exact_fingerprint("", data))
    path.unlink()
    digests.append(exact_fingerprint("", data))
    assert len(set(digests)) == 4
