"""Each natural and specialized data set from an imitation of its published files: images, labels, classes, keys."""

import gzip
import sys
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.io
from image_files import pixels_of
from PIL import Image
from tfds_keys import EUROSAT, KNOWN, RESISC45, known_keys

from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.registry import DATASETS, SPLITS, load_dataset
from vitlab.data.vtab.readers import EyeEntry, Published, prepare_eye, read_h5, read_idx
from vitlab.data.vtab.sources import SOURCES
from vitlab.data.vtab.tasks import READ_ERRORS, read_published
from vitlab.errors import UserError

rng = np.random.default_rng(0)


def write(path: Path, value: int = 0) -> None:
    """A uniform gray image, which survives the JPEG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (value % 256,) * 3).save(path, "JPEG")


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def values(data: Dataset) -> list[int]:
    """The gray values of all images."""
    return [int(data.image(i)[0, 0, 0]) for i in range(len(data))]


def read(name: str, root: Path, split: str) -> Published:
    """Reads a split, and checks what holds for every data set."""
    published = read_published(name, root, split, False)
    data, keys, _ = published
    assert (data.name, data.split, len(data.classes)) == (name, split, SOURCES[name].classes)
    assert len(keys) == len(data) == len(set(keys))
    assert name not in KNOWN or set(keys) <= set(known_keys(name, split))
    assert data.labels.dtype == np.int64
    return published


CALTECH = ["BACKGROUND_Google", "Faces", "Leopards", *(f"class_{i:02d}" for i in range(98)), "yin_yang"]


def test_caltech101(tmp_path: Path) -> None:
    home = tmp_path / "caltech101" / "101_ObjectCategories"
    for name in CALTECH:
        (home / name).mkdir(parents=True)
        for i in range(1, 41 if name == "Faces" else 32):
            (home / name / f"image_{i:04d}.jpg").touch()
    (home / "BACKGROUND_Google" / "tmp").touch()
    train, test = (read("caltech101", tmp_path, split) for split in ("train", "test"))
    assert not set(train.keys) & set(test.keys)
    assert len(train.keys) + len(test.keys) == 101 * 31 + 40  # `tmp` is in neither
    counts = np.bincount(train.dataset.labels)
    assert (np.delete(counts, train.dataset.classes.index("background_google")) == 30).all()
    assert train.dataset.classes == tuple(sorted(name.lower() for name in CALTECH))
    # The draw is NumPy's legacy one, seeded 1234, class after class in the order of the names.
    draws = np.random.RandomState(1234)
    first = draws.choice([*(f"image_{i:04d}.jpg" for i in range(1, 32)), "tmp"], 30, replace=False).tolist()
    drawn = {f"BACKGROUND_Google/{name}" for name in first} - {"BACKGROUND_Google/tmp"}
    assert {key for key in train.keys if key.startswith("BACK")} == drawn
    second = draws.choice([f"image_{i:04d}.jpg" for i in range(1, 41)], 30, replace=False).tolist()
    assert {key.removeprefix("Faces/") for key in train.keys if key.startswith("Faces/")} == set(second)


@pytest.mark.parametrize(("folder", "packed"), [(".", True), ("FashionMNIST/raw", False)])
def test_fashion_mnist(tmp_path: Path, folder: str, packed: bool) -> None:
    images, labels = np.empty(0), np.empty(0)
    for prefix, n in (("train", 200), ("t10k", 20)):
        images, labels = rng.integers(0, 256, (n, 28, 28), np.uint8), np.arange(n, dtype=np.uint8) % 10
        for content, array in (("images", images), ("labels", labels)):
            sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
            data = bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes()
            path = tmp_path / folder / f"{prefix}-{content}-idx{array.ndim}-ubyte{'.gz' if packed else ''}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(gzip.compress(data) if packed else data)
    sizes = {split: len(load_dataset("fashion_mnist", split, root=tmp_path, download=False)) for split in SPLITS}
    assert sizes == {"train": 180, "val": 20, "test": 20, "trainval": 200, "all": 220}
    data = read("fashion_mnist", tmp_path, "test").dataset
    np.testing.assert_array_equal(pixels_of(data), np.repeat(images[..., None], 3, axis=3))
    np.testing.assert_array_equal(data.labels, labels)
    assert data.classes[9] == "Ankle boot"


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the user's cache, where downloads go."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home, classes, n = tmp_path / "vitlab" / name, SOURCES[name].classes or 0, 200
    home.mkdir(parents=True)
    planes = labels = np.empty(0)
    for file in SOURCES[name].required["all"]:  # the test file is the last
        planes, labels = rng.integers(0, 256, (n, 3, 32, 32), np.uint8), np.arange(n) % classes
        heads = [labels] if name == "cifar10" else [np.full(n, 99), labels]  # CIFAR-100's first label is the coarse one
        np.concatenate([np.stack(heads, 1).astype(np.uint8), planes.reshape(n, -1)], axis=1).tofile(home / file)
    data, keys, _ = read(name, tmp_path / "vitlab", "test")
    np.testing.assert_array_equal(pixels_of(data), planes.transpose(0, 2, 3, 1))
    np.testing.assert_array_equal(data.labels, labels)
    assert (keys, data.classes[0]) == ([str(i) for i in range(n)], {10: "airplane", 100: "apple"}[classes])
    assert len(load_dataset(name, "val")) == {10: 20, 100: 100}[classes]  # 2%, and one of each class
    path = home / SOURCES[name].required["all"][-1]
    path.write_bytes(path.read_bytes().replace(b"\x05", b"\xff"))
    with pytest.raises(UserError, match=rf"does not hold {name} as published .*labels from 0 to 255"):
        load_dataset(name, "test", download=False)


def test_dtd(tmp_path: Path) -> None:
    names = sorted(["waffled", "banded", *(f"texture{i}" for i in range(45))])
    for number, part in enumerate(("train1", "val1", "test1")):
        lines = [f"{name}/{name}_{number:04d}.jpg" for name in names]
        write_lines(tmp_path / "dtd" / "labels" / f"{part}.txt", lines)
        for i, line in enumerate(lines):
            write(tmp_path / "dtd" / "images" / line, 5 * i + number)
    for number, split in enumerate(("train", "validation", "test")):
        data, keys, _ = read("dtd", tmp_path, split)
        assert keys[0] == f"banded/banded_{number:04d}.jpg"
        assert (data.labels.tolist(), data.classes[46]) == ([*range(47)], "waffled")
        assert values(data) == [5 * i + number for i in range(47)]
    (tmp_path / "dtd" / "images" / "banded" / "banded_0000.jpg").unlink()
    with pytest.raises(UserError, match="1 of the 47 files"):
        read("dtd", tmp_path, "train")
    for content, message in (("banded/banded_0000.jpg", "1 classes, expected 47"), ("\udcff", "UnicodeDecodeError")):
        (tmp_path / "dtd" / "labels" / "train1.txt").write_text(content, errors="surrogateescape")
        with pytest.raises(UserError, match=message):
            read("dtd", tmp_path, "train")


def test_flowers102(tmp_path: Path) -> None:
    home, labels, order = tmp_path / "flowers-102", np.arange(306) % 102 + 1, rng.permutation(306) + 1
    for number in range(1, 307):
        write(home / "jpg" / f"image_{number:05d}.jpg", number)
    scipy.io.savemat(home / "imagelabels.mat", {"labels": labels[None].astype(np.uint8)})
    parts = {"trnid": order[:50], "valid": order[50:90], "tstid": order[90:]}
    scipy.io.savemat(home / "setid.mat", {name: part[None].astype(np.uint16) for name, part in parts.items()})
    for split, count in (("train", 50), ("validation", 40), ("test", 216)):
        data, keys, _ = read("flowers102", tmp_path, split)
        numbers = np.array([int(key[6:11]) for key in keys])
        assert len(numbers) == count
        np.testing.assert_array_equal(data.labels, (numbers - 1) % 102)
        assert values(data) == (numbers % 256).tolist()
    assert (data.classes[0], data.classes[73], data.classes[101]) == ("pink primrose", "rose", "blackberry lily")
    (home / "setid.mat").write_bytes(b"<html>not found</html>" * 20)
    with pytest.raises(UserError, match="flowers102 as published"):
        read("flowers102", tmp_path, "test")


def test_pets(tmp_path: Path) -> None:
    breeds = ["Abyssinian", "american_bulldog", *(f"breed_{i}" for i in range(34)), "yorkshire_terrier"]
    home = tmp_path / "oxford-iiit-pet"
    for file, count in (("trainval", 3), ("test", 1)):
        rows = [(f"{name}_{file}{i}", label) for label, name in enumerate(breeds, 1) for i in range(count)]
        write_lines(home / "annotations" / f"{file}.txt", [f"{name} {label} 1 1" for name, label in rows])
        for name, label in rows:
            write(home / "images" / f"{name}.jpg", label)
    for split, file, count in (("train", "trainval", 111), ("test", "test", 37)):
        data, keys, _ = read("pets", tmp_path, split)
        assert (len(data), keys[0]) == (count, f"Abyssinian_{file}0.jpg")
        assert data.classes == tuple(breeds)  # by their numbers, not by the alphabet
        np.testing.assert_array_equal(data.labels + 1, values(data))
    # As a data set of its own, with a val split cut from train: 10% of each breed
    val = load_dataset("pets", "val", root=tmp_path, download=False)
    assert (val.name, val.split, np.bincount(val.labels).tolist()) == ("pets", "val", [1] * 37)


def test_sun397(tmp_path: Path) -> None:
    home = tmp_path / "SUN397"
    names = ["/a/abbey", "/a/apartment_building/outdoor", *(f"/b/place{i:03d}" for i in range(394)), "/y/youth_hostel"]
    write_lines(home / "ClassName.txt", names)
    for short, split in (("tr", "train"), ("va", "validation")):
        lines = [f"{names[i]}/sun_{short}{i}.jpg" for i in (0, 132, 264, 396)]
        write_lines(home / f"sun397_tfds_{short}.txt", lines)
        for line in lines:
            write(home / line[1:], len(line))
        data, keys, _ = read("sun397", tmp_path, split)
        assert (keys, data.labels.tolist()) == (lines, [0, 132, 264, 396])
        assert values(data) == [len(key) for key in keys]
    assert data.classes[:2] == ("abbey", "apartment_building/outdoor")
    with pytest.raises(UserError, match=r"needs the list of the test split, .*/sun397_tfds_te.txt; looked in"):
        read("sun397", tmp_path, "test")


def test_svhn(tmp_path: Path) -> None:
    images, labels = rng.integers(0, 256, (32, 32, 3, 12), np.uint8), np.arange(1, 13) % 10 + 1
    scipy.io.savemat(tmp_path / "train_32x32.mat", {"X": images, "y": labels[:, None].astype(np.uint8)})
    data = read("svhn", tmp_path, "train").dataset
    np.testing.assert_array_equal(pixels_of(data), np.moveaxis(images, 3, 0))
    assert data.labels.tolist() == (labels % 10).tolist()  # the digit 0 is stored as 10
    whole = (tmp_path / "train_32x32.mat").read_bytes()
    for count in (0, 50, 200, 3000):
        (tmp_path / "train_32x32.mat").write_bytes(whole[:count])
        with pytest.raises(UserError, match="does not hold svhn as published"):
            read("svhn", tmp_path, "train")


@pytest.mark.parametrize("packed", [True, False])
def test_patch_camelyon(tmp_path: Path, packed: bool) -> None:
    images, labels = rng.integers(0, 256, (6, 96, 96, 3), np.uint8), np.array([0, 1, 1, 0, 1, 0], np.uint8)
    for kind, array in (("x", images), ("y", labels.reshape(-1, 1, 1, 1))):
        path = tmp_path / "pcam" / f"camelyonpatch_level_2_split_valid_{kind}.h5"
        path.parent.mkdir(exist_ok=True)
        with h5py.File(path, "w") as file:
            file.create_dataset(kind, data=array, chunks=True, compression="gzip")
        if packed:
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    data, keys, _ = read("patch_camelyon", tmp_path, "validation")
    assert keys == [f"valid_{i}" for i in range(6)]
    np.testing.assert_array_equal(data.labels, labels)
    np.testing.assert_array_equal(data.take(np.array([4, 1])).pixels, images[[4, 1]])
    assert len(load_dataset("patch_camelyon", "val", root=tmp_path, download=False)) == 6


@pytest.mark.parametrize(
    ("name", "folder", "classes", "digits"),
    [("eurosat", "2750", [*EUROSAT], 1), ("resisc45", "NWPU-RESISC45", RESISC45.split(), 3)],
)
def test_class_folders(tmp_path: Path, name: str, folder: str, classes: list[str], digits: int) -> None:
    for label, kind in enumerate(classes):
        for i in (1, 2, 3):
            write(tmp_path / folder / kind / f"{kind}_{i:0{digits}d}.jpg", 5 * label + i)
    data, keys, _ = read(name, tmp_path, "train")
    assert data.classes == tuple(classes)
    assert keys[:2] == [f"{classes[0]}_{classes[0]}_{i:0{digits}d}.jpg" for i in (1, 2)]
    assert values(data) == [5 * label + i for label in range(len(classes)) for i in (1, 2, 3)]
    assert len(load_dataset(name, "test", root=tmp_path, download=False)) == len(classes)
    for file in (tmp_path / folder / classes[3]).iterdir():
        file.unlink()
    with pytest.raises(UserError, match=rf"{len(classes) - 1} classes, expected {len(classes)}"):
        read(name, tmp_path, "train")


@pytest.mark.parametrize("prepared", [".", "btgraham-300"])
def test_diabetic_retinopathy(tmp_path: Path, prepared: str) -> None:
    rows = [(f"{i}_{side}", (i + (side == "left")) % 5) for i in range(4) for side in ("left", "right")]
    home = tmp_path / "diabetic_retinopathy_detection"
    write_lines(home / "trainLabels.csv", ["image,level", *(f"{name},{level}" for name, level in rows)])
    usage = ["Private", "Public"] * 4
    solution = [f"9{name},{level},{use}" for (name, level), use in zip(rows, usage, strict=True)]
    write_lines(home / "retinopathy_solution.csv", ["image,level,Usage", *solution])
    for name, level in rows:
        write(home / prepared / "train" / f"{name}.jpeg", 10 * level)
        write(home / prepared / "test" / f"9{name}.jpeg", 10 * level + 3)
    for split, count, first in (("train", 8, "0_left"), ("validation", 4, "90_right"), ("test", 4, "90_left")):
        data, keys, _ = read("diabetic_retinopathy", tmp_path, split)
        assert (len(keys), keys[0]) == (count, first)
        if split == "train":
            assert data.labels.tolist() == [1, 0, 2, 1, 3, 2, 4, 3]
        if prepared == ".":
            assert data.image(0).shape == (450, 540, 3)  # 8 x 6 pixels scaled to a radius of 300, 90% of it shown
            assert Path(data.path(0)).is_relative_to(home / "btgraham-300")
        else:
            assert values(data) == (10 * data.labels + (0 if split == "train" else 3)).tolist()
    write_lines(home / "retinopathy_solution.csv", ["image,level,Usage", "1_left,5,Public"])
    with pytest.raises(UserError, match="does not hold diabetic_retinopathy as published"):
        read("diabetic_retinopathy", tmp_path, "validation")


def test_every_data_set_by_name(tmp_path: Path) -> None:
    for name, source in SOURCES.items():
        assert (name in DATASETS) == bool(source.classes)
        if source.classes and name != "fashion_mnist":  # which may be in /usr/share
            with pytest.raises(UserError, match=f"{name} needs"):
                load_dataset(name, "train", root=tmp_path, download=False)
            with pytest.raises(UserError, match=rf"{name} has the splits {', '.join(source.sizes)}, not 'extra'"):
                read_published(name, tmp_path, "extra", False)


def eye(height: int, width: int, radius: int) -> np.ndarray:
    """A disc of one color on black, in the middle."""
    down, right = np.ogrid[:height, :width]
    inside = (down - height // 2) ** 2 + (right - width // 2) ** 2 <= radius**2
    return (inside[..., None] * np.array((180, 90, 40))).astype(np.uint8)


@pytest.mark.parametrize(("height", "width", "radius"), [(500, 700, 200), (300, 700, 300)])
def test_an_eye_is_scaled_and_cropped(height: int, width: int, radius: int) -> None:
    done = prepare_eye(eye(height, width, radius))
    # 90% of 300 pixels each way; an eye that is cut off above and below, as many are, is not padded.
    assert done.shape == (540 if height > 300 else round(300 * 300 / 300.5), 540, 3)
    # A uniform disc is its own average: gray, but for the bright rim, 30 pixels inside which it ends.
    assert (done[135:250, 135:405] == 128).all()
    assert height == 300 or (done[0, 0] == 128).all()  # outside the circle


def test_local_average_is_subtracted_and_contrast_is_fourfold() -> None:
    image = eye(601, 601, 300)  # its radius is 300.5: hardly scaled
    image[299:302, 299:302] += 20
    middle = prepare_eye(image)[260:280, 260:280].astype(int)
    assert middle.max() == 128 + 4 * 20  # nine pixels are too few to raise the average of 61 x 61 by a level
    assert (middle[:7] == 128).all()


def test_unreadable_originals_and_folders(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "1_left.jpeg").write_bytes(b"not an image")
    Image.fromarray(eye(40, 40, 15)).save(tmp_path / "test" / "3_left.jpeg")
    for name, message in (("1_left", "not an image"), ("2_left", "No such file")):
        with pytest.raises(ImageError, match=rf"test/{name}.jpeg: {message}"):
            EyeEntry(str(tmp_path / "btgraham-300" / "test" / f"{name}.jpeg")).read()
    (tmp_path / "btgraham-300").write_text("a file is in the way")
    with pytest.raises(ImageError, match="cannot be written"):
        EyeEntry(str(tmp_path / "btgraham-300" / "test" / "3_left.jpeg")).read()


def test_corrupt_idx(tmp_path: Path) -> None:
    whole = bytes([0, 0, 8, 1]) + (20).to_bytes(4, "big") + bytes(20)
    for damaged in (whole[:-1], b"x" + whole[1:], b""):
        (tmp_path / "labels").write_bytes(damaged)
        with pytest.raises(READ_ERRORS):
            read_idx(tmp_path / "labels")


def test_two_processes_map_hdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One finishes before the other."""
    content, replace = rng.integers(0, 256, (9, 4), np.uint8), Path.replace
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = content

    def finish_later(path: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        np.testing.assert_array_equal(read_h5(tmp_path / "a.h5", "x"), content)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", finish_later)
    np.testing.assert_array_equal(read_h5(tmp_path / "a.h5", "x"), content)


def test_corrupt_hdf5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["y"] = np.zeros(5000, np.uint8)
    whole = path.read_bytes()
    for data, name in ((whole, "x"), (b"", "y"), (whole[:100], "y"), (b"x" * 5000, "y")):
        path.write_bytes(data)
        with pytest.raises(READ_ERRORS):
            read_h5(path, name)
    path.unlink()
    (tmp_path / "a.h5.gz").write_bytes(gzip.compress(whole)[:-20])
    with pytest.raises(READ_ERRORS):
        read_h5(path, "y")
    assert not path.exists()
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ValueError, match="h5py is not installed: install vitlab's extra vtab"):
        read_h5(path, "x")
