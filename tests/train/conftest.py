"""Processes to kill."""

import multiprocessing
import sys
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for `kill_harness`, here and in the processes


@pytest.fixture(scope="session")
def processes() -> ForkServerContext:
    """Processes that begin at once: one server, which has imported all that takes long, forks them."""
    from kill_harness import IMPORTS

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    return context
