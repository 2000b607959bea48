import subprocess
from pathlib import Path

import pytest

from vitlab.checksums import SUMS, find_corrupt_files, read_sums, write_sums


def test_checksums(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)
    assert read_sums(tmp_path) == find_corrupt_files(tmp_path) == {}
    write_sums(tmp_path, ["one"])
    write_sums(tmp_path, ["two"])
    checked = subprocess.run(["sha256sum", "--check", "--strict", SUMS], cwd=tmp_path, capture_output=True, check=False)
    assert checked.stdout == b"one: OK\ntwo: OK\n"
    assert checked.returncode == 0
    assert find_corrupt_files(tmp_path) == {}
    (tmp_path / "one").write_text("One")
    (tmp_path / "two").unlink()
    assert find_corrupt_files(tmp_path) == {"one": "does not match its checksum", "two": "is missing"}
    assert find_corrupt_files(tmp_path, ["two", "three"]) == {"two": "is missing"}


def test_damaged_checksums(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "one").write_text("one")
    write_sums(tmp_path, ["one"])
    content = (tmp_path / SUMS).read_bytes()
    for at in (0, 70, 136):
        (tmp_path / SUMS).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert find_corrupt_files(tmp_path) == {}
        assert "SHA256SUMS is corrupt" in caplog.text
        caplog.clear()
