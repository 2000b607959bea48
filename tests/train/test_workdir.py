"""A run's folder: whose it is, who may write, and what its logs hold after a stop."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_disk import small_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vitlab.train.workdir import Workdir, write_json

SETTINGS = {"model": {"width": 192, "image_size": (32, 32)}, "optim": {"lr": 0.001}, "steps": None}


def open_workdir(path: Path, settings: dict[str, Any] | None = None) -> Workdir:
    return Workdir(path, SETTINGS if settings is None else settings, tensorboard=False)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- whose folder it is


def test_a_new_folder_receives_the_settings(tmp_path: Path) -> None:
    with open_workdir(tmp_path / "deep" / "run") as workdir:
        assert not workdir.finished
        assert workdir.checkpoints == tmp_path / "deep" / "run" / "checkpoints"
    saved = json.loads((tmp_path / "deep" / "run" / "config.json").read_text())
    assert saved == {"model": {"width": 192, "image_size": [32, 32]}, "optim": {"lr": 0.001}, "steps": None}


def test_the_same_settings_continue_the_run(tmp_path: Path) -> None:
    for _ in range(2):
        with open_workdir(tmp_path) as workdir:
            workdir.log_metrics(1, {"loss": 2.0})
    assert len(lines(tmp_path / "metrics.jsonl")) == 2


def test_other_settings_are_refused_one_by_one(tmp_path: Path) -> None:
    open_workdir(tmp_path).close()
    before = (tmp_path / "config.json").read_bytes()
    other = {"model": {"width": 384, "image_size": (32, 32), "depth": 6}, "optim": {"lr": 0.001}, "steps": 10}
    with pytest.raises(ValueError, match="other settings") as caught:
        open_workdir(tmp_path, other)
    message = str(caught.value)
    assert "model.depth: not set -> 6" in message
    assert "model.width: 192 -> 384" in message
    assert "steps: None -> 10" in message
    assert "lr" not in message
    assert "image_size" not in message
    assert "another --workdir" in message
    assert (tmp_path / "config.json").read_bytes() == before
    open_workdir(tmp_path).close()  # and the folder is free again


@pytest.mark.parametrize("value", [None, False])
def test_a_setting_that_came_later_and_is_off_is_no_difference(value: object, tmp_path: Path) -> None:
    settings = {"model": {"width": 192}, "steps": None}
    open_workdir(tmp_path, settings).close()
    open_workdir(tmp_path, settings | {"fewshot": value}).close()
    with pytest.raises(ValueError, match="fewshot: not set -> 0"):
        open_workdir(tmp_path, settings | {"fewshot": 0})


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"not empty and holds no run .*thesis\.tex.*new or empty folder"):
        open_workdir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        open_workdir(tmp_path / "file")


def test_a_run_killed_at_its_very_start_starts_again(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("1")
    (tmp_path / ".config.json.tmp").write_text('{"model": {"wi')
    open_workdir(tmp_path).close()
    assert json.loads((tmp_path / "config.json").read_text())["steps"] is None


def test_unreadable_settings_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not readable JSON"):
        open_workdir(tmp_path)


# --- who may write

HOLDER = """
import os, sys, time
from vitlab.train.workdir import Workdir
workdir = Workdir(sys.argv[1], {}, tensorboard=False)
if os.fork() == 0:  # a process that reads images and outlives its parent
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_two_processes_cannot_share_a_folder_and_a_dead_one_frees_it(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        orphan = int(holder.stdout.readline())
        try:
            with pytest.raises(ValueError, match=rf"in use by process {holder.pid}; wait for it"):
                open_workdir(tmp_path, {})
            holder.kill()
            holder.wait()
            open_workdir(tmp_path, {}).close()
        finally:
            holder.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(orphan, 9)


# --- logs


def test_records_have_sorted_keys_and_valid_json(tmp_path: Path) -> None:
    with open_workdir(tmp_path) as workdir:
        workdir.log_metrics(3, {"loss": 0.1, "accuracy": 1 / 3, "gradient": float("inf")})
        workdir.log_speed(3, {"images_per_s": 100.0})
    assert (tmp_path / "metrics.jsonl").read_text() == (
        '{"accuracy": 0.3333333333333333, "gradient": null, "loss": 0.1, "step": 3}\n'
    )
    assert (tmp_path / "speed.jsonl").read_text() == '{"images_per_s": 100.0, "step": 3}\n'


def test_a_record_is_on_file_at_once(tmp_path: Path) -> None:
    with open_workdir(tmp_path) as workdir:
        workdir.log_metrics(1, {"loss": 1.0})
        assert lines(tmp_path / "metrics.jsonl") == [{"loss": 1.0, "step": 1}]


@pytest.mark.parametrize("half_line", ["", '{"loss": 9.0, "st', "\0" * 40])
def test_steps_that_run_again_are_logged_once(tmp_path: Path, half_line: str) -> None:
    def run(path: Path, steps: range) -> None:
        with open_workdir(path) as workdir:
            workdir.truncate_metrics(steps.start if steps.start else None)
            for step in steps:
                workdir.log_metrics(step + 1, {"loss": 1 / (step + 1)})
                workdir.log_speed(step + 1, {"images_per_s": 5.0})

    run(tmp_path / "straight", range(20))
    run(tmp_path / "stopped", range(13))  # the last checkpoint was that of step 10
    with (tmp_path / "stopped" / "metrics.jsonl").open("a") as file:
        file.write(half_line)
    run(tmp_path / "stopped", range(10, 20))
    for log in ("metrics.jsonl", "speed.jsonl"):
        assert (tmp_path / "stopped" / log).read_bytes() == (tmp_path / "straight" / log).read_bytes()


def test_without_a_checkpoint_everything_is_forgotten(tmp_path: Path) -> None:
    with open_workdir(tmp_path) as workdir:
        workdir.log_metrics(0, {"loss": 3.0})
        workdir.truncate_metrics(None)
        workdir.log_metrics(0, {"loss": 3.0})
    assert lines(tmp_path / "metrics.jsonl") == [{"loss": 3.0, "step": 0}]


# --- results


def test_a_result_ends_the_run(tmp_path: Path) -> None:
    with open_workdir(tmp_path) as workdir:
        workdir.write_result({"accuracy": 0.5})
        assert workdir.finished
    with open_workdir(tmp_path) as workdir:
        assert workdir.finished
        assert workdir.read_result() == {"accuracy": 0.5}


def test_json_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    write_json(tmp_path / "result.json", {"a": 1})
    with pytest.raises(TypeError):
        write_json(tmp_path / "result.json", {"a": 2, "b": object()})
    assert json.loads((tmp_path / "result.json").read_text()) == {"a": 1}


# --- TensorBoard


def test_tensorboard_shows_each_step_once_after_a_stop(tmp_path: Path) -> None:
    with Workdir(tmp_path, SETTINGS) as workdir:
        for step in (1, 2, 3):
            workdir.log_metrics(step, {"loss": 1.0, "name": "not a number"})
        workdir.sync()
    with Workdir(tmp_path, SETTINGS) as workdir:
        workdir.truncate_metrics(2)
        workdir.log_metrics(3, {"loss": 2.0})
        workdir.log_speed(3, {"images_per_s": 7.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert events.Tags()["scalars"] == ["loss", "images_per_s"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux's /proc, where nobody makes a folder")
def test_a_place_where_nothing_can_be_written() -> None:
    with pytest.raises(
        ValueError, match=r"nothing can be written to the work folder /proc/self/run .*another --workdir"
    ):
        Workdir("/proc/self/run", {})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_full_disk_says_what_to_do(tmp_path: Path, tensorboard: bool) -> None:
    """The records come oftener than checkpoints, so they meet it first; what was written before it stays."""

    def log(workdir: Workdir) -> None:
        for step in range(2, 200):
            with small_disk():
                workdir.log_metrics(step, {"a figure with a long name": step / 7})

    with Workdir(tmp_path / "run", SETTINGS, tensorboard=tensorboard) as workdir:
        workdir.log_metrics(1, {"loss": 1.0})
        workdir.sync()
        with pytest.raises(OSError, match=r"work folder .*run \(File too large\)\. Free space .*the last checkpoint"):
            log(workdir)
    whole = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert json.loads(whole.splitlines()[0]) == {"loss": 1.0, "step": 1}
    with Workdir(tmp_path / "run", SETTINGS, tensorboard=False) as workdir:
        workdir.truncate_metrics(1)
    assert lines(tmp_path / "run" / "metrics.jsonl") == [{"loss": 1.0, "step": 1}]


def test_settings_that_find_no_room(tmp_path: Path) -> None:
    with small_disk(), pytest.raises(OSError, match=r"work folder .* \(File too large\)\. Free space"):
        Workdir(tmp_path, {"model": "x" * 5000}, tensorboard=False)
