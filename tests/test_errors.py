"""Bad input is told apart from a fault of the program."""

import pytest

from vitlab import cli
from vitlab.commands import Doctor
from vitlab.errors import UserError


def test_bad_input_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["predict", "no-such-checkpoint", "no-such-image.png"])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.startswith("vitlab: there is nothing at no-such-checkpoint")
    assert "Traceback" not in error


def test_debug_shows_where_bad_input_was_noticed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VITLAB_DEBUG", "1")
    with pytest.raises(SystemExit) as end:
        cli.main(["predict", "no-such-checkpoint", "no-such-image.png"])
    assert end.value.code == 2
    assert "Traceback" in capsys.readouterr().err


def test_any_other_value_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Doctor) -> int:
        raise ValueError("a fault of the program")

    monkeypatch.setattr(Doctor, "run", run)
    with pytest.raises(ValueError, match="a fault of the program") as fault:
        cli.main(["doctor"])
    assert not isinstance(fault.value, UserError)
