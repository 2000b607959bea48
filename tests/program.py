"""The program, called from within the tests."""

import json
import re
import shlex
import subprocess
import sys
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


def without_torch(commands: list[str], ends: tuple[str, ...]) -> list[str]:
    """What the commands print on the standard error where torch cannot be imported. `ends`: as each of them may end."""
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': raise ImportError('no torch')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from vitlab.cli import main\n"
        f"for words in {commands}:\n"
        "    try: main(words.split())\n"
        f"    except (ImportError, SystemExit) as error: assert str(error) in {ends}, (words, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr.splitlines()
