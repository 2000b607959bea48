"""Writes docs/checkpoints.md: which of timm's ViTs load here, and whether they compute what timm computes.

`python benchmarks/checkpoints_page.py > docs/checkpoints.md` takes about ten minutes on two cores. Each architecture is
built by timm with two blocks and its own width, size and settings; every parameter is drawn at random. The folder that
timm writes for the hub is loaded here, and both compute the outputs of the same images, at the native size and at one
of two more patches a side.
"""

import argparse
import collections
import gc
import platform
import re
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import save_for_hf

import vitlab
from vitlab.display import format_table
from vitlab.errors import UserError
from vitlab.models import ViTConfig

MODULES = ("vision_transformer", "deit", "vision_transformer_hybrid", "eva", "beit", "resnetv2")
EQUAL = 1e-5
"""Largest error of an equal output, relative to the root mean square of timm's outputs."""
ROUNDING = 1e-4
"""The same for BiT's ResNets and stems, which cannot be shortened: rounding grows with their layers."""


def create(name: str) -> tuple[Any, dict[str, Any]]:
    """timm's model and the arguments that make it: two blocks, where depth is an argument, and random parameters."""
    args: dict[str, Any] = {"depth": 2}
    if "resnetv2" in name:
        args = {}
    elif "sapiens2" in name:
        args["num_kv_heads"] = [4, 4]  # one entry per block
    model = timm.create_model(name, **args)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2 or parameter.ndim == 4:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter += 0.3 * noise
    return model.eval(), args


@torch.no_grad()
def error(ours: Any, theirs: Any) -> float:
    """The largest error of the outputs for one image."""
    height, width = ours.config.image_hw
    images = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1
    mean, std = (torch.tensor(theirs.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
    expected = theirs(((images + 1) / 2 - mean) / std)
    return float((ours(images) - expected).abs().max() / expected.square().mean().sqrt())


def check(name: str, folder: Path) -> dict[str, Any]:
    """The row of an architecture: errors at both sizes, or why it is refused."""
    theirs, args = create(name)
    save_for_hf(theirs, str(folder), model_args=args, safe_serialization=True)
    row: dict[str, Any] = {"architecture": name, "native": "", "larger": "", "refused": ""}
    try:
        ours = vitlab.load_model(folder)
    except UserError as refusal:
        return row | {"refused": _reason(str(refusal), str(folder))}
    if hasattr(theirs, "set_input_size") and isinstance(ours.config, ViTConfig):
        theirs.set_input_size(img_size=ours.config.image_hw)  # without the pixels that no patch takes
    row["native"] = error(ours, theirs)
    if isinstance(ours.config, ViTConfig) and hasattr(theirs, "set_input_size"):
        height, width = (side + 2 * ours.config.stride for side in ours.config.image_hw)
        size = height, width
        theirs.set_input_size(img_size=size)
        row["larger"] = error(vitlab.load_model(folder, image_size=size), theirs)
    return row


def _reason(message: str, folder: str) -> str:
    message = re.sub(r"^.*?\): |^.*? looks like ", "", message.replace(folder, ""))
    return message[:150].replace("|", "/").replace("\n", " ")


def status(row: dict[str, Any]) -> str:
    """`equal`, `refused` or `DIFFERENT`."""
    if row["refused"]:
        return "refused"
    bound = ROUNDING if re.search(r"resnetv2|_r\d*_|_r50|_r26", row["architecture"]) else EQUAL
    return "equal" if max(float(row[size] or 0) for size in ("native", "larger")) <= bound else "DIFFERENT"


def page(rows: list[dict[str, Any]]) -> str:
    """The text of docs/checkpoints.md."""
    counts = collections.Counter(map(status, rows))
    cells = [
        {
            "architecture": row["architecture"],
            "": status(row),
            **{size: f"{row[size]:.1e}" if row[size] != "" else "" for size in ("native", "larger")},
            "why refused": row["refused"],
        }
        for row in rows
    ]
    return f"""# Checkpoints of timm

Of the {len(rows)} architectures in timm {timm.__version__}'s modules {", ".join(MODULES)}, {counts["equal"]} compute
here what they compute there, {counts["refused"]} are refused, and {counts["DIFFERENT"]} differ.

An architecture is equal if the largest error of its outputs, relative to their root mean square, is at most {EQUAL:g}
in float32 ({ROUNDING:g} with a ResNet, whose many layers amplify rounding), at its native size and at one of two more
patches a side. Models have two blocks, the width and settings of the architecture, and random parameters. Written by
`python benchmarks/checkpoints_page.py > docs/checkpoints.md` with torch {torch.__version__} on {platform.machine()}.

{format_table(cells, markdown=True)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of the architectures to check")
    only = parser.parse_args().only
    warnings.filterwarnings("ignore")
    names = sorted({name for module in MODULES for name in timm.list_models(only, module=module)})
    rows = []
    for number, name in enumerate(names, 1):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(check(name, Path(folder)))
        gc.collect()
        print(f"{number}/{len(names)} {name}: {status(rows[-1])} {rows[-1]}", file=sys.stderr, flush=True)
    sys.stdout.write(page(rows))


if __name__ == "__main__":
    main()
