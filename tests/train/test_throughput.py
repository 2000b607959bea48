"""The speed of a run, the table of devices, and the lines that show progress."""

import io
import sys

import pytest

from vitlab.train import throughput
from vitlab.train.throughput import DEVICES, Throughput, TrainProgress, find_device, peak_flops

METRICS = {"step": 50, "loss": 1.23456, "accuracy": 0.5, "lr": 3e-4, "epoch": 2.5, "skipped": 0}
SPEED = {"images_per_s": 1234.5, "data_wait": 0.031, "tflops": 0.1234, "eta_s": 3723.0}


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100 80GB PCIe", "a100"),
        ("A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("cpu", None),
    ],
)
def test_devices_by_their_whole_name(name: str, key: str | None) -> None:
    """A name that merely begins like a known one has another peak, which would make a false MFU."""
    assert find_device(name) == key
    assert peak_flops(name) == (DEVICES[key].tflops * 1e12 if key else None)


def test_speed_since_the_last_record(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now)
    measured = Throughput(flops_per_image=2e9, peak=1e12, since=now)
    with measured.waiting_for_data():
        now = 101.0
    measured.images, now = 640, 104.0
    record = measured.record(images_left=640)
    assert record == {"images_per_s": 160.0, "data_wait": 0.25, "tflops": 0.32, "eta_s": 4.0, "mfu": 0.32}
    measured.images, now = 64, 106.0
    record = measured.record(images_left=0)
    assert record == {"images_per_s": 32.0, "data_wait": 0.0, "tflops": 0.064, "eta_s": 0.0, "mfu": 0.064}


def test_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record is always shown; between records a line after five seconds, then every half minute."""
    now, stream = 100.0, io.StringIO()
    monkeypatch.setattr(throughput.time, "monotonic", lambda: now)
    monkeypatch.setattr(sys, "stderr", stream)
    shown = TrainProgress("train", 200, batch_size=120)
    with shown:
        shown.say("resumed from [step-000000040]")
        for second in range(1, 70):
            now = 100.0 + second
            shown.tick(second / 60)
        shown.show(METRICS, SPEED)
        shown.show(METRICS | {"step": 100}, SPEED | {"mfu": 0.408})
        now += 40
        shown.tick(100.5)
    record = "loss 1.2346 · acc 50.0% · 1,234 img/s · ETA 62:03 min · epoch 2.50 · lr 3.00e-04 · wait 3% · 0.12 TFLOP/s"
    assert stream.getvalue().splitlines() == [
        "train: resumed from [step-000000040]",
        "train: step 0.1/200 · 2 img/s · ETA 3:20 h",
        "train: step 0.6/200 · 2 img/s · ETA 3:19 h",
        "train: step 1.1/200 · 2 img/s · ETA 3:19 h",
        f"train: step 50/200 · {record}",
        f"train: step 100/200 · {record} (MFU 41%)",
        "train: step 100.5/200 · 1.5 img/s · ETA 2:13 h",
    ]
