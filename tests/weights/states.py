"""Helpers of the tests of formats: comparing states, and Google's files in any spelling."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitlab.io import write_arrays
from vitlab.models import ModelConfig
from vitlab.models.vit import Model, build_model
from vitlab.weights.google_layout import Spelling, google_layout, to_google

Arrays = dict[str, Any]
"""Name -> np.ndarray."""


def randomized(config: ModelConfig) -> Any:
    """A model of which every parameter is random, so that none can be lost or swapped unnoticed."""
    model = build_model(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.eval()


def same(state: Mapping[str, Tensor], model: Model) -> bool:
    """Whether a state is that of the model, to the bit."""
    expected = model.state_dict()
    return state.keys() == expected.keys() and all(
        state[name].dtype == tensor.dtype and torch.equal(state[name], tensor) for name, tensor in expected.items()
    )


def arrays_of(path: Path) -> Arrays:
    with np.load(path) as archive:
        return dict(archive)


def write_spelled(model: Model, path: Path, spelling: Spelling, prefix: str = "") -> None:
    """The model as an .npz in one of Google's spellings."""
    state, arrays = {name: tensor.detach() for name, tensor in model.state_dict().items()}, {}
    for name, slot in google_layout(model.config, spelling).items():
        arrays[prefix + name] = to_google(name, slot.select(state), slot.shape).contiguous().numpy()
    write_arrays(path, arrays)


class Bomb:
    """Runs code when it is unpickled: it creates the file `mark`."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)
