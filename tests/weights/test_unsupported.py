"""Checkpoints of other families are rejected with the family's name and what is different in it."""

import json
from pathlib import Path

import pytest
import timm
import torch
import transformers
from safetensors.torch import save_file

from vitlab.weights import load_checkpoint, load_model

FAMILIES = {
    # timm's architecture; Hugging Face's class of the same family; a word of the reason
    "beit_base_patch16_224": ("Beit", "relative position bias"),
    "beitv2_base_patch16_224": ("Data2VecVision", "Data2Vec"),
    "aimv2_large_patch14_224": ("Aimv2Vision", "RMSNorm"),
    "naflexvit_base_patch16_gap": ("Siglip2Vision", "aspect ratio"),
    "cait_xxs24_224": (None, "class-attention"),
    "xcit_nano_12_p16_224": (None, "cross-covariance"),
    "swin_tiny_patch4_window7_224": ("Swin", "shifted windows"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_named_with_its_difference(tmp_path: Path, name: str) -> None:
    """For a bare file, timm's folder, and Hugging Face's folder of the same family."""
    theirs, reason = FAMILIES[name]
    with torch.device("meta"):
        tensors = timm.create_model(name).state_dict()
    weights = tmp_path / "model.safetensors"
    save_file({key: torch.zeros((1,) * tensor.ndim) for key, tensor in tensors.items()}, weights)
    with pytest.raises(ValueError, match=rf"model\.safetensors: .*{reason}.*docs/checkpoints\.md"):
        load_model(weights)
    (tmp_path / "config.json").write_text(json.dumps({"architecture": name}))
    with pytest.raises(ValueError, match=rf"\({name}\): .*{reason}"):
        load_model(tmp_path)
    if theirs:
        kind = getattr(transformers, f"{theirs}Config").model_type
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(ValueError, match=f"type '{kind}': .*{reason}.*supported: vit, deit"):
            load_checkpoint(tmp_path)
