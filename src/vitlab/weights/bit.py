"""Google's arrays of a ResNet: the stem of a hybrid (Sec. 3.1), big_vision's ResNet, and BiT (Sec. 4.1).

| body | spelling | a unit's first convolution | a GroupNorm's arrays |
|---|---|---|---|
| `v1` | `stored` | `block1/unit1/conv1/kernel` | `scale`, `bias`, (1, 1, 1, C) |
| | `linen`, `big_vision` | the same | `scale`, `bias`, (C) |
| `v2` | `stored`, BiT as published | `resnet/block1/unit01/a/standardized_conv2d/kernel` | `gamma`, `beta`, (C) |
| | `linen`, `big_vision` | `block1/unit01/conv1/kernel` | `scale`, `bias`, (1, 1, 1, C) |

Some published files number their convolutions, `standardized_conv2d_17`; the number is ignored and not written.
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from vitlab.models.config import ImageSize, ResNetConfig
from vitlab.models.resnet_config import ResNetBody
from vitlab.weights.layout import Layout, Slot, count_units, require_shape
from vitlab.weights.npz import Spelling, dense

PART = re.compile(r"(resnet/|root_block/|conv_root/|gn_root/|block\d+/unit\d+/)")
"""Start of the names of a ResNet body's arrays."""
UNIT = re.compile(r"(?:resnet/)?block(\d{1,4})/unit(\d{1,4})/")


@dataclass(frozen=True)
class _Names:
    """Google's names of the parts of a body."""

    root: str = "conv_root/kernel"
    root_norm: str = "gn_root"
    unit: str = "block{}/unit{}/"
    convs: tuple[str, ...] = ("conv1", "conv2", "conv3")
    norms: tuple[str, ...] = ("gn1", "gn2", "gn3")
    shortcut: str = "conv_proj"
    shortcut_norm: str = "gn_proj"
    norm: str = "norm-pre-head"
    head: str = "head"
    scale: str = "scale"
    bias: str = "bias"
    flat: bool = True
    """Whether a GroupNorm's arrays are (C), not (1, 1, 1, C)."""

    def norm_layout(self, theirs: str, ours: str, channels: int) -> Layout:
        shape = (channels,) if self.flat else (1, 1, 1, channels)
        names = {"weight": f"{theirs}/{self.scale}", "bias": f"{theirs}/{self.bias}"}
        return {name: Slot(shape, f"{ours}.{leaf}") for leaf, name in names.items()}


_V1 = _Names()
_V2 = _Names(root="root_block/conv_root/kernel", unit="block{}/unit{:02}/", flat=False)
_PUBLISHED = _Names(
    root="resnet/root_block/standardized_conv2d/kernel",
    unit="resnet/block{}/unit{:02}/",
    convs=("a/standardized_conv2d", "b/standardized_conv2d", "c/standardized_conv2d"),
    norms=("a/group_norm", "b/group_norm", "c/group_norm"),
    shortcut="a/proj/standardized_conv2d",
    norm="resnet/group_norm",
    head="resnet/head/conv2d",
    scale="gamma",
    bias="beta",
)


def _names(body: ResNetBody, spelling: Spelling) -> _Names:
    if body.version == "v1":
        return dataclasses.replace(_V1, flat=spelling != "stored")
    return _PUBLISHED if spelling == "stored" else _V2


def google_body(version: str, spelling: Spelling) -> ResNetBody:
    """The body that Google's code computes from arrays of these names, except for its sizes."""
    if version == "v1":
        return ResNetBody()
    # big_vision pads the pooling with nothing at all, BiT's code with zeros.
    padding = "zero" if spelling == "stored" else "-inf"
    return ResNetBody(
        version="v2", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5, pool_padding=padding
    )


def body_layout(body: ResNetBody, spelling: Spelling, prefix: str) -> Layout:
    """Every array of a body; `prefix` is in front of our names."""
    names, v1 = _names(body, spelling), body.version == "v1"
    layout = {names.root: Slot((7, 7, 3, body.width), f"{prefix}.root.weight")}
    if v1:
        layout |= names.norm_layout(names.root_norm, f"{prefix}.root_norm", body.width)
    for stage, units in itertools.groupby(body.units(), key=lambda unit: unit.stage):
        for number, unit in enumerate(units):
            theirs, ours = names.unit.format(stage + 1, number + 1), f"{prefix}.stages.{stage}.{number}"
            c, m, out = unit.channels_in, unit.inner, unit.channels_out
            shapes = (1, 1, c, m), (3, 3, m, m), (1, 1, m, out)
            normed = (m, m, out) if v1 else (c, m, m)
            for i in range(3):
                layout[f"{theirs}{names.convs[i]}/kernel"] = Slot(shapes[i], f"{ours}.conv{i + 1}.weight")
                layout |= names.norm_layout(theirs + names.norms[i], f"{ours}.norm{i + 1}", normed[i])
            if unit.projects:
                layout[f"{theirs}{names.shortcut}/kernel"] = Slot((1, 1, c, out), f"{ours}.shortcut.weight")
                if v1:
                    layout |= names.norm_layout(theirs + names.shortcut_norm, f"{ours}.shortcut_norm", out)
    return layout


def resnet_layout(config: ResNetConfig, spelling: Spelling) -> Layout:
    """Every array of a ResNet."""
    names, channels = _names(config.body, spelling), config.body.channels
    layout = body_layout(config.body, spelling, "body")
    if config.body.version == "v2":
        layout |= names.norm_layout(names.norm, "norm", channels)
    if config.num_classes:
        ones = (1, 1) if names is _PUBLISHED else ()  # BiT's head is a 1x1 convolution
        layout |= dense(names.head, "head", (*ones, channels, config.num_classes))
    return layout


def infer_body(arrays: Mapping[str, Tensor], version: str, spelling: Spelling) -> ResNetBody:
    """The body of these arrays."""
    body = google_body(version, spelling)
    width = require_shape("the file", arrays, _names(body, spelling).root, 4)[-1]
    units = {(match[1], match[2]) for name in arrays if (match := UNIT.match(name))}
    return dataclasses.replace(body, layers=count_units(units), width=width)


def infer_resnet(arrays: Mapping[str, Tensor], image_size: ImageSize | None) -> tuple[ResNetConfig, Spelling]:
    """The ResNet of these arrays, and their spelling. The image size is not in them: 224 unless given."""
    if any(name.startswith("resnet/") for name in arrays):
        version, spelling, head = "v2", "stored", _PUBLISHED.head
    else:
        v2 = any(name.startswith("root_block/") for name in arrays)
        version, spelling, head = "v2" if v2 else "v1", "linen", _V1.head
    body = infer_body(arrays, version, spelling)
    kernel = arrays.get(f"{head}/kernel")
    classes = kernel.shape[-1] if kernel is not None and kernel.ndim else 0
    size = ResNetConfig.image_size if image_size is None else image_size
    return ResNetConfig(image_size=size, body=body, num_classes=classes), spelling
