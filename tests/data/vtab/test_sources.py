"""Missing files are named; downloaded archives are unpacked; what cannot be downloaded says where it comes from."""

import fcntl
import io
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from vitlab.data.vtab import sources
from vitlab.data.vtab.sources import SOURCES, locate
from vitlab.errors import UserError


def test_the_table_is_complete() -> None:
    assert len(SOURCES) == 18
    for name, source in SOURCES.items():
        assert source.sizes["train"] > (source.classes or 2) > 1, name
        assert source.sizes.keys() <= {"train", "validation", "test"}
        assert "all" in source.required or source.required.keys() == source.sizes.keys()
        assert bool(source.files) == (source.access == "automatic")
        for split in source.sizes if source.files else ():
            for url, digest in [*(source.files.get(split) or source.files["all"]), *source.lists.values()]:
                assert url.startswith("http")
                assert len(digest) == {"md5": 36, "sha256": 71}[digest.partition(":")[0]]


@pytest.mark.parametrize("folder", [".", "oxford-iiit-pet", "pets"])
def test_the_folder_below_the_root(tmp_path: Path, folder: str) -> None:
    for part in SOURCES["pets"].required["all"]:
        path = tmp_path / folder / part
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert locate("pets", "train", tmp_path, False) == tmp_path / folder
    (tmp_path / folder / SOURCES["pets"].required["all"][-1]).unlink()
    with pytest.raises(UserError, match=r"pets needs annotations/test.txt .*CC BY-SA 4.0.*allow the download"):
        locate("pets", "train", tmp_path, False)


def test_patterns_and_alternatives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    required = {"train": ["a-*.bin", "b or b.gz"]}
    monkeypatch.setitem(SOURCES, "dmlab", SOURCES["dmlab"]._replace(required=required))
    home = tmp_path / "dmlab"
    home.mkdir()
    for name, missing in (("b.txt", r"a-\*.bin and b or b.gz"), ("b.gz", r"a-\*.bin")):
        (home / name).touch()
        with pytest.raises(UserError, match=rf"dmlab needs {missing} \(from"):
            locate("dmlab", "train", tmp_path, True)
    (home / "a-1.bin").touch()
    assert locate("dmlab", "train", tmp_path, True) == locate("dmlab", "train", home, True) == home
    for name, split, message in (("kitti", "test", "label_2.*BY-NC-SA.*by hand"), ("eurosat", "test", "not 'test'")):
        with pytest.raises(UserError, match=message):
            locate(name, split, tmp_path, True)


def tar(*names: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    return buffer.getvalue()


PETS = {
    "images.tar.gz": tar("images/a.jpg"),
    "annotations.tar.gz": tar("annotations/trainval.txt", "annotations/test.txt"),
}


def serve(monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]) -> list[str]:
    """Replaces downloads by these files, by their names; returns the list of what is downloaded."""
    requested = []

    def download(url: str, target: Path, digest: str) -> None:
        requested.append(target.name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(files[target.name])

    monkeypatch.setattr(sources, "download_file", download)
    return requested


def test_archives_are_downloaded_and_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Archives within archives too, which are all removed."""
    inner = tar("101_ObjectCategories/BACKGROUND_Google/a.jpg", "101_ObjectCategories/yin_yang/b.jpg")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as outer:
        outer.writestr("caltech-101/101_ObjectCategories.tar.gz", inner)
    files = {"caltech-101.zip": buffer.getvalue(), **PETS}
    files |= {"SUN397.tar.gz": tar("SUN397/ClassName.txt"), "sun397_tfds_va.txt": b""}
    requested = serve(monkeypatch, files)
    for _ in range(2):
        assert (locate("caltech101", "train", tmp_path, True) / "yin_yang" / "b.jpg").is_file()
        assert (locate("pets", "test", tmp_path, True) / "images" / "a.jpg").is_file()
        assert (locate("sun397", "validation", tmp_path, True) / "sun397_tfds_va.txt").is_file()
    assert requested == [*files]
    assert not [*tmp_path.rglob("*.gz"), *tmp_path.rglob("*.zip")]


def test_one_of_several_processes_downloads_and_unpacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another finishes while this one waits for the lock."""
    requested, flock, unpack = serve(monkeypatch, PETS), fcntl.flock, shutil.unpack_archive
    unpacked: list[str] = []

    def wait(file: Any, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        locate("pets", "train", tmp_path, True)
        flock(file, operation)

    def unpack_alone(archive: Path, *args: Any, **options: Any) -> None:
        with (tmp_path / "pets" / ".lock").open("a") as lock, pytest.raises(BlockingIOError):
            flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unpacked.append(archive.name)
        unpack(archive, *args, **options)

    monkeypatch.setattr(fcntl, "flock", wait)
    monkeypatch.setattr(shutil, "unpack_archive", unpack_alone)
    assert locate("pets", "train", tmp_path, True) == tmp_path / "pets"
    assert requested == unpacked == [*PETS]


@pytest.mark.parametrize("name", PETS)
def test_an_interrupted_archive_is_unpacked_again(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though all that is required is there."""
    unpack = shutil.unpack_archive

    def interrupt(archive: Path, *args: Any, **options: Any) -> None:
        unpack(archive, *args, **options)
        if archive.name == name:
            for file in (archive.parent / name.partition(".")[0]).iterdir():
                file.write_text("the beginning of a file")
            raise KeyboardInterrupt

    serve(monkeypatch, PETS)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "unpack_archive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            locate("pets", "train", tmp_path, True)
    with pytest.raises(UserError, match="allow the download"):
        locate("pets", "train", tmp_path, False)
    files = [locate("pets", "train", tmp_path, True) / file for file in ("images/a.jpg", "annotations/test.txt")]
    assert [file.read_text() for file in files] == ["", ""]
    assert not [*tmp_path.rglob("*.gz")]
    assert locate("pets", "train", tmp_path, False) == tmp_path / "pets"


def test_bad_archives_and_incomplete_downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, {"dtd-r1.0.1.tar.gz": tar("../../outside"), "EuroSAT.zip": b"PK", "train_32x32.mat": b""})
    for name in ("dtd", "eurosat"):
        with pytest.raises(UserError, match="cannot be unpacked"):
            locate(name, "train", tmp_path, True)
    assert not (tmp_path.parent / "outside").exists()
    monkeypatch.setitem(SOURCES, "svhn", SOURCES["svhn"]._replace(required={"all": ["other.mat"]}))
    with pytest.raises(UserError, match=r"svhn was downloaded, but other.mat is not in"):
        locate("svhn", "train", tmp_path, True)
