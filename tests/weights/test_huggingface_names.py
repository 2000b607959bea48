import math
from typing import Any

import pytest
import torch
from peers import theirs

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.weights.huggingface_names import as_stored, huggingface_layout

SMALL: dict[str, Any] = {"image_size": 24, "patch_size": 8, "width": 32, "depth": 2, "heads": 4}
OLDER: dict[str, Any] = {**SMALL, "mlp_dim": 48, "num_classes": 7}
BODY: dict[str, Any] = {**SMALL, "mlp_dim": 48, "num_classes": 0}
DINOV2: dict[str, Any] = {**SMALL, "mlp_dim": 64, "num_classes": 7, "layer_scale": 1.0, "pool": "token+gap"}

KINDS: dict[str, tuple[str, ModelConfig]] = {
    # a case of `peers`: its kind, and our model of it
    "vit": ("vit", ViTConfig(**OLDER)),
    "vit body": ("vit", ViTConfig(**BODY)),
    "vit body, pooler": ("vit", ViTConfig(**BODY, representation_size=20)),
    "deit, teacher": ("deit", ViTConfig(**OLDER, distilled=True)),
    "dinov2": ("dinov2", ViTConfig(**DINOV2)),
    "dinov2, registers": ("dinov2_with_registers", ViTConfig(**DINOV2, registers=3)),
    "bit": ("bit", ResNetConfig(num_classes=7, body=ResNetBody((1, 2), 32, "v2"))),
    "bit bottleneck": ("bit", ResNetConfig(num_classes=7, body=ResNetBody((1, 2), 32, "v1"))),
    "bit body": ("bit", ResNetConfig(num_classes=0, body=ResNetBody((1, 2), 32, "v2"))),
}


@pytest.mark.parametrize(("kind", "config"), [*KINDS.values(), ("deit", ViTConfig(**OLDER, registers=1))])
def test_every_parameter_of_ours_has_arrays_of_its_own(kind: str, config: ModelConfig) -> None:
    with torch.device("meta"):
        expected = {name: tensor.numel() for name, tensor in build_model(config).state_dict().items()}
    layout = huggingface_layout(kind, config)
    assert {ours: len(names) * math.prod(shape) for ours, (names, shape) in layout.items()} == expected
    every = [name for names, _ in layout.values() for name in names]
    assert len(set(every)) == len(every)
    assert [as_stored(name) for name in every] == every


@pytest.mark.parametrize("case", KINDS)
def test_names_and_shapes_are_those_of_their_models(case: str) -> None:
    kind, config = KINDS[case]
    found = {as_stored(name.removeprefix(f"{kind}.")): value.shape for name, value in theirs(case).state_dict().items()}
    found.pop("embeddings.mask_token", None)
    assert found == {name: shape for names, shape in huggingface_layout(kind, config).values() for name in names}
