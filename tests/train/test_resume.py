"""A run that is killed again and again ends as one that never was: the same weights, metrics and result.

`kill_harness.py` does the same with any number of kills.
"""

import importlib
import multiprocessing
from pathlib import Path

import pytest
from kill_harness import IMPORTS, Run, contents, differing, masked, settings

from vitlab.config import TrainConfig


@pytest.mark.usefixtures("unchecked")  # each process would compile the checks anew
@pytest.mark.parametrize(("config", "processes"), [(settings(12), 2), (masked(12), 1)])
def test_killed_again_and_again(config: TrainConfig, processes: int, tmp_path: Path) -> None:
    """Of two processes one is killed, and the other ends by itself."""
    assert all(map(importlib.import_module, IMPORTS))  # once, not in each process
    fork = multiprocessing.get_context("fork")
    straight, killed = (Run(config, tmp_path / name, fork, processes) for name in ("straight", "killed"))
    seconds = straight.finish()
    # At a record each; of two processes with no moment after it in which a run could end.
    done = killed.kill_often(2, seconds if processes == 1 else 0.0, seed=1)
    assert any(0 < kill.step < (config.steps or 0) for kill in done)
    assert processes == 1 or [kill.process for kill in done] == [0, 1]
    if config.masking:
        assert {"masking.safetensors", "reconstructions.png"} <= contents(straight.folder).keys()
    assert differing(straight.folder, killed.folder) == []
