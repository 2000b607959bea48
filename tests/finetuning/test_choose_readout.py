"""The block and the pooling of a job, chosen before its plan."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from staged_job import tune

from vitlab.config import FinetuneConfig
from vitlab.errors import UserError
from vitlab.evaluation import readouts
from vitlab.evaluation.readouts import Readout, ReadoutChoice, ReadoutScore
from vitlab.finetuning import choose_readout
from vitlab.recipes.finetune import LAYER
from vitlab.weights import load_model


@pytest.fixture
def head_alone(staged: FinetuneConfig) -> FinetuneConfig:
    return dataclasses.replace(staged, runs=0, learning_rates=(), sweep_steps=None)


@pytest.mark.usefixtures("pretrained")
def test_the_result_is_cut_where_the_loss_is_least(
    workdir: Path, head_alone: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth = load_model(workdir).config.depth  # pyright: ignore[reportAttributeAccessIssue]
    chosen = Readout(1, "gap")
    scores = (ReadoutScore(chosen, 0.5, 0.9), ReadoutScore(Readout(depth, "token"), 0.6, 0.8))
    monkeypatch.setattr(
        choose_readout, "choose_readout", lambda *_, **__: ReadoutChoice(scores, chosen, 0.55, 0.85, 40)
    )
    logged: list[str] = []
    result = tune(workdir, head_alone, tmp_path / "job", open_settings=LAYER, log=logged.append)
    assert any(line.startswith("block 1 of ") for line in logged)
    config: Any = load_model(tmp_path / "job" / "model").config
    assert (config.depth, config.pool, config.variant.registers) == (1, "gap", 1)
    assert result.result["layers"]["chosen"] == {"depth": 1, "pool": "gap"}
    assert result.result["layers"]["nested"] == {"loss": 0.55, "accuracy": 0.85}
    # The same call keeps the choice, and does not choose again.
    (tmp_path / "job" / "result.json").unlink()
    shutil.rmtree(tmp_path / "job" / "linear")
    monkeypatch.setattr(choose_readout, "choose_readout", lambda *_, **__: pytest.fail("chosen again"))
    again = tune(workdir, head_alone, tmp_path / "job", open_settings=LAYER)
    assert again.result == result.result


@pytest.mark.usefixtures("pretrained")
def test_a_real_choice_is_that_of_least_loss(workdir: Path, head_alone: FinetuneConfig, tmp_path: Path) -> None:
    tune(workdir, head_alone, tmp_path / "job", open_settings=LAYER)
    record = json.loads((tmp_path / "job" / "config.json").read_bytes())["layers"]
    best = min(record["candidates"], key=lambda row: row["loss"])
    assert record["chosen"] == {"depth": best["depth"], "pool": best["pool"]}
    assert 30 <= record["images"] <= 1000


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("why", ["few images", "given", "closed", "no head"])
def test_nothing_is_chosen(
    why: str, workdir: Path, head_alone: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_readout, "choose_readout", lambda *_, **__: pytest.fail("chosen"))
    options: dict[str, Any] = {"open_settings": LAYER}
    config = head_alone
    if why == "few images":
        monkeypatch.setattr(readouts, "MIN_IMAGES", 10**6)
    elif why == "given":
        options["layer"] = 1
    elif why == "closed":
        options["open_settings"] = ()
    else:
        config = dataclasses.replace(config, head=None, runs=1, steps=1)
    tune(workdir, config, tmp_path / "job", **options)
    folder = tmp_path / "job" / ("" if why == "no head" else "model")
    depth = load_model(workdir).config.depth  # pyright: ignore[reportAttributeAccessIssue]
    assert load_model(folder).config.depth == (1 if why == "given" else depth)  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.usefixtures("pretrained")
def test_a_layer_that_the_checkpoint_does_not_have(workdir: Path, head_alone: FinetuneConfig, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"depth is 99; allowed: 1 to \d"):
        tune(workdir, head_alone, tmp_path / "job", layer=99)


@pytest.mark.usefixtures("pretrained")
def test_a_job_of_another_size_with_the_mean_over_patches(
    workdir: Path, staged: FinetuneConfig, tmp_path: Path
) -> None:
    """A given block and pooling, through sweep, final run and average."""
    result = tune(workdir, staged, tmp_path / "job", layer=1, pool="gap", image_size=16)
    config: Any = load_model(tmp_path / "job" / "model").config
    assert (config.depth, config.pool, config.image_size) == (1, "gap", 16)
    assert "layers" not in result.result


@pytest.mark.usefixtures("pretrained")
def test_a_job_with_a_given_pool_resumes(workdir: Path, head_alone: FinetuneConfig, tmp_path: Path) -> None:
    """A pool makes the class token a register. Without the flag, the folder is of another job."""
    options: dict[str, Any] = {"open_settings": LAYER, "pool": "gap"}
    first = tune(workdir, head_alone, tmp_path / "job", **options)
    assert first.result["layers"]["chosen"]["pool"] == "gap"
    (tmp_path / "job" / "result.json").unlink()
    assert tune(workdir, head_alone, tmp_path / "job", **options).result == first.result
    with pytest.raises(UserError, match=r"model\.pool"):
        tune(workdir, head_alone, tmp_path / "job", open_settings=LAYER, pool="token+gap")


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("budget", [1e-3, 20.0])
def test_a_budget_bounds_the_images_that_choose(
    budget: float, workdir: Path, head_alone: FinetuneConfig, tmp_path: Path
) -> None:
    """With no time left, all blocks are kept."""
    logged: list[str] = []
    open_settings = (*LAYER, "runs", "data.subset_fraction")
    tune(workdir, head_alone, tmp_path / "job", open_settings=open_settings, budget=budget, log=logged.append)
    kept = [line for line in logged if line == "all blocks are kept: there is no time to choose"]
    assert len(kept) == (budget < 1)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (None, True),
        (np.zeros(100, int), False),
        (np.repeat(np.arange(10), 10), True),
        (np.r_[np.zeros(9, int), -np.ones(91, int)], False),
    ],
)
def test_groups_that_can_be_left_out(groups: Any, expected: bool) -> None:
    """One group, or a val split of a few images, cannot choose."""
    assert readouts.is_enough(100, 10, groups) == expected
    assert not readouts.is_enough(29, 2, None if groups is None else groups[:29])
    assert not readouts.is_enough(100, 51, groups)
