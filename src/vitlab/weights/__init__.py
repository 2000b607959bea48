"""Checkpoints: `load_model` reads every format, `save_model` writes ours, `convert` the others. Imports no torch."""

from vitlab.weights.checkpoint import Checkpoint as Checkpoint
from vitlab.weights.checkpoint import class_names as class_names
from vitlab.weights.checkpoint import class_probabilities as class_probabilities
from vitlab.weights.checkpoint import load_checkpoint as load_checkpoint
from vitlab.weights.checkpoint import load_metadata as load_metadata
from vitlab.weights.checkpoint import load_model as load_model
from vitlab.weights.checkpoint import save_model as save_model
from vitlab.weights.conversion import convert as convert
from vitlab.weights.detect import READABLE as READABLE
from vitlab.weights.parity import ParityError as ParityError
