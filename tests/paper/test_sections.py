"""Inductive bias, and what Sec. 4.5 says, asked of a model."""

import torch

from vitlab.models.vit import ViT
from vitlab.paper import sections
from vitlab.paper.figures import Request
from vitlab.paper.sections import bias_rows
from vitlab.paper.show import show


def test_inductive_bias(vit: ViT) -> None:
    """Without positions patches are a set; the MLP sees each alone."""
    rows = bias_rows(vit, torch.rand(2, 3, 16, 16))
    assert [row[""] for row in rows] == ["the same"] * 3 + ["not the same"] * 2
    assert all(row["difference"] > 0.05 for row in rows[3:])


def test_what_was_learned_is_read_from_the_model(request_of: Request, vit: ViT) -> None:
    """Positions made to be similar nearby are found so, and random ones are not."""
    with torch.no_grad():
        place = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")).flatten(1).T
        waves = torch.cat([(place / 3).cos(), (place / 3).sin()], dim=1)
        assert vit.position.table is not None
        vit.position.table[0, 1:] = torch.cat([waves, torch.zeros(16, 28)], dim=1)
    near, rows = sections.position_rows(vit)
    assert (near[""], rows[""]) == ("holds", "holds")
    text = show("sec4.5", request_of).text
    assert text.count("holds") + text.count("does not hold") >= 4
