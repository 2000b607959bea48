import runpy
import sys

import pytest


def test_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["vitlab", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("vitlab", run_name="__main__")
    assert (ended.value.code, "pretrain" in capsys.readouterr().out) == (0, True)
