"""What an equation shows is what the model computes."""

import pytest
import torch

from vitlab.models.vit import ViT
from vitlab.paper import equations
from vitlab.paper.equations import EQUATIONS, MODEL, TOLERANCE
from vitlab.paper.figures import Request
from vitlab.paper.show import show


@pytest.mark.parametrize("name", EQUATIONS)
def test_an_equation_is_what_the_model_computes(name: str, vit: ViT) -> None:
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        *_, (_, ours), (last, reference) = EQUATIONS[name](vit, images)
    assert last == MODEL
    assert ours.shape == reference.shape
    assert (ours - reference).abs().max() <= TOLERANCE * reference.square().mean().sqrt()
    assert reference.std() > 0


def test_another_equation_is_said_to_differ(request_of: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ": equal, " in show("eq4", request_of).text
    monkeypatch.setattr(equations, "layer_norm", lambda z, norm: z)
    assert ": DIFFERENT, " in show("eq4", request_of).text
