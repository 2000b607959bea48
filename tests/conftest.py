"""What every test stands on: shapes and types checked at each call, fixed seeds, the shared files' place."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

# Before the first import of vitlab: from here on every annotated shape and type is checked when called.
install_import_hook("vitlab", "beartype.beartype")

SHARED = Path(__file__).parents[2] / "shared"
"""Golden files and data sets that are too large for the repository; they stand beside it, or nowhere."""

torch.set_num_threads(1)  # small models gain nothing from more, and sums come out in the same order everywhere
settings.register_profile("vitlab", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("vitlab")


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (for libraries that draw from it)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of shared files; the test is skipped where there is none."""
    if not SHARED.is_dir():
        pytest.skip(f"needs the golden files and data sets in {SHARED.name}/ beside the repository")
    return SHARED
