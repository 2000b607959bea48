import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.models import ResNetConfig, ViTConfig, get_config
from vitlab.weights.google_layout import google_layout


def test_names_and_shapes_are_those_of_every_published_model(shared: Path) -> None:
    """Of a ViT in both spellings of vit_jax, of BiT, and counts of big_vision's ResNets."""
    hybrids = []
    for path in sorted((shared / "facts" / "keys").glob("imagenet21k__*.json")):
        theirs = json.loads(path.read_text())
        name, size, classes = "/".join(theirs["model"].rsplit("_", 1)), theirs["resolution"], theirs["num_classes"]
        config = get_config(name, image_size=size, num_classes=classes)
        assert isinstance(config, ViTConfig)
        config = dataclasses.replace(config, representation_size=config.width)
        keys: dict[Any, str] = {"stored": "stored_prelinen", "linen": "linen"}
        for spelling, key in keys.items():
            layout = google_layout(config, spelling)
            assert {name: list(slot.shape) for name, slot in layout.items()} == theirs[key], path.name
        hybrids.append(config.stem is not None)
    assert (hybrids.count(False), hybrids.count(True)) == (6, 3)
    published = json.loads((shared / "facts" / "keys" / "BiT-M-R50x1.json").read_text())
    layout = google_layout(get_config("R50x1", num_classes=21_843), "stored")
    assert {name: list(slot.shape) for name, slot in layout.items()} == published
    for config, arrays, count in ((get_config("R50x1"), 153, 25_549_352), (ResNetConfig(), 161, 25_557_032)):
        layout = google_layout(config, "big_vision")
        assert (len(layout), sum(np.prod(slot.shape) for slot in layout.values())) == (arrays, count)
