"""A run that is killed again and again ends as one that never was: the same weights, metrics and result.

`kill_harness.py` does the same with any number of kills.
"""

import importlib
import multiprocessing
from pathlib import Path

import pytest
from kill_harness import IMPORTS, Run, contents, differing, masked


@pytest.mark.usefixtures("unchecked")  # each process would compile the checks anew
def test_killed_again_and_again(tmp_path: Path) -> None:
    """Of two processes one is killed, and the other ends by itself."""
    assert all(map(importlib.import_module, IMPORTS))  # once, not in each process
    fork = multiprocessing.get_context("fork")
    straight, killed = (Run(masked(12), tmp_path / name, fork, 2) for name in ("straight", "killed"))
    straight.finish()
    done = killed.kill_often(2, 0.0, seed=1)  # at a record each, with no moment after it in which a run could end
    assert any(0 < kill.step < 12 for kill in done)
    assert [kill.process for kill in done] == [0, 1]
    assert {"masking.safetensors", "reconstructions.png"} <= contents(straight.folder).keys()
    assert differing(straight.folder, killed.folder) == []
