"""Table 7: its numbers, the rates that are tried, and how the best is chosen."""

import numpy as np
import pytest
from finished import finished, noise, report, verdicts

from vitlab.studies.optimizer import ADAM_RATES, BIT_RATES, OPTIMIZER, STANDS_FOR, TABLE7, best_rate, bit_sgd
from vitlab.studies.scaling import TABLE6
from vitlab.studies.spec import Point, Scale

MIDDLE = {"adam": ADAM_RATES["tiny"][1], "sgd": bit_sgd(64, 0, BIT_RATES["tiny"][1]).lr}


def test_numbers_of_the_paper() -> None:
    """Its averages as printed; with Adam these runs are those of Table 6."""
    averages = {key: np.mean(cells) for key, cells in TABLE7.items()}
    printed = {("R50x1", "adam"): 89.33, ("R50x1", "sgd"): 88.79, ("R152x2", "adam"): 94.01, ("R152x2", "sgd"): 93.72}
    assert averages == pytest.approx(printed, abs=0.0051)
    for run in TABLE6:
        if (run.model, "adam") in TABLE7 and run.epochs == 7:
            assert TABLE7[run.model, "adam"] == (run.imagenet, run.cifar10, run.cifar100, run.pets, run.flowers)


def test_runs_of_the_paper() -> None:
    points = OPTIMIZER.variants("paper")
    assert [(point.labels["model"], point.labels["optimizer"]) for point in points] == list(TABLE7)
    rates = {"adam": [1e-3, 6e-4], "sgd": [0.48, 0.48]}  # 0.03 x 4096 / 256
    for name, expected in rates.items():
        assert [p.config.optim.lr for p in points if p.labels["optimizer"] == name] == pytest.approx(expected)
    assert {(p.config.epochs, p.config.batch_size, p.config.data.name) for p in points} == {
        (7.0, 4096, "shards:jft300m")
    }


def test_decay_of_bit_in_the_long_run() -> None:
    """Coupled decay through momentum: what a constant parameter loses in a step, once the momentum has built up."""
    optim, velocity = bit_sgd(256, 0), 0.0
    for _ in range(500):
        velocity = optim.momentum * velocity + 1e-4  # of a parameter that stays 1
    assert optim.lr * velocity == pytest.approx(optim.lr * optim.weight_decay)


@pytest.mark.parametrize("scale", ["tiny", "gpu"])
def test_the_rate_is_not_chosen_by_the_test(scale: Scale) -> None:
    points = OPTIMIZER.variants(scale)
    assert len(points) == 2 * 2 * 3
    for point in points:
        fewshot, data = point.config.fewshot, point.config.data
        assert fewshot is not None
        assert (data.train_split, data.eval_split, fewshot.test_split) == ("train", "val", "test")


@pytest.mark.parametrize(("gain", "verdict"), [(0.02, "shows"), (-0.02, "contradicted")])
def test_report(gain: float, verdict: str) -> None:
    """As if the middle rate were the best by held-out accuracy, and the largest one by the test."""

    def accuracy(point: Point) -> float:
        optim = point.config.optim
        return 0.5 + gain * (optim.name == "adam") + noise(point) + 10 * optim.lr * (optim.lr > MIDDLE[optim.name])

    def held_out(point: Point) -> float:
        return 0.9 - abs(np.log(point.config.optim.lr / MIDDLE[point.config.optim.name])) / 10

    results = finished(OPTIMIZER, accuracy, held_out)
    assert (best_rate(results, "small", "adam"), best_rate(results, "large", "sgd")) == pytest.approx((3e-3, 0.12))
    written = report(OPTIMIZER, accuracy, held_out)
    assert verdicts(written) == [verdict] * 2
    assert [claim["measured"]["mean"] for claim in written["claims"]] == pytest.approx([gain, gain])
    chosen = [row for row in written["table"]["rows"] if "chosen" in row]
    assert [(row[0], row[-1]) for row in chosen] == [
        ("small", "89.33"),
        ("small", "88.79"),
        ("large", "94.01"),
        ("large", "93.72"),
    ]
    transfer, search = written["panels"]
    assert transfer["series"][0]["y"] == pytest.approx([0.5 + gain] * 2)
    assert transfer["ticks"] == list(STANDS_FOR)
    assert [len(line["x"]) for line in search["series"]] == [3] * 4
