"""Checkpoints: `load_model` reads every format, `save_model` writes ours, `convert` the others. Imports no torch."""

from vitlab.weights.checkpoint import (
    Checkpoint,
    ParityError,
    class_names,
    class_probabilities,
    convert,
    load_checkpoint,
    load_metadata,
    load_model,
    save_model,
)
from vitlab.weights.detect import READABLE

__all__ = [
    "READABLE",
    "Checkpoint",
    "ParityError",
    "class_names",
    "class_probabilities",
    "convert",
    "load_checkpoint",
    "load_metadata",
    "load_model",
    "save_model",
]
