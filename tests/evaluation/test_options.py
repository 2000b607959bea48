"""The protocols of few-shot evaluation, and option groups that refuse invalid values."""

from typing import Any

import numpy as np
import pytest

from vitlab.errors import UserError
from vitlab.evaluation.options import FewShotProtocol


def test_protocols() -> None:
    assert (FewShotProtocol().l2_grid, FewShotProtocol().sample_seeds) == ((1024.0,), (0, 1, 2))
    assert FewShotProtocol(l2=(1.0, 2.0), seeds=1).l2_grid == (1.0, 2.0)
    original = FewShotProtocol(original=True)
    assert (original.l2_grid[0], original.l2_grid[-1], len(original.l2_grid)) == (2.0**-10, 2.0**19, 30)
    assert original.sample_seeds == (None,)
    settings: dict[str, Any]
    for settings in ({"shots": ()}, {"shots": (0, 5)}, {"l2": ()}, {"l2": (np.nan,)}, {"original": True, "seeds": 2}):
        with pytest.raises(UserError, match=next(reversed(settings))):
            FewShotProtocol(**settings)
