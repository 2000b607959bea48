"""Eq. 1 to 8, each in a few lines of tensors, next to what the model of this package computes.

A function takes a ViT of the paper and a batch of images. It yields the tensors of the equation by name, and last what
the model computes itself for the tensor before it. `vitlab paper eq1` prints the function and the shapes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.inspection.attention import attention_maps
from vitlab.models.attention import attention
from vitlab.models.encoder import Block
from vitlab.models.vit import ViT

Step = tuple[str, Tensor]
"""Name of a tensor in the paper, and the tensor."""
MODEL = "the model"
"""Name of the last tensor: what the model computes."""
TOLERANCE = 1e-5
"""Largest allowed difference, as a fraction of the tensor's root mean square."""


def eq1(vit: Any, images: Tensor) -> Iterator[Step]:
    """z_0 = [x_class; x_p^1 E; x_p^2 E; ...; x_p^N E] + E_pos"""
    P, D = vit.config.patch_size, vit.config.width
    rows = images.unfold(2, P, P).unfold(3, P, P)  # [B, 3, h, w, P, P]
    patches = rows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
    yield "image", images
    yield "x_p", patches
    E = vit.embedding.weight.reshape(D, -1).T
    yield "E", E
    embeddings = patches @ E + vit.embedding.bias
    yield "x_p E", embeddings
    cls = vit.cls.expand(len(images), 1, D)
    tokens = torch.cat([cls, embeddings], dim=1)
    yield "z_0", tokens + vit.position.table
    yield MODEL, _input_of(vit, images, "blocks.0")


def eq2(vit: Any, images: Tensor) -> Iterator[Step]:
    """z'_l = MSA(LN(z_{l-1})) + z_{l-1}"""
    block = _first_block(vit)
    z = _input_of(vit, images, "blocks.0")
    yield "z_0", z
    normalized = layer_norm(z, block.norm1)
    yield "LN(z_0)", normalized
    yield "z'_1", block.attention(normalized) + z
    yield MODEL, _input_of(vit, images, "blocks.0.norm2")


def eq3(vit: Any, images: Tensor) -> Iterator[Step]:
    """z_l = MLP(LN(z'_l)) + z'_l, where MLP is two dense layers with a GELU between them"""
    block = _first_block(vit)
    z = _input_of(vit, images, "blocks.0.norm2")
    yield "z'_1", z
    fc1, fc2 = block.mlp.fc1, block.mlp.fc2
    first = layer_norm(z, block.norm2) @ fc1.weight.T + fc1.bias
    hidden = block.mlp.activation(first)  # GELU
    yield "hidden", hidden
    yield "z_1", hidden @ fc2.weight.T + fc2.bias + z
    yield MODEL, _output_of(vit, images, "blocks.0")


def eq4(vit: Any, images: Tensor) -> Iterator[Step]:
    """y = LN(z_L^0)"""
    z = _input_of(vit, images, "norm")
    yield "z_L", z
    yield "z_L^0", z[:, 0]
    yield "y", layer_norm(z[:, 0], vit.norm)
    yield MODEL, vit.forward_features(images)[:, 0]


def eq5(vit: Any, images: Tensor) -> Iterator[Step]:
    """[q, k, v] = z U_qkv"""
    msa = _first_block(vit).attention
    z = _input_of(vit, images, "blocks.0.attention")
    yield "z", z
    U_qkv = msa.qkv.weight.T
    yield "U_qkv", U_qkv
    qkv = (z @ U_qkv + msa.qkv.bias).unflatten(2, (3, msa.heads, -1))
    yield "q, k, v", qkv.permute(2, 0, 3, 1, 4)
    yield MODEL, torch.stack(msa.project(z))


def eq6(vit: Any, images: Tensor) -> Iterator[Step]:
    """A = softmax(q k^T / sqrt(D_h))"""
    q, k, _ = _heads(vit, images)
    yield "q", q
    yield "k", k
    exponentials = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).exp()
    yield "A", exponentials / exponentials.sum(dim=-1, keepdim=True)
    yield MODEL, attention_maps(vit, images)[0]


def eq7(vit: Any, images: Tensor) -> Iterator[Step]:
    """SA(z) = A v"""
    A, (q, k, v) = attention_maps(vit, images)[0], _heads(vit, images)
    yield "A", A
    yield "v", v
    yield "SA(z)", A @ v
    yield MODEL, attention(q, k, v)


def eq8(vit: Any, images: Tensor) -> Iterator[Step]:
    """MSA(z) = [SA_1(z); SA_2(z); ...; SA_k(z)] U_msa"""
    msa = _first_block(vit).attention
    heads = attention(*_heads(vit, images))
    yield "SA_1 ... SA_k", heads
    U_msa = msa.out.weight.T
    yield "U_msa", U_msa
    joined = torch.cat(heads.unbind(1), dim=-1)
    yield "MSA(z)", joined @ U_msa + msa.out.bias
    yield MODEL, _output_of(vit, images, "blocks.0.attention")


EQUATIONS: dict[str, Callable[[Any, Tensor], Iterator[Step]]] = {
    equation.__name__: equation for equation in (eq1, eq2, eq3, eq4, eq5, eq6, eq7, eq8)
}


def layer_norm(z: Tensor, norm: Any) -> Tensor:
    """LN: each token by its own mean and variance, then scale and shift."""
    variance, mean = torch.var_mean(z, dim=-1, keepdim=True, correction=0)
    return (z - mean) / (variance + norm.eps).sqrt() * norm.weight + norm.bias


def check_model(vit: ViT) -> None:
    """Raises UserError for a model that is not the plain one of Sec. 3.1."""
    config, plain = vit.config, type(vit.config)()
    settings = ("stem", "encoder", "position", "position_at", "pool")
    differences = [name for name in settings if getattr(config, name) != getattr(plain, name)]
    differences += [name for name in config.variant.differences if name not in ("gelu", "layer_norm_eps")]
    if differences:
        raise UserError(
            f"the equations are shown on the plain model of Sec. 3.1; this checkpoint differs in "
            f"{', '.join(differences)}. Leave CHECKPOINT out, or give a plain ViT with a class token."
        )


def _first_block(vit: ViT) -> Block:
    block = vit.blocks[0]
    assert isinstance(block, Block)
    return block


def _heads(vit: ViT, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the first block."""
    return _first_block(vit).attention.project(_input_of(vit, images, "blocks.0.attention"))


def _input_of(vit: ViT, images: Tensor, module: str) -> Tensor:
    return _pass_through(vit, images, module)[0]


def _output_of(vit: ViT, images: Tensor, module: str) -> Tensor:
    return _pass_through(vit, images, module)[1]


def _pass_through(vit: ViT, images: Tensor, module: str) -> tuple[Tensor, Tensor]:
    """Input and output of a module in a forward pass of the model."""
    seen: list[Any] = []
    hook = vit.get_submodule(module).register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    try:
        vit(images)
    finally:
        hook.remove()
    return seen[0]
