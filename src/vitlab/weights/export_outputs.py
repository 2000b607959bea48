"""What an exported program returns, by name.

| output | | |
|---|---|---|
| `logits` | [B, K] | of the head |
| `features` | [B, D] | the input of the head (Sec. 4.1); what a model without a head returns |
| `tokens` | [B, T, D] | after the last LayerNorm (`forward_features`); the prefix tokens come first |
| `attention` | [B, L, k, T, T] | the softmax of every layer and head (`vitlab.inspection.attention_maps`) |
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models.attention import Attention
from vitlab.models.encoder import Block
from vitlab.models.vit import Model, ViT

Output = Literal["logits", "features", "tokens", "attention"]


class Outputs(nn.Module):
    """A model that returns the outputs with these names: a tensor for one, else a dict in their order."""

    def __init__(self, model: Model, names: Sequence[Output]) -> None:
        super().__init__()
        self.model, self.config, self.names = model, model.config, tuple(names)

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        model = self.model
        with self._maps(images) if "attention" in self.names else contextlib.nullcontext([]) as maps:
            tokens = model.forward_features(images)
        outputs = {"tokens": tokens}
        if "logits" in self.names:
            outputs["logits"] = model.forward_head(tokens)
        if "features" in self.names:
            outputs["features"] = model.forward_head(tokens, pre_logits=True)
        if "attention" in self.names:
            outputs["attention"] = torch.stack(maps, dim=1)
        return outputs[self.names[0]] if len(self.names) == 1 else {name: outputs[name] for name in self.names}

    @contextlib.contextmanager
    def _maps(self, images: Tensor) -> Iterator[list[Tensor]]:
        """The attention maps of the layers that have run inside; torch.export traces the hooks as well."""
        model, maps = self.model, []
        assert isinstance(model, ViT)
        tables = model.position.tables(model._grid(images))

        def take(layer: int, attention: Attention, qkv: Tensor) -> None:
            q, k, _ = attention.split(qkv)
            positions = model.position.in_attention(layer, tables)
            maps.append(attention.weights(q, k, positions, model.config.num_prefix_tokens))

        with contextlib.ExitStack() as stack:
            for layer, block in enumerate(model.blocks):
                assert isinstance(block, Block)
                hook = functools.partial(take, layer, block.attention)
                handle = block.attention.qkv.register_forward_hook(lambda *call, hook=hook: hook(call[2]))
                stack.callback(handle.remove)
            yield maps


def with_outputs(model: Model, names: Sequence[Output]) -> nn.Module:
    """The model as it is, or with the outputs of these names, if any."""
    return Outputs(model, names) if names else model


def check_outputs(model: Model, names: Sequence[str]) -> tuple[Output, ...]:
    """The names, by default the name of what `forward` returns. Raises UserError for outputs that the model lacks."""
    if not names:
        return ("logits",) if model.config.num_classes else ("features",)
    if not set(names) <= set(get_args(Output)) or len(set(names)) < len(names):
        raise UserError(f"outputs are {', '.join(names)}; allowed: {', '.join(get_args(Output))}, each once.")
    if "logits" in names and not model.config.num_classes:
        raise UserError("the model has no head, so no logits; its outputs are features, tokens and attention.")
    if "attention" in names and (not isinstance(model, ViT) or model.config.encoder == "axial"):
        raise UserError("only models with full attention among all tokens have the output attention; leave it out.")
    return tuple(names)  # pyright: ignore[reportReturnType]
