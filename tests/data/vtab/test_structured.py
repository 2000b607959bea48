"""Each structured task from a small imitation of its published files: images, labels, keys, corrupt files."""

import dataclasses
import gzip
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from image_files import encode
from PIL import Image
from tfds_keys import known_keys

from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset
from vitlab.data.vtab import structured
from vitlab.data.vtab.readers import Published
from vitlab.data.vtab.sources import SOURCES
from vitlab.data.vtab.tasks import TASKS, read_published
from vitlab.errors import UserError

rng = np.random.default_rng(0)


def read(name: str, root: Path, split: str) -> Published:
    published = read_published(name, root, split, False)
    assert published.dataset.labels.dtype == np.int64
    return published


def require_refused(name: str, root: Path, split: str) -> None:
    with pytest.raises(UserError, match=f"does not hold {name} as published .*: get it again"):
        read_published(name, root, split, False)


def image(kind: str, shade: int) -> bytes:
    return encode(Image.new("RGB", (6, 4), (shade, 0, 255 - shade)), kind)


def write(path: Path, data: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def shades(dataset: Dataset) -> list[int]:
    return [int(dataset.image(i)[0, 0, 0]) for i in range(len(dataset))]


@pytest.fixture
def clevr(tmp_path: Path) -> Path:
    """Images 2, 0, 1 of train and val, in that order of scenes, with 4, 10, 3 objects."""
    home = tmp_path / "CLEVR_v1.0"
    for part in ("train", "val"):
        scenes = []
        for index, depths in ((2, [9.0, 12, 9.5, 11]), (0, [14.0] * 9 + [8.0]), (1, [10.25, 10.125, 13])):
            name = f"CLEVR_{part}_{index:06d}.png"
            rgba = Image.new("RGBA", (6, 4), (index, 0, 0, 255))  # as published: with an opaque alpha
            (home / "images" / part).mkdir(parents=True, exist_ok=True)
            rgba.save(home / "images" / part / name)
            objects = [{"color": "red", "3d_coords": [1, 2, 0.7], "pixel_coords": [9, 9, depth]} for depth in depths]
            relations = {"directions": {"left": [0.1, 0.2, 0]}, "relationships": {"left": [[1], []]}}
            scenes.append({"image_index": index, "image_filename": name, "objects": objects, **relations})
        content = json.dumps({"info": {"split": part, "version": "1.0"}, "scenes": scenes})
        write(home / "scenes" / f"CLEVR_{part}_scenes.json", content)
    return tmp_path


@pytest.mark.parametrize(("split", "part"), [("train", "train"), ("validation", "val")])
def test_clevr(clevr: Path, split: str, part: str) -> None:
    count, keys, _ = read("clevr_count", clevr, split)
    assert keys == [f"CLEVR_{part}_{i:06d}.png" for i in range(3)] == known_keys("clevr", split)[:3]
    assert [count.classes[label] for label in count.labels] == ["10 objects", "3 objects", "4 objects"]
    assert shades(count) == [0, 1, 2]
    distance = read("clevr_distance", clevr / "CLEVR_v1.0", split)
    assert (distance.dataset.labels.tolist(), distance.keys) == ([0, 5, 2], keys)


def test_corrupt_clevr(clevr: Path) -> None:
    (clevr / "CLEVR_v1.0/images/train/CLEVR_train_000001.png").unlink()
    for text in ("", '{"scenes": [', "[]", '{"scenes": []}'):
        if text:
            write(clevr / "CLEVR_v1.0/scenes/CLEVR_train_scenes.json", text)
        require_refused("clevr_count", clevr, "train")


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value % 128 | 128]) + varint(value // 128)


def field(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def feature(value: bytes | int | float, packed: bool = True) -> bytes:
    if isinstance(value, bytes):
        return field(1, field(1, value))
    if isinstance(value, float):
        return field(2, field(1, struct.pack("<f", value)))
    return field(3, field(1, varint(value)) if packed else varint(1 << 3) + varint(value))


def tfrecord(packed: bool = True, **values: bytes | int | float) -> bytes:
    """A record with a tf.train.Example of these features, from the descriptions of both formats."""
    entries = [field(1, field(1, name.encode()) + field(2, feature(value, packed))) for name, value in values.items()]
    content = field(1, b"".join(entries))
    return struct.pack("<Q", len(content)) + bytes(4) + content + bytes(4)  # the checksums are not read


@pytest.mark.parametrize("packed", [True, False])
def test_dmlab(tmp_path: Path, packed: bool) -> None:
    for split in ("train", "validation", "test"):
        for shard, rows in enumerate([[4, 0, 5], [2, 1]]):
            images = {row: image("JPEG" if row else "PNG", row * 40) for row in rows}
            names = {row: f"{split}/{row}.jpg".encode() for row in rows}
            data = b"".join(
                tfrecord(packed, label=row, image=images[row], weight=0.5, filename=names[row]) for row in rows
            )
            write(tmp_path / "dmlab" / f"dmlab-{split}.tfrecord-{shard:05d}-of-00002", data)
        dataset, keys, _ = read("dmlab", tmp_path, split)
        assert dataset.labels.tolist() == [4, 0, 5, 2, 1]
        assert keys == [f"{split}/{row}.jpg" for row in (4, 0, 5, 2, 1)]
        assert shades(dataset) == pytest.approx([160, 0, 200, 80, 40], abs=2)
        assert dataset.path(4).endswith(f"dmlab-{split}.tfrecord-00001-of-00002/{split}/1.jpg")
    assert dataset.classes[4] == "far penalty"


def test_corrupt_dmlab(tmp_path: Path) -> None:
    good = tfrecord(label=1, image=b"x" * 300, filename=b"a")
    for data in (
        b"",
        good[:-1],
        bytes([good[0] - 1]) + good[1:],
        tfrecord(image=3, filename=b"a", label=1),
        tfrecord(image=b"x", filename=b"a", label=6),
        struct.pack("<Q", 12) + bytes(4) + b"\xff" * 12 + bytes(4),  # a varint without an end
        struct.pack("<Q", 5) + bytes(4) + b"\x0a\x7fabc" + bytes(4),  # a field longer than its message
        struct.pack("<Q", 1) + bytes(4) + b"\x0b" + bytes(4),  # a type of field that does not exist
    ):
        write(tmp_path / "dmlab-train.tfrecord", data)
        require_refused("dmlab", tmp_path, "train")


OBJECT = "{} 0.00 0 -1.57 599.41 156.40 629.75 189.25 2.85 2.63 12.34 0.47 1.49 {} -1.56\n"
SCENES = [
    [("Car", 7.99), ("Van", 30.0)],
    [("Pedestrian", 3.0), ("Truck", 8.0), ("DontCare", -1000)],
    [("Van", 8.01)],
    [("Truck", 20.0), ("Tram", 1.0)],
    [("Car", 20.01), ("Cyclist", 2.0), ("Misc", 1.0), ("Person_sitting", 1.0)],
    [("Cyclist", 5.0), ("DontCare", -1000)],
    [],
]
BINS = [0, 0, 1, 1, 2, 3, 3]


@pytest.fixture
def kitti(tmp_path: Path) -> Path:
    """40 images, two of each of 20 videos: image i is of video 7 i mod 20."""
    home = tmp_path / "kitti"
    for i in range(40):
        write(home / "training" / "image_2" / f"{i:06d}.png", image("PNG", i))
        lines = "".join(OBJECT.format(kind, z) for kind, z in SCENES[i % 7])
        write(home / "training" / "label_2" / f"{i:06d}.txt", lines)
    frames = [(video, frame) for video in range(20) for frame in range(2)]
    lines = "".join(f"2011_09_26 2011_09_26_drive_{v:04d}_sync {f:010d}\n" for v, f in frames)
    write(home / "mapping" / "train_mapping.txt", lines)
    rand = ",".join(str(frames.index((7 * i % 20, i // 20)) + 1) for i in range(40))
    write(home / "mapping" / "train_rand.txt", rand + "\n")
    return tmp_path


def test_kitti(kitti: Path) -> None:
    seen: list[int] = []
    for split, size in (("train", 32), ("validation", 4), ("test", 4)):
        dataset, keys, _ = read("kitti_distance", kitti, split)
        numbers = [int(key.removesuffix(".png")) for key in keys]
        assert keys == [f"{n:06d}.png" for n in sorted(numbers)]
        assert dataset.labels.tolist() == [BINS[n % 7] for n in numbers]
        assert shades(dataset) == numbers
        assert len({7 * n % 20 for n in numbers}) == size // 2, "videos stay together"
        seen += numbers
    assert sorted(seen) == list(range(40))
    (kitti / "kitti" / "mapping" / "train_rand.txt").write_text("1,41")
    require_refused("kitti_distance", kitti, "test")


def test_kitti_videos_are_drawn_as_in_tfds() -> None:
    """The rule, step by step, by NumPy's global generator, as the builder draws."""
    videos = [f"drive_{7 * i % 141:04d}" for i in range(1000)]  # 141 drives, as KITTI has
    np.random.seed(123)  # noqa: NPY002
    test = np.random.choice(sorted(set(videos)), 14, replace=False)  # noqa: NPY002
    rest = sorted(set(videos) - set(test))
    validation = np.random.choice(rest, 14, replace=False)  # noqa: NPY002
    splits = structured.kitti_splits(videos)
    assert {videos[i] for i in splits["test"]} == set(test)
    assert {videos[i] for i in splits["validation"]} == set(validation)
    assert sorted(np.concatenate(list(splits.values())).tolist()) == list(range(1000))


DSPRITES = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"


def save_sprites(path: Path, images: np.ndarray, count: int = 40) -> None:
    i = np.arange(count)
    latents = np.stack([0 * i, i % 3, i % 6, i % 40, i % 32, (i * 5) % 32], axis=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = np.array({"author": "a pickled dictionary, as in the published file"}, object)
    np.savez_compressed(path, imgs=images, latents_classes=latents, latents_values=latents * 0.5, metadata=metadata)


def test_dsprites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in any order, over the edges of chunks."""
    monkeypatch.setattr(structured, "SPRITES_CHUNK", 16)
    images = rng.integers(0, 2, (40, 64, 64)).astype(np.uint8)
    save_sprites(tmp_path / "dsprites" / DSPRITES, images)
    location = read("dsprites_location", tmp_path, "train")
    orientation = read("dsprites_orientation", tmp_path, "train")
    assert location.keys == [str(i) for i in range(40)]
    assert location.dataset.labels.tolist() == [i % 32 // 2 for i in range(40)]
    assert orientation.dataset.labels.tolist() == [int(i % 40 // 2.5) for i in range(40)]
    part = location.take(np.array([17, 39, 0, 17]))
    assert part.labels.tolist() == [8, 3, 0, 8]
    for i, n in enumerate((17, 39, 0, 17)):
        np.testing.assert_array_equal(part.image(i), np.repeat(images[n, ..., None] * 255, 3, axis=2))


@pytest.mark.parametrize("damage", ["cut off", "a byte", "no zip", "another count"])
def test_corrupt_dsprites(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / DSPRITES
    save_sprites(path, rng.integers(0, 2, (40, 64, 64)).astype(np.uint8), 41 if damage == "another count" else 40)
    data = bytearray(path.read_bytes())
    data[5000] ^= 0xFF if damage == "a byte" else 0  # within the images
    path.write_bytes(data[:-100] if damage == "cut off" else b"<html>" if damage == "no zip" else data)
    monkeypatch.setitem(SOURCES, "dsprites", SOURCES["dsprites"]._replace(sizes={"train": 40 + (len(damage) > 10)}))
    task = dataclasses.replace(TASKS["dsprites_location"], val=("train", 10), test=("train", 20))
    monkeypatch.setitem(TASKS, "dsprites_location", task)
    with pytest.raises(UserError, match="does not hold dsprites_location as published"):
        load_dataset("vtab:dsprites_location", "test", root=tmp_path, download=False)


NORB = {"train": "smallnorb-5x46789x9x18x6x2x96x96-training-", "test": "smallnorb-5x01235x9x18x6x2x96x96-testing-"}


def norb(array: np.ndarray) -> bytes:
    """The format of NORB's page: little-endian; three sizes are written at least."""
    magic = {"uint8": 0x1E3D4C55, "int32": 0x1E3D4C54}[str(array.dtype)]
    sizes = [*array.shape, 1, 1][: max(3, array.ndim)]
    return struct.pack(f"<{2 + len(sizes)}i", magic, array.ndim, *sizes) + array.tobytes()


def save_norb(folder: Path, split: str, packed: bool) -> np.ndarray:
    pairs = rng.integers(0, 256, (18, 2, 96, 96)).astype(np.uint8)
    i = np.arange(18, dtype=np.int32)
    info = np.stack([i % 10, (i + 3) % 9, (2 * i + 4) % 36, i % 6], axis=1)
    for kind, array in (("dat", pairs), ("cat", i % 5), ("info", info)):
        data = norb(array)
        write(folder / f"{NORB[split]}{kind}.mat{'.gz' if packed else ''}", gzip.compress(data, 1) if packed else data)
    return pairs


@pytest.mark.parametrize(("split", "folder", "packed"), [("train", "", True), ("test", "smallnorb", False)])
def test_smallnorb(tmp_path: Path, split: str, folder: str, packed: bool) -> None:
    pairs = save_norb(tmp_path / folder, split, packed)
    azimuth, keys, _ = read("smallnorb_azimuth", tmp_path, split)
    elevation = read("smallnorb_elevation", tmp_path, split).dataset
    assert keys == [str(i) for i in range(18)]
    assert azimuth.labels.tolist() == [(i + 2) % 18 for i in range(18)]
    assert elevation.labels.tolist() == [(i + 3) % 9 for i in range(18)]
    assert (azimuth.classes[2], elevation.classes[3]) == ("40 degrees", "45 degrees")
    np.testing.assert_array_equal(azimuth.image(17), np.repeat(pairs[17, 0, ..., None], 3, axis=2))  # the left camera's


def test_corrupt_smallnorb(tmp_path: Path) -> None:
    save_norb(tmp_path, "train", packed=False)
    path = tmp_path / f"{NORB['train']}info.mat"
    data = path.read_bytes()
    for damaged in (data[:-1], b"\0" + data[1:]):  # cut off; another type
        path.write_bytes(damaged)
        require_refused("smallnorb_azimuth", tmp_path, "train")
