"""A run that is stopped, in whatever way, ends as one that never was: the same weights, metrics and result."""

import signal
import time
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
from kill_harness import Run, contents, differing, masked, settings

from vitlab.config import TrainConfig

STEPS = 45


@pytest.fixture(scope="module")
def config() -> TrainConfig:
    return settings(STEPS)


@pytest.fixture(scope="module")
def quiet(
    tmp_path_factory: pytest.TempPathFactory, config: TrainConfig, processes: ForkServerContext
) -> tuple[Run, float]:
    """A run that was left alone, and the seconds that it took."""
    run = Run(config, tmp_path_factory.mktemp("quiet") / "run", processes)
    return run, run.finish()


@pytest.fixture
def run(tmp_path: Path, config: TrainConfig, processes: ForkServerContext) -> Run:
    return Run(config, tmp_path / "run", processes)


def test_two_processes_of_which_one_is_killed(tmp_path: Path, processes: ForkServerContext) -> None:
    """Whichever it is, the other ends by itself, and both together go on to the same end."""
    quiet, run = (Run(settings(30), tmp_path / name, processes, count=2) for name in ("quiet", "killed"))
    quiet.finish()
    kills = run.kill_often(2, 0.0, seed=1)  # at a record each, with no moment after it in which a life could end
    assert [kill.process for kill in kills] == [0, 1]
    assert differing(quiet.folder, run.folder) == []


def stop_at(run: Run, step: int, how: signal.Signals) -> int | None:
    """Starts a life, sends it a signal once it has recorded `step`, and gives its exit code."""
    life = run.start()
    while life.is_alive() and run.last_step() < step:
        time.sleep(0.005)
    life.kill() if how == signal.SIGKILL else life.terminate()
    life.join()
    return life.exitcode


def newest_checkpoint(run: Run) -> Path:
    return max((run.folder / "checkpoints").glob("step-*"))


def test_killed_again_and_again(run: Run, quiet: tuple[Run, float]) -> None:
    """`kill_harness.py` does the same with as many kills as one likes."""
    untouched, seconds = quiet
    kills = run.kill_often(6, seconds, seed=0)
    assert any(0 < kill.step < STEPS for kill in kills)
    assert differing(untouched.folder, run.folder) == []


def test_asked_to_stop(run: Run, quiet: tuple[Run, float]) -> None:
    untouched, _ = quiet
    assert stop_at(run, 10, signal.SIGTERM) == 143
    newest = newest_checkpoint(run).name
    saved = int(newest.removeprefix("step-"))
    assert 10 <= saved < STEPS
    assert f"stopped and saved at step {saved}" in run.said()
    run.finish()
    assert f"continues from {newest}" in run.said()
    assert differing(untouched.folder, run.folder) == []


def test_last_checkpoint_damaged(run: Run, quiet: tuple[Run, float]) -> None:
    untouched, _ = quiet
    assert stop_at(run, 20, signal.SIGKILL) == -signal.SIGKILL
    newest = newest_checkpoint(run)
    content = bytearray((newest / "state.safetensors").read_bytes())
    content[len(content) // 2] ^= 4
    (newest / "state.safetensors").write_bytes(content)
    run.finish()
    assert f"{newest.name} is corrupt and skipped: state.safetensors does not match" in run.said()
    assert differing(untouched.folder, run.folder) == []


def test_started_again_after_the_end(quiet: tuple[Run, float]) -> None:
    """Nothing is trained twice."""
    run, _ = quiet
    before, saved = contents(run.folder), newest_checkpoint(run).stat().st_mtime_ns
    run.finish()
    assert newest_checkpoint(run).stat().st_mtime_ns == saved
    assert contents(run.folder) == before


def test_masked_pretraining_killed_again_and_again(tmp_path: Path, processes: ForkServerContext) -> None:
    """Down to the images of what it tells."""
    quiet = Run(masked(STEPS), tmp_path / "quiet", processes)
    seconds = quiet.finish()
    killed = Run(quiet.config, tmp_path / "killed", processes)
    kills = killed.kill_often(4, seconds, seed=1)
    assert any(0 < kill.step < STEPS for kill in kills)
    assert {"masking.safetensors", "reconstructions.png"} <= contents(quiet.folder).keys()
    assert differing(quiet.folder, killed.folder) == []
