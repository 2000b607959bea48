"""Compiling that a signal stops at once. What signals do to a run: tests/train/test_loop.py."""

import os
import signal
import threading
import time

import pytest

from vitlab.train.signals import StoppedError, interruptible, stop_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_at_once(number: signal.Signals) -> None:
    received: list[int] = []

    def work() -> None:
        with interruptible():
            os.kill(os.getpid(), number)
            time.sleep(60)

    before = signal.signal(number, lambda given, _: received.append(given))
    try:
        with pytest.raises(StoppedError, match="the same command continues"):
            work()
        assert received == [number]
        os.kill(os.getpid(), number)
        assert received == [number, number]  # the handler from before is back
    finally:
        signal.signal(number, before)


def test_another_thread_gets_no_signals() -> None:
    done: list[bool] = []

    def enter() -> None:
        with interruptible():
            done.append(True)

    def request() -> None:
        with stop_signals() as stop:
            done.append(stop.is_set())

    for work in (enter, request):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert done == [True, False]
