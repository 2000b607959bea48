"""Each set from a small imitation of its published files: images, labels, classes, keys, splits, errors."""

import gzip
import logging
import os
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np
import pytest
import scipy.io
from PIL import Image
from tfds_keys import RESISC45, known_keys
from torchvision.datasets import SVHN

from vitlab.data.dataset import Dataset
from vitlab.data.registry import DATASETS, load_dataset
from vitlab.data.vtab import readers, sources
from vitlab.data.vtab.readers import Published
from vitlab.data.vtab.sources import SOURCES
from vitlab.data.vtab.tasks import SPLITS_SHA256

rng = np.random.default_rng(0)


def write(path: Path, value: int = 0) -> None:
    """An even gray image, which survives the JPEG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 6), (value % 256,) * 3).save(path, "JPEG")


def values(data: Dataset) -> list[int]:
    """The gray values of all images."""
    return [int(data.image(i)[0, 0, 0]) for i in range(len(data))]


def text(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def check(found: Published, name: str, split: str) -> Dataset:
    """What holds for all: lengths, names, the number of classes, the keys where they are known without the data."""
    data = found.dataset
    assert (data.name, data.split, len(data.classes)) == (name, split, SOURCES[name].classes)
    assert len(found.keys) == len(data) == len(set(found.keys))
    assert name not in SPLITS_SHA256 or set(found.keys) <= set(known_keys(name, split))
    assert data.labels.dtype == np.int64
    assert data.pixels is not None or len(data.entries) == len(data)
    return data


@pytest.fixture(autouse=True)
def _without_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="vitlab.data.vtab.readers")  # that the imitations are small


# ------------------------------------------------------------------------------------------------ natural

CALTECH = ["BACKGROUND_Google", "Faces", "Leopards", *(f"class_{i:02d}" for i in range(98)), "yin_yang"]


def write_caltech(folder: Path) -> None:
    for name in CALTECH:
        count = 40 if name == "Faces" else 31
        (folder / name).mkdir(parents=True)
        for i in range(1, count + 1):
            (folder / name / f"image_{i:04d}.jpg").touch()
    write(folder / "Faces" / "image_0007.jpg", 77)
    (folder / "BACKGROUND_Google" / "tmp").touch()


@pytest.mark.parametrize("place", [".", "caltech101/101_ObjectCategories", "101_ObjectCategories"])
def test_caltech101(tmp_path: Path, place: str) -> None:
    write_caltech(tmp_path / place)
    train, test = (readers.caltech101(tmp_path, split, False) for split in ("train", "test"))
    for found, split in ((train, "train"), (test, "test")):
        check(found, "caltech101", split)
    assert not set(train.keys) & set(test.keys)
    assert len(train.keys) + len(test.keys) == 101 * 31 + 40  # `tmp` is in neither
    counts = np.bincount(train.dataset.labels)
    background = train.dataset.classes.index("background_google")
    assert counts[background] in (29, 30)  # 29 where the draw took `tmp`
    assert (np.delete(counts, background) == 30).all()
    assert train.dataset.classes == tuple(sorted(name.lower() for name in CALTECH))
    # The draw is NumPy's legacy one, seeded 1234, class after class in the order of the names.
    draws = np.random.RandomState(1234)
    names = [f"image_{i:04d}.jpg" for i in range(1, 32)]
    first = {f"BACKGROUND_Google/{name}" for name in draws.choice([*names, "tmp"], 30, replace=False)}
    assert {key for key in train.keys if key.startswith("BACK")} == first - {"BACKGROUND_Google/tmp"}
    second = set(draws.choice([f"image_{i:04d}.jpg" for i in range(1, 41)], 30, replace=False).tolist())
    assert {key.removeprefix("Faces/") for key in train.keys if key.startswith("Faces/")} == second
    home = train if "Faces/image_0007.jpg" in train.keys else test
    at = home.keys.index("Faces/image_0007.jpg")
    assert home.dataset.classes[home.dataset.labels[at]] == "faces"
    assert home.dataset.image(at)[0, 0, 0] == 77


def test_damaged_caltech101(tmp_path: Path) -> None:
    write_caltech(tmp_path)
    for path in sorted((tmp_path / "Leopards").iterdir())[:2]:
        path.unlink()
    with pytest.raises(ValueError, match=r"Leopards has 29 files, fewer than the 30"):
        readers.caltech101(tmp_path, "train", False)
    for path in (tmp_path / "Leopards").iterdir():
        path.unlink()
    (tmp_path / "Leopards").rmdir()
    with pytest.raises(ValueError, match=r"has 101 class folders, not the 102 of caltech101"):
        readers.caltech101(tmp_path, "train", False)


def test_cifar100(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for file, count in (("train.bin", 200), ("test.bin", 100)):
        records = rng.integers(0, 256, (count, 3074), np.uint8)
        records[:, 1] = np.arange(count) % 100
        (folder / file).write_bytes(records.tobytes())
    found = readers.cifar100(tmp_path, "train", False)
    assert check(found, "cifar100", "train").labels.tolist() == [*range(100)] * 2
    assert found.keys[:3] == ["0", "1", "2"]
    assert found.dataset.classes[:2] == ("apple", "aquarium_fish")
    with pytest.raises(ValueError, match="cifar100 has the splits train, test, not 'validation'"):
        readers.cifar100(tmp_path, "validation", False)


def write_dtd(folder: Path) -> None:
    names = sorted(["waffled", "banded", *(f"texture{i}" for i in range(45))])
    for number, part in enumerate(("train1", "val1", "test1")):
        lines = [f"{name}/{name}_{number:04d}.jpg" for name in names]
        text(folder / "labels" / f"{part}.txt", lines)
        for i, line in enumerate(lines):
            write(folder / "images" / line, 5 * i + number)


@pytest.mark.parametrize("place", [".", "dtd", "dtd/dtd"])
def test_dtd(tmp_path: Path, place: str) -> None:
    write_dtd(tmp_path / place)
    for number, split in enumerate(("train", "validation", "test")):
        found = readers.dtd(tmp_path, split, False)
        data = check(found, "dtd", split)
        assert found.keys[0] == f"banded/banded_{number:04d}.jpg"
        assert data.labels.tolist() == list(range(47))
        assert (data.classes[0], data.classes[46]) == ("banded", "waffled")
        assert values(data) == [5 * i + number for i in range(47)]


def test_damaged_dtd(tmp_path: Path) -> None:
    write_dtd(tmp_path)
    (tmp_path / "images" / "banded" / "banded_0000.jpg").unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of the 47 images that .*train1.txt lists, first .*banded_0000.jpg"):
        readers.dtd(tmp_path, "train", False)
    text(tmp_path / "labels" / "val1.txt", ["banded/banded_0001.jpg"])
    with pytest.raises(ValueError, match=r"val1.txt has 1 classes, not the 47 of dtd"):
        readers.dtd(tmp_path, "validation", False)
    text(tmp_path / "labels" / "val1.txt", ["banded_0001.jpg"])
    with pytest.raises(ValueError, match=r"val1.txt has the line 'banded_0001.jpg', expected CLASS/IMAGE.jpg"):
        readers.dtd(tmp_path, "validation", False)
    (tmp_path / "labels" / "val1.txt").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ValueError, match=r"val1.txt is corrupt"):
        readers.dtd(tmp_path, "validation", False)
    (tmp_path / "labels" / "test1.txt").unlink()
    os.mkfifo(tmp_path / "labels" / "test1.txt")
    with pytest.raises(ValueError, match=r"test1.txt is corrupt .* is a named pipe; only regular files"):
        readers.dtd(tmp_path, "test", False)
    (tmp_path / "labels" / "test1.txt").unlink()
    with pytest.raises(ValueError, match=r"dtd needs labels/test1.txt .*vgg/data/dtd; license: for research"):
        readers.dtd(tmp_path, "train", False)


def write_flowers(folder: Path) -> None:
    labels = np.arange(306) % 102 + 1
    order = rng.permutation(306) + 1
    folder.mkdir(parents=True, exist_ok=True)
    scipy.io.savemat(folder / "imagelabels.mat", {"labels": labels[None].astype(np.uint8)})
    parts = {"trnid": order[:50], "valid": order[50:90], "tstid": order[90:]}
    scipy.io.savemat(folder / "setid.mat", {name: part[None].astype(np.uint16) for name, part in parts.items()})
    for number in range(1, 307):
        write(folder / "jpg" / f"image_{number:05d}.jpg", number)


@pytest.mark.parametrize("place", [".", "flowers-102"])
def test_flowers102(tmp_path: Path, place: str) -> None:
    write_flowers(tmp_path / place)
    parts = {split: readers.flowers102(tmp_path, split, False) for split in ("train", "validation", "test")}
    assert [len(found.keys) for found in parts.values()] == [50, 40, 216]
    assert len({key for found in parts.values() for key in found.keys}) == 306
    for split, found in parts.items():
        data = check(found, "flowers102", split)
        numbers = np.array([int(key[6:11]) for key in found.keys])
        assert found.keys[0] == f"image_{numbers[0]:05d}.jpg"
        np.testing.assert_array_equal(data.labels, (numbers - 1) % 102)
        assert values(data) == (numbers % 256).tolist()
    classes = parts["test"].dataset.classes
    assert (classes[0], classes[73], classes[101]) == ("pink primrose", "rose", "blackberry lily")


def test_damaged_flowers102(tmp_path: Path) -> None:
    write_flowers(tmp_path)
    scipy.io.savemat(tmp_path / "imagelabels.mat", {"labels": np.arange(40)[None]})
    with pytest.raises(ValueError, match=r"setid.mat names images that .*imagelabels.mat, with 40, has no label of"):
        readers.flowers102(tmp_path, "test", False)
    scipy.io.savemat(tmp_path / "imagelabels.mat", {"labels": np.arange(306)[None]})
    with pytest.raises(ValueError, match=r"imagelabels.mat has labels beyond 1 to 102"):
        readers.flowers102(tmp_path, "test", False)
    (tmp_path / "setid.mat").write_bytes(b"<html>not found</html>" * 20)
    with pytest.raises(ValueError, match=r"setid.mat is corrupt"):
        readers.flowers102(tmp_path, "test", False)


BREEDS = ["Abyssinian", "american_bulldog", *(f"breed_{i}" for i in range(34)), "yorkshire_terrier"]


def write_pets(folder: Path) -> None:
    for file, count in (("trainval", 10), ("test", 2)):
        rows = [(name, label, i) for label, name in enumerate(BREEDS, 1) for i in range(count)]
        text(folder / "annotations" / f"{file}.txt", [f"{name}_{file}{i} {label} 1 1" for name, label, i in rows])
        for name, label, i in rows:
            write(folder / "images" / f"{name}_{file}{i}.jpg", label)


@pytest.mark.parametrize("place", [".", "oxford-iiit-pet", "pets"])
def test_pets(tmp_path: Path, place: str) -> None:
    write_pets(tmp_path / place)
    for split, file, count in (("train", "trainval", 370), ("test", "test", 74)):
        found = readers.pets(tmp_path, split, False)
        data = check(found, "pets", split)
        assert (len(data), found.keys[0]) == (count, f"Abyssinian_{file}0.jpg")
        assert data.classes == tuple(BREEDS)  # by their numbers, not by the alphabet
        np.testing.assert_array_equal(data.labels + 1, values(data))


def test_pets_as_a_data_set_like_others(tmp_path: Path) -> None:
    write_pets(tmp_path)
    sizes = {split: len(load_dataset("pets", split, root=tmp_path, download=False)) for split in ("train", "val")}
    assert sizes == {"train": 333, "val": 37}  # 10 % of each breed
    val = load_dataset("pets", "val", root=tmp_path, download=False)
    assert (val.name, val.split) == ("pets", "val")
    assert np.bincount(val.labels).tolist() == [1] * 37
    assert len(load_dataset("pets", "trainval", root=tmp_path, download=False)) == 370
    assert len(load_dataset("pets", "test", root=tmp_path, download=False)) == 74


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Abyssinian_1 1 1", "has the line 'Abyssinian_1 1 1'"),
        ("Abyssinian_1 one 1 1", "has the line 'Abyssinian_1 one 1 1'"),
        (f"Abyssinian_1 {'9' * 5000} 1 1", "has the line 'Abyssinian_1 9999"),
        ("Abyssinian_1 ² 1 1", "has the line 'Abyssinian_1 ² 1 1'"),
        ("Abyssinian_1 38 1 1", "does not give each of 37 breeds its own number"),
        ("Abyssinian_1 2 1 1", "does not give each of 37 breeds its own number"),
    ],
)
def test_damaged_pets(tmp_path: Path, line: str, message: str) -> None:
    write_pets(tmp_path)
    with (tmp_path / "annotations" / "test.txt").open("a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=f"test.txt {message}"):
        readers.pets(tmp_path, "test", False)


def write_sun(folder: Path) -> None:
    names = ["/a/abbey", "/a/apartment_building/outdoor", *(f"/b/place{i:03d}" for i in range(394)), "/y/youth_hostel"]
    text(folder / "ClassName.txt", names)
    for short, count in (("tr", 4), ("va", 2), ("te", 2)):
        lines = [f"{names[i]}/sun_{short}{i}.jpg" for i in (0, 132, 264, 396)[:count]]
        text(folder.parent / f"sun397_tfds_{short}.txt", lines)
        for line in lines:
            write(folder / line[1:], len(line))


def test_sun397(tmp_path: Path) -> None:
    write_sun(tmp_path / "SUN397")
    for split, count in (("train", 4), ("validation", 2), ("test", 2)):
        found = readers.sun397(tmp_path, split, False)
        data = check(found, "sun397", split)
        assert data.labels.tolist() == [0, 132, 264, 396][:count]
        assert values(data) == [len(key) for key in found.keys]
    assert found.keys[0] == "/a/abbey/sun_te0.jpg"
    assert data.classes[:2] == ("abbey", "apartment_building/outdoor")
    text(tmp_path / "sun397_tfds_te.txt", ["/a/abbot/sun_x.jpg"])
    with pytest.raises(ValueError, match=r"sun397_tfds_te.txt has 397 classes and others \(\['abbot'\]\)"):
        readers.sun397(tmp_path, "test", False)


def test_the_lists_of_sun397_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_sun(tmp_path / "SUN397")
    (tmp_path / "sun397_tfds_va.txt").rename(tmp_path / "served")
    with pytest.raises(ValueError, match=r"sun397 needs TFDS's list .*image_classification/sun397_tfds_va.txt; looked"):
        readers.sun397(tmp_path, "validation", False)

    def serve(url: str, target: Path, digest: str) -> None:
        assert url.endswith("/sun397_tfds_va.txt")
        assert digest == "md5:cf69489da6db30ebc6e36730a2fd499b"
        (tmp_path / "served").rename(target)

    monkeypatch.setattr(readers, "download_file", serve)
    assert len(readers.sun397(tmp_path, "validation", True).keys) == 2


@pytest.mark.parametrize("place", [".", "svhn"])
def test_svhn(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = rng.integers(0, 256, (32, 32, 3, 20), np.uint8), np.arange(20) % 10 + 1
    (tmp_path / place).mkdir(exist_ok=True)
    scipy.io.savemat(tmp_path / place / "test_32x32.mat", {"X": images, "y": labels[:, None].astype(np.uint8)})
    found = readers.svhn(tmp_path, "test", False)
    data = check(found, "svhn", "test")
    assert found.keys == [str(i) for i in range(20)]
    assert data.classes == tuple("0123456789")
    assert data.labels[:11].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    np.testing.assert_array_equal(data.image(3), images[..., 3])
    with pytest.raises(ValueError, match=r"svhn needs train_32x32.mat \(from http://ufldl.*non-commercial use"):
        readers.svhn(tmp_path, "train", False)

    def serve(url: str, target: Path, digest: str) -> None:
        assert [digest] == [f"md5:{md5}" for other, _, md5 in SVHN.split_list.values() if other == url]
        target.parent.mkdir(exist_ok=True)
        (tmp_path / place / "test_32x32.mat").rename(target)

    monkeypatch.setattr(sources, "download_file", serve)
    assert len(readers.svhn(tmp_path, "train", True).keys) == 20
    assert len(load_dataset("svhn", "val", root=tmp_path)) == 10  # one of each digit


# -------------------------------------------------------------------------------------------- specialized


def write_camelyon(folder: Path, split: str, packed: bool) -> tuple[np.ndarray, np.ndarray]:
    images, labels = rng.integers(0, 256, (6, 96, 96, 3), np.uint8), np.array([0, 1, 1, 0, 1, 0], np.uint8)
    folder.mkdir(exist_ok=True)
    for what, array in (("x", images), ("y", labels.reshape(-1, 1, 1, 1))):
        path = folder / f"camelyonpatch_level_2_split_{split}_{what}.h5"
        with h5py.File(path, "w") as file:
            file.create_dataset(what, data=array, chunks=True, compression="gzip")
        if packed:
            path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
    return images, labels


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", [".", "pcam"])
def test_patch_camelyon(tmp_path: Path, place: str, packed: bool) -> None:
    for split, short in (("train", "train"), ("validation", "valid"), ("test", "test")):
        images, labels = write_camelyon(tmp_path / place, short, packed)
        found = readers.patch_camelyon(tmp_path, split, False)
        data = check(found, "patch_camelyon", split)
        assert found.keys == [f"{short}_{i}" for i in range(6)]
        np.testing.assert_array_equal(data.labels, labels)
        np.testing.assert_array_equal(data.take(np.array([4, 1])).pixels, images[[4, 1]])
    assert len(load_dataset("patch_camelyon", "val", root=tmp_path, download=False)) == 6


def test_missing_and_other_patch_camelyon(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"needs camelyonpatch_level_2_split_test_x.h5 or .*_x.h5.gz and .*_y.h5.gz .*zenodo.*CC0"
    ):
        readers.patch_camelyon(tmp_path, "test", False)
    write_camelyon(tmp_path, "test", False)
    with h5py.File(tmp_path / "camelyonpatch_level_2_split_test_y.h5", "w") as file:
        file["y"] = np.zeros((5, 1, 1, 1))
    with pytest.raises(ValueError, match=r"is not PatchCamelyon's: x \(6, 96, 96, 3\), y \(5, 1, 1, 1\)"):
        readers.patch_camelyon(tmp_path, "test", False)


def write_classes(folder: Path, names: Iterable[str], count: int, digits: int = 1) -> None:
    for label, name in enumerate(names):
        for i in range(1, count + 1):
            write(folder / name / f"{name}_{i:0{digits}d}.jpg", 5 * label + i)


EUROSAT = "AnnualCrop Forest HerbaceousVegetation Highway Industrial Pasture PermanentCrop Residential River SeaLake"


@pytest.mark.parametrize("place", [".", "eurosat/2750", "2750", "EuroSAT_RGB"])
def test_eurosat(tmp_path: Path, place: str) -> None:
    write_classes(tmp_path / place, EUROSAT.split(), 3)
    found = readers.eurosat(tmp_path, "train", False)
    data = check(found, "eurosat", "train")
    assert data.classes == tuple(EUROSAT.split())
    assert found.keys[:2] == ["AnnualCrop_AnnualCrop_1.jpg", "AnnualCrop_AnnualCrop_2.jpg"]
    assert values(data) == [5 * label + i for label in range(10) for i in (1, 2, 3)]
    assert np.bincount(data.labels).tolist() == [3] * 10
    parts = [load_dataset("eurosat", split, root=tmp_path, download=False) for split in ("train", "val", "test")]
    assert [len(part) for part in parts] == [10, 10, 10]
    assert parts[0].pixels is not None  # small images of one size are held in memory


def test_resisc45(tmp_path: Path) -> None:
    names = RESISC45.split()
    write_classes(tmp_path / "NWPU-RESISC45", names, 2, digits=3)
    found = readers.resisc45(tmp_path, "train", False)
    data = check(found, "resisc45", "train")
    assert data.classes == tuple(names)
    assert (found.keys[0], found.keys[-1]) == ("airplane_airplane_001.jpg", "wetland_wetland_002.jpg")
    assert values(data)[:4] == [1, 2, 6, 7]
    for file in (tmp_path / "NWPU-RESISC45" / "church").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"resisc45 has 44 classes, not the 45"):
        readers.resisc45(tmp_path, "train", False)
    (tmp_path / "NWPU-RESISC45" / "church").rmdir()
    with pytest.raises(
        ValueError, match=r"NWPU-RESISC45 has 44 class folders, not the 45 of resisc45: unpack it again"
    ):
        readers.resisc45(tmp_path, "train", False)


def write_eyes(folder: Path, place: str = ".") -> None:
    rows = [(f"{i}_{side}", (i + (side == "left")) % 5) for i in range(4) for side in ("left", "right")]
    text(folder / "trainLabels.csv", ["image,level", *(f"{name},{level}" for name, level in rows)])
    usage = ["Private", "Public"] * 4
    solution = [f"9{name},{level},{use}" for (name, level), use in zip(rows, usage, strict=True)]
    text(folder / "retinopathy_solution.csv", ["image,level,Usage", *solution])
    for name, level in rows:
        write(folder / place / "train" / f"{name}.jpeg", 10 * level)
        write(folder / place / "test" / f"9{name}.jpeg", 10 * level + 3)


@pytest.mark.parametrize("place", [".", "diabetic_retinopathy_detection"])
def test_diabetic_retinopathy(tmp_path: Path, place: str) -> None:
    write_eyes(tmp_path / place)
    for split, count, first in (("train", 8, "0_left"), ("validation", 4, "90_right"), ("test", 4, "90_left")):
        found = readers.diabetic_retinopathy(tmp_path, split, False)
        check(found, "diabetic_retinopathy", split)
        assert (len(found.keys), found.keys[0]) == (count, first)
    train = readers.diabetic_retinopathy(tmp_path, "train", False).dataset
    assert train.labels.tolist() == [1, 0, 2, 1, 3, 2, 4, 3]
    assert train.image(0).shape == (450, 540, 3)  # 8 x 6 pixels scaled to a radius of 300, 90 % of it kept
    assert Path(train.path(0)) == tmp_path / place / "btgraham-300" / "train" / "0_left.jpeg"
    assert Path(train.path(0)).is_file()


def test_prepared_diabetic_retinopathy(tmp_path: Path) -> None:
    write_eyes(tmp_path, "btgraham-300")
    assert values(readers.diabetic_retinopathy(tmp_path, "train", False).dataset) == [10, 0, 20, 10, 30, 20, 40, 30]
    assert values(readers.diabetic_retinopathy(tmp_path, "test", False).dataset) == [13, 23, 33, 43]
    (tmp_path / "btgraham-300" / "test" / "91_right.jpeg").unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of the 4 images that .*solution.csv lists, first .*test/91_right"):
        readers.diabetic_retinopathy(tmp_path, "validation", False)


def test_missing_and_damaged_diabetic_retinopathy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainLabels.csv and train or .*kaggle.*rules.*after consent .* by hand"):
        readers.diabetic_retinopathy(tmp_path, "train", True)
    write_eyes(tmp_path)
    for lines in (["image,level,Usage"], ["image,level"], ["image,level,Usage", "1_left,5,Public"], ["", ",1,Public"]):
        text(tmp_path / "retinopathy_solution.csv", lines)
        with pytest.raises(ValueError, match=r"solution.csv is not a table of image,level,Usage with levels 0 to 4"):
            readers.diabetic_retinopathy(tmp_path, "validation", False)


# ---------------------------------------------------------------------------------------------------- all


def test_every_set_has_a_reader_and_is_asked_for_by_name(tmp_path: Path) -> None:
    for name, source in SOURCES.items():
        if not source.classes:
            assert name not in DATASETS
            continue
        with pytest.raises(ValueError, match=rf"{name} (needs|has the splits)"):
            getattr(readers, name)(tmp_path, "train", False)
        with pytest.raises(ValueError, match=rf"{name} has the splits {', '.join(source.sizes)}, not 'extra'"):
            getattr(readers, name)(tmp_path, "extra", False)
        with pytest.raises(ValueError, match=f"{name} needs"):
            load_dataset(name, "train", root=tmp_path, download=False)
        assert DATASETS[name].num_classes == source.classes


def test_a_set_that_is_not_whole_is_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="vitlab.data.vtab.readers")
    write_classes(tmp_path, EUROSAT.split(), 1)
    readers.eurosat(tmp_path, "train", False)
    assert "eurosat: train has 10 images here, and 27000 as published" in caplog.text
