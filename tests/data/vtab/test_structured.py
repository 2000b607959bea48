"""Small imitations of the published sets, written in their own formats: images, labels, keys, and what is refused."""

import gzip
import io
import json
import pickle
import shutil
import struct
import tracemalloc
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tfds_keys import known_keys

from vitlab.data.dataset import Dataset, join
from vitlab.data.loader import eval_batches
from vitlab.data.transforms import EvalTransform
from vitlab.data.vtab import structured
from vitlab.data.vtab.readers import Published

Reader = Callable[[Path, str, bool], Published]
rng = np.random.default_rng(0)


def image(kind: str, shade: int, size: tuple[int, int] = (6, 4)) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", size, (shade, 0, 255 - shade)).save(buffer, kind)
    return buffer.getvalue()


def write(path: Path, data: bytes | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.encode() if isinstance(data, str) else data)


def shades(dataset: Dataset) -> list[int]:
    return [int(dataset.image(i)[0, 0, 0]) for i in range(len(dataset))]


# ----------------------------------------------------------------------------------------------------- CLEVR


@pytest.fixture
def clevr(tmp_path: Path) -> Path:
    """Images 2, 0, 1 of each part, in that order of scenes, with 4, 10, 3 objects."""
    for part in ("train", "val"):
        scenes = []
        for index, depths in ((2, [9.0, 12, 9.5, 11]), (0, [14.0] * 9 + [8.0]), (1, [10.25, 10.125, 13])):
            name = f"CLEVR_{part}_{index:06d}.png"
            rgba = Image.new("RGBA", (6, 4), (index, 0, 0, 255))  # as published: with an opaque alpha
            (tmp_path / "CLEVR_v1.0" / "images" / part).mkdir(parents=True, exist_ok=True)
            rgba.save(tmp_path / "CLEVR_v1.0" / "images" / part / name)
            objects = [
                {"color": "red", "size": "large", "rotation": 1.5, "shape": "cube", "material": "metal",
                 "3d_coords": [1, 2, 0.7], "pixel_coords": [240, 160, depth]}
                for depth in depths
            ]  # fmt: skip
            scenes.append(
                {"image_index": index, "image_filename": name, "split": part, "objects": objects,
                 "directions": {"left": [0.1, 0.2, 0]}, "relationships": {"left": [[1], []]}}
            )  # fmt: skip
        info = {"split": part, "license": "Creative Commons Attribution (CC-BY 4.0)", "version": "1.0"}
        scenes_json = tmp_path / "CLEVR_v1.0" / "scenes" / f"CLEVR_{part}_scenes.json"
        write(scenes_json, json.dumps({"info": info, "scenes": scenes}))
    return tmp_path


@pytest.mark.parametrize(("split", "part"), [("train", "train"), ("validation", "val")])
@pytest.mark.parametrize("folder", ["", "CLEVR_v1.0"])
def test_clevr(clevr: Path, split: str, part: str, folder: str) -> None:
    count, keys = structured.clevr_count(clevr / folder, split, False)
    assert keys == [f"CLEVR_{part}_{i:06d}.png" for i in range(3)] == known_keys("clevr", split)[:3]
    assert count.labels.tolist() == [7, 0, 1]
    assert [count.classes[label] for label in count.labels] == ["10 objects", "3 objects", "4 objects"]
    assert shades(count) == [0, 1, 2]
    distance = structured.clevr_distance(clevr / folder, split, False)
    assert distance.dataset.labels.tolist() == [0, 5, 2]
    assert (distance.keys, distance.dataset.labels.dtype) == (keys, np.int64)


def test_clevr_has_no_annotated_test_part(clevr: Path) -> None:
    with pytest.raises(ValueError, match="clevr has the splits train, validation, not 'test'"):
        structured.clevr_count(clevr, "test", False)


def test_clevr_images_and_scenes_must_belong_together(clevr: Path) -> None:
    (clevr / "CLEVR_v1.0/images/train/CLEVR_train_000001.png").unlink()
    with pytest.raises(ValueError, match=r"1 images in .* no counterpart, first 'CLEVR_train_000001.png'"):
        structured.clevr_count(clevr, "train", False)
    write(clevr / "CLEVR_v1.0/images/val/CLEVR_val_000003.png", b"")
    with pytest.raises(ValueError, match=r"first 'CLEVR_val_000003\.png'"):
        structured.clevr_distance(clevr, "validation", False)


@pytest.mark.parametrize(
    "text", ['{"scenes": [', "[]", "{}", '{"scenes": [3]}', '{"scenes": []}', '{"scenes": [{"image_filename": "a"}]}']
)
def test_damaged_scenes_are_refused(clevr: Path, text: str) -> None:
    write(clevr / "CLEVR_v1.0/scenes/CLEVR_train_scenes.json", text)
    with pytest.raises(ValueError, match=r"CLEVR_train_scenes.json .*: download it again"):
        structured.clevr_count(clevr, "train", False)


# ----------------------------------------------------------------------------------------------------- DMLab


def tagged(number: int, content: bytes) -> bytes:
    """A protobuf field of bytes, of less than 2^14 of them."""
    size = len(content)
    return bytes([number << 3 | 2, *([size] if size < 128 else [size & 127 | 128, size >> 7])]) + content


def tfrecord(**values: bytes | int) -> bytes:
    """A record with an Example of these features."""
    entries = b""
    for name, value in values.items():
        feature = tagged(1, tagged(1, value)) if isinstance(value, bytes) else tagged(3, tagged(1, bytes([value])))
        entries += tagged(1, tagged(1, name.encode()) + tagged(2, feature))
    content = tagged(1, entries)
    length = struct.pack("<Q", len(content))
    return length + bytes(4) + content + bytes(4)  # the checksums are not read


@pytest.fixture
def dmlab(tmp_path: Path) -> Path:
    for split in ("train", "validation", "test"):
        for shard, rows in enumerate([[4, 0, 5], [2, 1]]):
            names = {row: f"{split}/{row}.jpg".encode() for row in rows}
            images = {row: image("JPEG" if row else "PNG", row * 40) for row in rows}
            data = b"".join(tfrecord(label=row, image=images[row], filename=names[row]) for row in rows)
            write(tmp_path / "dmlab" / f"dmlab-{split}.tfrecord-{shard:05d}-of-00002", data)
    return tmp_path


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("folder", ["", "dmlab"])
def test_dmlab(dmlab: Path, split: str, folder: str) -> None:
    dataset, keys = structured.dmlab(dmlab / folder, split, False)
    assert dataset.labels.tolist() == [4, 0, 5, 2, 1]
    assert keys == [f"{split}/{row}.jpg" for row in (4, 0, 5, 2, 1)]
    assert shades(dataset) == pytest.approx([160, 0, 200, 80, 40], abs=2)
    assert dataset.classes[4] == "far penalty"
    assert dataset.path(4).endswith(f"dmlab-{split}.tfrecord-00001-of-00002/{split}/1.jpg")


def test_dmlab_in_one_file(dmlab: Path) -> None:
    home = dmlab / "dmlab"
    for file in home.glob("dmlab-train*"):
        file.unlink()
    write(home / "dmlab-train.tfrecord", tfrecord(image=image("PNG", 7), filename=b"a", label=3))
    dataset, keys = structured.dmlab(dmlab, "train", False)
    assert (keys, dataset.labels.tolist(), shades(dataset)) == (["a"], [3], [7])


def test_dmlab_that_is_not_whole_is_refused(dmlab: Path) -> None:
    shard = dmlab / "dmlab" / "dmlab-test.tfrecord-00001-of-00002"
    data = shard.read_bytes()
    shard.write_bytes(data[:-40])
    with pytest.raises(ValueError, match="00001-of-00002 is corrupt or cut off at byte"):
        structured.dmlab(dmlab, "test", False)
    shard.write_bytes(b"")
    with pytest.raises(ValueError, match="is empty: download it again"):
        structured.dmlab(dmlab, "test", False)
    shard.unlink()
    with pytest.raises(ValueError, match="has 1 of 2 files dmlab-test"):
        structured.dmlab(dmlab, "test", False)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"image": b"x", "filename": b"a"}, "not image, filename and label"),
        ({"image": 3, "filename": b"a", "label": 1}, "not image, filename and label"),
        ({"image": b"x", "filename": b"a", "label": 6}, "labels of dmlab are 0 to 5, not 6"),
    ],
)
def test_other_examples_are_no_dmlab(dmlab: Path, values: dict[str, bytes | int], reason: str) -> None:
    write(dmlab / "dmlab" / "dmlab-train.tfrecord-00001-of-00002", tfrecord(**values))
    with pytest.raises(ValueError, match=reason):
        structured.dmlab(dmlab, "train", False)


# ----------------------------------------------------------------------------------------------------- KITTI

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
    for i in range(40):
        write(tmp_path / "kitti" / "training" / "image_2" / f"{i:06d}.png", image("PNG", i))
        lines = "".join(OBJECT.format(kind, z) for kind, z in SCENES[i % 7])
        write(tmp_path / "kitti" / "training" / "label_2" / f"{i:06d}.txt", lines)
    frames = [(video, frame) for video in range(20) for frame in range(2)]
    lines = "".join(f"2011_09_26 2011_09_26_drive_{v:04d}_sync {f:010d}\n" for v, f in frames)
    rand = ",".join(str(frames.index((7 * i % 20, i // 20)) + 1) for i in range(40))
    write(tmp_path / "kitti" / "mapping" / "train_mapping.txt", lines)
    write(tmp_path / "kitti" / "mapping" / "train_rand.txt", rand + "\n")
    return tmp_path


def test_kitti(kitti: Path) -> None:
    seen: list[int] = []
    for split, size in (("train", 32), ("validation", 4), ("test", 4)):
        dataset, keys = structured.kitti_distance(kitti, split, False)
        numbers = [int(key.removesuffix(".png")) for key in keys]
        assert keys == [f"{n:06d}.png" for n in sorted(numbers)]
        assert dataset.labels.tolist() == [BINS[n % 7] for n in numbers]
        assert shades(dataset) == numbers
        assert len({7 * n % 20 for n in numbers}) == size // 2, "videos stay together"
        seen += numbers
    assert sorted(seen) == list(range(40))


def test_kitti_videos_are_drawn_as_in_tfds() -> None:
    """The rule, step by step, by NumPy's global generator, as the builder draws."""
    videos = [f"drive_{7 * i % 141:04d}" for i in range(1000)]  # 141 drives, as KITTI has
    np.random.seed(123)  # noqa: NPY002
    test = np.random.choice(sorted(set(videos)), 14, replace=False)  # noqa: NPY002
    rest = sorted(set(videos) - set(test))
    validation = np.random.choice(rest, 14, replace=False)  # noqa: NPY002
    found = structured.kitti_splits(videos)
    assert {videos[i] for i in found["test"]} == set(test)
    assert {videos[i] for i in found["validation"]} == set(validation)
    assert sorted(np.concatenate(list(found.values())).tolist()) == list(range(1000))


def test_a_mapping_that_splits_kitti_otherwise_is_refused(kitti: Path) -> None:
    write(kitti / "kitti/mapping/train_rand.txt", ",".join(str(i % 40 + 1) for i in range(7481)))
    with pytest.raises(
        ValueError, match=r"not \{'train': 6347, 'validation': 423, 'test': 711\}: download devkit_object"
    ):
        structured.kitti_distance(kitti, "test", False)


@pytest.mark.parametrize("text", ["1,2,x", "", "0,1", "1,41"])
def test_a_damaged_mapping_is_refused(kitti: Path, text: str) -> None:
    write(kitti / "kitti/mapping/train_rand.txt", text)
    with pytest.raises(ValueError, match=r"train_mapping\.txt is corrupt"):
        structured.kitti_distance(kitti, "train", False)


def test_kitti_without_its_mapping_says_what_to_fetch(kitti: Path) -> None:
    shutil.rmtree(kitti / "kitti" / "mapping")
    with pytest.raises(
        ValueError, match=r"needs mapping/train_rand.txt and mapping/.*devkit_object.zip.*BY-NC-SA.*after consent"
    ) as told:
        structured.kitti_distance(kitti, "train", True)  # its images are never fetched unasked
    assert "image_2" not in str(told.value).partition("(")[0]


def test_a_kitti_that_is_not_whole_is_refused(kitti: Path) -> None:
    labels = kitti / "kitti/training/label_2"
    number = structured.kitti_distance(kitti, "test", False).keys[2].removesuffix(".png")
    (labels / f"{number}.txt").write_text("Car 0.00 0\n")
    with pytest.raises(ValueError, match=rf"{number}.txt, line 1, is not an object of KITTI \(3 fields\)"):
        structured.kitti_distance(kitti, "test", False)
    (labels / f"{number}.txt").write_text(OBJECT.format("Car", "near"))
    with pytest.raises(ValueError, match=r"line 1, is not an object .*'near'"):
        structured.kitti_distance(kitti, "test", False)
    (labels / f"{number}.txt").unlink()
    with pytest.raises(ValueError, match=rf"label_2 lacks 1 files, first {number}.txt"):
        structured.kitti_distance(kitti, "test", False)


# -------------------------------------------------------------------------------------------------- dSprites

DSPRITES = "dsprites_ndarray_co1sh3sc6or40x32y32_64x64.npz"


def sprites(count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    images = rng.integers(0, 2, (count, 64, 64)).astype(np.uint8)
    i = np.arange(count)
    return images, np.stack([0 * i, i % 3, i % 6, i % 40, i % 32, (i * 5) % 32], axis=1)


def save_sprites(path: Path, images: np.ndarray, latents: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    metadata = np.array({"author": "a pickled dictionary, as in the published file"}, object)
    np.savez_compressed(path, imgs=images, latents_classes=latents, latents_values=latents * 0.5, metadata=metadata)


@pytest.mark.parametrize("folder", ["", "dsprites"])
def test_dsprites(tmp_path: Path, folder: str) -> None:
    images, latents = sprites()
    save_sprites(tmp_path / folder / DSPRITES, images, latents)
    location, keys = structured.dsprites_location(tmp_path, "train", False)
    orientation = structured.dsprites_orientation(tmp_path, "train", False).dataset
    assert keys == [str(i) for i in range(40)] == known_keys("dsprites", "train")[:40]
    assert location.labels.tolist() == [i % 32 // 2 for i in range(40)]
    assert orientation.labels.tolist() == [int(i % 40 // 2.5) for i in range(40)]
    assert (len(location.classes), len(orientation.classes)) == (16, 16)
    for i in (0, 17, 39):
        np.testing.assert_array_equal(location.image(i), np.repeat(images[i, ..., None] * 255, 3, axis=2))


def test_a_part_of_dsprites_takes_no_more_memory_than_its_bits(tmp_path: Path) -> None:
    count = 6000
    images = np.zeros((count, 64, 64), np.uint8)
    images[np.arange(count), np.arange(count) % 64] = 1
    save_sprites(tmp_path / DSPRITES, images, sprites(count)[1])
    del images
    tracemalloc.start()
    dataset = (
        structured.dsprites_location(tmp_path, "train", False).dataset.take(np.arange(0, count, 3)).in_memory("raise")
    )
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert dataset.pixels is None
    assert dataset.image(1000)[3000 % 64].min() == 255
    assert kept < 2000 * 64 * 64 * 3 / 10, "RGB would be 25 MB"
    assert peak < 64 * 64 * (4096 * 2 + count), "a chunk of images, its bytes, the bits and the rest"


def test_gray_images_in_batches_joined_and_in_processes(tmp_path: Path) -> None:
    images, latents = sprites()
    save_sprites(tmp_path / DSPRITES, images, latents)
    whole = structured.dsprites_location(tmp_path, "train", False).dataset
    dataset = join(whole.take(np.array([5, 3])), whole.take(np.array([39])))
    assert dataset.labels.tolist() == [2, 1, 3]
    assert dataset.path(1) == f"{tmp_path / DSPRITES}/[3]"
    assert [entry.path for entry in dataset.entries[1:]] == [
        entry.path for entry in [whole.entries[3], whole.entries[39]]
    ]
    for copy, workers in ((dataset, 0), (dataset, 1), (pickle.loads(pickle.dumps(dataset)), 0)):  # noqa: S301
        (batch,) = eval_batches(copy, EvalTransform(64), batch_size=8, workers=workers)
        wanted = np.repeat(images[[5, 3, 39], None] * 2.0 - 1, 3, axis=1)
        np.testing.assert_allclose(batch.images.numpy(), wanted, atol=1e-6)


@pytest.mark.parametrize(
    ("images", "latents", "reason"),
    [
        (sprites(4)[0], sprites(5)[1], r"latents \(5, 6\) for 4 images"),
        (sprites(4)[0], sprites(4)[1][:, :5], r"latents \(4, 5\)"),
        (sprites(4)[0] * 255, sprites(4)[1], "a pixel is 255"),
        (sprites(4)[0], sprites(4)[1] + 32, "are 0 to 15"),
    ],
)
def test_other_sprites_are_refused(tmp_path: Path, images: np.ndarray, latents: np.ndarray, reason: str) -> None:
    save_sprites(tmp_path / DSPRITES, images, latents)
    with pytest.raises(ValueError, match=rf"{DSPRITES} is corrupt or not dSprites \(.*{reason}.*: download it again"):
        structured.dsprites_location(tmp_path, "train", False)


@pytest.mark.parametrize("damage", ["cut off", "a byte", "no zip", "no images"])
def test_a_damaged_npz_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / DSPRITES
    save_sprites(path, *sprites())
    data = bytearray(path.read_bytes())
    if damage == "no images":
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "new", "w") as new:
            new.writestr("latents_classes.npy", old.read("latents_classes.npy"))
        (tmp_path / "new").rename(path)
    elif damage == "a byte":
        data[5000] ^= 0xFF  # within the images
        path.write_bytes(data)
    else:
        path.write_bytes(data[:-100] if damage == "cut off" else b"<html>")
    with pytest.raises(ValueError, match="is corrupt or not dSprites"):
        structured.dsprites_location(tmp_path, "train", False)


# ------------------------------------------------------------------------------------------------- SmallNORB


def norb(array: np.ndarray) -> bytes:
    magic = {"uint8": 0x1E3D4C55, "int32": 0x1E3D4C54}[str(array.dtype)]
    sizes = [*array.shape, 1, 1][: max(3, array.ndim)]
    return struct.pack(f"<{2 + len(sizes)}i", magic, array.ndim, *sizes) + array.tobytes()


NORB = {"train": "smallnorb-5x46789x9x18x6x2x96x96-training-", "test": "smallnorb-5x01235x9x18x6x2x96x96-testing-"}


def save_norb(folder: Path, split: str, packed: bool) -> np.ndarray:
    pairs = rng.integers(0, 256, (18, 2, 96, 96)).astype(np.uint8)
    i = np.arange(18, dtype=np.int32)
    info = np.stack([i % 10, (i + 3) % 9, (2 * i + 4) % 36, i % 6], axis=1)
    for kind, array in (("dat", pairs), ("cat", i % 5), ("info", info)):
        data = norb(array)
        write(folder / f"{NORB[split]}{kind}.mat{'.gz' if packed else ''}", gzip.compress(data, 1) if packed else data)
    return pairs


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("split", "folder"), [("train", ""), ("test", "smallnorb")])
def test_smallnorb(tmp_path: Path, split: str, folder: str, packed: bool) -> None:
    pairs = save_norb(tmp_path / folder, split, packed)
    azimuth, keys = structured.smallnorb_azimuth(tmp_path, split, False)
    elevation = structured.smallnorb_elevation(tmp_path, split, False).dataset
    assert keys == [str(i) for i in range(18)] == known_keys("smallnorb", split)[:18]
    assert azimuth.labels.tolist() == [(i + 2) % 18 for i in range(18)]
    assert elevation.labels.tolist() == [(i + 3) % 9 for i in range(18)]
    assert (azimuth.classes[2], elevation.classes[3]) == ("40 degrees", "45 degrees")
    for i in (0, 17):  # the left camera's
        np.testing.assert_array_equal(azimuth.image(i), np.repeat(pairs[i, 0, ..., None], 3, axis=2))
    np.testing.assert_array_equal(elevation.take(np.array([4])).image(0)[..., 1], pairs[4, 0])


def test_smallnorb_files_that_are_exchanged_are_refused(tmp_path: Path) -> None:
    save_norb(tmp_path, "train", packed=False)
    shutil.copy(tmp_path / f"{NORB['train']}info.mat", tmp_path / f"{NORB['train']}dat.mat")
    with pytest.raises(ValueError, match=r"dat\.mat is not smallnorb: images"):
        structured.smallnorb_azimuth(tmp_path, "train", False)


# ------------------------------------------------------------------------------------------- missing files


@pytest.mark.parametrize(
    ("reader", "split", "told"),
    [
        (structured.clevr_count, "train", ["images/train", "CLEVR_train_scenes.json", "CLEVR_v1.0.zip", "CC BY 4.0"]),
        (structured.clevr_distance, "validation", ["images/val", "CLEVR_val_scenes.json"]),
        (structured.dmlab, "test", ["dmlab-test.tfrecord", "dmlab.tar.gz", "not stated"]),
        (structured.kitti_distance, "test", ["training/label_2", "data_object_image_2.zip", "CC BY-NC-SA 3.0"]),
        (structured.dsprites_location, "train", [DSPRITES, "dsprites-dataset", "Apache-2.0", "allow the download"]),
        (structured.smallnorb_azimuth, "test", [NORB["test"] + "dat.mat", "cs.nyu.edu", "research", "download"]),
    ],
)  # fmt: skip
def test_what_is_missing_is_told(tmp_path: Path, reader: Reader, split: str, told: Sequence[str]) -> None:
    with pytest.raises(ValueError) as error:
        reader(tmp_path, split, False)
    assert [part for part in [*told, str(tmp_path), "license", "another root"] if part not in str(error.value)] == []


@pytest.mark.parametrize("reader", [structured.clevr_count, structured.dmlab])
def test_large_sets_are_never_downloaded(tmp_path: Path, reader: Reader) -> None:
    with pytest.raises(ValueError, match=r"downloaded by hand; looked in .*: put it there, or give another root$"):
        reader(tmp_path, "train", True)


@pytest.mark.parametrize(
    ("reader", "splits"),
    [
        (structured.dmlab, "train, validation, test"),
        (structured.kitti_distance, "train, validation, test"),
        (structured.dsprites_orientation, "train"),
        (structured.smallnorb_elevation, "train, test"),
    ],
)
def test_other_splits_are_refused(tmp_path: Path, reader: Reader, splits: str) -> None:
    with pytest.raises(ValueError, match=f"has the splits {splits}, not 'val'"):
        reader(tmp_path, "val", False)


def test_classes_are_those_of_the_labels(clevr: Path) -> None:
    assert structured.clevr_count(clevr, "train", False).dataset.classes == structured.CLEVR_COUNT
    assert structured.clevr_distance(clevr, "train", False).dataset.classes == structured.CLEVR_DISTANCE
