"""Draws docs/howto/scale.webp: what `vitlab plan` says that 1 to 4,096 GPUs need, for B/16, L/16, H/14 and g/14.

    python benchmarks/plan_scale.py

Read from the plan: hours of JFT-300M's 14 epochs, the network of each process, and the data rate of all. ViT-g/14 is
not in the paper; it is the next size, of "Scaling Vision Transformers" (2022), by the recipe of H/14.
"""

import io
from dataclasses import replace
from pathlib import Path

from PIL import Image

from vitlab.cost.plan import estimate
from vitlab.inspection.figures import png
from vitlab.inspection.plots import panels
from vitlab.panels import Panel, Series
from vitlab.recipes import pretrain

OUT = Path(__file__).parents[1] / "docs" / "howto" / "scale.webp"
COUNTS = [2**power for power in range(13)]
RECIPES = {model: pretrain.jft(model) for model in ("ViT-B/16", "ViT-L/16", "ViT-H/14")}
RECIPES["ViT-g/14"] = replace(
    RECIPES["ViT-H/14"], model=replace(RECIPES["ViT-H/14"].model, width=1408, depth=40, mlp_dim=6144)
)
DEVICE = "h100"


def main() -> None:
    costs = {
        model: [estimate(recipe, device=DEVICE, count=count, model_name=model) for count in COUNTS]
        for model, recipe in RECIPES.items()
    }
    shown = {
        "Duration": ("hours", lambda cost: cost["hours"]),
        "Network of a process": ("GB/s in and out", lambda cost: cost["needs"]["exchange_bytes_per_s"] / 1e9),
        "Images of all processes": ("GB/s", lambda cost: cost["bytes_per_s"] / 1e9),
    }
    drawn = [
        Panel(
            title,
            f"{DEVICE.upper()} GPUs",
            unit,
            [
                Series(model, COUNTS[skipped:], [value(cost) for cost in costs[model][skipped:]])
                for model in RECIPES
                for skipped in [title.startswith("Network")]  # a single one has nobody to exchange with
            ],
            log_x=True,
            log_y=True,
            percent=False,
        )
        for title, (unit, value) in shown.items()
    ]
    Image.open(io.BytesIO(png(panels(drawn)))).save(OUT, quality=85, method=6)
    for model, rows in costs.items():
        for cost in rows:
            values = [f"{value(cost):.3g} {unit}" for unit, value in shown.values()]
            print(model, cost["count"], *values, f"{cost['needs']['checkpoint_bytes_per_s'] / 1e6:.3g} MB/s", sep=", ")


if __name__ == "__main__":
    main()
