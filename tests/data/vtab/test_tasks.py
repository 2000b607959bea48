"""VTAB-1k's splits against what the benchmark's own code gives, and both layouts on small imitations."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from image_files import put
from tfds_keys import computed_splits

from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset
from vitlab.data.vtab import readers, sources
from vitlab.data.vtab import tasks as vtab
from vitlab.data.vtab.tasks import GROUPS, TASKS, available, benchmark_order, load_task
from vitlab.errors import UserError

CIFAR10_FIRST = [16399, 1680, 47917, 17307, 27051, 48736, 26263, 1456, 19135, 31598, 12970, 4223, 27152, 49635, 4093]
"""The ids that TFDS's `cifar10` starts with, as tutorials print them; CIFAR-100's keys are the same counter."""
SPLITS_SHA256 = {
    "cifar100": "04ebb3c962eead2e060a559b94efab27ac2382b759139d8593251480e7f51184",
    "svhn": "8df54b113d476219c61c1c53764ae5f39192763bfd05cf12c5805d88c7ab729b",
    "patch_camelyon": "b3d770050c18924b8f7976953f2344c42a2d7b2ae679837a834b3ada7e8d700d",
    "eurosat": "053cad9115ddb1be306ff9c384884a691335ee9a7fce4f03ece25ffcc4994498",
    "resisc45": "65e52bf38d4d72109eda07e7456b374d0e73a51c75247d3bf3697f7118db8aab",
    "clevr": "0638706a226d62903c1a33f800536412921002262ed97f70894fd315a19312df",
    "smallnorb": "47cdd51e6ebcbadc2fa60213522132ca333efadd8373b8cb6d0a8f51390c93f3",
}
"""Of the keys of train800 and val200 as JSON. dSprites, whose keys are a counter as well, takes seconds."""
# Out of the lists of file names that VPT's authors wrote out of TFDS: (train800, val200).
PUBLISHED = {
    "cifar100": ("24144 30855 40929 31336 48880 13739 32160 11148", "13431 9237 17462 32685 9518 27747 41925 5529"),
    "clevr": (
        "CLEVR_train_056632.png CLEVR_train_032163.png CLEVR_train_036167.png CLEVR_train_035038.png",
        "CLEVR_train_035084.png CLEVR_train_029360.png CLEVR_train_004525.png CLEVR_train_024831.png",
    ),
    "eurosat": (
        "HerbaceousVegetation_HerbaceousVegetation_881.jpg AnnualCrop_AnnualCrop_1764.jpg Highway_Highway_1062.jpg",
        "SeaLake_SeaLake_804.jpg Forest_Forest_1554.jpg River_River_2237.jpg Pasture_Pasture_1701.jpg",
    ),
    "patch_camelyon": ("train_206220 train_243269 train_131450 train_7 train_793", ""),
    "resisc45": (
        "basketball_court_basketball_court_144.jpg stadium_stadium_469.jpg overpass_overpass_385.jpg",
        "cloud_cloud_238.jpg roundabout_roundabout_303.jpg ship_ship_398.jpg railway_railway_506.jpg",
    ),
}


def test_the_order_is_that_of_the_benchmark() -> None:
    order = benchmark_order([str(i) for i in range(50_000)], "train")
    assert order[: len(CIFAR10_FIRST)].tolist() == CIFAR10_FIRST
    assert np.array_equal(np.sort(order), np.arange(50_000))
    keys = [f"a/{i}.jpg" for i in range(20)]
    sums = [hashlib.md5(f"test{key}".encode()).hexdigest() for key in keys]
    assert benchmark_order(keys, "test").tolist() == np.argsort(sums).tolist()
    backslashes = [key.replace("/", "\\") for key in keys]
    assert np.array_equal(benchmark_order(backslashes, "test"), benchmark_order(keys, "test"))


@pytest.mark.parametrize("source", SPLITS_SHA256)
def test_splits_of_known_keys(source: str) -> None:
    """They never change, and agree with what others have published."""
    splits = computed_splits(source)
    assert hashlib.sha256(f"{json.dumps(splits, indent=0)}\n".encode()).hexdigest() == SPLITS_SHA256[source]
    assert [len(set(keys)) for keys in splits.values()] == [800, 200]
    for published, keys in zip(PUBLISHED.get(source, ()), splits.values(), strict=False):
        assert set(published.split()) <= set(keys)


def test_the_table_is_the_benchmark() -> None:
    groups = [task.group for task in TASKS.values()]
    assert [groups.count(group) for group in GROUPS] == [7, 4, 8]
    assert {task.source for task in TASKS.values()} == sources.SOURCES.keys() - {"cifar10", "fashion_mnist"}
    assert len({task.folder for task in TASKS.values()}) == len({task.title for task in TASKS.values()}) == 19
    # Table 2 of the VTAB paper: the sizes of the test parts, KITTI's as split since 2020
    sizes = [6084, 10000, 1880, 6149, 3669, 21750, 26032, 32768, 5400, 6300, 42670]
    sizes += [15000, 15000, 22735, 73728, 73728, 711, 12150, 12150]
    assert [task.test_size for task in TASKS.values()] == sizes


KINDS = tuple("abcd")
TOY = sources.Source("nowhere", "none", {"train": 1300}, (), {"all": ["toy.bin"]}, classes=4, access="by hand")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A task `toy` whose set has 1,300 images of train, the last 400 of which test; the splits that were read."""
    calls: list[str] = []

    def read(folder: Path, split: str) -> readers.Published:
        calls.append(split)
        pixels = np.arange(1300, dtype=np.uint16).view(np.uint8).reshape(-1, 1, 2, 1).repeat(3, 3)
        dataset = Dataset("toy", split, KINDS, np.arange(1300, dtype=np.int64) % 4, pixels)
        return readers.Published(dataset, [f"k{i}" for i in range(1300)])

    (tmp_path / "toy.bin").touch()
    monkeypatch.setitem(TASKS, "toy", vtab.Task("Toy", "natural", 4, "toy", "toy", ("train", 600), ("train", 900)))
    monkeypatch.setitem(sources.SOURCES, "toy", TOY)
    monkeypatch.setattr(readers, "toy", read, raising=False)
    return calls


def numbers(dataset: Dataset) -> list[int]:
    """The indices of images of `toy`, from their pixels."""
    assert dataset.pixels is not None
    return (dataset.pixels[:, 0, 0, 0] + 256 * dataset.pixels[:, 0, 1, 0].astype(int)).tolist()


def test_the_parts_of_a_published_set(toy: list[str], tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "train800.txt").write_text("images/1.jpg 1\n")  # not all four lists
    order = sorted(range(1300), key=lambda i: hashlib.md5(f"traink{i}".encode()).hexdigest())
    parts = {split: load_task("toy", split, tmp_path, download=False) for split in vtab.LISTS}
    assert numbers(parts["train"]) == order[:800]
    assert numbers(parts["val"]) == order[600:800]
    assert numbers(parts["trainval"]) == order[:800] + order[600:800]
    assert numbers(parts["test"]) == order[900:]
    assert toy == ["train"] * 4  # trainval reads it once
    for split, part in parts.items():
        assert (part.name, part.split, part.classes) == ("vtab:toy", split, KINDS)
        assert part.labels.tolist() == [i % 4 for i in numbers(part)]
        assert [part.path(i) for i in range(len(part))] == [f"vtab:toy/train[{i}]" for i in numbers(part)]
    assert available("toy", tmp_path) == "published"
    assert set(load_dataset("vtab:toy", "val", root=tmp_path, classes=(2, 0)).classes) == {"c", "a"}


@pytest.mark.usefixtures("toy")
def test_the_same_images_are_excluded_from_every_split(tmp_path: Path) -> None:
    """The parts of this set overlap: 200 images are in train and in val."""
    name, listed = "vtab:toy", tmp_path / "exclude.txt"
    val = load_dataset(name, "val", root=tmp_path)
    listed.write_text("\n".join(val.path(i) for i in range(0, 200, 3)))
    for split in ("train", "trainval"):
        whole = load_dataset(name, split, root=tmp_path, classes=(1, 3))
        left = load_dataset(name, split, root=tmp_path, exclude=listed, classes=(1, 3))
        assert numbers(left) == [i for i in numbers(whole) if i not in numbers(val)[::3]]
        assert len(left) < len(whole)


def test_other_data_is_refused(toy: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, split, message in (("toi", "train", "the nearest: toy"), ("toy", "extra", "not 'extra'")):
        with pytest.raises(UserError, match=message):
            load_task(name, split, tmp_path)
    monkeypatch.setitem(sources.SOURCES, "toy", TOY._replace(sizes={"train": 1301}))
    with pytest.raises(UserError, match="1300 images and the published one 1301"):
        load_task("toy", "train", tmp_path)
    (tmp_path / "toy.bin").unlink()
    with pytest.raises(UserError, match=rf"toy needs toy.bin .*{tmp_path}"):
        load_task("toy", "train", tmp_path)
    assert available("toy", tmp_path) == "-"


def write_lists(folder: Path, classes: int) -> None:
    """A task as PyTorch's users have it, with one image; 30 in test."""
    for i in range(2):
        put(folder / "images" / f"{i}.png", i)
    for split, count in (("train", 800), ("val", 200), ("trainval", 1000), ("test", 30)):
        lines = [f"images/{i % 2}.png {i % classes}\n" for i in range(count)]
        (folder / vtab.LISTS[split]).write_text("".join(lines))


@pytest.mark.parametrize("below", ["", "vtab-1k"])
def test_lists_have_precedence(below: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_lists(tmp_path / below / "smallnorb_azi", 18)
    train = load_task("smallnorb_azimuth", "train", tmp_path)
    test = load_dataset("vtab:smallnorb_azimuth", "test", root=tmp_path)
    assert (len(train), len(train.classes), train.name) == (800, 18, "vtab:smallnorb_azimuth")
    assert train.labels[:20].tolist() == [*range(18), 0, 1]
    assert test.image(7)[0, 0].tolist() == [1, 1, 1]
    assert "has 30 images and the benchmark's test part 12150" in caplog.text
    assert available("smallnorb_azimuth", tmp_path) == "lists"


def test_invalid_lists(tmp_path: Path) -> None:
    write_lists(tmp_path / "dtd", 47)
    for text, message in (
        ("images/1.png 0\n" * 799, "799 lines, not the 800"),
        ("images/1.png ²\n" * 800, "line 1: .* label below 47"),
        ("images/1.png\n" * 800, "line 1: .* label below 47"),
        ("images/1.png 46\nimages/1.png 47\n" + "images/1.png 1\n" * 798, "line 2: .* label below 47"),
        ("images/b.png 0\n" * 800, r"images/b\.png, which is missing"),
    ):
        (tmp_path / "dtd" / "train800.txt").write_text(text)
        with pytest.raises(UserError, match=message):
            load_task("dtd", "train", tmp_path)
