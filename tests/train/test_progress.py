"""What a person sees of a run, and the arithmetic of its speed."""

import io
import sys

import pytest
import torch

from vitlab.data.loader import Batch
from vitlab.train import progress
from vitlab.train.progress import Progress, Speed, counted, duration, peak_flops, per_second

METRICS = {"step": 50, "loss": 1.23456, "accuracy": 0.5, "lr": 3e-4, "epoch": 2.5, "skipped": 0}
SPEED = {"images_per_s": 1234.5, "data_wait": 0.031, "tflops": 0.1234, "eta_s": 3723.0}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what a person or a build server may have told rich to think of its output."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(0.0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (125.0, "2:05"), (3600.0, "1:00:00"), (93784.0, "26:03:04")],
)
def test_duration(seconds: float, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H200", 989.0),
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("Tesla T4", None),
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA T400", None),
        ("Something Newer", None),
    ],
)
def test_peak_of_known_devices_only(monkeypatch: pytest.MonkeyPatch, name: str, tera: float | None) -> None:
    """A name that merely begins like a known one has another peak, which would make a false MFU."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == (None if tera is None else tera * 1e12)


def test_a_processor_has_no_known_peak() -> None:
    assert peak_flops(torch.device("cpu")) is None


def test_speed_since_the_last_record(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    speed = Speed(flops_per_image=2e9, peak=1e12, since=now)
    speed.images, speed.waited, now = 640, 1.0, 104.0
    figures = speed.record(steps_left=10, batch_size=64)
    assert figures == {"images_per_s": 160.0, "data_wait": 0.25, "tflops": 0.32, "eta_s": 4.0, "mfu": 0.32}
    speed.images, now = 64, 106.0
    figures = speed.record(steps_left=0, batch_size=64)
    assert figures == {"images_per_s": 32.0, "data_wait": 0.0, "tflops": 0.064, "eta_s": 0.0, "mfu": 0.064}


def test_pauses_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation between two records takes nothing off the speed, and nothing off what was done before it."""
    now = 0.0
    monkeypatch.setattr(progress.time, "perf_counter", lambda: now)
    speed = Speed(flops_per_image=1.0, peak=None, since=now)
    speed.images, speed.waited, now = 100, 1.0, 2.0
    with speed.paused():
        now = 1002.0
    speed.images, now = 200, 1004.0
    figures = speed.record(steps_left=1, batch_size=100)
    assert (figures["images_per_s"], figures["data_wait"], figures["eta_s"]) == (50.0, 0.25, 2.0)


def test_no_share_of_an_unknown_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "perf_counter", lambda: 5.0)
    figures = Speed(flops_per_image=1.0, peak=None, since=1.0).record(steps_left=3, batch_size=2)
    assert figures == {"images_per_s": 0.0, "data_wait": 0.0, "tflops": 0.0, "eta_s": 0.0}


def test_the_line() -> None:
    shown = Progress("pretrain", 200)
    expected = (
        "pretrain step 50/200 · epoch 2.50 · loss 1.2346 · acc 50.0% · lr 3.00e-04 · 1,234 img/s · wait 3% · "
        "0.12 TFLOP/s · ETA 1:02:03"
    )
    assert shown.line(METRICS, SPEED) == expected
    assert "0.12 TFLOP/s (MFU 41%) · ETA" in shown.line(METRICS, SPEED | {"mfu": 0.408})


def test_plain_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("train", 200) as shown:
        shown.say("continues from [step-000000040]")
        shown.show(METRICS, SPEED)
        shown.show(METRICS | {"step": 100}, SPEED)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "train: continues from [step-000000040]"
    assert lines[1:] == [shown.line(METRICS | {"step": step}, SPEED) for step in (50, 100)]
    assert "\x1b" not in stream.getvalue()


def test_one_live_line_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("train", 200) as shown:
        shown.show(METRICS, SPEED)
        shown.say("a word in between")
        shown.show(METRICS | {"step": 200}, SPEED)
    said = stream.getvalue()
    assert "━" * 5 + "╌" * 15 + " train step 50/200" in said
    assert "━" * 20 + " train step 200/200" in said
    assert "train: a word in between\n" in said
    assert "\x1b[2K" in said  # the line before is wiped out, not left standing


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def test_the_first_step_is_heard_of_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of a minute, records of ten: a word after five seconds, then every half minute, without a terminal."""
    clock, stream = Clock(monkeypatch), io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("train", 200) as shown:
        for second in range(1, 70):
            clock.now = 100.0 + second
            shown.tick(second / 60, images=2.0 * second, left=24_000.0 - 2 * second)
    assert stream.getvalue().splitlines() == [
        "train step 0.1/200 · 2 img/s · ETA 3:19:55",
        "train step 0.6/200 · 2 img/s · ETA 3:19:25",
        "train step 1.1/200 · 2 img/s · ETA 3:18:55",
    ]


def test_ticks_are_counted_from_the_last_record(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("train", 200) as shown:
        clock.now += 100
        shown.show(METRICS, SPEED)
        clock.now += 40
        shown.tick(50.5, images=20.0, left=100.0)
    assert stream.getvalue().splitlines()[1] == "train step 50.5/200 · 0.5 img/s · ETA 3:20"


def test_a_terminal_hears_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, stream = Clock(monkeypatch), Terminal()
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress("train", 200) as shown:
        for _ in range(8):
            clock.now += 0.25
            shown.tick(1.0, images=5.0, left=10.0)
    assert 4 <= stream.getvalue().count("train step 1.0/200") <= 6


@pytest.mark.parametrize(("rate", "text"), [(1234.5, "1,234"), (56.4, "56"), (7.84, "7.8"), (0.123, "0.12")])
def test_rates_have_the_digits_that_mean_something(rate: float, text: str) -> None:
    assert per_second(rate) == text


def test_batches_are_counted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A word after five seconds, then every half minute; none at the end, or of a short loop."""
    clock = Clock(monkeypatch)
    labels = torch.zeros(10, dtype=torch.int64)
    batches = [Batch(torch.zeros(10, 3, 1, 1), labels, labels)] * 100
    for seconds, quiet, expected in (
        (1.0, False, ["evaluation: 50 of 1,000 images · ETA 1:35", "evaluation: 350 of 1,000 images · ETA 1:05",
                      "evaluation: 650 of 1,000 images · ETA 0:35", "evaluation: 950 of 1,000 images · ETA 0:05"]),
        (0.04, False, []),
        (1.0, True, []),
    ):  # fmt: skip
        seen = 0
        for _ in counted(batches, 1000, "evaluation", quiet=quiet):
            clock.now += seconds
            seen += 1
        assert seen == 100
        assert capsys.readouterr().err.splitlines() == expected
