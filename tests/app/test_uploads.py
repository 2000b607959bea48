"""Which files count as uploaded."""

import os
from pathlib import Path

import pytest

from vitlab.app.uploads import find_upload, paths_in, read_upload
from vitlab.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "uploads"
    (place / "deep").mkdir(parents=True)
    (place / "deep" / "a.png").write_bytes(b"12345")
    (place / "link.png").symlink_to("deep/a.png")
    (tmp_path / "secret.png").write_bytes(b"secret")
    return place


def test_what_lies_in_the_folder_is_read(folder: Path) -> None:
    for name in ("deep/a.png", "link.png", "deep/../link.png"):
        assert find_upload(f"{folder}/{name}", folder, 5) == folder / "deep" / "a.png"
        assert read_upload(f"{folder}/{name}", folder, 5) == b"12345"
    with pytest.raises(UserError, match=r"a.png has 0.0 MB; at most 3.8147e-06 MB"):
        find_upload(f"{folder}/link.png", folder, 4)


def test_anything_else_is_refused_with_one_message(folder: Path) -> None:
    (folder / "out.png").symlink_to(folder.parent / "secret.png")
    (folder / "zero.png").symlink_to("/dev/zero")
    (folder / "round.png").symlink_to("round.png")
    os.mkfifo(folder / "pipe.png")
    places = [f"{folder}/{name}" for name in ("out.png", "zero.png", "round.png", "pipe.png", "none.png", "a\0b", "")]
    places += [f"{folder}/../secret.png", f"{folder}x/a.png", "secret.png", "", "/dev/zero", "http://127.0.0.1/a.png"]
    for place in places:
        with pytest.raises(UserError, match="is not an uploaded file"):
            find_upload(place, folder, 100)


def test_every_path_in_a_request_is_found() -> None:
    request = {"data": [{"path": "a", "meta": {"path": "b"}}, [[{"path": 3}]], "path", 4, None], "path": {"path": "c"}}
    assert sorted(map(str, paths_in(request))) == ["3", "a", "b", "c", "{'path': 'c'}"]
    assert paths_in("path") == []
