"""The program, called from within the tests."""

import json
import re
import shlex
from typing import Any

import pytest

from vitlab.cli import main

SMALL = shlex.split("""
    --batch-size 8 --model.image-size 8 --model.width 8 --model.depth 1 --model.heads 2 --model.mlp-dim 8
    --data.classes 0 1 2 --data.crop none --log-every 1 --checkpoint-every 50 --device cpu
""")


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `vitlab argv`; boxes and line breaks taken out of the last."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert isinstance(ended.value.code, int)
    out, err = capsys.readouterr()
    return ended.value.code, out, " ".join(re.sub(r"[─│╭╮╰╯]", " ", err).split())


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    """What a command prints for programs, read."""
    code, out, _ = call(capsys, *argv, "--json")
    assert code == 0
    return json.loads(out)
