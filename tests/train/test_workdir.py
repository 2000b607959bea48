"""A run's folder: its settings, its lock, and its logs after a stop."""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from small_disk import small_disk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from vitlab.errors import UserError
from vitlab.train.workdir import METRICS, SPEED, Workdir, check_folder, read_log

SETTINGS = {"model": {"width": 192, "image_size": (32, 32)}, "optim": {"lr": 0.001}, "steps": None}


def open_workdir(path: Path, settings: dict[str, Any] | None = None) -> Workdir:
    return Workdir(path, SETTINGS if settings is None else settings, tensorboard=False)


def test_settings_are_saved_and_continue_the_run(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "run"
    for _ in range(2):
        with open_workdir(folder) as workdir:
            assert not workdir.finished
            workdir.log(METRICS, 1, {"loss": 2.0})
    assert json.loads((folder / "config.json").read_text()) == json.loads(json.dumps(SETTINGS))
    assert len(read_log(folder / "metrics.jsonl")) == 2


def test_other_settings_are_refused(tmp_path: Path) -> None:
    open_workdir(tmp_path).close()
    before = (tmp_path / "config.json").read_bytes()
    other = {"model": {"width": 384, "image_size": (32, 32), "depth": 6}, "optim": {"lr": 0.001}, "steps": 10}
    with pytest.raises(ValueError, match="other settings") as caught:
        open_workdir(tmp_path, other)
    differences = str(caught.value).splitlines()[1:-1]
    assert differences == ["  model.depth: not set -> 6", "  model.width: 192 -> 384", "  steps: None -> 10"]
    assert (tmp_path / "config.json").read_bytes() == before
    open_workdir(tmp_path).close()  # the folder is not locked


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("folder:a", "folder:b/", True),
        ("folder:a", "csv:a", False),
        ("shards:https://host/a", "shards:https://host/b", False),
        ("shards:hub:a/b", "shards:hub:a/c", False),
    ],
)
def test_the_location_of_local_images_may_differ(before: str, after: str, same: bool, tmp_path: Path) -> None:
    open_workdir(tmp_path, {"data": {"name": before, "root": None}}).close()
    with contextlib.nullcontext() if same else pytest.raises(ValueError, match=r"data\.name"):
        open_workdir(tmp_path, {"data": {"name": after, "root": "/elsewhere"}}).close()


@pytest.mark.parametrize(
    ("name", "content"),
    [("run/thesis.tex", "x"), ("run", ""), ("run/config.json", "{")],
)
def test_what_is_no_run_is_refused_and_unchanged(name: str, content: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=Path(name).name):
        open_workdir(tmp_path / "run")
    assert (tmp_path / name).read_text() == content


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems refuse such names")
def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    """Before any work: what is written there could not be read."""
    with pytest.raises(UserError, match=r"r\\udcfcn' .*--workdir"):
        check_folder(Path(os.fsdecode(bytes(tmp_path) + b"/r\xfcn")))
    check_folder(tmp_path / "r\u00fcn")


def test_a_locale_without_utf_8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The name is UTF-8, and Python decodes it as ASCII: TensorBoard's writer would raise."""
    folder = tmp_path / "r\u00fcn".encode().decode("ascii", "surrogateescape")
    with Workdir(folder, {}) as workdir:
        workdir.log(METRICS, 1, {"loss": 2.0})
    assert "no files for TensorBoard" in caplog.text
    assert read_log(folder / METRICS) == [{"loss": 2.0, "step": 1}]


def test_a_run_killed_at_its_start_starts_again(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("1")
    (tmp_path / ".config.json.tmp").write_text('{"model": {"wi')
    open_workdir(tmp_path).close()
    assert json.loads((tmp_path / "config.json").read_text())["steps"] is None


def hold(folder: Path, pipe: Any) -> None:
    workdir = open_workdir(folder, {})
    worker = os.fork()  # a loader worker that outlives its parent
    if worker:
        pipe.send(worker)
    time.sleep(60)
    os._exit(workdir.finished)


def test_a_folder_is_locked_until_its_process_ends(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    holder = fork.Process(target=hold, args=(tmp_path, theirs), daemon=True)
    holder.start()
    worker = ours.recv()
    try:
        with pytest.raises(ValueError, match=f"in use by process {holder.pid}"):
            open_workdir(tmp_path, {})
        holder.kill()
        holder.join()
        open_workdir(tmp_path, {}).close()
    finally:
        holder.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def test_records_are_valid_json_with_sorted_keys(tmp_path: Path) -> None:
    with open_workdir(tmp_path) as workdir:
        workdir.log(METRICS, 3, {"loss": 0.1, "accuracy": 1 / 3, "gradient": float("inf")})
        workdir.log(SPEED, 3, {"images_per_s": 100.0})
        assert (tmp_path / "metrics.jsonl").read_text() == (
            '{"accuracy": 0.3333333333333333, "gradient": null, "loss": 0.1, "step": 3}\n'
        )
        assert (tmp_path / "speed.jsonl").read_text() == '{"images_per_s": 100.0, "step": 3}\n'
        workdir.log(METRICS, 4, {"val_accuracy": 0.4})
        workdir.log(METRICS, 5, {"loss": 1.0, "lr": 0.1})
        assert (workdir.is_evaluated(4), workdir.is_evaluated(5)) == (True, False)
        workdir.write_runtime({"microbatch": 4})
        assert workdir.read_runtime() == {"microbatch": 4}
        for content in ("{", '{"microbatch": 0}'):
            (tmp_path / "runtime.json").write_text(content)
            assert workdir.read_runtime() == {}


def log_steps(path: Path, steps: range) -> None:
    with open_workdir(path) as workdir:
        workdir.truncate_logs(steps.start or -1)
        for step in steps:
            workdir.log(METRICS, step + 1, {"loss": 1 / (step + 1), "lr": 0.1})
            workdir.log(SPEED, step + 1, {"images_per_s": 5.0})


@pytest.mark.parametrize(("checkpoint", "half_line"), [(0, '{"loss": 9.0, "st'), (10, "\0" * 40)])
def test_repeated_steps_are_logged_once(tmp_path: Path, checkpoint: int, half_line: str) -> None:
    log_steps(tmp_path / "straight", range(20))
    log_steps(tmp_path / "stopped", range(13))
    with (tmp_path / "stopped" / "metrics.jsonl").open("a") as file:
        file.write(half_line)
    log_steps(tmp_path / "stopped", range(checkpoint, 20))
    for log in ("metrics.jsonl", "speed.jsonl"):
        assert (tmp_path / "stopped" / log).read_bytes() == (tmp_path / "straight" / log).read_bytes()


def test_tensorboard_shows_every_step_once_after_a_stop(tmp_path: Path) -> None:
    with Workdir(tmp_path, SETTINGS) as workdir:
        for step in (1, 2, 3):
            workdir.log(METRICS, step, {"loss": 1.0, "name": "not a number"})
        workdir.sync()
    with Workdir(tmp_path, SETTINGS) as workdir:
        workdir.truncate_logs(2)
        workdir.log(METRICS, 3, {"loss": 2.0})
        workdir.log(SPEED, 3, {"images_per_s": 7.0})
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert events.Tags()["scalars"] == ["loss", "images_per_s"]


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux's /proc, in which no folder can be created")
def test_a_folder_that_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match=r"/proc/self/run .*--workdir"):
        Workdir("/proc/self/run", {})


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of TensorBoard's writer
@pytest.mark.parametrize("tensorboard", [False, True])
def test_a_full_disk(tmp_path: Path, tensorboard: bool) -> None:
    """What was written before stays."""

    def log(workdir: Workdir) -> None:
        for step in range(2, 200):
            with small_disk():
                workdir.log(METRICS, step, {"a figure with a long name": step / 7})

    with Workdir(tmp_path / "run", SETTINGS, tensorboard=tensorboard) as workdir:
        workdir.log(METRICS, 1, {"loss": 1.0})
        workdir.sync()
        with pytest.raises(OSError, match=r"work folder .*run \(File too large\)"):
            log(workdir)
    with Workdir(tmp_path / "run", SETTINGS, tensorboard=False) as workdir:
        workdir.truncate_logs(1)
    assert read_log(tmp_path / "run" / "metrics.jsonl") == [{"loss": 1.0, "step": 1}]
    with small_disk(), pytest.raises(OSError, match="File too large"):
        Workdir(tmp_path / "new", {"model": "x" * 5000}, tensorboard=False)
