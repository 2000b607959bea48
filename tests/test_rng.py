"""The random streams: the values that runs are reproduced by."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitlab.rng import Stream, example_uniforms, generator, philox


def test_values_never_change() -> None:
    names = "AUGMENTATION EPOCH_ORDER SPLIT STEP EXAMPLE_DRAWS SUBSET REMOTE_ORDER SHARD_ASSIGNMENT HELD_OUT"
    assert [stream.name for stream in Stream] == [*names.split(), "RANDAUGMENT", "PARTS"]
    assert [stream.value for stream in Stream] == list(range(11))
    assert philox(5, Stream.SPLIT).random_raw(2).tolist() == [17620318457466787005, 16676151441253390105]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 2**40), st.integers(1, 9))
@pytest.mark.parametrize("stream", [Stream.AUGMENTATION, Stream.EXAMPLE_DRAWS])
def test_uniforms_are_those_of_each_example(stream: Stream, seed: int, epoch: int, index: int, count: int) -> None:
    rows = example_uniforms(seed, np.array([3, epoch]), np.array([7, index]), count, stream)
    np.testing.assert_array_equal(rows[1], generator(seed, stream, epoch, index).random(count))
    numpys = np.random.Philox(
        key=np.array([seed, epoch], np.uint64), counter=np.array([0, 0, stream, index], np.uint64)
    )
    np.testing.assert_array_equal(rows[1], np.random.Generator(numpys).random(count))


def test_seeds_streams_epochs_and_examples_differ() -> None:
    keys = [(s, stream, e, i) for s, stream, e, i in itertools.product((0, 1), Stream, (0, 1), (0, 1))]
    assert len({tuple(generator(*key).random(3)) for key in keys}) == len(keys)
