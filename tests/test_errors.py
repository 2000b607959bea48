"""Bad input is distinguished from a bug."""

import logging
import os

import pytest

from vitlab import cli
from vitlab.commands.info import Doctor
from vitlab.errors import UserError, printable, quoted, warn_once


def test_debug_shows_where_bad_input_was_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITLAB_DEBUG", "1")
    with pytest.raises(SystemExit) as end:
        cli.main(["predict", "no-such-checkpoint", "no-such-image.png"])
    assert end.value.code == 2
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a b.png", "日本\u3000.png", os.fsdecode(b"caf\xe9"), "it's"])
def test_a_plain_name_stays_as_it_is(name: str) -> None:
    assert quoted(name) == printable(name) == name


@pytest.mark.parametrize("character", ["\n", "\x1b", "\x7f", "\x9b", "\u2028", "\u202e", "\0"])
def test_a_name_with_a_control_character_is_quoted(character: str) -> None:
    shown = quoted(f"a{character}[31mb.jpg")
    assert shown.isprintable()
    assert shown == repr(f"a{character}[31mb.jpg")
    assert printable(f"a{character}b").isprintable() or character == "\n"


def test_errors_and_warnings_are_printed_without_escapes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Doctor) -> int:
        assert logging.lastResort
        logging.lastResort.handle(logging.makeLogRecord({"msg": "warned of \x1b[31mred", "levelno": logging.WARNING}))
        raise UserError("no \x1b[31mred\nsecond line")

    monkeypatch.setattr(Doctor, "run", run)
    with pytest.raises(SystemExit):
        cli.main(["doctor"])
    assert capfd.readouterr().err == "warned of \\x1b[31mred\nvitlab: error: no \\x1b[31mred\nsecond line\n"


def test_an_error_is_red_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    for no_color, expected in (("", "vitlab: \x1b[31merror:\x1b[0m "), ("1", "vitlab: error: ")):
        monkeypatch.setenv("NO_COLOR", no_color)
        with pytest.raises(SystemExit):
            cli.main(["no-such-command"])
        assert capsys.readouterr().err.startswith(expected)


def test_a_warning_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    for text in ("flowers has no val", "flowers has no 50%", "flowers has no val"):
        warn_once(text)
    assert caplog.messages == ["flowers has no val", "flowers has no 50%"]
