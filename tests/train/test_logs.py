"""Logs with checksums: what a stop leaves, and what damage is noticed."""

import json
from pathlib import Path

import pytest

from vitlab.train.logs import Log, checksum_file, corrupt_lines, read_log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A log of steps 1 to 6."""
    log = Log(tmp_path / "metrics.jsonl")
    for step in range(1, 7):
        log.append(step, {"loss": step / 7, "ratio": float("nan")})
    log.sync()
    log.close()
    return log.path


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def truncate(path: Path, after_step: int) -> list[int]:
    log = Log(path)
    damaged = log.truncate(after_step)
    log.close()
    return damaged


def test_an_undamaged_log(path: Path) -> None:
    assert steps(path) == [1, 2, 3, 4, 5, 6]
    assert json.loads(path.read_text().splitlines()[0]) == {"loss": 1 / 7, "ratio": None, "step": 1}
    assert corrupt_lines(path) == []
    assert truncate(path, 4) == []
    assert steps(path) == [1, 2, 3, 4]
    assert checksum_file(path).stat().st_size == 4 * 9


@pytest.mark.parametrize("number", [1, 3, 6])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_flipped_bit_is_noticed_in_its_line(path: Path, number: int, share: float) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    line = bytearray(lines[number - 1])
    line[int(share * (len(line) - 1))] ^= 1
    path.write_bytes(b"".join([*lines[: number - 1], bytes(line), *lines[number:]]))
    assert corrupt_lines(path) == [number]


def test_a_flipped_bit_in_the_checksums_is_noticed(path: Path) -> None:
    content = bytearray(checksum_file(path).read_bytes())
    content[20] ^= 1
    checksum_file(path).write_bytes(content)
    assert corrupt_lines(path) == [3]


@pytest.mark.parametrize(
    ("old", "new"), [(b'"step": 2}', b'"step": 9}'), (b'"step": 2}', b'"step" 2}}'), (b'"step": 5}', b'"step": 1}')]
)
def test_damage_does_not_move_the_cut(path: Path, old: bytes, new: bytes) -> None:
    """Neither a line that cannot be read nor one with another step takes its neighbors along."""
    path.write_bytes(path.read_bytes().replace(old, new))
    assert truncate(path, 4) == ([2] if b"2" in old else [])
    assert len(path.read_bytes().splitlines()) == 4
    assert checksum_file(path).stat().st_size == 4 * 9


@pytest.mark.parametrize("half_line", [b"", b'{"loss": 9.0, "st', b"\0" * 40, b'{"loss": 9.0, "step": 7}\n'])
def test_what_a_kill_leaves_is_no_damage(path: Path, half_line: bytes) -> None:
    """Half a line, or a line without its checksum."""
    with path.open("ab") as file:
        file.write(half_line)
    assert truncate(path, 6) == []
    assert steps(path) == [1, 2, 3, 4, 5, 6]


def test_a_log_of_an_older_version_gets_checksums(path: Path) -> None:
    checksum_file(path).unlink()
    assert corrupt_lines(path) == []
    Log(path).close()
    path.write_bytes(path.read_bytes().replace(b'"step": 2', b'"step": 3'))
    assert corrupt_lines(path) == [2]


@pytest.mark.parametrize("new", [b'"step": 9}', b'"step" 2}}'])
def test_records_without_the_damaged_ones(path: Path, new: bytes) -> None:
    assert [record["step"] for record in read_log(path)] == [1, 2, 3, 4, 5, 6]
    path.write_bytes(path.read_bytes().replace(b'"step": 2}', new) + b'{"loss": 0.1')
    assert [record["step"] for record in read_log(path)] == [1, 3, 4, 5, 6]
