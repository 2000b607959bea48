"""VTAB-1k's splits against what the benchmark's own code gives, and both layouts on small imitations."""

import hashlib
import json
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tfds_keys import computed_splits, known_keys

from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset
from vitlab.data.vtab import sources
from vitlab.data.vtab import tasks as vtab
from vitlab.data.vtab.tasks import GROUPS, SPLITS_SHA256, TASKS, benchmark_order, load_task, stored_splits

CIFAR10_FIRST = [16399, 1680, 47917, 17307, 27051, 48736, 26263, 1456, 19135, 31598, 12970, 4223, 27152, 49635, 4093]
"""The ids that TFDS's `cifar10` starts with, as tutorials print them; CIFAR-100's keys are the same counter."""

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


# --------------------------------------------------------------------------------------------------- splits


def test_the_order_is_that_of_the_benchmark() -> None:
    order = benchmark_order([str(i) for i in range(50_000)], "train")
    assert order[: len(CIFAR10_FIRST)].tolist() == CIFAR10_FIRST
    assert np.array_equal(np.sort(order), np.arange(50_000))


def test_the_salt_and_slashes_count() -> None:
    keys = [f"a/{i}.jpg" for i in range(20)]
    sums = [hashlib.md5(f"test{key}".encode()).hexdigest() for key in keys]
    assert benchmark_order(keys, "test").tolist() == np.argsort(sums).tolist()
    assert benchmark_order(keys, "test").tolist() != benchmark_order(keys, "train").tolist()
    assert np.array_equal(
        benchmark_order([key.replace("/", "\\") for key in keys], "test"), benchmark_order(keys, "test")
    )


@pytest.mark.parametrize("source", SPLITS_SHA256)
def test_the_stored_splits_are_the_computed_ones(source: str) -> None:
    stored = stored_splits(source)
    assert stored == computed_splits(source)
    assert [len(set(keys)) for keys in stored.values()] == [800, 200]
    assert not set(stored["train800"]) & set(stored["val200"]) or source == "smallnorb"  # two sets with equal counters


@pytest.mark.parametrize("source", SPLITS_SHA256)
def test_known_keys_are_as_many_as_the_images(source: str) -> None:
    """That they are those of the readers is a matter of `test_published.py` and `test_structured.py`."""
    for part, size in sources.SOURCES[source].sizes.items():
        keys = known_keys(source, part)
        assert len(set(keys)) == len(keys) == size


@pytest.mark.parametrize("source", PUBLISHED)
def test_published_lists_agree(source: str) -> None:
    train, val = (names.split() for names in PUBLISHED[source])
    stored = stored_splits(source)
    assert set(train) <= set(stored["train800"])
    assert set(val) <= set(stored["val200"])


def test_every_stored_file_is_known() -> None:
    folder = Path(vtab.__file__).parent / "splits"
    assert {path.stem for path in folder.iterdir()} == set(SPLITS_SHA256)


def test_a_changed_split_is_refused(tmp_path: Path) -> None:
    keys = stored_splits("svhn")
    keys["train800"][3] = "0"
    (tmp_path / "svhn.json").write_text(json.dumps(keys, indent=0) + "\n")
    with pytest.raises(ValueError, match=r"svhn\.json has the SHA-256 .*, expected 8df54b"):
        stored_splits("svhn", tmp_path)


# ---------------------------------------------------------------------------------------------------- table


def test_the_table_is_the_benchmark() -> None:
    groups = [task.group for task in TASKS.values()]
    assert [groups.count(group) for group in GROUPS] == [7, 4, 8]
    assert {task.source for task in TASKS.values()} == set(sources.SOURCES)
    assert {task.origin.access for task in TASKS.values()} == {"automatic", "by hand", "license"}
    assert len({task.folder for task in TASKS.values()}) == len({task.csv for task in TASKS.values()}) == 19
    # Table 2 of the VTAB paper: the sizes of the test parts, KITTI's as split since 2020
    sizes = [6084, 10000, 1880, 6149, 3669, 21750, 26032, 32768, 5400, 6300, 42670,
             15000, 15000, 22735, 73728, 73728, 711, 12150, 12150]  # fmt: skip
    assert [task.test_size for task in TASKS.values()] == sizes


@pytest.mark.parametrize("name", TASKS)
def test_the_parts_do_not_overlap(name: str) -> None:
    task, sizes = TASKS[name], TASKS[name].origin.sizes
    parts = {
        "train": ("train", 0, 800),
        "val": (*task.val, task.val[1] + 200),
        "test": (*task.test, sizes[task.test[0]]),
    }
    taken = [(split, i) for split, start, stop in parts.values() for i in range(start, stop)]
    assert len(taken) == len(set(taken)) == 1000 + task.test_size
    assert all(stop <= sizes[split] for split, _, stop in parts.values())


# ------------------------------------------------------------------------------------------- published sets

KINDS = tuple("abcd")
TOY = sources.Source("nowhere", "none", {"train": 1300}, (), {}, classes=4, access="by hand")


@pytest.fixture
def imitation(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """A task `toy` whose set has 1,300 images of train, the last 400 of which test; what was read of it."""
    calls: list[tuple[str, bool]] = []

    def read(root: Path, split: str, download: bool) -> SimpleNamespace:
        calls.append((split, download))
        if not (root / "toy.bin").exists():
            raise ValueError(f"toy needs toy.bin; looked in {root}")
        pixels = np.arange(1300, dtype=np.uint16).view(np.uint8).reshape(-1, 1, 2, 1).repeat(3, 3)
        dataset = Dataset("toy", split, KINDS, np.arange(1300, dtype=np.int64) % 4, pixels)
        return SimpleNamespace(dataset=dataset, keys=[f"k{i}" for i in range(1300)])

    toy = vtab.Task("Toy", "natural", 4, "toy", "toy", ("train", 600), ("train", 900))
    monkeypatch.setitem(TASKS, "toy", toy)
    monkeypatch.setitem(sources.SOURCES, "toy", TOY)
    monkeypatch.setattr(vtab, "_reader", lambda name, task: read)
    return calls


def numbers(dataset: Dataset) -> list[int]:
    """Which images of the imitation these are, from their pixels."""
    assert dataset.pixels is not None
    return (dataset.pixels[:, 0, 0, 0] + 256 * dataset.pixels[:, 0, 1, 0].astype(int)).tolist()


def test_the_parts_of_a_published_set(imitation: list[tuple[str, bool]], tmp_path: Path) -> None:
    (tmp_path / "toy.bin").touch()
    order = sorted(range(1300), key=lambda i: hashlib.md5(f"traink{i}".encode()).hexdigest())
    parts = {split: load_task("toy", split, tmp_path, download=False) for split in vtab.LISTS}
    assert numbers(parts["train"]) == order[:800]
    assert numbers(parts["val"]) == order[600:800]
    assert numbers(parts["trainval"]) == order[:800] + order[600:800]
    assert numbers(parts["test"]) == order[900:]
    for split, part in parts.items():
        assert (part.name, part.split, part.classes) == ("vtab:toy", split, KINDS)
        assert part.labels.tolist() == [i % 4 for i in numbers(part)]
    assert imitation == [("train", False)] * 4  # once for each part


@pytest.mark.parametrize("stray", ["train.txt", "train800.txt", "test.txt"])
def test_a_stray_list_does_not_hide_a_published_set(imitation: list, tmp_path: Path, stray: str) -> None:
    (tmp_path / "toy.bin").touch()
    expected = {split: numbers(load_task("toy", split, tmp_path)) for split in vtab.LISTS}
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / stray).write_text("images/1.jpg 1\n")
    assert {split: numbers(load_task("toy", split, tmp_path)) for split in vtab.LISTS} == expected
    assert vtab.found("toy", tmp_path) == "published"


def test_by_name(imitation: list[tuple[str, bool]], tmp_path: Path) -> None:
    (tmp_path / "toy.bin").touch()
    part = load_dataset("vtab:toy", "val", root=tmp_path, classes=(2, 0))
    assert set(part.classes) == {"c", "a"}
    assert imitation == [("train", True)]


def test_stored_keys_are_what_is_taken(imitation: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.bin").touch()
    monkeypatch.setitem(SPLITS_SHA256, "toy", "")
    monkeypatch.setattr(vtab, "stored_splits", lambda source: {"train800": ["k7", "k3"], "val200": ["k9"]})
    assert numbers(load_task("toy", "trainval", tmp_path)) == [7, 3, 9]
    monkeypatch.setattr(vtab, "stored_splits", lambda source: {"train800": ["k7", "K3"], "val200": ["k9"]})
    with pytest.raises(ValueError, match="lacks the train image 'K3'; get the data set again"):
        load_task("toy", "train", tmp_path)


def test_a_set_with_other_images_is_refused(imitation: list, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy.bin").touch()
    monkeypatch.setitem(sources.SOURCES, "toy", TOY._replace(sizes={"train": 1301}))
    with pytest.raises(ValueError, match="train part has 1300 images and the published one 1301; get it again, by"):
        load_task("toy", "train", tmp_path)


def test_missing_data_is_named(imitation: list, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(f"toy needs toy.bin; looked in {tmp_path}")):
        load_task("toy", "train", tmp_path)


@pytest.mark.parametrize(
    ("name", "split", "said"),
    [
        ("cifar", "train", "unknown VTAB task 'cifar'; the nearest: cifar100"),
        ("svhn", "extra", "must be one of train, val, trainval, test, not 'extra'"),
    ],
)
def test_what_there_is_not(name: str, split: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        load_task(name, split, tmp_path)


@pytest.mark.parametrize("name", TASKS)
def test_every_task_has_its_reader(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"."):  # an empty folder: the reader says what it lacks
        load_task(name, "train", tmp_path, download=False)


# ---------------------------------------------------------------------------------------------------- lists


def write_lists(folder: Path, classes: int, counts: dict[str, int]) -> None:
    """A task as PyTorch's users have it, every image of one color: its place in its list."""
    for number, (split, count) in enumerate(counts.items()):
        lines = []
        for i in range(count):
            path = folder / "images" / split / f"{i:06d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                Image.new("RGB", (2, 2), (i % 256, i // 256, number)).save(path, compress_level=0)
            lines.append(f"images/{split}/{path.name} {i % classes}")
        (folder / vtab.LISTS[split]).write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("below", ["", "vtab-1k"])
def test_lists_come_first_and_it_is_said(below: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_lists(tmp_path / below / "smallnorb_azi", 18, {"train": 800, "val": 200, "test": 30})
    with caplog.at_level(logging.WARNING):
        train = load_task("smallnorb_azimuth", "train", tmp_path)
        test = load_dataset("vtab:smallnorb_azimuth", "test", root=tmp_path)
    assert (len(train), len(train.classes), train.name) == (800, 18, "vtab:smallnorb_azimuth")
    assert train.image(300)[0, 0].tolist() == [300 - 256, 1, 0]
    assert train.labels[:20].tolist() == [*range(18), 0, 1]
    assert test.image(7)[0, 0].tolist() == [7, 0, 2]
    assert "is read from the lists in" in caplog.text
    assert "has 30 images and the benchmark's test part 12150" in caplog.text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("images/a.png 0\n" * 799, "has 799 lines, not the 800 of VTAB-1k"),
        (f"images/a.png {'9' * 5000}\n" + "images/a.png 0\n" * 799, "is not an image and a label below 47"),
        ("images/a.png ²\n" * 800, "line 1: 'images/a.png ²' is not an image and a label below 47"),
        ("images/a.png\n" * 800, "line 1: 'images/a.png' is not an image and a label below 47"),
        ("images/a.png 46\nimages/a.png 47\n" + "images/a.png 1\n" * 798, "line 2: .* label below 47"),
        ("images/b.png 0\n" * 800, "lists .*images/b.png, which is missing"),
    ],
)
def test_lists_that_are_wrong(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "dtd" / "images").mkdir(parents=True)
    (tmp_path / "dtd" / "images" / "a.png").touch()
    (tmp_path / "dtd" / "train800.txt").write_text(text)
    with pytest.raises(ValueError, match=said):
        load_task("dtd", "train", tmp_path)


def test_a_list_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "dtd").mkdir()
    (tmp_path / "dtd" / "train800.txt").touch()
    with pytest.raises(ValueError, match=r"val200\.txt is missing: a task's folder needs train800\.txt, val200\.txt"):
        load_task("dtd", "val", tmp_path)
