"""Option groups refuse what cannot be meant."""

from typing import Any

import pytest

from vitlab.errors import UserError
from vitlab.evaluate.options import EvalOptions, FewShotProtocol, LoaderOptions


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (EvalOptions, {"batch_size": 0}, "batch_size=0"),
        (LoaderOptions, {"workers": -1}, "workers=-1"),
        (FewShotProtocol, {"shots": ()}, r"shots=\(\)"),
        (FewShotProtocol, {"shots": (0, 5)}, r"shots=\(0, 5\)"),
        (FewShotProtocol, {"seeds": 0}, "seeds=0"),
        (FewShotProtocol, {"test_images": 0}, "test_images=0"),
        (FewShotProtocol, {"l2": ()}, r"l2=\(\)"),
        (FewShotProtocol, {"l2": (0.0,)}, "positive"),
        (FewShotProtocol, {"l2": (float("nan"),)}, "nan"),
        (FewShotProtocol, {"original": True, "seeds": 2}, "leave out l2 and seeds"),
        (FewShotProtocol, {"original": True, "l2": (1.0,)}, "leave out l2 and seeds"),
    ],
)
def test_refused(kind: type, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        kind(**settings)


def test_protocols() -> None:
    assert FewShotProtocol().l2_grid == (1024.0,)
    assert FewShotProtocol().draw_seeds == (0, 1, 2)
    assert FewShotProtocol(l2=(1.0, 2.0), seeds=1).l2_grid == (1.0, 2.0)
    original = FewShotProtocol(original=True)
    assert (original.l2_grid[0], original.l2_grid[-1], len(original.l2_grid)) == (2.0**-10, 2.0**19, 30)
    assert original.draw_seeds == (None,)
