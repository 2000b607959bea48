"""The blocks' matrix products in numbers of 8 bits, by torchao: `--float8`.

Of each product of a block's dense layers (`qkv`, `out`, `fc1`, `fc2`), forward and backward, both factors are rounded
to float8, scaled by the tensor's largest number at that moment: activations and weights to e4m3, gradients to e5m2.
Everything else stays in the run's precision: sums, biases, what is between the layers, the weights that are trained.
So names, checkpoints and the finished model are those of any run, and tests are made without float8.

Deviation: the paper's models were trained in 16 bits and more. `benchmarks/float8.py` measures what it costs.
"""

import logging
from types import ModuleType

import torch
from torch import nn

from vitlab.errors import UserError
from vitlab.models.encoder import Block

SIDE = 16
"""The kernels multiply matrices whose sides are multiples of it."""


def has_float8_units(device: torch.device) -> bool:
    """Whether this device multiplies float8 matrices: NVIDIA's from Ada and Hopper on."""
    if device.type != "cuda" or torch.version.cuda is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def to_float8(model: nn.Module, device: torch.device) -> None:
    """Lets the dense layers of the model's blocks multiply in float8, in place; parameters stay what they are.

    Layers with a side that is no multiple of 16 stay as they are. Where the device has no units for it the factors are
    rounded alike and multiplied in float32. Raises ValueError where torchao is missing, or no layer fits.
    """
    layers = dense_layers(model)
    if not any(map(_fits, layers.values())):
        raise UserError(
            f"float8 needs dense layers in blocks, with sides that are multiples of {SIDE}, and none of this model's "
            f"{len(layers)} is one. Take a ViT whose width is, or leave float8 out."
        )
    torchao, real = _torchao(), has_float8_units(device)
    # A batch's tokens are padded to the kernels' multiple; where they are emulated nothing needs it.
    config = torchao.Float8LinearConfig(emulate=not real, pad_inner_dim=real)
    for block in _blocks(model):
        torchao.convert_to_float8_training(block, module_filter_fn=lambda layer, _: _fits(layer), config=config)


def describe_float8(model: nn.Module, device: torch.device) -> str:
    """What `to_float8` does to this model, before or after it, as a run says at its start."""
    names = {True: dict[str, None](), False: dict[str, None]()}  # each layer of a block, once, in order
    for name, layer in dense_layers(model).items():
        names[_fits(layer)][name.rpartition(".")[2]] = None
    text = f"float8 products in every block's {', '.join(names[True])}"
    if names[False]:
        text += f" (not in {', '.join(names[False])}: a side is no multiple of {SIDE})"
    if not has_float8_units(device):
        text += ", emulated: this device has no units for them, so they round alike and gain no time"
    return text


def dense_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """The dense layers of all blocks, by name within their block and its place in the model."""
    return {
        f"{number}.{name}": layer
        for number, block in enumerate(_blocks(model))
        for name, layer in block.named_modules()
        if isinstance(layer, nn.Linear)
    }


def _blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


def _fits(layer: nn.Module) -> bool:
    assert isinstance(layer, nn.Linear)
    return layer.in_features % SIDE == 0 and layer.out_features % SIDE == 0


def _torchao() -> ModuleType:
    """torchao's float8, imported without what it is warned of as its makers."""
    log = logging.getLogger("torch.utils._pytree")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        import torchao.float8
    except ModuleNotFoundError as error:
        raise UserError(
            "float8 needs the package torchao, which is not installed: pip install 'vitlab[float8]'."
        ) from error
    finally:
        log.setLevel(level)
    return torchao.float8
