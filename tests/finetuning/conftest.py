"""A small finished run for the tests of this folder."""

from pathlib import Path

import pytest
from pretrained_run import config, pretrained, workdir
from staged_job import staged, start

from vitlab.inspection import write_pages

__all__ = ["config", "pretrained", "staged", "start", "workdir"]


@pytest.fixture(autouse=True)
def _cache_of_its_own_and_no_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report's figures take four times as long as these jobs, and have tests of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(write_pages, "inspect_checkpoint", lambda *arguments, **settings: {})
