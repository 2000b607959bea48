"""The start of a run: its weights, classes and splits."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from image_files import paths_of
from pretrained_run import again
from torch import nn

from vitlab.config import TrainConfig
from vitlab.data.registry import load_dataset
from vitlab.runs import run
from vitlab.runs.pretrain import pretrain
from vitlab.runs.run import RunResult
from vitlab.runs.splits import load_splits
from vitlab.train.distributed import World
from vitlab.weights import load_model


def same_weights(one: nn.Module, two: nn.Module) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.usefixtures("pretrained")
def test_seed_decides_the_start(
    config: TrainConfig, workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1234)  # the default generator has no say
    again(config, tmp_path / "same")
    assert same_weights(load_model(tmp_path / "same"), load_model(workdir))
    monkeypatch.setattr(run, "train", lambda config, folder, model, *args, **options: model)  # leaves it as it began
    for seed in (0, 1):
        again(dataclasses.replace(config, seed=seed), tmp_path / str(seed))
    assert not same_weights(load_model(tmp_path / "0"), load_model(tmp_path / "1"))


def test_model_is_fitted_to_the_classes(config: TrainConfig, pretrained: RunResult, tmp_path: Path) -> None:
    assert pretrained.config == config
    every = dataclasses.replace(config, data=dataclasses.replace(config.data, classes=None), steps=1)
    finished = again(every, tmp_path)
    expected = dataclasses.replace(every, model=dataclasses.replace(config.model, num_classes=10))
    assert finished.config == expected
    assert load_model(tmp_path).config == expected.model


def test_a_batch_that_the_processes_cannot_share(config: TrainConfig, tmp_path: Path) -> None:
    """Refused before the folder holds its settings, so that a better batch may be given."""
    with pytest.raises(ValueError, match="batch_size="):
        pretrain(dataclasses.replace(config, batch_size=32), tmp_path / "run", device="cpu", world=World(0, 7))
    assert not (tmp_path / "run").exists()


def test_part_and_exclude(config: TrainConfig, tmp_path: Path) -> None:
    """Both apply to the training split alone, and the content of the list is a setting of the run."""
    plain = load_splits(config.data)
    part = dataclasses.replace(config.data, subset_fraction=0.1)
    splits = load_splits(part)
    assert paths_of(splits.train) == paths_of(load_dataset("digits", "train", classes=(0, 1, 2), subset_fraction=0.1))
    assert len(splits.train) == sum(round(0.1 * count) for count in np.bincount(plain.train.labels).tolist())
    assert (len(splits.val), len(splits.test)) == (len(plain.val), len(plain.test))
    same_split = load_splits(dataclasses.replace(part, eval_split=part.train_split))
    assert (len(same_split.train), len(same_split.val)) == (len(splits.train), len(plain.train))
    assert paths_of(load_splits(dataclasses.replace(part, subset_seed=1)).train) != paths_of(splits.train)
    exclude = tmp_path / "exclude.txt"
    outside = next(path for path in paths_of(plain.train) if path not in paths_of(splits.train))
    exclude.write_text(f"{splits.train.path(3)}\n{outside}\n")
    data = dataclasses.replace(part, exclude=str(exclude))
    both = load_splits(data)
    assert paths_of(both.train) == [path for path in paths_of(splits.train) if path != splits.train.path(3)]
    assert (len(both.val), len(both.test)) == (len(plain.val), len(plain.test))
    chosen = dataclasses.replace(config, data=data)
    settings = run.run_settings("pretrain", None, both, chosen)
    assert (settings["examples"], settings["excluded"]["listed"]) == (len(both.train), 2)
    exclude.write_text(f"{splits.train.path(4)}\n{outside}\n")
    assert run.run_settings("pretrain", None, both, chosen) != settings
    assert "excluded" not in run.run_settings("pretrain", None, plain, config)
