"""What Hugging Face calls the parameters of a model, and what else reading and writing must agree on."""

import re

import torch

from vitlab.models import ModelConfig, ViTConfig, build_model

IMAGES = "preprocessor_config.json"
# BiT's epsilons stand in their code; no setting changes them.
BIT_WEIGHT_EPS, BIT_NORM_EPS = 1e-8, 1e-5

_VIT = {
    "cls": "embeddings.cls_token",
    "distillation": "embeddings.distillation_token",
    "registers": "embeddings.register_tokens",
    "position.table": "embeddings.position_embeddings",
    "embedding": "embeddings.patch_embeddings.projection",
    "norm1": "layernorm_before",
    "attention.out": "attention.output.dense",
    "norm2": "layernorm_after",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
    "norm": "layernorm",
    "pre_logits": "pooler.dense",
    "head": "classifier",
    "head_distilled": "distillation_classifier",
}
_DINOV2 = {
    **{ours: theirs for ours, theirs in _VIT.items() if ours not in ("norm1", "norm2", "mlp.fc1", "mlp.fc2")},
    "branch1.scale": "layer_scale1.lambda1",
    "branch2.scale": "layer_scale2.lambda1",
}
NAMES: dict[str, dict[str, str]] = {
    "vit": _VIT,
    "deit": {**_VIT, "registers": "embeddings.distillation_token"},
    "dinov2": _DINOV2,
    "dinov2_with_registers": _DINOV2,
    "bit": {
        "body.root": "embedder.convolution",
        "body.root_norm": "embedder.norm",
        "shortcut": "downsample.conv",
        "shortcut_norm": "downsample.norm",
        "head": "classifier.1",
    },
}
"""Every kind: our name of a part, without block, `.weight` and `.bias`, -> theirs, where it is another."""

PARAMETER = re.compile(
    r"(blocks\.(?P<block>\d+)\.|body\.stages\.(?P<stage>\d+)\.(?P<unit>\d+)\.)?(?P<part>.+?)(?P<leaf>\.weight|\.bias)?"
)
HEADS = ("classifier", "cls_classifier", "distillation_classifier")
"""What stands beside the model proper, whose names begin with its kind wherever there is a head."""

RENAMED = (
    (r"^layers\.(\d+)\.mlp\.fc1", r"encoder.layer.\1.intermediate.dense"),
    (r"^layers\.(\d+)\.mlp\.fc2", r"encoder.layer.\1.output.dense"),
    (r"^layers\.", "encoder.layer."),
    (r"attention\.q_proj", "attention.attention.query"),
    (r"attention\.k_proj", "attention.attention.key"),
    (r"attention\.v_proj", "attention.attention.value"),
    (r"attention\.o_proj", "attention.output.dense"),
)
"""What their classes of today call otherwise than their files, and whoever stores a state dict by hand with them."""


def huggingface_layout(kind: str, config: ModelConfig) -> dict[str, tuple[list[str], tuple[int, ...]]]:
    """Every parameter of ours: the arrays of theirs that make it, one below the other, and the shape of each.

    Names are without the kind that stands in front of most of them in the files of models with a head.
    """
    with torch.device("meta"):
        state = build_model(config).state_dict()
    found = {}
    for ours, tensor in state.items():
        match = PARAMETER.fullmatch(ours)
        assert match
        place = ""
        if match["block"]:
            place = f"encoder.layer.{match['block']}."
        elif match["stage"]:
            place = f"encoder.stages.{match['stage']}.layers.{match['unit']}."
        part, leaf = match["part"], match["leaf"] or ""
        theirs = [NAMES[kind].get(part, part)]
        if part == "attention.qkv":
            theirs = [f"attention.attention.{each}" for each in ("query", "key", "value")]
        if part == "head" and isinstance(config, ViTConfig) and config.distilled:
            theirs = ["cls_classifier"]
        rows, *rest = tensor.shape
        found[ours] = [f"{place}{each}{leaf}" for each in theirs], (rows // len(theirs), *rest)
    return found


def as_stored(name: str) -> str:
    """What their files call the array of such a name, without the kind in front."""
    for theirs, stored in RENAMED:
        name = re.sub(theirs, stored, name)
    return name
