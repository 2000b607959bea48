"""The best learning rate."""

import pytest

from vitlab.finetuning.scores import Score, best_score
from vitlab.train.stopping import NonFiniteError


def score(lr: float, accuracy: float | None, loss: float = 1.0, **metrics: float) -> Score:
    return Score(lr, {} if accuracy is None else {"accuracy": accuracy, "loss": loss, **metrics})


@pytest.mark.parametrize(
    ("scores", "best"),
    [
        ([score(0.03, 0.5), score(0.003, 0.9), score(0.01, 0.7)], 0.003),
        ([score(0.03, 0.9), score(0.01, 0.9), score(0.003, 0.8)], 0.01),  # of equals the smaller
        ([score(lr, lr, mean_average_precision=1 - lr) for lr in (0.03, 0.003, 0.01)], 0.003),
        ([score(0.03, 0.9, 0.2), score(0.01, 0.9, 0.3), score(0.003, 0.8, 0.1)], 0.03),  # or that of lower loss
        ([score(0.03, None), score(0.01, 0.0)], 0.01),
        # Beside a least-squares head, by loss.
        ([score(0.03, 0.9, 0.3, alpha=0.5), score(0.01, 0.8, 0.2, alpha=1.0)], 0.01),
    ],
)
def test_best_learning_rate(scores: list[Score], best: float) -> None:
    assert best_score(scores).learning_rate == best


def test_no_best_learning_rate() -> None:
    with pytest.raises(NonFiniteError, match=r"diverged at every learning rate \(0\.03, 0\.1\)"):
        best_score([score(0.03, None), score(0.1, None)])
