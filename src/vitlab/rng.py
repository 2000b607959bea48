"""The random streams by name: every draw is a pure function of (seed, stream, epoch or step, example).

Each is NumPy's Philox with key (seed, epoch) and counter (0, 0, stream, example), so that no two streams meet. Its
raw output is the same in every version of NumPy, and does not depend on batches, workers or ranks.
"""

import enum

import numpy as np
from numpy.random import Generator, Philox


class Stream(enum.IntEnum):
    """What the numbers are drawn for. The values are part of a run's reproducibility: never change one."""

    AUGMENTATION = 0  # crop and flip of a training example
    EPOCH_ORDER = 1
    SPLIT = 2  # splits held out from train
    STEP = 3  # one step's choices for the whole batch, as mixup's
    EXAMPLE_DRAWS = 4  # uniform numbers that come with each example of a batch, as for masking
    SUBSET = 5
    REMOTE_ORDER = 6  # the order of images in remote shards
    SHARD_ASSIGNMENT = 7  # which shard an image is written to
    HELD_OUT = 8  # images held out of a training split to choose settings
    RANDAUGMENT = 9
    PARTS = 10  # parts of the training images for the least-squares head


def philox(seed: int, stream: Stream, epoch: int = 0, example: int = 0) -> Philox:
    """The bit generator of a stream; its `random_raw` gives uint64."""
    key = np.array([seed, epoch], np.uint64)
    counter = np.array([0, 0, stream, example], np.uint64)
    return Philox(key=key, counter=counter)


def generator(seed: int, stream: Stream, epoch: int = 0, example: int = 0) -> Generator:
    """The generator of a stream."""
    return Generator(philox(seed, stream, epoch, example))


def example_uniforms(
    seed: int, epochs: np.ndarray, indices: np.ndarray, count: int, stream: Stream = Stream.AUGMENTATION
) -> np.ndarray:
    """The first `count` uniform numbers of each example's `generator`: float64 [B, count].

    One generator is moved from key to key, because building one per example costs ten times as much.
    """
    bits = philox(seed, stream)
    random, state = Generator(bits), bits.state
    rows = np.empty((len(indices), count))
    for row, epoch, index in zip(rows, epochs, indices, strict=True):
        state["state"]["key"][1], state["state"]["counter"][3] = epoch, index
        bits.state = state
        random.random(out=row)
    return rows
