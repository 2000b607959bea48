"""What a person sees of a run: one live line on a terminal, plain lines elsewhere; and its speed, measured."""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from vitlab.data.loader import Batch
from vitlab.train.devices import DEVICES, device_called

FIRST_WORD, FURTHER_WORDS = 5.0, 30.0
"""Seconds of silence after which a run that writes to a file or a pipe says how far it is: at first, and later."""


def peak_flops(device: torch.device) -> float | None:
    """Peak FLOP/s of the device in bfloat16, or None where it is not known (as of every CPU)."""
    if device.type != "cuda":
        return None
    name = device_called(torch.cuda.get_device_name(device))
    return DEVICES[name].tflops * 1e12 if name else None


@dataclass
class Speed:
    """Time between two records: whole, and waiting for images."""

    flops_per_image: float
    peak: float | None
    images: int = 0
    waited: float = 0.0
    since: float = field(default_factory=time.perf_counter)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Does not count the time within: evaluation, saving."""
        start = time.perf_counter()
        yield
        self.since += time.perf_counter() - start

    def record(self, steps_left: int, batch_size: int) -> dict[str, float]:
        """Figures since the last record, and a fresh start."""
        now = time.perf_counter()
        seconds = max(now - self.since, 1e-9)
        rate = self.images / seconds
        figures = {
            "images_per_s": rate,
            "data_wait": self.waited / seconds,
            "tflops": rate * self.flops_per_image / 1e12,
            "eta_s": steps_left * batch_size / rate if rate else 0.0,
        }
        if self.peak is not None:
            figures["mfu"] = rate * self.flops_per_image / self.peak
        self.images, self.waited, self.since = 0, 0.0, now
        return figures


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, seconds = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def per_second(rate: float) -> str:
    """A rate with the digits that mean something: `1,234`, `56`, `7.8`."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def counted(batches: Iterable[Batch], total: int, label: str, quiet: bool = False) -> Iterator[Batch]:
    """The batches, and how many of `total` images they had on the standard error: after FIRST_WORD seconds, and then
    every FURTHER_WORDS."""
    started = heard = time.monotonic()
    images, patience = 0, FIRST_WORD
    for batch in batches:
        yield batch
        images += len(batch.labels)
        now = time.monotonic()
        if not quiet and now - heard >= patience and images < total:
            left = duration((total - images) * (now - started) / max(images, 1))
            sys.stderr.write(f"{label}: {images:,} of {total:,} images · ETA {left}\n")
            sys.stderr.flush()
            heard, patience = now, FURTHER_WORDS


class Progress:
    """The live line. A context manager; `show` replaces the line, `say` leaves one behind; `quiet` does neither."""

    def __init__(self, label: str, total_steps: int, quiet: bool = False) -> None:
        self.label, self.total_steps = label, total_steps
        self._console = Console(file=sys.stderr, highlight=False, soft_wrap=True, quiet=quiet)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._on_terminal = self._console.is_terminal and not quiet
        self._last_word = self._last_record = time.monotonic()
        self._patience = FIRST_WORD

    def __enter__(self) -> "Progress":
        if self._on_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal:
            self._live.stop()

    def show(self, metrics: Mapping[str, float | int], speed: Mapping[str, float]) -> None:
        self._print(self.line(metrics, speed), int(metrics["step"]))
        self._last_record = time.monotonic()
        self._patience = FURTHER_WORDS

    def tick(self, step: float, images: float, left: float) -> None:
        """What can be said between two records: `step` steps are made, the last in part, with `images` since the last
        record; so many images are `left`. A terminal hears it at most twice a second; anything else after FIRST_WORD
        seconds of silence, and then every FURTHER_WORDS seconds."""
        now = time.monotonic()
        if now - self._last_word < (0.5 if self._on_terminal else self._patience):
            return
        rate = images / (now - self._last_record)
        speed = f" · {per_second(rate)} img/s · ETA {duration(left / rate)}" if rate else ""
        self._print(f"{self.label} step {step:.1f}/{self.total_steps}{speed}", int(step))
        self._patience = FURTHER_WORDS

    def _print(self, line: str, step: int) -> None:
        self._last_word = time.monotonic()
        if self._on_terminal:
            done = int(20 * step / self.total_steps)
            self._live.update(Text("━" * done + "╌" * (20 - done) + " " + line), refresh=True)
        else:
            self._console.print(line, markup=False)

    def say(self, text: str) -> None:
        self._console.print(f"{self.label}: {text}", markup=False)

    def line(self, metrics: Mapping[str, float | int], speed: Mapping[str, float]) -> str:
        """The figures of a record, in one line."""
        parts = [
            f"{self.label} step {int(metrics['step'])}/{self.total_steps}",
            f"epoch {metrics['epoch']:.2f}",
            f"loss {metrics['loss']:.4f}",
            *([f"acc {metrics['accuracy']:.1%}"] if "accuracy" in metrics else []),
            f"lr {metrics['lr']:.2e}",
            f"{per_second(speed['images_per_s'])} img/s",
            f"wait {speed['data_wait']:.0%}",
            f"{speed['tflops']:.2f} TFLOP/s" + (f" (MFU {speed['mfu']:.0%})" if "mfu" in speed else ""),
            f"ETA {duration(speed['eta_s'])}",
        ]
        return " · ".join(parts)
