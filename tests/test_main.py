import subprocess
import sys


def test_help() -> None:
    run = subprocess.run([sys.executable, "-m", "vitlab", "--help"], check=True, capture_output=True, text=True)
    assert "pretrain" in run.stdout
