"""Option groups refuse invalid values."""

from typing import Any

import pytest

from vitlab.errors import UserError
from vitlab.evaluation.options import EvalOptions, FewShotProtocol, LoaderOptions


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (EvalOptions, {"batch_size": 0}, "batch_size is 0"),
        (LoaderOptions, {"workers": -1}, "workers is -1"),
        (FewShotProtocol, {"shots": ()}, r"shots=\(\)"),
        (FewShotProtocol, {"shots": (0, 5)}, r"shots is \(0, 5\)"),
        (FewShotProtocol, {"l2": ()}, r"l2=\(\)"),
        (FewShotProtocol, {"l2": (float("nan"),)}, "nan"),
        (FewShotProtocol, {"original": True, "seeds": 2}, "leave out l2 and seeds"),
    ],
)
def test_invalid(kind: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        kind(**settings)


def test_protocols() -> None:
    assert (FewShotProtocol().l2_grid, FewShotProtocol().sample_seeds) == ((1024.0,), (0, 1, 2))
    assert FewShotProtocol(l2=(1.0, 2.0), seeds=1).l2_grid == (1.0, 2.0)
    original = FewShotProtocol(original=True)
    assert (original.l2_grid[0], original.l2_grid[-1], len(original.l2_grid)) == (2.0**-10, 2.0**19, 30)
    assert original.sample_seeds == (None,)
