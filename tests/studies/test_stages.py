"""What a measurement shows while it works, on a terminal and elsewhere."""

import io

from rich.console import Console

from vitlab.studies.stages import SECONDS, Stages


def test_without_a_terminal_what_begins_is_a_line_at_once() -> None:
    said, now = io.StringIO(), 100.0
    with Stages(Console(file=said, soft_wrap=True), lambda: now) as stages:
        stages.begin("copying")
        stages.begin("row 1")
        stages.show("row 1: does a batch of [1] fit?")  # too soon
        now += SECONDS
        stages.show("row 1: does a batch of [64] fit?")
        stages.done("row 1: 5 images/s")
        stages.begin("row 2")
    told = ["copying", "row 1", "row 1: does a batch of [64] fit?", "row 1: 5 images/s", "row 2"]
    assert said.getvalue().splitlines() == told


def test_on_a_terminal_each_stage_takes_the_place_of_the_last() -> None:
    said = io.StringIO()
    with Stages(Console(file=said, force_terminal=True, highlight=False, width=80)) as stages:
        for stage in ("copying", "warming up"):
            stages.show(stage)
            stages._status._live.refresh()
        stages.done("row 1: 5 images/s")
    assert "copying" in said.getvalue()
    assert "warming up" in said.getvalue()
    assert said.getvalue().count("row 1: 5 images/s\n") == 1
