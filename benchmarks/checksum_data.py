"""The images that `checksums.py` runs on: pieces of scikit-learn's photographs, and imitations of data sets."""

import io
import os
import shutil
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat
from sklearn.datasets import load_sample_images


def write_data() -> None:
    """jpegs/: two classes of JPEGs, cut from scikit-learn's photographs; broken/: the same with an unreadable file.

    variants/: one class of near-duplicates of test images; lists/: two tasks of VTAB-1k as lists of files.
    labels/: WebDataset tars of images with several labels each.
    """
    rng, excluded = np.random.default_rng(0), []
    for name, pixels in zip(("china", "flower"), load_sample_images().images, strict=True):
        for i in range(40):
            split, (side, wide) = "test" if i % 4 == 0 else "train", rng.integers(48, 140, 2)
            top, left = rng.integers(0, 427 - side), rng.integers(0, 640 - wide)
            image = Image.fromarray(pixels[top : top + side, left : left + wide])
            image = image.convert("L") if i == 5 else image
            file = Path("jpegs", split, name, f"{i:02d}.{'png' if i == 7 else 'jpg'}")
            file.parent.mkdir(parents=True, exist_ok=True)
            exif = Image.Exif()
            exif[0x112] = 6 if i == 6 else 1  # orientation
            image.save(file, exif=exif)
            if i % 10 == 1:
                excluded.append(f"{split}/{name}/{file.name}\n")
            variant = Path("variants", name, f"variant-{i}.jpg")
            variant.parent.mkdir(parents=True, exist_ok=True)
            changed = image.resize((int(wide) * 3 // 4, int(side) * 3 // 4)).convert("RGB")
            (changed if i % 2 else changed.transpose(Image.Transpose.FLIP_LEFT_RIGHT)).save(variant, quality=60)
    Path("exclude.txt").write_text("".join(excluded))
    shutil.copytree("jpegs", "broken")
    Path("broken/train/china/01.jpg").write_bytes(b"not an image")
    Path("labels").mkdir()
    Path("labels/classes.json").write_text('["a", "b", "c"]')
    for split in ("train", "val", "test"):
        with tarfile.open(f"labels/{split}-00.tar", "w") as tar:
            for i, file in enumerate(sorted(Path("jpegs/train").rglob("*.jpg"))[:24]):
                for suffix, content in (("jpg", file.read_bytes()), ("cls", b"0 2" if i % 2 else b"1")):
                    member = tarfile.TarInfo(f"{i:05d}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
    for task, classes in (("kitti", 4), ("patch_camelyon", 2)):
        shutil.copytree("jpegs/test/flower", f"lists/{task}/images")
        files = sorted(file.name for file in Path(f"lists/{task}/images").iterdir())
        for part, count in (("train800", 800), ("val200", 200), ("train800val200", 1000), ("test", 30)):
            lines = [f"images/{files[i % len(files)]} {i % classes}\n" for i in range(count)]
            Path(f"lists/{task}/{part}.txt").write_text("".join(lines))


def write_published() -> None:
    """Imitations of published data sets: the right number of images under the right names, with random labels."""
    root, rng, photo = Path("published"), np.random.default_rng(1), Path("jpegs/test/china/00.jpg").resolve()

    def link(*parts: str) -> None:
        file = root.joinpath(*parts)
        file.parent.mkdir(parents=True, exist_ok=True)
        os.link(photo, file)

    def write(name: str, content: bytes) -> None:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)

    for part, count in (("train", 50_000), ("test", 10_000)):
        records = np.zeros((count, 3074), np.uint8)
        records[:, 1] = rng.integers(0, 100, count)
        write(f"cifar-100-binary/{part}.bin", records.tobytes())
    for part, count in (("46789x9x18x6x2x96x96-training", 24_300), ("01235x9x18x6x2x96x96-testing", 24_300)):
        info = rng.integers(0, 9, (count, 4)).astype("<i4") * [1, 1, 2, 1]
        header = np.array([0x1E3D4C54, 2, count, 4, 1], "<i4")
        write(f"smallnorb-5x{part}-info.mat", header.tobytes() + info.astype("<i4").tobytes())
        write(f"smallnorb-5x{part}-dat.mat", np.array([0x1E3D4C55, 4, count, 2, 96, 96], "<i4").tobytes())
        os.truncate(root / f"smallnorb-5x{part}-dat.mat", 24 + count * 2 * 96 * 96)  # zeros, which take no space
    textures = [f"class{i % 47:02d}/{i:04d}.jpg" for i in rng.permutation(3 * 1880).tolist()]
    for number, part in enumerate(("train", "val", "test")):
        lines = textures[1880 * number :][:1880]
        write(f"dtd/labels/{part}1.txt", "\n".join(lines).encode())
        for line in lines:
            link("dtd/images", line)
    for part, count in (("trainval", 3680), ("test", 3669)):
        animals = [(f"Breed{i % 37:02d}_{part}{i}", i % 37 + 1) for i in range(count)]
        write(f"oxford-iiit-pet/annotations/{part}.txt", "".join(f"{n} {c} 1 1\n" for n, c in animals).encode())
        for name, _ in animals:
            link("oxford-iiit-pet/images", f"{name}.jpg")
    numbers_of = rng.permutation(8189) + 1
    for i in range(8189):
        link("flowers-102/jpg", f"image_{i + 1:05d}.jpg")
    savemat(root / "flowers-102/imagelabels.mat", {"labels": rng.integers(1, 103, (1, 8189)).astype(np.uint8)})
    ids = {"trnid": numbers_of[:1020], "valid": numbers_of[1020:2040], "tstid": numbers_of[2040:]}
    savemat(root / "flowers-102/setid.mat", {name: each[None].astype(np.uint16) for name, each in ids.items()})
    names = ["BACKGROUND_Google", "yin_yang", *(f"class{i:03d}" for i in range(100))]
    for i in range(9144):
        link("caltech101/101_ObjectCategories", names[i % 102], f"image_{i:04d}.jpg")
