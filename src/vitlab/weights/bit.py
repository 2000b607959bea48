"""Google's arrays of a ResNet: the stem of a hybrid (Sec. 3.1), big_vision's ResNet, and BiT (Sec. 4.1).

| body | spelling | a unit's first convolution | a GroupNorm's arrays |
|---|---|---|---|
| `v1` | `stored` | `block1/unit1/conv1/kernel` | `scale`, `bias`, (1, 1, 1, C) |
| | `linen`, `big_vision` | the same | `scale`, `bias`, (C) |
| `v2` | `stored`, BiT as published | `resnet/block1/unit01/a/standardized_conv2d/kernel` | `gamma`, `beta`, (C) |
| | `linen`, `big_vision` | `block1/unit01/conv1/kernel` | `scale`, `bias`, (1, 1, 1, C) |

Some published files number their convolutions, `standardized_conv2d_17`; the number says nothing and is not written.
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.config import ImageSize, ResNetConfig
from vitlab.models.resnet_config import ResNetBody
from vitlab.weights.npz import Slot, Spelling, dense, last_axis, need

PART = re.compile(r"(resnet/|root_block/|conv_root/|gn_root/|block\d+/unit\d+/)")
"""How the name of an array of a ResNet's body begins."""


@dataclass(frozen=True)
class _Names:
    """What Google calls the parts of a body."""

    root: str
    root_norm: str
    unit: str
    convs: tuple[str, str, str]
    norms: tuple[str, str, str]
    shortcut: str
    shortcut_norm: str
    norm: str
    head: str
    scale: str
    bias: str
    flat: bool
    """Whether a GroupNorm's arrays are (C), not (1, 1, 1, C)."""

    def norm_slots(self, theirs: str, ours: str, channels: int) -> dict[str, Slot]:
        shape = (channels,) if self.flat else (1, 1, 1, channels)
        return {
            f"{theirs}/{self.scale}": Slot(shape, f"{ours}.weight"),
            f"{theirs}/{self.bias}": Slot(shape, f"{ours}.bias"),
        }


_V1 = _Names(
    root="conv_root/kernel",
    root_norm="gn_root",
    unit="block{}/unit{}/",
    convs=("conv1", "conv2", "conv3"),
    norms=("gn1", "gn2", "gn3"),
    shortcut="conv_proj",
    shortcut_norm="gn_proj",
    norm="norm-pre-head",
    head="head",
    scale="scale",
    bias="bias",
    flat=True,
)
_V2 = dataclasses.replace(_V1, root="root_block/conv_root/kernel", unit="block{}/unit{:02}/", flat=False)
_PUBLISHED = dataclasses.replace(
    _V2,
    root="resnet/root_block/standardized_conv2d/kernel",
    unit="resnet/block{}/unit{:02}/",
    convs=("a/standardized_conv2d", "b/standardized_conv2d", "c/standardized_conv2d"),
    norms=("a/group_norm", "b/group_norm", "c/group_norm"),
    shortcut="a/proj/standardized_conv2d",
    norm="resnet/group_norm",
    head="resnet/head/conv2d",
    scale="gamma",
    bias="beta",
    flat=True,
)


def _names(body: ResNetBody, spelling: Spelling) -> _Names:
    if body.version == "v1":
        return dataclasses.replace(_V1, flat=spelling != "stored")
    return _PUBLISHED if spelling == "stored" else _V2


def body_read(version: str, spelling: Spelling) -> ResNetBody:
    """The body that Google's code computes from arrays so named, but for its sizes."""
    if version == "v1":
        return ResNetBody()
    # big_vision pads the pooling with nothing at all, BiT's own code with zeros.
    padding = "zero" if spelling == "stored" else "-inf"
    return ResNetBody(
        version="v2", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5, pool_padding=padding
    )


def body_layout(body: ResNetBody, spelling: Spelling, ours: str) -> dict[str, Slot]:
    """Every array of a body: Google's name -> its shape there and our parameter, below `ours`."""
    names, v1 = _names(body, spelling), body.version == "v1"
    slots = {names.root: Slot((7, 7, 3, body.width), f"{ours}.root.weight")}
    if v1:
        slots |= names.norm_slots(names.root_norm, f"{ours}.root_norm", body.width)
    for stage, units in itertools.groupby(body.units(), key=lambda unit: unit.stage):
        for number, unit in enumerate(units):
            theirs, mine = names.unit.format(stage + 1, number + 1), f"{ours}.stages.{stage}.{number}"
            c, m, out = unit.channels_in, unit.inner, unit.channels_out
            shapes = (1, 1, c, m), (3, 3, m, m), (1, 1, m, out)
            normed = (m, m, out) if v1 else (c, m, m)
            for i in range(3):
                slots[f"{theirs}{names.convs[i]}/kernel"] = Slot(shapes[i], f"{mine}.conv{i + 1}.weight")
                slots |= names.norm_slots(theirs + names.norms[i], f"{mine}.norm{i + 1}", normed[i])
            if unit.projects:
                slots[f"{theirs}{names.shortcut}/kernel"] = Slot((1, 1, c, out), f"{mine}.shortcut.weight")
                if v1:
                    slots |= names.norm_slots(theirs + names.shortcut_norm, f"{mine}.shortcut_norm", out)
    return slots


def resnet_layout(config: ResNetConfig, spelling: Spelling) -> dict[str, Slot]:
    """Every array of a ResNet: Google's name -> its shape there and our parameter."""
    names, channels = _names(config.body, spelling), config.body.channels
    slots = body_layout(config.body, spelling, "body")
    if config.body.version == "v2":
        slots |= names.norm_slots(names.norm, "norm", channels)
    if config.num_classes:
        lone = (1, 1) if names is _PUBLISHED else ()  # BiT's head is a 1x1 convolution
        slots |= dense(names.head, "head", (*lone, channels, config.num_classes))
    return slots


def holds_resnet(arrays: Mapping[str, Tensor]) -> bool:
    return any(PART.match(name) for name in arrays) and not any(name.startswith("Transformer/") for name in arrays)


def infer_body(path: Path, arrays: Mapping[str, Tensor], version: str, spelling: Spelling) -> ResNetBody:
    """The body whose arrays stand among these; raises ValueError for one that cannot be built."""
    body = body_read(version, spelling)
    names = _names(body, spelling)
    need(path, arrays, {names.root: 4}, "ResNet")
    found = {
        match.groups() for name in arrays if (match := re.match(r"(?:resnet/)?block(\d{1,4})/unit(\d{1,4})/", name))
    }
    layers = [sum(block == each for block, _ in found) for each in sorted({block for block, _ in found}, key=int)]
    try:
        return dataclasses.replace(body, layers=tuple(layers), width=arrays[names.root].shape[-1])
    except ValueError as error:
        raise UserError(f"{path} holds no ResNet that can be built: {error}") from error


def infer_resnet(
    path: Path, arrays: Mapping[str, Tensor], image_size: ImageSize | None
) -> tuple[ResNetConfig, Spelling]:
    """The ResNet that the arrays are of, and how they are spelled. They do not tell the size of its images: that
    is 224 unless given, and matters to nothing but what `image_size` says."""
    if any(name.startswith("resnet/") for name in arrays):
        version, spelling, head = "v2", "stored", _PUBLISHED.head
    else:
        v2 = any(name.startswith("root_block/") for name in arrays)
        version, spelling, head = "v2" if v2 else "v1", "linen", _V1.head
    body = infer_body(path, arrays, version, spelling)
    classes = last_axis(arrays, f"{head}/kernel") or 0
    size = ResNetConfig.image_size if image_size is None else image_size
    return ResNetConfig(image_size=size, body=body, num_classes=classes), spelling
