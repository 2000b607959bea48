"""Every figure of the paper is drawn to files."""

import json

import numpy as np
import pytest
from PIL import Image

from vitlab.paper.figures import PAPER_FIGURES, Request
from vitlab.paper.sections import SECTIONS
from vitlab.paper.show import OF_A_MODEL, show


@pytest.mark.parametrize("name", [*PAPER_FIGURES, "sec3.1"])
def test_a_figure_is_written(name: str, request_of: Request) -> None:
    request = request_of if name in OF_A_MODEL or name in SECTIONS else Request(out=request_of.out)
    shown = show(name, request)
    assert shown.files
    for path in shown.files:
        if path.suffix == ".png":
            pixels = np.asarray(Image.open(path).convert("L"))
            assert min(pixels.shape) > 100
            assert pixels.std() > 5
    assert json.loads(json.dumps(shown.as_dict()))["files"]
