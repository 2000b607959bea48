"""Options of a bench: invalid values are refused."""

from typing import Any

import pytest

from vitlab.cost.options import BenchOptions
from vitlab.errors import UserError


@pytest.mark.parametrize(("name", "value"), [("batch", 0), ("sizes", (64, -1)), ("seconds", 0.0), ("memory", -1.0)])
def test_invalid(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{name} is"):
        BenchOptions(**{name: value})
