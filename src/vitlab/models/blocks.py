"""What every model shares: repeated blocks, activation checkpointing, and the depth of each parameter."""

import functools
import re
from collections.abc import Iterable

from torch import nn
from torch.utils.checkpoint import checkpoint

from vitlab.errors import UserError

BLOCK = re.compile(r"(?:^|\.)(?:blocks\.\d+|body\.stages\.\d+\.\d+)\.")
"""Names of the parameters of an encoder block, or of a unit of a ResNet; a hybrid's stem is part of its embedding."""
EMBEDDING = re.compile(
    r"(?:^|\.)(?:embedding|cls|distillation|registers|position|stem|pre_norm|body\.root(?:_norm)?)\b"
)
HEAD = re.compile(r"(?:^|\.)heads?(?:_\w+)?\.")


class RepeatedBlock(nn.Module):
    """An encoder block or a unit of a ResNet: what is recomputed, compiled and sharded as one."""


def model_blocks(model: nn.Module) -> list[RepeatedBlock]:
    """The repeated parts of a model, none inside another: encoder blocks and the units of a ResNet or a stem."""
    return [module for module in model.modules() if isinstance(module, RepeatedBlock)]


def set_grad_checkpointing(model: nn.Module, enable: bool = True) -> None:
    """Activation checkpointing: each block of `model` computes its activations again in the backward pass, which saves
    most of their memory, costs about a third more time, and changes no gradient."""
    for block in model_blocks(model):
        forward = block.forward
        if isinstance(forward, functools.partial) and forward.func is checkpoint:
            forward = forward.args[0]
        block.forward = functools.partial(checkpoint, forward, use_reentrant=False) if enable else forward


def refuse_script(model: nn.Module) -> nn.Module:
    """Raises UserError: what torch.jit.script calls before it compiles a module."""
    raise UserError(
        f"torch.jit.script cannot compile a {type(model).__name__}, and torch has deprecated it: give the model to "
        f"torch.export.export or torch.jit.trace, or write its checkpoint with `vitlab export --to torch-export`."
    )


def freeze_blocks(model: nn.Module, trained_blocks: int | None) -> None:
    """Only the last `trained_blocks` blocks and what follows them are trained, of 0 the head alone; None trains all."""
    if trained_blocks is None:
        return
    depths = parameter_depths(name for name, _ in model.named_parameters())
    lowest = max(depths.values()) - trained_blocks
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(depths[name] >= lowest if trained_blocks else bool(HEAD.search(name)))


def parameter_depths(names: Iterable[str]) -> dict[str, int]:
    """How deep each of a model's parameters lies: 0 in the embedding, i + 1 in block i, and one more than the last
    block's in what follows the blocks, the head included."""
    blocks: dict[str, int] = {}
    depths: dict[str, int] = {}
    after: list[str] = []
    for name in names:
        if EMBEDDING.search(name) and not BLOCK.search(name):
            depths[name] = 0
        elif block := BLOCK.search(name):
            depths[name] = blocks.setdefault(block.group(), len(blocks) + 1)
        else:
            after.append(name)
    return depths | dict.fromkeys(after, len(blocks) + 1)
