"""What is missing is asked for by name; what was downloaded is found; what cannot be had says where it comes from."""

import hashlib
from pathlib import Path

import pytest
import torchvision.datasets

from vitlab.data import downloads as fetch
from vitlab.data.downloads import SOURCES


def test_the_table_is_complete() -> None:
    assert len(SOURCES) == 16
    for name, source in SOURCES.items():
        assert source.page.startswith("http")
        assert source.license
        assert source.folders
        assert source.sizes["train"] > (source.classes or 2) > 1, name
        assert source.sizes.keys() <= {"train", "validation", "test"}
        assert source.access in ("automatic", "by hand", "license")


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch.cache_folder() == tmp_path / "vitlab"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fetch.cache_folder() == tmp_path / ".cache" / "vitlab"


def test_without_a_network_the_message_says_what_to_fetch(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"could not download \(http://127.0.0.1:9/x.gz: .*put it into"):
        fetch.download_file(["http://127.0.0.1:9/x.gz"], tmp_path, "md5:" + "0" * 32)


def test_a_file_is_fetched_until_it_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = {"http://a/x": b"wrong", "http://b/x": b"right"}

    def download_url(url: str, folder: str, name: str) -> None:
        asked.append(url)
        if not Path(folder, name).exists():  # as torchvision's, which keeps what is there
            Path(folder, name).write_bytes(served[url])

    asked: list[str] = []
    monkeypatch.setattr("torchvision.datasets.utils.download_url", download_url)
    digest = f"sha256:{hashlib.sha256(b'right').hexdigest()}"
    (tmp_path / "x").write_bytes(b"damaged")
    (tmp_path / "x.part").write_bytes(b"ri")
    for _ in range(2):  # the second time it is there
        fetch.download_file(list(served), tmp_path, digest)
    assert asked == list(served)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"x": b"right"}
    (tmp_path / "x").unlink()
    with pytest.raises(ValueError, match=r"http://a/x: it has the sum sha256:[0-9a-f]{64}, not sha256:[0-9a-f]{64}\)"):
        fetch.download_file(["http://a/x"], tmp_path, digest)
    assert not any(tmp_path.iterdir())


def test_torchvision_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.datasets.DTD, "_URL", "http://127.0.0.1:9/dtd.tar.gz")
    with pytest.raises(ValueError, match=f"could not download DTD .*fetch it elsewhere and unpack it into {tmp_path}"):
        fetch.download_by_torchvision("DTD", tmp_path)


@pytest.mark.parametrize("place", [".", "oxford-iiit-pet", "pets"])
def test_a_set_is_found_where_it_may_lie(tmp_path: Path, place: str) -> None:
    for part in SOURCES["pets"].needed:
        path = tmp_path / place / part
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert fetch.locate("pets", "train", tmp_path, False, "OxfordIIITPet") == tmp_path / place
    (tmp_path / place / "annotations" / "test.txt").unlink()
    with pytest.raises(
        ValueError, match=r"pets needs annotations/test.txt \(from .*CC BY-SA 4.0\); .*allow the download"
    ):
        fetch.locate("pets", "train", tmp_path, False, "OxfordIIITPet")


def test_patterns_and_alternatives(tmp_path: Path) -> None:
    home = tmp_path / "dmlab"
    home.mkdir()
    needed = ["a-*.bin", "b or b.gz"]
    (home / "b.txt").touch()
    with pytest.raises(ValueError, match=r"dmlab needs a-\*.bin and b or b.gz \(from"):
        fetch.locate("dmlab", "train", tmp_path, True, needed=needed)
    (home / "b.gz").touch()
    with pytest.raises(ValueError, match=r"dmlab needs a-\*.bin \(from"):
        fetch.locate("dmlab", "train", tmp_path, True, needed=needed)
    (home / "a-1.bin").touch()
    assert fetch.locate("dmlab", "train", tmp_path, True, needed=needed) == home
    (home / "b.gz").rename(home / "b")
    assert fetch.locate("dmlab", "train", home, True, needed=needed) == home


def test_what_is_downloaded_is_looked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def serve(urls: list[str], folder: Path, digest: str) -> None:
        asked.append((folder, digest))
        folder.mkdir(exist_ok=True)
        (folder / urls[0].rpartition("/")[2]).touch()

    monkeypatch.setattr(fetch, "download_file", serve)
    with pytest.raises(ValueError, match=r"svhn was downloaded, but x.mat is not in .*: fetch it by hand"):
        fetch.locate("svhn", "train", tmp_path, True, {"http://a/y.mat": "md5:1"}, ["x.mat"])
    home = fetch.locate("svhn", "train", tmp_path, True, {"http://a/x.mat": "md5:2"}, ["x.mat"])
    assert asked == [(home, "md5:1"), (home, "md5:2")]
    assert home == tmp_path / "svhn"


def test_by_hand_only(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resisc45 needs airplane and wetland .*has to be fetched by hand; .*NWPU"):
        fetch.locate("resisc45", "train", tmp_path, True)
    with pytest.raises(ValueError, match=r"kitti needs .*has, after consent to its license, to be fetched by hand"):
        fetch.locate("kitti", "train", tmp_path, True)


def test_a_split_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="eurosat has the splits train, not 'test'"):
        fetch.locate("eurosat", "test", tmp_path, True, "EuroSAT")


def test_torchvision_has_the_classes_that_download() -> None:
    for name in ("Caltech101", "DTD", "Flowers102", "OxfordIIITPet", "SUN397", "EuroSAT"):
        assert callable(getattr(torchvision.datasets, name))
