from pathlib import Path

import pytest

from vitlab.files import replacing_file, replacing_folder


def test_a_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with replacing_file(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    assert list(path.parent.iterdir()) == [path]


def test_a_file_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail() -> None:
        with replacing_file(path) as file:
            file.write(b"ne")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder"
    for text in ("one", "two"):
        with replacing_folder(path) as aside:
            (aside / text).write_text(text)
            assert not (path / text).exists()
        assert [each.name for each in path.iterdir()] == [text]
        assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "folder"
    path.mkdir()
    (path / "old").write_text("old")

    def fail() -> None:
        with replacing_folder(path) as aside:
            (aside / "new").write_text("new")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert [each.name for each in path.iterdir()] == ["old"]
    assert list(tmp_path.iterdir()) == [path]


def test_the_working_folder_can_be_named_by_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with replacing_folder(Path()) as aside:
        (aside / "file").write_text("text")
    assert (tmp_path / "here" / "file").read_text() == "text"
