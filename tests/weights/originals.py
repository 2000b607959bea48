"""Files by the names of other code, from timm's models."""

import re
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

State = dict[str, Tensor]
TO_CLIP = {
    r"^cls_token$": "class_embedding",
    r"^pos_embed$": "positional_embedding",
    r"^patch_embed\.proj\.": "conv1.",
    r"^norm_pre\.": "ln_pre.",
    r"^norm\.": "ln_post.",
    r"^blocks\.": "transformer.resblocks.",
    r"\.norm(\d)\.": r".ln_\1.",
    r"\.qkv\.": ".in_proj_",
    r"\.attn\.proj\.": ".attn.out_proj.",
    r"\.fc1\.": ".c_fc.",
    r"\.fc2\.": ".c_proj.",
}


def rename(state: State, names: dict[str, str]) -> State:
    def new(name: str) -> str:
        for pattern, replacement in names.items():
            name = re.sub(pattern, replacement, name)
        return name

    return {new(name): tensor for name, tensor in state.items()}


def behind(prefix: str, state: State) -> State:
    return {prefix + name: tensor for name, tensor in state.items()}


def save(state: State, path: Path) -> Path:
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in state.items()}, path)
    return path


def clip(state: State) -> State:
    """open_clip's, with what its text tower has."""
    named = rename(state, TO_CLIP) | {"proj": state["head.weight"].T}
    named["class_embedding"], named["positional_embedding"] = state["cls_token"][0, 0], state["pos_embed"][0]
    del named["head.weight"], named["head.bias"]
    text = {"positional_embedding": torch.ones(7, 8), "transformer.resblocks.0.ln_1.weight": torch.ones(8)}
    return behind("visual.", named) | text | {"token_embedding.weight": torch.ones(9, 8), "logit_scale": torch.ones(())}
