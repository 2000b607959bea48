"""The recommended checkpoints: each row says what its publisher's library says, and can be loaded."""

import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import transformers
from timm.models._hub import save_config_for_hf

import vitlab.weights.timm
from vitlab.preprocessing import Preprocessing
from vitlab.weights.recommended import DEFAULT, RECOMMENDED, Recommended

DATA = {f"in{size}": f"ImageNet-{size}" for size in ("1k", "12k", "21k", "22k")} | {
    **dict.fromkeys(("dino", "mae"), "ImageNet-1k"),
    **{name.lower().replace("-", ""): name for name in ("LVD-142M", "LVD-1689M", "SAT-493M", "LAION-2B", "WebLI")},
    "datacompxl": "DataComp-1B",
    "m30m": "Merged-30M",
    "m38m": "Merged-38M",
}
"""Part of a tag of timm's -> the data that it names."""
HUB: dict[str, tuple[str, dict[str, Any], int]] = {
    # class and settings of transformers, and parameters that are the head's or of pre-training alone
    "google/vit-base-patch16-224": ("ViTForImageClassification", {"num_labels": 1000}, 769_000),
    "google/vit-base-patch16-224-in21k": ("ViTModel", {}, 0),
    "facebook/dinov2-small": ("Dinov2Model", {"hidden_size": 384, "num_attention_heads": 6, "image_size": 518}, 384),
    "facebook/dinov2-base": ("Dinov2Model", {"image_size": 518}, 768),
}


def named(kind: str) -> list[Any]:
    """Its rows; most of timm's are left to `pytest -m slow`: each builds a large model."""
    rows = [each for each in RECOMMENDED if each.spec.startswith(f"{kind}:")]
    late = {row.spec for i, row in enumerate(rows) if kind == "timm" and i % 5 and row.spec != DEFAULT}
    return [pytest.param(row, id=row.spec, marks=[pytest.mark.slow] * (row.spec in late)) for row in rows]


def test_one_is_the_default() -> None:
    specs = [each.spec for each in RECOMMENDED]
    assert specs.count(DEFAULT) == 1
    assert len(set(specs)) == len(specs) == len(named("timm")) + len(named("hub"))


@pytest.mark.parametrize("row", named("timm"))
def test_a_row_of_timms(row: Recommended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = row.spec.removeprefix("timm:")
    published = timm.get_pretrained_cfg(name)
    assert published is not None
    assert (published.hf_hub_id, published.license) == (f"timm/{name}", row.license)
    assert published.input_size == (3, row.image_size, row.image_size)
    named = [DATA[part] for part in name.split(".")[1].split("_") if part in DATA]
    assert row.pretraining.removesuffix(", no labels").removesuffix(", with texts") == ", ".join(named)
    with torch.device("meta"):  # every name and shape, and no memory
        theirs: Any = timm.create_model(name)
        tensors = theirs.state_dict()
        save_config_for_hf(theirs, str(tmp_path / "config.json"))
        theirs.reset_classifier(0)
    assert row.parameters == pytest.approx(sum(map(torch.numel, theirs.parameters())), rel=1e-3)  # ours add biases
    monkeypatch.setattr(vitlab.weights.timm, "read_safetensors", lambda path: dict(tensors))
    monkeypatch.setattr(vitlab.weights.timm, "fold_normalization", lambda state, *_: state)  # needs numbers
    config, state = vitlab.weights.timm.read_timm(tmp_path)
    heads = sum(tensor.numel() for key, tensor in state.items() if re.match("head", key))
    assert row.parameters == config.num_parameters - heads == sum(map(torch.numel, state.values())) - heads
    prepared = Preprocessing.read(vitlab.weights.timm.metadata_timm(tmp_path), "")
    assert row.image_size == (prepared.crop_size or prepared.image_size)


@pytest.mark.parametrize("row", named("hub"))
def test_a_row_of_hugging_faces(row: Recommended) -> None:
    name, settings, extra = HUB[row.spec.removeprefix("hub:")]
    model = getattr(transformers, name)
    with torch.device("meta"):
        theirs = model(model.config_class(**settings))
    assert row.parameters == sum(each.numel() for each in theirs.parameters()) - extra
