"""Points, their digests and compute."""

import dataclasses
import re

import pytest

from vitlab.config import FewShotConfig, FinetuneConfig, TrainConfig
from vitlab.models.config import ViTConfig
from vitlab.models.registry import get_config
from vitlab.recipes import tiny
from vitlab.studies.point import Point, Result, digest, exaflops, held_out
from vitlab.studies.presets import changed

BASE = tiny.digits()


def digest_of(config: TrainConfig) -> str:
    return digest(Point("p", config, {}), {})


def test_a_digest_is_of_the_settings_alone() -> None:
    assert re.fullmatch(r"[0-9a-f]{8}", digest_of(BASE))
    assert digest(Point("other", tiny.digits(), {"kind": "1d"}), {}) == digest_of(BASE)


def test_digests_stay_the_same_in_later_versions() -> None:
    """Or every finished point would run again."""
    assert digest_of(TrainConfig(model=ViTConfig(depth=1), steps=1)) == "7ee47adb"


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"optim": {"lr": 1e-3}},
        {"model": {"pool": "token"}},
        {"data": {"part": 0.1}},
        {"fewshot": FewShotConfig()},
    ],
)
def test_a_digest_changes_with_every_setting(changes: dict) -> None:
    assert digest_of(changed(BASE, **changes)) != digest_of(BASE)


def test_a_setting_that_is_off_does_not_count() -> None:
    @dataclasses.dataclass(frozen=True)
    class Later(TrainConfig):
        """A later version with two more settings, both off."""

        sharper: float | None = None
        blurred: bool = False

    Later.__name__ = "TrainConfig"
    settings = {field.name: getattr(BASE, field.name) for field in dataclasses.fields(BASE)}
    assert digest_of(Later(**settings)) == digest_of(BASE)
    assert digest_of(Later(**settings, blurred=True)) != digest_of(BASE)
    assert digest_of(Later(**settings, sharper=0.1)) != digest_of(BASE)


def test_a_point_changes_with_the_one_that_it_starts_from() -> None:
    tune = tiny.finetune_digits()

    def chain(lr: float) -> dict[str, str]:
        first = Point("a", changed(BASE, optim={"lr": lr}), {})
        points = {
            p.name: p for p in (first, Point("b", tune, {}, "a"), Point("c", tune, {}, "b"), Point("d", BASE, {}))
        }
        return {name: digest(point, points) for name, point in points.items()}

    one, other = chain(1e-3), chain(3e-3)
    assert {name for name in one if one[name] != other[name]} == {"a", "b", "c"}
    assert len(set(one.values())) == 4  # b and c have the same settings and different starts


def test_a_seed_is_in_name_config_and_start() -> None:
    point = Point("b", BASE, {"kind": "1d"}, start="a").with_seed(2)
    assert (point.name, point.config.seed, point.start) == ("b.seed-2", 2, "a.seed-2")


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
    config = TrainConfig(model=get_config("ViT-B/16"), steps=100, batch_size=4096)
    assert exaflops(config, 1) == pytest.approx(6 * macs * 100 * 4096 / 1e18, rel=1e-3)


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
        assert exaflops(changed(one, **changes), 50) == pytest.approx(steps / 100 * exaflops(one, 50))


def test_a_result_has_the_compute_of_the_model_that_was_run() -> None:
    tune = tiny.finetune_digits()
    model = ViTConfig(image_size=32, patch_size=8, width=32, depth=2, heads=2, mlp_dim=64, num_classes=10)
    result = Result(Point("b", tune, {}, "a"), {"accuracy": 0.5}, [], 1000, model=model)
    assert result.exaflops == pytest.approx(6 * model.forward_macs * 200 * 64 / 1e18)
    own = dataclasses.replace(result, model=None)
    assert own.exaflops == pytest.approx(6 * tune.model.forward_macs * 200 * 64 / 1e18)


def test_metrics() -> None:
    records = [{"val_accuracy": 0.1}, {"val_accuracy": 0.7}, {"loss": 1.0}]
    result = Result(Point("b", BASE, {}), {"accuracy": 0.5}, records, 1000)
    assert (result.metric("accuracy"), result.metric(held_out)) == (0.5, 0.7)
    with pytest.raises(ValueError, match=r"'fewshot_5shot'.*accuracy"):
        result.metric("fewshot_5shot")
