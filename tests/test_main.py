import subprocess
import sys

MEASURE = """
import resource, subprocess, sys
ended = subprocess.run([sys.executable, "-m", "vitlab", "--help"], check=True, capture_output=True, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, ended.stdout)
"""


def test_help_comes_at_once() -> None:
    """Under a second of processor time, the interpreter's start included; a busy machine may need some tries."""
    tried = list[float]()
    while not tried or (min(tried) >= 1 and len(tried) < 10):
        run = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True).stdout
        assert "pretrain" in run
        tried.append(float(run.split()[0]))
    assert min(tried) < 1
