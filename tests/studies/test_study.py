"""Points, their names and costs, and when a claim counts as shown."""

import dataclasses
import math
import re

import pytest

from vitlab.config import FewShotConfig, FinetuneConfig, TrainConfig
from vitlab.models.config import ViTConfig
from vitlab.models.registry import get_config
from vitlab.recipes import tiny
from vitlab.studies.study import Claim, Difference, Done, Point, digest, exaflops

BASE = tiny.digits()


def digest_of(config: TrainConfig) -> str:
    point = Point("p", config, {})
    return digest(point, {"p": point})


def test_a_digest_is_eight_digits_fit_for_a_folder() -> None:
    assert re.fullmatch(r"[0-9a-f]{8}", digest_of(BASE))
    assert digest_of(BASE) == digest_of(tiny.digits())


@pytest.mark.parametrize(
    "changed",
    [
        {"seed": 1},
        {"optim": dataclasses.replace(BASE.optim, lr=1e-3)},
        {"model": dataclasses.replace(BASE.model, pool="token")},
        {"data": dataclasses.replace(BASE.data, part=0.1)},
        {"fewshot": FewShotConfig()},
    ],
)
def test_a_digest_changes_with_every_setting(changed: dict) -> None:
    assert digest_of(dataclasses.replace(BASE, **changed)) != digest_of(BASE)


def test_names_and_labels_are_not_part_of_a_digest() -> None:
    point = Point("other", BASE, {"kind": "1d"})
    assert digest(point, {"other": point}) == digest_of(BASE)


def test_a_setting_that_is_switched_off_does_not_count() -> None:
    @dataclasses.dataclass(frozen=True)
    class Later(TrainConfig):
        """A later version with two more settings, both off."""

        sharper: float | None = None
        blurred: bool = False

    Later.__name__ = "TrainConfig"
    settings = {each.name: getattr(BASE, each.name) for each in dataclasses.fields(BASE)}
    assert digest_of(Later(**settings)) == digest_of(BASE)
    assert digest_of(Later(**settings, blurred=True)) != digest_of(BASE)
    assert digest_of(Later(**settings, sharper=0.1)) != digest_of(BASE)


def test_a_point_changes_with_the_one_that_it_starts_from() -> None:
    tune = tiny.finetune_digits()

    def chain(lr: float) -> dict[str, str]:
        first = Point("a", dataclasses.replace(BASE, optim=dataclasses.replace(BASE.optim, lr=lr)), {})
        points = {
            p.name: p for p in (first, Point("b", tune, {}, "a"), Point("c", tune, {}, "b"), Point("d", BASE, {}))
        }
        return {name: digest(point, points) for name, point in points.items()}

    one, other = chain(1e-3), chain(3e-3)
    assert {name for name in one if one[name] != other[name]} == {"a", "b", "c"}
    assert len(set(one.values())) == 4  # b and c have the same settings and other beginnings


@pytest.mark.parametrize(
    ("model", "epochs", "paper"), [("ViT-B/16", 7.0, 224), ("ViT-B/32", 7.0, 55), ("ViT-L/16", 14.0, 1567)]
)
def test_compute_is_counted_as_in_table_6(model: str, epochs: float, paper: float) -> None:
    config = TrainConfig(model=get_config(model), epochs=epochs, batch_size=4096)
    assert exaflops(config, 303_000_000) == pytest.approx(paper, rel=0.021)


def test_compute_of_base_by_hand() -> None:
    """196 + 1 tokens: 12 layers of 4 T D^2 + 2 T^2 D (attention) and 8 T D^2 (MLP), 196 patches of 768 D, 1000 D."""
    width, tokens = 768, 197
    macs = 12 * (12 * tokens * width**2 + 2 * tokens**2 * width) + 196 * 768 * width + 1000 * width
    steps = round(7 * 303e6 / 4096)
    config = TrainConfig(model=get_config("ViT-B/16"), epochs=7.0, batch_size=4096)
    assert exaflops(config, 303_000_000) == pytest.approx(6 * macs * steps * 4096 / 1e18, rel=1e-3)
    assert round(exaflops(config, 303_000_000)) == 224  # as printed


def test_a_fine_tuning_costs_what_its_model_does() -> None:
    tune = tiny.finetune_digits()
    model = ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, mlp_dim=64, num_classes=10)
    done = Done(Point("b", tune, {}, "a"), {}, [], 1000, model=model)
    assert done.seed == tune.seed
    assert done.exaflops == pytest.approx(6 * model.forward_macs * 200 * 64 / 1e18)
    assert dataclasses.replace(done, model=None).exaflops == pytest.approx(
        6 * tune.model.forward_macs * 200 * 64 / 1e18
    )


@pytest.mark.parametrize(
    ("low", "high", "pairs", "more", "equal"),
    [
        (0.01, 0.03, 3, "shows", "differ"),
        (-0.01, 0.03, 3, "not clear", "shows"),
        (0.0, 0.03, 3, "not clear", "shows"),
        (-0.03, 0.0, 3, "not clear", "shows"),
        (-0.03, -0.01, 3, "contradicted", "differ"),
        (-math.inf, math.inf, 1, "not clear", "not clear"),
        (math.nan, math.nan, 3, "not clear", "not clear"),
    ],
)
def test_the_interval_decides_a_claim(low: float, high: float, pairs: int, more: str, equal: str) -> None:
    measured = Difference((low + high) / 2 if pairs > 1 else 0.5, low, high, pairs)
    assert Claim("text", "paper", measured).verdict == more
    assert Claim("text", "paper", measured, expected="equal").verdict == equal


def test_a_fine_tuning_counts_its_search_and_all_its_runs() -> None:
    model = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8)
    one = FinetuneConfig(model=model, steps=100, batch_size=10)
    assert exaflops(one, 50) == pytest.approx(6 * model.forward_macs * 1000 / 1e18)
    for changes, steps in (
        ({"learning_rates": (0.1,)}, 100),
        ({"learning_rates": (0.1, 0.2, 0.3)}, 400),
        ({"learning_rates": (0.1, 0.2, 0.3), "runs": 3}, 600),
        ({"learning_rates": (0.1, 0.2), "sweep_steps": 25}, 150),
    ):
        assert exaflops(dataclasses.replace(one, **changes), 50) == pytest.approx(steps / 100 * exaflops(one, 50))
