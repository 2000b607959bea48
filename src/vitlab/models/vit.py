"""Sec. 3.1: the Vision Transformer, Eq. 1-4, and its hybrid on a ResNet's feature map.

An image is cut into N patches of P x P pixels, and E projects each to D numbers (Eq. 1). Position embeddings are added,
L encoder blocks follow (Eq. 2-3, `encoder.py`), and the head reads the class token (Eq. 4). `ViTConfig` chooses among
the paper's models; by default its `variant`, for checkpoints of other code, adds nothing.

The letters are the paper's: B images, H x W pixels, P patch side, N patches, T tokens, D width, k heads, K classes;
besides, p prefix tokens, t tokens after patch dropout, Dr numbers that the head reads.

    vitlab.create_model("ViT-B/16", num_classes=10)(torch.zeros(1, 3, 224, 224))  # logits [1, 10]
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.fx
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models import blocks
from vitlab.models.config import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.encoder import AxialBlock, Block, MAPHead
from vitlab.models.init import init_weights, linear
from vitlab.models.position import PositionEmbedding, Tables
from vitlab.models.resnet import Body, ResNet, check_images
from vitlab.models.variant_layers import layer_norm
from vitlab.preprocessing import Preprocessing

torch.fx.wrap("check_images")  # one node of a symbolic trace, which knows neither shape nor type


class PatchEmbedding(nn.Module):
    """E of Eq. 1: cuts the image into patches and projects each to D numbers, as one matrix product."""

    def __init__(self, channels: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.weight = nn.Parameter(torch.empty(width, channels, patch_size, patch_size))
        self.bias = nn.Parameter(torch.empty(width))

    def forward(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        batch, channels, height, width = images.shape
        p = self.patch_size
        rows, columns = height // p, width // p
        patches = images.reshape(batch, channels, rows, p, columns, p)
        patches = patches.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * p * p)
        return F.linear(patches.to(self.weight.dtype), self.weight.flatten(1), self.bias)


class ViT(nn.Module):
    """The Vision Transformer: `ViT(config)` is freshly initialized; `vitlab.load_model` returns trained ones."""

    preprocessing = Preprocessing()
    """How an evaluation image becomes the input; `load_model` sets the checkpoint's."""
    set_grad_checkpointing = blocks.set_grad_checkpointing
    __prepare_scriptable__ = blocks.refuse_script

    def __init__(self, config: ViTConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config, variant = config, config.variant
        self.stem = Body(config.stem, config.image_hw) if config.stem else None
        channels = config.stem.channels if config.stem else config.in_chans
        self.embedding = PatchEmbedding(channels, config.patch_size, config.width)
        self.cls = _tokens(config, 1) if config.has_class_token else None
        self.distillation = _tokens(config, 1) if variant.distilled else None
        self.registers = _tokens(config, variant.registers) if variant.registers else None
        self.position = PositionEmbedding(config)
        self.dropout = nn.Dropout(config.dropout)
        self.pre_norm = layer_norm(config, variant.pre_norm)
        kind = AxialBlock if config.encoder == "axial" else Block
        rates = [config.stochastic_depth * layer / max(config.depth - 1, 1) for layer in range(config.depth)]
        self.blocks = nn.ModuleList(kind(config, rate) for rate in rates)
        self.norm = layer_norm(config, variant.final_norm != "none")
        self.map = MAPHead(config) if config.pool == "map" else None
        rep = config.representation_size
        self.pre_logits = linear(config.pooled_dim, rep) if rep else None
        self.head = linear(config.num_features, config.num_classes) if config.num_classes else None
        has_two_heads = variant.distilled and config.num_classes
        self.head_distilled = linear(config.num_features, config.num_classes) if has_two_heads else None
        init_weights(self, config, generator)

    def forward_features(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B T D"]:
        """Tokens after the last LayerNorm (before it with `final_norm='mean'`) of images in [-1, 1]. Prefix tokens
        (class, distillation, register), if any, come first."""
        return self.encode(self.embed(images), self._grid(images))

    def embed(self, images: Float[Tensor, "B C H W"]) -> Float[Tensor, "B N D"]:
        """The patch embeddings x_p E of Eq. 1, in row-major order, before position embeddings are added."""
        config = self.config
        size = None if config.dynamic_image_size else config.image_hw
        images = check_images(images, size, config.patch_size, config.stem, config.in_chans)
        return self.embedding(images if self.stem is None else self.stem(images))

    def _grid(self, images: Float[Tensor, "B C H W"]) -> tuple[int, int] | None:
        """(rows, columns) of the images' patch grid, with `dynamic_image_size`; None is the configuration's."""
        if not self.config.dynamic_image_size:
            return None
        height, width = images.shape[-2:]
        return self.config.grid_of((height, width))

    def get_intermediate_layers(
        self,
        images: Float[Tensor, "B C H W"],
        n: int | Sequence[int] = 1,
        reshape: bool = False,
        norm: bool = True,
        return_prefix_tokens: bool = False,
    ) -> tuple[Any, ...]:
        """Patch tokens [B, N, D] after the last `n` blocks, or after those that `n` lists (0 is the first, -1 the
        last), lowest first, as in DINOv2 and timm.

        reshape: as maps [B, D, rows, columns]. norm: after the last LayerNorm. return_prefix_tokens: pairs with the
        prefix tokens [B, p, D]. Raises UserError for a block that the model does not have.
        """
        depth = self.config.depth
        wanted, lowest = (range(depth - n, depth), 0) if isinstance(n, int) else (n, -depth)
        if not wanted or min(wanted) < lowest or max(wanted) >= depth:
            raise UserError(f"n={n}; the model has {depth} blocks, from 0 to {depth - 1}.")
        layers = {layer % depth for layer in wanted}
        grid = self._grid(images)
        tables, outputs = self.position.tables(grid), []
        tokens = self._to_tokens(self.embed(images), tables)
        for layer in range(max(layers) + 1):
            tokens = self._apply_block(layer, tokens, tables)
            if layer in layers:
                prefix_tokens, patches = self._split_prefix(self.norm(tokens) if norm else tokens)
                patches = patches.transpose(1, 2).unflatten(2, grid or self.config.grid) if reshape else patches
                outputs.append((patches, prefix_tokens) if return_prefix_tokens else patches)
        return tuple(outputs)

    def encode(self, tokens: Float[Tensor, "B N D"], grid: tuple[int, int] | None = None) -> Float[Tensor, "B T D"]:
        """Runs the encoder on patch embeddings: prepends prefix tokens, adds position embeddings (Eq. 1), applies
        blocks and the final LayerNorm. `grid` is (rows, columns) of the patch grid, by default the configuration's."""
        tables = self.position.tables(grid)
        tokens = self._drop_patches(self._to_tokens(tokens, tables))
        for layer in range(self.config.depth):
            tokens = self._apply_block(layer, tokens, tables)
        return tokens if self.config.variant.final_norm == "mean" else self.norm(tokens)

    def _to_tokens(self, tokens: Float[Tensor, "B N D"], tables: Tables) -> Float[Tensor, "B T D"]:
        """The input of the first block (Eq. 1)."""
        prefix_tokens = [token for token in (self.cls, self.distillation, self.registers) if token is not None]
        if prefix_tokens:
            batch, dtype = tokens.shape[0], tokens.dtype
            tokens = torch.cat([*(token.to(dtype).expand(batch, -1, -1) for token in prefix_tokens), tokens], dim=1)
        at_stem = self.config.position_at == "stem"
        return self.pre_norm(self.dropout(self.position(tokens, 0, tables) if at_stem else tokens))

    def _split_prefix(self, tokens: Float[Tensor, "B T D"]) -> tuple[Float[Tensor, "B p D"], Float[Tensor, "B N D"]]:
        """Prefix tokens and patch tokens."""
        prefix_tokens, patches = tokens.tensor_split([self.config.num_prefix_tokens], dim=1)
        return prefix_tokens, patches

    def _drop_patches(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B t D"]:
        """In training, the prefix tokens and a random part of each image's patches."""
        if not (self.training and self.config.patch_dropout):
            return tokens
        prefix_tokens, patches = self._split_prefix(tokens)
        uniforms = torch.rand_like(patches[..., 0], dtype=torch.float32)
        kept = uniforms.argsort(dim=1)[:, : self.config.kept_patches(patches.shape[1])]
        return torch.cat([prefix_tokens, patches.gather(1, kept[..., None].expand(-1, -1, patches.shape[2]))], dim=1)

    def _apply_block(self, layer: int, tokens: Float[Tensor, "B T D"], tables: Tables) -> Float[Tensor, "B T D"]:
        tokens = tokens if self.config.position_at == "stem" else self.position(tokens, layer, tables)
        return self.blocks[layer](tokens, self.position.in_attention(layer, tables))

    def forward_head(
        self, tokens: Float[Tensor, "B T D"], pre_logits: bool = False
    ) -> Float[Tensor, "B K"] | Float[Tensor, "B Dr"]:
        """Logits from the tokens of `forward_features`; with `pre_logits`, the head's input. With a distillation token
        that is the mean of the two tokens, and the logits are the mean of the two heads."""
        pooled = self._pool(tokens)
        if self.pre_logits is not None:
            pooled = torch.tanh(self.pre_logits(pooled))
        if self.distillation is not None:
            if pre_logits or self.head is None or self.head_distilled is None:
                return (pooled + tokens[:, 1]) / 2
            return (self.head(pooled) + self.head_distilled(tokens[:, 1])) / 2
        return pooled if pre_logits or self.head is None else self.head(pooled)

    def _pool(self, tokens: Float[Tensor, "B T D"]) -> Float[Tensor, "B D"] | Float[Tensor, "B D2"]:
        match self.config.pool:
            case "token":
                return tokens[:, 0]  # Eq. 4
            case "map":
                assert self.map is not None
                return self.map(tokens)
        mean = tokens[:, self.config.num_prefix_tokens :].mean(dim=1)  # App. D.3
        mean = self.norm(mean) if self.config.variant.final_norm == "mean" else mean
        return mean if self.config.pool == "gap" else torch.cat([tokens[:, 0], mean], dim=1)

    def forward(self, images: Tensor) -> Tensor:
        """[B, K] logits of [B, C, H, W] images."""
        # Annotated with Tensor only: torch.fx copies annotations into the traced module, and jaxtyping's do not pickle.
        return self.forward_head(self.forward_features(images))


def _tokens(config: ViTConfig, count: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(1, count, config.width))


Model = ViT | ResNet
"""Any model of the paper: what `build_model` returns and everything outside this folder takes."""
WRAPPERS = ("_orig_mod", "module", "_checkpoint_wrapped_module")
"""Where torch keeps the module that it has compiled, averaged, or wrapped for data parallelism or checkpointing."""


def build_model(config: ModelConfig, *, generator: torch.Generator | None = None) -> Model:
    """The model that `config` describes, freshly initialized."""
    if isinstance(config, ResNetConfig):
        return ResNet(config, generator=generator)
    return ViT(config, generator=generator)


def unwrap(model: object) -> Model:
    """The model itself, out of torch's wrappers and peft's; adapters stay. Raises UserError for another module."""
    inner = unwrap_module(model)
    if not isinstance(inner, ViT | ResNet):
        raise UserError(
            f"a {type(inner).__name__} is not a model of vitlab: give what load_model or create_model returns, bare or "
            f"as torch.compile, DataParallel, DistributedDataParallel, AveragedModel or peft wrap it."
        )
    return inner


def unwrap_module(module: Any) -> Any:
    """What torch's wrappers and peft's hold."""
    while not isinstance(module, ViT | ResNet):
        if hasattr(module, "get_base_model"):  # peft
            module = module.get_base_model()
        elif wrapper := next((name for name in WRAPPERS if isinstance(getattr(module, name, None), nn.Module)), None):
            module = getattr(module, wrapper)
        else:
            break
    return module


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; on exit every module is in its previous mode again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
