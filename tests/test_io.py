import contextlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from small_disk import small_disk

from vitlab.errors import UserError, WriteError
from vitlab.io import (
    as_cells,
    clear_leftovers,
    from_cell,
    open_regular,
    parse_json,
    read_json,
    read_regular,
    reading_npz,
    replacing_file,
    replacing_folder,
    resolved,
    temporary_folder,
    write_arrays,
    write_bytes,
    write_csv,
)
from vitlab.train.workdir import check_folder
from vitlab.weights import load_model


def test_a_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    with replacing_file(path) as file:
        file.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with contextlib.suppress(KeyError), replacing_file(path) as file:
        file.write(b"tw")
        raise KeyError
    assert path.read_bytes() == b"one"
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "folder"
    for text in ("one", "two"):
        with replacing_folder(path) as new:
            (new / text).write_text(text)
            assert not (path / text).exists()
        assert [file.name for file in path.iterdir()] == [text]
    with contextlib.suppress(KeyError), replacing_folder(path) as new:
        (new / "three").write_text("three")
        raise KeyError
    assert [file.name for file in path.iterdir()] == ["two"]
    monkeypatch.chdir(path)
    with replacing_folder(Path()) as new:
        (new / "file").write_text("text")
    assert [file.name for file in path.iterdir()] == ["file"]
    assert list(path.parent.iterdir()) == [path]


def kill_while_writing(moment: str, path: Path) -> None:
    """In a process of its own, whose id is 1, as in a container: at a renaming, or while a folder is filled."""

    def job() -> None:
        moves, replace = itertools.count(1), Path.replace

        def move(*given: Path) -> Path:
            if moment == f"move {next(moves)}":
                signal.raise_signal(signal.SIGKILL)
            return replace(*given)

        (patch := pytest.MonkeyPatch()).setattr(Path, "replace", move)
        patch.setattr(os, "getpid", lambda: 1)
        if path.suffix:
            write_bytes(path, b"new")
            return
        with replacing_folder(path) as aside:
            (aside / "file").write_text("new")
            if moment == "filling":
                signal.raise_signal(signal.SIGKILL)

    process = multiprocessing.get_context("fork").Process(target=job)
    process.start()
    process.join()
    assert process.exitcode == -9


@pytest.mark.parametrize(
    ("name", "moment", "text"),
    [
        ("model", "filling", "old"),
        ("model", "move 1", "old"),
        ("model", "move 2", "new"),
        ("result.json", "move 1", "old"),
    ],
)
def test_a_kill_while_something_is_written(
    name: str, moment: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is the old one or the new one, whole, and nothing else once it was cleared up, or once a process has
    written it again: with the same id, as every process has in a container."""
    path = tmp_path / name
    if path.suffix:
        path.write_text("old")
    else:
        path.mkdir()
        (path / "file").write_text("old")
    kill_while_writing(moment, path)
    assert len(list(tmp_path.iterdir())) == 2
    clear_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    assert (path if path.suffix else path / "file").read_text() == text
    if moment == "move 2":
        kill_while_writing(moment, path)
        monkeypatch.setattr(os, "getpid", lambda: 1)
        with replacing_folder(path) as aside:
            (aside / "file").write_text("newest")
        assert list(tmp_path.iterdir()) == [path]
        assert (path / "file").read_text() == "newest"


def test_the_next_writer_removes_what_a_killed_one_has_left(tmp_path: Path) -> None:
    """Of the same name, even where the next one fails."""
    kill_while_writing("move 1", tmp_path / "table.csv")
    kill_while_writing("filling", tmp_path / "model")
    assert len(list(tmp_path.iterdir())) == 2
    with contextlib.suppress(KeyError), replacing_file(tmp_path / "table.csv"):
        raise KeyError
    with contextlib.suppress(KeyError), temporary_folder(tmp_path / "model") as folder:
        (folder / "file").touch()
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_removed_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process, which took it for a killed one's: it is created again."""
    touch, created = Path.touch, []

    def touch_and_lose(path: Path) -> None:
        touch(path)
        created.append(path)
        if len(created) == 1:
            path.unlink()

    monkeypatch.setattr(Path, "touch", touch_and_lose)
    with replacing_file(tmp_path / "file") as file:
        file.write(b"new")
    assert (len(created), (tmp_path / "file").read_bytes()) == (2, b"new")


def write_folder(path: Path) -> None:
    with replacing_folder(path.with_name("folder"), 9000) as folder, (folder / "part").open("wb") as part:
        part.write(bytes(9000))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_bytes(path, bytes(9000)),
        lambda path: write_arrays(path, {"x": np.random.default_rng(0).random(2000)}),
        lambda path: write_csv(path, ["x"], [["y" * 8997]]),
        write_folder,
    ],
)
def test_a_full_disk(write: Callable[[Path], None], tmp_path: Path) -> None:
    """The message has the folder and the bytes; the earlier file stays, and nothing else."""
    path = tmp_path / "deep" / "file"
    write_bytes(path, b"old")
    with pytest.raises(WriteError, match=r"deep \(File too large\): .*[\d,]+ bytes are free"), small_disk():
        write(path)
    assert [file.read_bytes() for file in path.parent.iterdir()] == [b"old"]


def enter(path: Path) -> None:
    with replacing_folder(path):
        pytest.fail("it was created")


def test_a_loop_of_links(tmp_path: Path) -> None:
    """As a work folder, a checkpoint or a destination, and as a folder of it."""
    loop = tmp_path / "loop"
    loop.symlink_to("loop")
    (tmp_path / "data").mkdir()
    (tmp_path / "link").symlink_to("data")
    assert resolved(tmp_path / "link" / "new") == tmp_path / "data" / "new"
    for path in (loop, loop / "model"):
        for use in (resolved, check_folder, load_model, enter, lambda path: write_bytes(path / "file", b"")):
            with pytest.raises(UserError, match=r"loop.* is a loop of links"):
                use(path)


def test_what_is_being_written_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    others = [".notes.old", ".model.new", ".model.1.old", ".a.0123456789abcdef.txt", ".b.0123456789abcdef.new"]
    for name in others:
        (tmp_path / name).mkdir()
    with replacing_folder(tmp_path / "model") as aside, replacing_file(tmp_path / "file") as file:
        (aside / "weights").write_text("new")
        file.write(b"new")
        clear_leftovers(tmp_path, "model")  # of one name
        assert (tmp_path / others.pop()).exists()
        clear_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "file", *others}


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/zero")
    assert read_regular(tmp_path / "link", 5) == b"12345"
    with pytest.raises(UserError, match="at most 4"):
        read_regular(tmp_path / "link", 4)
    for name in ("pipe", "device"):
        with pytest.raises(UserError, match="only regular files"):
            read_json(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none")


def test_json() -> None:
    for data in (b"", b"\xff", b"1" * 5000, b"[" * 100_000):
        with pytest.raises(UserError, match="x is not valid JSON"):
            parse_json(data, "x")


def test_an_archive_is_read_array_by_array(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    arrays = {"x": np.arange(6.0).reshape(2, 3), "empty": np.zeros((0, 5)), "one": np.array(7), "text": np.array(["é"])}
    np.savez_compressed(path, **arrays)
    with reading_npz(path) as read:
        assert {name: read[name].tolist() for name in read} == {name: array.tolist() for name, array in arrays.items()}


def test_cells_that_spreadsheets_would_compute_are_text() -> None:
    """And can be read back; numbers and other names stay as they are."""
    for text in ("=1+1", "+", "-", "-1+1", "@x", "\t=1", "'=1", "''=1", "'-1", "'x", "+4a", "--1"):
        (cell,) = as_cells([text])
        assert from_cell(cell) == text
        assert cell.startswith("'")
    plain = ["-1", "+1.5e-3", "-0.25", "Übung", "x=1", "", -1.5]
    assert as_cells(plain) == plain
