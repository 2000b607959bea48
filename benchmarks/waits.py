"""How long a person waits for vitlab, and for the same by hand with torch and timm: each in a process of its own.

    python benchmarks/waits.py S14 photos --out benchmarks/results/waits.json

The checkpoint needs a head. All are started in turn, round after round; the first round, `cold`, is the first start
since the files of the packages were last read, if nothing ran before.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import tyro
from run_record import describe_run
from tyro.conf import Positional

from vitlab.cost.measure import spread
from vitlab.data.contents import images_below

BY_HAND = """
import sys, torch, timm
from pathlib import Path
from PIL import Image
model = timm.create_model("local-dir:" + sys.argv[1], pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
place = Path(sys.argv[2])
files = sorted(place.rglob("*.jpg")) if place.is_dir() else [place]
with torch.inference_mode():
    for i in range(0, len(files), 32):
        images = torch.stack([transform(Image.open(file).convert("RGB")) for file in files[i : i + 32]])
        print(model(images).softmax(dim=1).topk(5))
"""
FIRST_CELL = """
import sys, vitlab
model = vitlab.load_model(sys.argv[1])
print(vitlab.features(model, sys.argv[2]).shape)
"""


@dataclasses.dataclass(frozen=True)
class Arguments:
    checkpoint: Positional[str]
    photos: Positional[Path]
    """A folder of JPEGs."""
    rounds: int = 5
    """Timed rounds after the first."""
    out: Path | None = None
    """JSON file for the figures."""


def processes(arguments: Arguments, peer: Path) -> dict[str, list[str]]:
    """Name -> the words of a command."""
    photo = sorted(images_below(arguments.photos))[0]
    python, vitlab = [sys.executable, "-c"], [sys.executable, "-m", "vitlab"]
    checkpoint, folder = arguments.checkpoint, str(arguments.photos)
    return {
        "import torch": [*python, "import torch"],
        "import vitlab": [*python, "import vitlab"],
        "help": [*vitlab, "--help"],
        "help of finetune": [*vitlab, "finetune", "--help"],
        "one photo": [*vitlab, "predict", checkpoint, str(photo)],
        "one photo, timm by hand": [*python, BY_HAND, str(peer), str(photo)],
        "a folder": [*vitlab, "predict", checkpoint, folder],
        "a folder, timm by hand": [*python, BY_HAND, str(peer), folder],
        "first cell of a notebook": [*python, FIRST_CELL, checkpoint, str(photo)],
    }


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    with tempfile.TemporaryDirectory() as place:
        peer = Path(place) / "timm"
        words = [sys.executable, "-m", "vitlab", "convert", arguments.checkpoint, str(peer), "--to", "timm"]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        commands = processes(arguments, peer)
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(arguments.rounds + 1):
            for name, words in commands.items():
                since = time.perf_counter()
                subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                seconds[name].append(time.perf_counter() - since)
    record: dict[str, Any] = {"environment": describe_run(arguments, torch, images=len(images_below(arguments.photos)))}
    record["seconds"] = {name: {"cold": cold, **spread(warm)} for name, (cold, *warm) in seconds.items()}
    for name, row in record["seconds"].items():
        low, high = row["quartiles"]
        print(f"{name}: {row['median']:.2f} s ({low:.2f} to {high:.2f}), first {row['cold']:.2f}")
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
