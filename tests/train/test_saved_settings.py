"""config.json against the settings of a new start, of this version and of another one."""

import json
from pathlib import Path
from typing import Any

import pytest

from vitlab.config import TrainConfig
from vitlab.models import ViTConfig
from vitlab.settings import from_dict, to_dict
from vitlab.train.workdir import Workdir


def open_workdir(path: Path, settings: dict[str, Any]) -> Workdir:
    return Workdir(path, settings, tensorboard=False)


def test_a_run_of_an_earlier_version(tmp_path: Path) -> None:
    """Whose config.json has the settings of the model on one level."""
    model = {"kind": "vit", "width": 192, "gelu": "erf", "rotary": None, "registers": 4}
    settings = to_dict(TrainConfig(model=from_dict(ViTConfig, model), steps=1))
    variant = settings["model"].pop("variant")
    open_workdir(tmp_path, settings | {"model": settings["model"] | variant}).close()
    assert json.loads((tmp_path / "config.json").read_text())["model"]["registers"] == 4
    settings["model"]["variant"] = variant
    open_workdir(tmp_path, settings).close()
    settings["model"]["variant"] = variant | {"registers": 2}
    with pytest.raises(ValueError, match=r"model\.variant\.registers: 4 -> 2"):
        open_workdir(tmp_path, settings)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    settings = {"model": {"width": 192, "image_size": (32, 32)}, "optim": {"lr": 0.001}, "steps": None}
    open_workdir(tmp_path, settings).close()
    before = (tmp_path / "config.json").read_bytes()
    other = {"model": {"width": 384, "image_size": (32, 32), "depth": 6}, "optim": {"lr": 0.001}, "steps": 10}
    with pytest.raises(ValueError, match="other settings") as caught:
        open_workdir(tmp_path, other)
    differences = str(caught.value).splitlines()[1:-1]
    assert differences == ["  model.depth: not set -> 6", "  model.width: 192 -> 384", "  steps: None -> 10"]
    assert (tmp_path / "config.json").read_bytes() == before
    open_workdir(tmp_path, settings).close()  # the folder is not locked


PART = {"name": "digits", "subset_fraction": 0.1, "subset_seed": None}
OLD_PART = {"name": "digits", "part": 0.1, "part_seed": None}


@pytest.mark.parametrize(
    ("before", "same", "other", "difference"),
    [
        # Only one version knows it: None is the same as none.
        ({}, {"fewshot": None}, {"fewshot": 0}, "fewshot: not set -> 0"),
        ({"float8": False, "start": None}, {"float8": False}, {}, "float8: False -> not set"),
        # It was removed: at the value at which it did nothing the run resumes.
        (
            {"optim": {"cooldown_steps": 0}},
            {"optim": {}},
            {"optim": {"cooldown_steps": 5}},
            "optim.cooldown_steps: 0 -> 5",
        ),
        # It was renamed.
        (
            {"data": OLD_PART},
            {"data": PART},
            {"data": PART | {"subset_fraction": 0.2}},
            "data.subset_fraction: 0.1 -> 0.2",
        ),
    ],
)
def test_settings_of_another_version(
    before: dict[str, Any], same: dict[str, Any], other: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    settings = {"model": {"width": 192}, "steps": None}
    open_workdir(tmp_path, settings | before).close()
    open_workdir(tmp_path, settings | same).close()
    with pytest.raises(ValueError, match=f"other settings:\n  {difference}\n"):
        open_workdir(tmp_path, settings | other)
