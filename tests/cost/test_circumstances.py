"""What stands beside a measurement."""

import re
import subprocess
from pathlib import Path

import pytest

from vitlab.cost import circumstances as module
from vitlab.cost.circumstances import circumstances, commit


def test_versions_and_machine() -> None:
    found = circumstances("torch", "numpy")
    assert list(found) == ["commit", "cpu", "cores", "torch", "numpy"]
    assert re.match(r"\d+\.\d+", found["numpy"])
    assert found["cores"] >= 1


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def test_commit_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "src" / "vitlab"
    package.mkdir(parents=True)
    monkeypatch.setattr(module, "PACKAGE", package)
    assert commit() is None  # no repository
    (package / "a.py").write_text("1\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "a")
    git(tmp_path, "tag", "v1")
    assert commit() == git(tmp_path, "rev-parse", "HEAD")
    (package / "a.py").write_text("2\n")
    assert commit() == git(tmp_path, "rev-parse", "HEAD") + "-dirty"


def test_another_repository_around_an_installed_package_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / ".venv" / "vitlab"
    package.mkdir(parents=True)
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "a")
    monkeypatch.setattr(module, "PACKAGE", package)
    assert commit() is None


def test_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert commit() is None
