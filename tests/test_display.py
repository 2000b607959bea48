"""Progress on the standard error, with and without a terminal, and tables."""

import io
import itertools
import math
import sys
from types import SimpleNamespace

import pytest

from vitlab import display
from vitlab.display import ProgressDisplay, fit, format_duration, format_rate, format_table


def test_tables_durations_and_rates() -> None:
    rows = [{"model": "ViT-B/16", "parameters": 86_567_656}, {"model": "R50", "parameters": None}]
    assert format_table(rows) == "model     parameters\nViT-B/16  86,567,656\nR50"
    assert format_table(rows, markdown=True).splitlines()[:2] == ["| model | parameters |", "| --- | --: |"]
    assert format_table([]) == ""
    durations = {3.4: "3 s", 119.4: "119 s", 119.6: "2:00 min", 3723: "62:03 min", 7199.6: "2:00 h"}
    durations[math.inf] = "unknown"
    assert {seconds: format_duration(seconds) for seconds in durations} == durations
    assert [format_rate(rate) for rate in (1234.5, 56.4, 7.84)] == ["1,234", "56", "7.8"]


def test_a_narrow_terminal_breaks_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Optional columns go first, then texts are wrapped, then the last column goes below; addresses stay whole. Files
    and pipes get whole lines."""
    text = "several words that are wrapped"
    row = {"name": "digits", "kind": "embedded", "about": text, "source": f"https://host/{'x' * 30}"}
    whole = format_table([row], optional=["kind"])
    assert [len(line.split()) for line in whole.splitlines()] == [4, 8]
    for width, columns in ((70, ["name", "about", "source"]), (40, ["name", "about"])):
        monkeypatch.setenv("COLUMNS", str(width))
        head, *lines = format_table([row], optional=["kind"]).splitlines()
        assert head.split() == columns
        assert max(map(len, lines)) <= max(width, len(f"    {row['source']}"))
        assert set(f"digits {text} {row['source']}".split()) <= set(" ".join(lines).split())
        assert "embedded" not in " ".join(lines)
    assert fit("size      of several words that are wrapped; `vitlab --help` lists all", sys.stdout).splitlines() == [
        "size      of several words that are",
        "          wrapped; `vitlab --help` lists",
        "          all",
    ]


def test_what_all_rows_share_stands_once_below(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "24")
    rows = [{"model": f"ViT-{size}", "dataset": "JFT-300M", "other": 3 * size, "batch": 4096} for size in "BL"]
    lines = format_table(rows).splitlines()
    assert lines[-1] == "all rows: batch 4,096"
    assert sum("4,096" in line for line in lines) == 1
    assert {"BBB", "LLL"} <= set(" ".join(lines).split())
    assert "batch: 4,096" in format_table(rows[:1])


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at the clock finds it two seconds later."""
    times = itertools.count(0.0, 2.0)
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: next(times)))  # others ask the real one


@pytest.mark.usefixtures("clock")
def test_without_a_terminal_lines_are_few(capsys: pytest.CaptureFixture[str]) -> None:
    """What was done before took no time."""
    with ProgressDisplay("reading", 300) as progress:
        for done in range(10, 300, 10):
            progress.update(done)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("reading: 30 of 300 images · ETA ")
    with ProgressDisplay("study", 30, "points", done=10) as progress:
        progress.update(10, force=True)
        progress.update(20, force=True)
        progress.update(25, "step 5\x1b[2J", force=True)
    with ProgressDisplay("x", 10, quiet=True) as progress:
        progress.update(5, force=True)
        progress.say("nothing")
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["study: 10 of 30 points", "study: 20 of 30 points · ETA 4 s", r"study: step 5\x1b[2J"]


def test_nested_displays_share_one_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in training, which evaluates: the inner bar goes when it ends, the outer one stays."""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with ProgressDisplay("train [/b]", 10) as outer:
        with ProgressDisplay("evaluate", 3) as inner:
            inner.update(1)
        with ProgressDisplay("silent", 3, quiet=True) as silent:
            silent.update(1, "unseen", force=True)
        outer.update(5, "step 5 [/i]")
        assert [task.description for task in outer._bar.tasks] == ["train [/b]"]
    assert ProgressDisplay._live == []
    text = terminal.getvalue()
    assert "evaluate" in text
    assert "train [/b]" in text
    assert "step 5 [/i]" in text
    assert "unseen" not in text
