"""What the studies of App. D share: a pre-training that runs and is judged on classes that it has not seen."""

import dataclasses
from pathlib import Path

import pytest
from finished import finished

from vitlab.models.config import ViTConfig
from vitlab.pipelines.pretrain import pretrain
from vitlab.studies import small
from vitlab.studies.small import CARRIED_TO, FEWSHOT, LEARNED, best, gpu_vit, groups, over_training, tiny_vit
from vitlab.studies.study import Point, exaflops


def point(kind: str, rate: float, seed: int) -> Point:
    config = small.tiny(tiny_vit(), seed, steps=2)
    return Point(f"{kind}-{rate}-{seed}", config, {"kind": kind, "rate": rate})


GRID = [point(kind, rate, seed) for seed in (0, 1) for kind in ("a", "b") for rate in (0.1, 0.2)]


def test_the_transfer_task_is_never_seen() -> None:
    assert sorted(LEARNED + CARRIED_TO) == list(range(10))
    for config in (small.tiny(tiny_vit(), 0, steps=2), small.gpu(gpu_vit(), 0, steps=2)):
        assert config.fewshot is not None
        assert (config.data.classes, config.fewshot.classes) == (LEARNED, CARRIED_TO)
        assert config.model.num_classes == len(LEARNED)


def test_a_run_has_both_figures(tmp_path: Path) -> None:
    """On the digits, and but two steps long."""
    config = small.tiny(tiny_vit(depth=1), 0, steps=2)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, name="digits"), eval_every=1)
    outcome = pretrain(config, tmp_path, device="cpu", tensorboard=False)
    assert 0 <= outcome.test.accuracy <= 1
    assert len(outcome.test.classes) == len(LEARNED)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert sum(FEWSHOT in line for line in lines) == 2


def test_the_papers_runs() -> None:
    """Seven epochs of Table 3; Table 6's compute of B/16."""
    config = small.jft("ViT-B/16", position="none")
    assert isinstance(config.model, ViTConfig)
    assert (config.epochs, config.optim.lr, config.model.position) == (7.0, 8e-4, "none")
    assert exaflops(config, 303_000_000) == pytest.approx(224, rel=0.02)
    wide = small.jft("ViT-L/32", width=2048, heads=32).model
    assert isinstance(wide, ViTConfig)
    assert wide.representation_size == 2048


def test_what_the_runs_are_is_told() -> None:
    said = small.told(finished(GRID, lambda point: 0.5))
    assert "30,000 images of the classes 0, 2, 4, 7, 9 of fashion_mnist, 2 steps of 64, 2 seeds" in said
    assert "the classes 1, 3, 5, 6, 8 of the same data set" in said
    paper = [Point("one", small.jft(), {})]
    told = small.told(finished(paper, lambda point: 0.5, examples=303_000_000))
    assert "images of shards:jft300m" in told
    assert "517,822 steps of 4096, 1 seed." in told
    assert "on imagenet." in told


def test_groups_are_in_the_points_order() -> None:
    done = finished(GRID, lambda point: 0.5)
    assert groups(done, "kind", "rate") == [("a", 0.1), ("a", 0.2), ("b", 0.1), ("b", 0.2)]
    assert groups(done, "rate") == [(0.1,), (0.2,)]


def test_the_best_is_that_of_the_mean() -> None:
    """`a` is best at 0.2 though one seed is better at 0.1; `b` at 0.1."""
    table = {("a", 0.1): (0.6, 0.2), ("a", 0.2): (0.5, 0.5), ("b", 0.1): (0.3, 0.3), ("b", 0.2): (0.2, 0.2)}
    done = finished(GRID, lambda each: table[str(each.labels["kind"]), float(each.labels["rate"])][each.config.seed])
    assert best(done, "rate", kind="a") == 0.2
    assert best(done, "rate", kind="b") == 0.1
    with pytest.raises(ValueError, match="no point has the labels"):
        best(done, "rate", kind="c")


def test_curves_keep_the_steps_that_all_seeds_have() -> None:
    done = finished(GRID, lambda each: 0.4 + 0.2 * each.config.seed)
    done[0] = dataclasses.replace(done[0], records=[*done[0].records, {"step": 15, FEWSHOT: 0.1}])
    steps, figures = over_training(done, kind="a", rate=0.1)
    assert steps == [10, 20]
    assert [each.values for each in figures] == [pytest.approx((0.2, 0.3)), pytest.approx((0.4, 0.6))]
    with pytest.raises(ValueError, match="no point has the labels"):
        over_training(done, kind="c")
