import os
import subprocess
import sys
from pathlib import Path

import pytest

from vitlab.files import SUMS, clear_leftovers, find_damage, read_sums, replacing_file, replacing_folder, write_sums


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


# --- what a killed process leaves

KILLED = """
import os, sys
from pathlib import Path
from vitlab import files
moment, path = sys.argv[1], Path(sys.argv[2])
replace = Path.replace
moves = 0

def kill(*given):
    global moves
    moves += 1
    if f"move {moves}" == moment:
        os.kill(os.getpid(), 9)
    return replace(*given)

Path.replace = kill
os.getpid = lambda: 1  # as in a container, but for the kill
real, os.kill = os.kill, lambda pid, number: real(int(os.readlink("/proc/self")), number)
if path.suffix:
    with files.replacing_file(path) as file:
        file.write(b"new")
else:
    with files.replacing_folder(path) as aside:
        (aside / "file").write_text("new")
        if moment == "filling":
            os.kill(1, 9)
"""


def kill_while_writing(moment: str, path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, moment, str(path)], check=False)
    assert done.returncode == -9


@pytest.mark.parametrize(("moment", "text"), [("filling", "old"), ("move 1", "old"), ("move 2", "new")])
def test_a_kill_while_a_folder_is_written(moment: str, text: str, tmp_path: Path) -> None:
    """There is the old one or the new one, whole, and nothing else once it was cleared up."""
    path = tmp_path / "model"
    with replacing_folder(path) as aside:
        (aside / "file").write_text("old")
    kill_while_writing(moment, path)
    assert len(list(tmp_path.iterdir())) == 2
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    assert (path / "file").read_text() == text


@pytest.mark.parametrize("moment", ["filling", "move 1", "move 2"])
def test_the_same_process_id_again(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, where every run has the same one."""
    path = tmp_path / "model"
    path.mkdir()
    kill_while_writing(moment, path)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    with replacing_folder(path) as aside:
        (aside / "file").write_text("newest")
    assert list(tmp_path.iterdir()) == [path]
    assert (path / "file").read_text() == "newest"


def test_a_kill_while_a_file_is_written(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("old")
    kill_while_writing("move 1", path)
    assert len(list(tmp_path.iterdir())) == 2
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "old"


def test_what_is_being_written_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    others = [tmp_path / name for name in (".notes.old", ".model.new", ".a.0123456789abcdef.txt")]
    for other in others:
        other.touch()
    with replacing_folder(tmp_path / "model") as aside, replacing_file(tmp_path / "file") as file:
        (aside / "weights").write_text("new")
        file.write(b"new")
        clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "file", *(other.name for other in others)}


def test_only_the_leftovers_of_one_name(tmp_path: Path) -> None:
    for name in ("one", "two", "one.more"):
        (tmp_path / f".{name}.0123456789abcdef.new").mkdir()
    clear_leftovers(tmp_path, "one")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {".two.0123456789abcdef.new", ".one.more.0123456789abcdef.new"}


# --- checksums


def test_checksums(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    assert read_sums(tmp_path) == find_damage(tmp_path) == {}
    write_sums(tmp_path, ["one"])
    write_sums(tmp_path, ["two"])
    checked = subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=tmp_path, capture_output=True, check=False)
    assert checked.stdout == b"one: OK\ntwo: OK\n"
    assert checked.returncode == 0
    assert find_damage(tmp_path) == {}
    (tmp_path / "one").write_text("One")
    (tmp_path / "two").unlink()
    assert find_damage(tmp_path) == {"one": "does not match its checksum", "two": "is missing"}
    assert find_damage(tmp_path, ["two", "three"]) == {"two": "is missing"}


@pytest.mark.parametrize("at", range(0, 150, 7))
def test_damaged_checksums(at: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "one").write_text("one")
    write_sums(tmp_path, ["one"])
    content = bytearray((tmp_path / SUMS).read_bytes())
    content[at % len(content)] ^= 1
    (tmp_path / SUMS).write_bytes(content)
    assert find_damage(tmp_path) == {}
    assert "SHA256SUMS is damaged" in caplog.text
