import os
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from vitlab.errors import UserError
from vitlab.io import (
    JSON_DEPTH,
    SUMS,
    check_regular,
    clear_leftovers,
    find_damage,
    open_regular,
    parse_json,
    read_json,
    read_regular,
    read_sums,
    reading_npz,
    replacing_file,
    replacing_folder,
    write_sums,
)


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
from vitlab import io as files
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
    assert "SHA256SUMS is corrupt" in caplog.text


def test_a_regular_file_is_read_and_a_link_to_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    for name in ("file", "link"):
        check_regular(tmp_path / name)
        assert read_regular(tmp_path / name, 5) == b"12345"
        with open_regular(tmp_path / name) as file:
            assert file.read() == b"12345"
    with pytest.raises(UserError, match=r"file has 5 bytes; files of its kind have at most 4"):
        read_regular(tmp_path / "file", 4)


def special_file(folder: Path, kind: str) -> Path:
    """A file of that kind, which nobody writes to."""
    path = folder / kind
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "socket":
            here = os.open(".", os.O_RDONLY)
            os.chdir(folder)  # a socket's path may have 107 bytes
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(kind)
            os.fchdir(here)
            os.close(here)
        case "device":
            path.symlink_to("/dev/zero")
    return path


@pytest.mark.parametrize("kind", ["pipe", "socket", "device"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = special_file(tmp_path, kind)
    for read in (check_regular, open_regular, read_json, lambda path: read_regular(path, 10)):
        with pytest.raises(UserError, match=f"{kind} is a (named )?{kind}; only regular files"):
            read(path)


def test_what_the_system_refuses_is_its_own_error(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")


def test_json_is_read_to_a_depth() -> None:
    def nested(depth: int) -> bytes:
        return b"[" * depth + b"]" * depth

    assert parse_json(b'{"a": [1, null, "\\u00e9"]}', "x") == {"a": [1, None, "\u00e9"]}
    assert parse_json(nested(JSON_DEPTH), "x")
    for data in (nested(JSON_DEPTH + 1), nested(100_000), b'{"a":' * 100_000, b'{"a":' * 200 + b"1" + b"}" * 200):
        with pytest.raises(UserError, match="x is JSON nested more than 100 levels deep"):
            parse_json(data, "x")
    for data in (b"", b"{", b"\xff", b"1" * 5000):
        with pytest.raises(UserError, match="x is not valid JSON"):
            parse_json(data, "x")


def test_an_archive_is_read_array_by_array(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    arrays = {"x": np.arange(6.0).reshape(2, 3), "empty": np.zeros((0, 5)), "one": np.array(7), "text": np.array(["é"])}
    np.savez_compressed(path, **arrays)
    with reading_npz(path) as read:
        assert {name: read[name].tolist() for name in read} == {name: array.tolist() for name, array in arrays.items()}


def header(shape: tuple[int, ...]) -> bytes:
    said = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(said).to_bytes(2, "little") + said


@pytest.mark.parametrize(
    ("shape", "zeros", "compression", "said"),
    [
        ((2**26,), 2**28, zipfile.ZIP_DEFLATED, r"requires 268,435,\d+ in memory"),
        ((2**38,), 16, zipfile.ZIP_DEFLATED, r"has 16 bytes, which do not make float32 of shape \(274877906944,\)"),
        ((2**62, 4), 0, zipfile.ZIP_DEFLATED, r"float32 of shape \(4611686018427387904, 4\)"),
        ((-4,), 0, zipfile.ZIP_DEFLATED, r"float32 of shape \(-4,\)"),
        ((4,), 16, zipfile.ZIP_LZMA, "compression that NumPy does not write"),
    ],
)
def test_an_archive_that_asks_for_more_than_it_holds_is_refused(
    tmp_path: Path, shape: tuple[int, ...], zeros: int, compression: int, said: str
) -> None:
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", compression) as archive, archive.open("x.npy", "w", force_zip64=True) as file:
        file.write(header(shape))
        for _ in range(zeros // 2**20):
            file.write(bytes(2**20))
        file.write(bytes(zeros % 2**20))
    with pytest.raises(UserError, match=said), reading_npz(path):
        pytest.fail("it was opened")


def test_an_array_before_an_archive_is_not_read_instead_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    path.write_bytes(header((2**38,)))
    with zipfile.ZipFile(path, "a") as archive, archive.open("x.npy", "w") as file:
        file.write(header((1,)) + bytes(4))
    with reading_npz(path) as read:
        assert read["x"].tolist() == [0.0]
