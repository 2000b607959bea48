"""A run that is killed again and again ends as one that never was: the same weights, metrics and result.

`kill_harness.py` does the same with any number of kills.
"""

from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from kill_harness import Run, contents, differing, masked, settings

from vitlab.config import TrainConfig


@pytest.mark.parametrize(
    ("config", "processes_of_run", "kills"), [(settings(20), 1, 2), (settings(16), 2, 2), (masked(20), 1, 2)]
)
def test_killed_again_and_again(
    config: TrainConfig, processes_of_run: int, kills: int, tmp_path: Path, processes: ForkServerContext
) -> None:
    """Of two processes one is killed, and the other ends by itself."""
    straight, killed = (Run(config, tmp_path / name, processes, processes_of_run) for name in ("straight", "killed"))
    seconds = straight.finish()
    # At a record each; of two processes with no moment after it in which a run could end.
    done = killed.kill_often(kills, seconds if processes_of_run == 1 else 0.0, seed=1)
    assert any(0 < kill.step < (config.steps or 0) for kill in done)
    if processes_of_run == 2:
        assert [kill.process for kill in done] == [0, 1]
    if config.masking:
        assert {"masking.safetensors", "reconstructions.png"} <= contents(straight.folder).keys()
    assert differing(straight.folder, killed.folder) == []
