"""Writes docs/models.md, every model by family: `python benchmarks/models_page.py > docs/models.md`."""

import sys
from typing import Any

from vitlab.commands.info import models
from vitlab.display import format_table

FAMILIES = {
    "ViT": "Vision Transformers (Sec. 3.1, Table 1)",
    "hybrid": "Hybrids: a ViT on a ResNet's feature map (Sec. 3.1)",
    "ResNet": "ResNets (BiT, Sec. 4.1)",
    "axial": "Axial attention (App. D.6)",
}


def models_page() -> str:
    """The text of `docs/models.md`: every model by family, in Markdown."""
    rows = models()
    in_table_1 = [row for row in rows if row["model"] in ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32", "ViT-H/14")]
    counted = ", ".join(f"{row['model']} {row['parameters'] / 1e6:.1f}" for row in in_table_1)
    page = f"""# Models

Every name that `vitlab.create_model` accepts, at its native size of 224 pixels, with 1,000 classes.
`vitlab list models` prints the same. This page is written by `python benchmarks/models_page.py > docs/models.md`;
`tests/commands/test_info.py` compares its counts with Google's code and with the paper.

- **layers**, **width**, **mlp**, **heads**: L, D, MLP size and k of Table 1. A ResNet's layers are those that its name
  counts; its width is the root's, 64 times BiT's factor. Each layer of an axial ViT is two blocks.
- **patch**: side of a patch in pixels; for a hybrid, in cells of the ResNet's feature map. **stride**: pixels from one
  token to the next. The published name is R+ViT-Ti/16, although its stride is 32.
- **tokens**: length of the sequence, including the class token; for a ResNet, the cells of its last feature map.
- **GMACs**: billions of multiply-accumulates in one forward pass of one image.

The paper gives 86M, 307M and 632M parameters for Base, Large and Huge (Table 1). Counted here, in millions:
{counted}.
GMACs include products with the zeros around a feature map. Table 6's exaFLOPs, 6 x MACs x images seen (303 million per
epoch), do not, so its ResNets have about 4% more here. One of its rows, R50+ViT-L/16 after 7 epochs, does not fit the
same model after 14 ([compute](records/equality.md#table-6s-compute)).
"""
    for kind, title in FAMILIES.items():
        page += f"\n## {title}\n\n{_markdown([row for row in rows if row['kind'] == kind])}"
    return page


def _markdown(rows: list[dict[str, Any]]) -> str:
    """A table of the columns that have a value in any row."""
    names = [name for name in rows[0] if name != "kind" and any(row[name] != "-" for row in rows)]
    title = {"gmacs": "GMACs"}
    return format_table([{title.get(name, name): row[name] for name in names} for row in rows], markdown=True) + "\n"


if __name__ == "__main__":
    sys.stdout.write(models_page())
