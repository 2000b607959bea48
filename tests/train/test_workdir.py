"""A run's folder: its settings, its lock, and its logs after a stop."""

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

from vitlab.config import TrainConfig
from vitlab.errors import UserError
from vitlab.models import ViTConfig
from vitlab.settings import from_dict, to_dict
from vitlab.train.workdir import METRICS, SPEED, Workdir, check_folder, read_log

SETTINGS = {"model": {"width": 192, "image_size": (32, 32)}, "optim": {"lr": 0.001}, "steps": None}


def open_workdir(path: Path, settings: dict[str, Any] | None = None) -> Workdir:
    return Workdir(path, SETTINGS if settings is None else settings, tensorboard=False)


def test_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    """Whose config.json has the settings of the model on one level."""
    model = {"kind": "vit", "width": 192, "gelu": "erf", "rotary": None, "registers": 4}
    settings = to_dict(TrainConfig(model=from_dict(ViTConfig, model), steps=1))
    variant = settings["model"].pop("variant")
    open_workdir(tmp_path, settings | {"model": settings["model"] | variant}).close()
    assert json.loads((tmp_path / "config.json").read_text())["model"]["registers"] == 4
    settings["model"]["variant"] = variant
    open_workdir(tmp_path, settings).close()
    settings["model"]["variant"] = variant | {"registers": 2}
    with pytest.raises(ValueError, match=r"model\.variant\.registers: 4 -> 2"):
        open_workdir(tmp_path, settings)


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


def test_a_setting_that_only_one_version_knows(tmp_path: Path) -> None:
    """None is the same as none."""
    settings = {"model": {"width": 192}, "steps": None}
    open_workdir(tmp_path, settings).close()
    open_workdir(tmp_path, settings | {"fewshot": None}).close()
    for value in (0, False):
        with pytest.raises(ValueError, match=f"fewshot: not set -> {value}"):
            open_workdir(tmp_path, settings | {"fewshot": value})
    open_workdir(tmp_path / "other", settings | {"float8": False, "start": None}).close()
    with pytest.raises(ValueError, match=r"other settings:\n  float8: False -> not set\n"):
        open_workdir(tmp_path / "other", settings)


def test_a_setting_that_was_removed(tmp_path: Path) -> None:
    """At the value at which it did nothing the run resumes."""
    for steps in (0, 5):
        optim = {"optim": {"lr": 0.001, "cooldown_steps": steps}}
        open_workdir(tmp_path / str(steps), SETTINGS | optim).close()
    open_workdir(tmp_path / "0").close()
    with pytest.raises(ValueError, match=r"other settings:\n  optim.cooldown_steps: 5 -> 0\n"):
        open_workdir(tmp_path / "5")


def test_a_setting_that_was_renamed(tmp_path: Path) -> None:
    open_workdir(tmp_path, SETTINGS | {"data": {"name": "digits", "part": 0.1, "part_seed": None}}).close()
    renamed = {"name": "digits", "subset_fraction": 0.1, "subset_seed": None}
    open_workdir(tmp_path, SETTINGS | {"data": renamed}).close()
    with pytest.raises(ValueError, match=r"other settings:\n  data.subset_fraction: 0.1 -> 0.2\n"):
        open_workdir(tmp_path, SETTINGS | {"data": renamed | {"subset_fraction": 0.2}})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run/thesis.tex", "x", r"holds no run .*thesis\.tex"),
        ("run", "", "is a file"),
        ("run/config.json", "{", "JSON"),
        ("run/config.json", "3", "JSON"),
    ],
)
def test_what_is_no_run_is_refused_and_unchanged(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        open_workdir(tmp_path / "run")
    assert (tmp_path / name).read_text() == content


@pytest.mark.skipif(sys.platform == "darwin", reason="its file systems refuse such names")
def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    """Before any work: what is written there could not be read."""
    with pytest.raises(UserError, match=r"r\\udcfcn' is not valid UTF-8.*another --workdir"):
        check_folder(Path(os.fsdecode(bytes(tmp_path) + b"/r\xfcn")))
    check_folder(tmp_path / "r\u00fcn")


LOGGED = """
import sys
from vitlab.config import TrainConfig
from vitlab.models import ViTConfig
from vitlab.settings import from_dict, to_dict
from vitlab.train.workdir import METRICS, Workdir
with Workdir(sys.argv[1], {}) as workdir:
    workdir.log(METRICS, 1, {"loss": 2.0})
"""


def test_a_locale_without_utf_8(tmp_path: Path) -> None:
    """The name is UTF-8, and Python does not know: TensorBoard's writer would raise."""
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    folder = tmp_path / "r\u00fcn"
    ended = subprocess.run(
        [sys.executable, "-c", LOGGED, folder], env=os.environ | locale, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, "no files for TensorBoard" in ended.stderr) == (0, True), ended.stderr
    assert read_log(folder / METRICS) == [{"loss": 2.0, "step": 1}]


def test_a_run_killed_at_its_start_starts_again(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("1")
    (tmp_path / ".config.json.tmp").write_text('{"model": {"wi')
    open_workdir(tmp_path).close()
    assert json.loads((tmp_path / "config.json").read_text())["steps"] is None


HOLDER = """
import os, sys, time
from vitlab.config import TrainConfig
from vitlab.models import ViTConfig
from vitlab.settings import from_dict, to_dict
from vitlab.train.workdir import Workdir
workdir = Workdir(sys.argv[1], {}, tensorboard=False)
if os.fork() == 0:  # a loader worker that outlives its parent
    print(os.getpid(), flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def test_a_folder_is_locked_until_its_process_ends(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        worker = int(holder.stdout.readline())
        try:
            with pytest.raises(ValueError, match=rf"in use by process {holder.pid}"):
                open_workdir(tmp_path, {})
            holder.kill()
            holder.wait()
            open_workdir(tmp_path, {}).close()
        finally:
            holder.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, 9)


def test_records_are_valid_json_with_sorted_keys(tmp_path: Path) -> None:
    with open_workdir(tmp_path) as workdir:
        workdir.log(METRICS, 3, {"loss": 0.1, "accuracy": 1 / 3, "gradient": float("inf")})
        workdir.log(SPEED, 3, {"images_per_s": 100.0})
        assert (tmp_path / "metrics.jsonl").read_text() == (
            '{"accuracy": 0.3333333333333333, "gradient": null, "loss": 0.1, "step": 3}\n'
        )
        assert (tmp_path / "speed.jsonl").read_text() == '{"images_per_s": 100.0, "step": 3}\n'


def log_steps(path: Path, steps: range) -> None:
    with open_workdir(path) as workdir:
        workdir.truncate_logs(steps.start or -1)
        for step in steps:
            workdir.log(METRICS, step + 1, {"loss": 1 / (step + 1), "lr": 0.1})
            workdir.log(SPEED, step + 1, {"images_per_s": 5.0})


@pytest.mark.parametrize("half_line", ["", '{"loss": 9.0, "st', "\0" * 40])
@pytest.mark.parametrize("checkpoint", [0, 10])
def test_repeated_steps_are_logged_once(tmp_path: Path, half_line: str, checkpoint: int) -> None:
    log_steps(tmp_path / "straight", range(20))
    log_steps(tmp_path / "stopped", range(13))
    with (tmp_path / "stopped" / "metrics.jsonl").open("a") as file:
        file.write(half_line)
    log_steps(tmp_path / "stopped", range(checkpoint, 20))
    for log in ("metrics.jsonl", "speed.jsonl"):
        assert (tmp_path / "stopped" / log).read_bytes() == (tmp_path / "straight" / log).read_bytes()


def test_whether_a_step_is_evaluated(tmp_path: Path) -> None:
    with open_workdir(tmp_path) as workdir:
        workdir.log(METRICS, 3, {"val_accuracy": 0.4})
        workdir.log(METRICS, 4, {"loss": 1.0, "lr": 0.1})
        assert (workdir.is_evaluated(3), workdir.is_evaluated(4)) == (True, False)


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
    with pytest.raises(ValueError, match=r"/proc/self/run .*another --workdir"):
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
        with pytest.raises(OSError, match=r"work folder .*run \(File too large\)\. Free space .*the last checkpoint"):
            log(workdir)
    with Workdir(tmp_path / "run", SETTINGS, tensorboard=False) as workdir:
        workdir.truncate_logs(1)
    assert read_log(tmp_path / "run" / "metrics.jsonl") == [{"loss": 1.0, "step": 1}]
    with small_disk(), pytest.raises(OSError, match="File too large"):
        Workdir(tmp_path / "new", {"model": "x" * 5000}, tensorboard=False)
