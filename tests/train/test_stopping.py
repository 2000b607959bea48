"""Signals of a run: the first asks it to stop, a second Ctrl-C ends it."""

import os
import signal
import threading

import pytest

from vitlab.train.stopping import stop_signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_to_stop_and_a_second_ctrl_c_interrupts(number: signal.Signals) -> None:
    handler = signal.getsignal(number)
    with stop_signals() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.wait(5.0)
        os.kill(os.getpid(), signal.SIGTERM)  # the run is stopping already
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) is handler


def test_other_threads_receive_no_signals() -> None:
    def enter() -> None:
        with stop_signals() as stop:
            entered.append(stop.is_set())

    entered: list[bool] = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [False]
