"""Sentences of the text that a model can be asked about: inductive bias (Sec. 3.1), and what was learned (Sec. 4.5)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.stats import spearmanr
from torch import Tensor

from vitlab.display import format_table
from vitlab.errors import UserError
from vitlab.inspection import plots
from vitlab.inspection.attention import patch_distances
from vitlab.inspection.embeddings import positions_of
from vitlab.models.encoder import Block
from vitlab.models.vit import ViT
from vitlab.panels import Panel, Series
from vitlab.paper.figures import AVERAGED, Figures, Request

EQUAL = 1e-4
"""Largest difference, as a fraction of the root mean square, that counts as rounding."""
GLOBAL = 0.8
"""A head is called global from this fraction of the attention distance of uniform attention."""


def inductive_bias(request: Request) -> tuple[str, Figures]:
    """Sec. 3.1: the MLP acts on each patch alone, attention sees a set, and only positions tell the patches apart."""
    request = replace(request, untrained=True, shown=1)
    vit = request.vit.eval()
    rows = bias_rows(vit, request.batch.to(next(vit.parameters()).device))
    names, values = zip(*((f"{row['part']}, {row['patches']}", row["difference"]) for row in rows), strict=True)
    panel = Panel(
        "What changes if patches move first",
        "",
        "difference / rms",
        [Series("difference", range(len(values)), values)],
        ticks=names,
        percent=False,
    )
    shown = [row | {"difference": f"{row['difference']:.1e}"} for row in rows]
    return format_table(shown), {"sec3.1": plots.panels([panel])}


@torch.no_grad()
def bias_rows(vit: ViT, images: Tensor) -> list[dict[str, Any]]:
    """Parts of the model, how the patches are moved, and the difference between moving them before and after the part,
    as a fraction of the root mean square.

    Raises UserError for a model without plain blocks.
    """
    block = vit.blocks[0]
    if not isinstance(block, Block):
        raise UserError("inductive bias is shown on plain encoder blocks; give a ViT without axial attention.")
    patches, (height, width) = vit.embed(images), vit.config.grid
    number = torch.arange(height * width).reshape(height, width)
    shift = number.roll((1, 1), dims=(0, 1)).flatten().to(patches.device)
    order = torch.randperm(height * width, generator=torch.Generator().manual_seed(0)).to(patches.device)

    def with_positions(tokens: Tensor) -> Tensor:
        return vit.encode(tokens)[:, vit.config.num_prefix_tokens :]

    def without_positions(tokens: Tensor) -> Tensor:
        for layer in vit.blocks:
            tokens = layer(tokens)
        return vit.norm(tokens)

    parts: list[tuple[str, Callable[[Tensor], Tensor], str, Tensor]] = [
        ("MLP", lambda tokens: block.mlp(block.norm2(tokens)), "shifted by one", shift),
        ("attention", lambda tokens: block.attention(block.norm1(tokens)), "shuffled", order),
        ("encoder without positions", without_positions, "shuffled", order),
        ("encoder with positions", with_positions, "shifted by one", shift),
        ("encoder with positions", with_positions, "shuffled", order),
    ]
    rows = []
    for name, part, how, moved in parts:
        after = part(patches)[:, moved]
        difference = float((part(patches[:, moved]) - after).square().mean().sqrt() / after.square().mean().sqrt())
        same = "the same" if difference <= EQUAL else "not the same"
        rows.append({"part": name, "patches": how, "difference": difference, "": same})
    return rows


def learned(request: Request) -> tuple[str, Figures]:
    """Sec. 4.5: what the text says about positions and attention distance, asked of one model."""
    return format_table([*position_rows(request.vit), *distance_rows(request)]), {}


def position_rows(vit: ViT) -> list[dict[str, str]]:
    """Whether near patches, and patches of one row or column, have similar position embeddings."""
    similarity = positions_of(vit)
    if similarity is None:
        return [_row("near patches have similar positions", "the model has no absolute positions", None)]
    height, width = vit.config.grid
    flat = similarity[0].reshape(height * width, height * width)
    pixels = patch_distances(vit.config.grid, vit.config.stride).numpy()
    other = ~np.eye(len(flat), dtype=bool)
    correlation = _rank_correlation(pixels[other], flat[other])
    row, column = np.divmod(np.arange(len(flat)), width)
    in_line = ((row[:, None] == row) | (column[:, None] == column)) & other
    far = pixels >= 2 * vit.config.stride
    gain = float(flat[in_line & far].mean() - flat[~in_line & far].mean())
    return [
        _row(
            "near patches have similar positions",
            f"rank correlation with distance {correlation:.2f}",
            correlation < 0,
        ),
        _row("rows and columns show", f"similarity within a row or column {gain:+.2f} against others", gain > 0),
    ]


def distance_rows(request: Request) -> list[dict[str, str]]:
    """Whether attention distance grows with depth, and whether heads of the first layer see the whole image."""
    distances = replace(request, shown=AVERAGED).captured.distances
    means = distances.mean(axis=1)
    correlation = _rank_correlation(np.arange(len(means)), means)
    uniform = float(patch_distances(request.vit.config.grid, request.vit.config.stride).mean())
    count = int((distances[0] >= GLOBAL * uniform).sum())
    widest = int(means.argmax()) + 1
    return [
        _row(
            "attention distance grows with depth",
            f"rank correlation of layers' means with depth {correlation:.2f}; layer {widest} is the widest",
            correlation > 0 and widest > len(means) / 2,
        ),
        _row(
            "some heads of the lowest layer attend to most of the image",
            f"{count} of {distances.shape[1]} heads have {GLOBAL:.0%} of uniform attention's distance or more",
            count > 0,
        ),
    ]


def _rank_correlation(x: np.ndarray, y: np.ndarray) -> float:
    return float(spearmanr(x, y).statistic)  # pyright: ignore[reportAttributeAccessIssue]


def _row(claim: str, here: str, holds: bool | None) -> dict[str, str]:
    return {"the paper": claim, "this model": here, "": {True: "holds", False: "does not hold", None: ""}[holds]}


SECTIONS: dict[str, Callable[[Request], tuple[str, Figures]]] = {"sec3.1": inductive_bias, "sec4.5": learned}
