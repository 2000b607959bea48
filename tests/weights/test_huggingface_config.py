"""Settings in their config.json and preprocessor_config.json that no model here has."""

import json
from pathlib import Path
from typing import Any

import pytest
from peers import create_huggingface

from vitlab.weights.huggingface import read_huggingface

CARD, IMAGES = "config.json", "preprocessor_config.json"


@pytest.mark.parametrize(
    ("case", "file", "changes", "problem"),
    [
        ("vit", CARD, {"model_type": "levit"}, "type 'levit'; supported: vit, deit"),
        ("vit", CARD, {"hidden_act": "relu"}, "hidden_act='relu'; supported: 'gelu', 'gelu_new'"),
        ("vit", CARD, {"image_size": 32}, r"position_embeddings has shape \(1, 10, 32\) instead of"),
        ("vit", CARD, {"id2label": {"0": "a", "1": "b"}}, "2 names, and the model has 7"),
        ("vit", IMAGES, {"size": 24}, "lacks image_mean"),
        ("vit", IMAGES, {"do_rescale": False}, "rescale_factor"),
        ("vit", IMAGES, {"image_mean": [0.4], "image_std": [0.4]}, "3 numbers each"),
        ("vit body, pooler", CARD, {"pooler_act": "relu"}, "pooler_act='relu'; supported: 'tanh'"),
        ("dinov2", CARD, {"use_swiglu_ffn": True}, r"mlp\.weights_out\.weight is missing"),
        ("dinov2", CARD, {"image_size": [16, 32]}, "square"),
        ("bit", CARD, {"global_padding": "SAME"}, "global_padding='SAME'; supported: None"),
        ("bit", CARD, {"layer_type": "bottleneck"}, "global_padding=None; supported: 'SAME'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_unsupported_settings_are_refused(
    tmp_path: Path, case: str, file: str, changes: dict[str, Any], problem: str
) -> None:
    create_huggingface(case).save_pretrained(tmp_path)
    path = tmp_path / file
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(settings | changes))
    with pytest.raises(ValueError, match=problem):
        read_huggingface(tmp_path)
