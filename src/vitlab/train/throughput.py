"""The throughput of a run: images/s, FLOP/s and MFU (fraction of the device's peak), and how it is shown.

Nothing here imports torch: the command line takes its choices from `DEVICES`.
"""

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from vitlab.display import ProgressDisplay, format_duration, format_rate


@dataclass(frozen=True)
class Device:
    """An accelerator as its data sheet describes it: peak of dense bfloat16 products in TFLOP/s, memory in 1e9 bytes.

    `name_pattern` matches the whole name that torch reports, without the maker; None where torch does not run on it.
    """

    tflops: float
    gigabytes: int
    name_pattern: str | None = None

    @property
    def memory(self) -> int:
        """Bytes."""
        return self.gigabytes * 10**9


DEVICES: dict[str, Device] = {
    "h200": Device(989.0, 141, "H200"),
    "h100-pcie": Device(756.0, 80, "H100 PCIe"),
    "h100-nvl": Device(835.0, 94, "H100 NVL"),
    "h100": Device(989.0, 80, "H100 80GB HBM3"),
    "b200": Device(2250.0, 180, "B200"),
    "a100-40gb": Device(312.0, 40, r"A100-(SXM4|PCIE)-40GB"),
    "a100": Device(312.0, 80, "A100-SXM4-80GB|A100 80GB PCIe"),
    "a40": Device(149.7, 48, "A40"),
    "a10": Device(125.0, 24, "A10"),
    "l40s": Device(362.0, 48, "L40S"),
    "l4": Device(121.0, 24, "L4"),
    "rtx4090": Device(165.2, 24, "GeForce RTX 4090"),
    "rtx3090": Device(71.0, 24, "GeForce RTX 3090"),
    "tpuv3-core": Device(61.5, 16),  # half a chip, as the paper counts (Table 2)
    "tpuv4": Device(275.0, 32),
}


def find_device(torch_name: str) -> str | None:
    """The key of DEVICES for torch's name of a device, or None.

    The whole name must match: a laptop's version, or a part of a GPU as MIG makes it, has another peak.
    """
    patterns = ((key, device.name_pattern) for key, device in DEVICES.items() if device.name_pattern)
    return next((key for key, pattern in patterns if re.fullmatch(rf"(NVIDIA )?({pattern})", torch_name)), None)


def peak_flops(torch_name: str) -> float | None:
    """Peak bfloat16 FLOP/s of the device with this name; None where it is unknown, as of every CPU."""
    name = find_device(torch_name)
    return DEVICES[name].tflops * 1e12 if name else None


@dataclass
class Throughput:
    """Images per second and what follows from it, since the last record."""

    flops_per_image: float
    """FLOPs of a training step: two per multiply-add of the forward pass, twice as many for the backward pass."""
    peak: float | None
    images: int = 0
    data_wait: float = 0.0
    """Seconds spent waiting for images."""
    since: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time inside, as of evaluation and saving."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Counts the time inside as waiting for images."""
        start = time.perf_counter()
        yield
        self.data_wait += time.perf_counter() - start

    def record(self, images_left: int) -> dict[str, float]:
        """The measurements since the last record; starts the next one."""
        now = time.perf_counter()
        seconds = max(now - self.since, 1e-9)
        rate = self.images / seconds
        record = {
            "images_per_s": rate,
            "data_wait": self.data_wait / seconds,
            "tflops": rate * self.flops_per_image / 1e12,
            "eta_s": images_left / rate if rate else 0.0,
        }
        if self.peak is not None:
            record["mfu"] = rate * self.flops_per_image / self.peak
        self.images, self.data_wait, self.since = 0, 0.0, now
        return record


class TrainProgress(ProgressDisplay):
    """The progress of a run: `show` displays a record, `tick` the speed between two records."""

    def __init__(
        self, description: str, total_steps: int, batch_size: int, quiet: bool = False, multi_label: bool = False
    ) -> None:
        super().__init__(description, total_steps, unit="steps", quiet=quiet)
        self._batch_size = batch_size
        self._accuracy_name = "top label right" if multi_label else "acc"
        self.last_record = 0, time.monotonic()
        """The step of the last record, and its time."""

    def show(self, metrics: Mapping[str, float | int], speed: Mapping[str, float]) -> None:
        """Displays a record."""
        parts = [
            f"step {metrics['step']}/{self.total}",
            f"loss {metrics['loss']:.4f}",
            *([f"{self._accuracy_name} {metrics['accuracy']:.1%}"] if "accuracy" in metrics else []),
            f"{format_rate(speed['images_per_s'])} img/s",
            f"ETA {format_duration(speed['eta_s'])}",  # from here on, a terminal of 80 columns may cut
            f"epoch {metrics['epoch']:.2f}",
            f"lr {metrics['lr']:.2e}",
            f"wait {speed['data_wait']:.0%}",
            f"{speed['tflops']:.2f} TFLOP/s" + (f" (MFU {speed['mfu']:.0%})" if "mfu" in speed else ""),
        ]
        self.update(metrics["step"], " · ".join(parts), force=True)
        self.last_record = metrics["step"], time.monotonic()

    def tick(self, step: int | float) -> None:
        """Displays the step, which may be fractional, and the speed since the last record."""
        since_step, since = self.last_record
        rate = (step - since_step) * self._batch_size / max(time.monotonic() - since, 1e-9)
        eta = format_duration((self.total - step) * self._batch_size / rate) if rate else "unknown"
        done = f"{step:.1f}".removesuffix(".0")
        self.update(step, f"step {done}/{self.total} · {format_rate(rate)} img/s · ETA {eta}")
