"""Metrics of masked patch prediction beside those of the best constant prediction, on one rank and on several."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from masked_models import MODEL, constant, flat

from vitlab.config import MaskingConfig
from vitlab.data.dataset import Dataset
from vitlab.data.decode import ImageError
from vitlab.data.registry import load_dataset
from vitlab.evaluation.masked import MaskedEvaluation, evaluate_masked, format_masked
from vitlab.evaluation.options import LoaderOptions
from vitlab.train.distributed import init_distributed
from vitlab.train.masking import MaskedViT

SKIP = LoaderOptions(2, on_error="skip")


def test_a_loss_that_is_not_finite_as_text() -> None:
    """In the result of a finished run it is null."""
    record = MaskedEvaluation(1234, 5678, float("nan"), 0.5, None, None, 2).record()
    texts = {format_masked(record | {"loss": loss}) for loss in (float("nan"), None)}
    assert len(texts) == 1
    assert "nan" in texts.pop()


def test_entropy_is_the_loss_of_the_best_constant_prediction() -> None:
    """A quarter of class 73 and three of class 4 * 73: entropy 0.5623 nats; a model of these shares has that loss."""
    shares = torch.full((512,), 1e-30)
    shares[73], shares[4 * 73] = 0.25, 0.75
    test = evaluate_masked(constant("mean-color", shares.log()), flat([40, 130, 130, 130]), LoaderOptions(3))
    assert test.constant_loss == pytest.approx(-(0.25 * np.log(0.25) + 0.75 * np.log(0.75)))
    assert test.loss == pytest.approx(test.constant_loss, rel=1e-5)
    assert (test.accuracy, test.constant_accuracy) == (0.75, 0.75)
    cells = torch.full((16, 512), 1e-30)
    cells[:, 0] = cells[:, 511] = 0.5
    test = evaluate_masked(constant("downsized", cells.log().flatten()), flat([0, 255]))
    assert (test.loss, test.constant_loss) == (pytest.approx(test.constant_loss, rel=1e-5), pytest.approx(np.log(2)))


def test_variance_is_the_loss_of_the_best_constant_prediction() -> None:
    """Values -1, 1 and 1: mean 1/3, variance 8/9."""
    test = evaluate_masked(constant("regression", torch.full((48,), 1 / 3)), flat([0, 255, 255]))
    assert test.metrics() == {"loss": pytest.approx(8 / 9), "constant_loss": pytest.approx(8 / 9)}


@pytest.mark.parametrize(("target", "count"), [("mean-color", 2), ("regression", 3)])
def test_several_ranks(target: Any, count: int, in_ranks: Callable[[int, Callable[[], Any]], list[Any]]) -> None:
    """Each computes its share only, and returns the whole: 13 images, one of which cannot be read."""
    model, data = MaskedViT(MODEL, MaskingConfig(target)).eval(), load_dataset("digits", "val").take(np.arange(13))
    data.failures[4] = ImageError("4.png", "broken")
    alone, other = evaluate_masked(model, data, SKIP), evaluate_masked(model, data, LoaderOptions(7, on_error="skip"))
    assert dataclasses.replace(other, loss=alone.loss) == alone  # batches do not matter
    assert (alone.images, alone.skipped) == (12, 1)

    def job() -> tuple[MaskedEvaluation, int]:
        seen = []
        model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        with init_distributed() as world:
            return evaluate_masked(model, data, SKIP, world=world), sum(seen)

    results = in_ranks(count, job)
    assert sum(seen for _, seen in results) == 12
    for test, seen in results:
        assert seen <= -(-13 // count)
        assert test == results[0][0]
        assert dataclasses.replace(test, loss=alone.loss, constant_loss=alone.constant_loss) == alone
        assert test.loss == pytest.approx(alone.loss, rel=1e-6)
        assert test.constant_loss == pytest.approx(alone.constant_loss, rel=1e-12)


def test_ranks_without_an_image(in_ranks: Callable[[int, Callable[[], Any]], list[Any]]) -> None:
    model, data = constant("mean-color", torch.zeros(512)), flat([40, 130])
    one, none = dataclasses.replace(data), dataclasses.replace(data)
    one.failures = {0: ImageError("0", "broken")}
    none.failures = {i: ImageError(str(i), "broken") for i in range(2)}

    def job(data: Dataset) -> MaskedEvaluation:
        with init_distributed() as world:
            return evaluate_masked(model, data, SKIP, world=world)

    assert in_ranks(3, lambda: job(one)) == [evaluate_masked(model, one, SKIP)] * 3
    for error in in_ranks(3, lambda: job(none)):
        assert "none of the 2 images of flat (test) could be read" in str(error)
