"""config.json against the settings of another start."""

import contextlib
from pathlib import Path

import pytest

from vitlab.train.workdir import Workdir


def test_other_settings_are_refused(tmp_path: Path) -> None:
    settings = {"model": {"width": 192, "image_size": (32, 32)}, "optim": {"lr": 0.001}, "steps": None}
    Workdir(tmp_path, settings, tensorboard=False).close()
    before = (tmp_path / "config.json").read_bytes()
    other = {"model": {"width": 384, "image_size": (32, 32), "depth": 6}, "optim": {"lr": 0.001}, "steps": 10}
    with pytest.raises(ValueError, match="other settings") as caught:
        Workdir(tmp_path, other, tensorboard=False)
    differences = str(caught.value).splitlines()[1:-1]
    assert differences == ["  model.depth: not set -> 6", "  model.width: 192 -> 384", "  steps: None -> 10"]
    assert (tmp_path / "config.json").read_bytes() == before
    Workdir(tmp_path, settings, tensorboard=False).close()  # the folder is not locked


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("folder:a", "folder:b/", True),
        ("folder:a", "csv:a", False),
        ("shards:https://host/a", "shards:https://host/b", False),
        ("shards:hub:a/b", "shards:hub:a/c", False),
    ],
)
def test_the_location_of_local_images_may_differ(before: str, after: str, same: bool, tmp_path: Path) -> None:
    Workdir(tmp_path, {"data": {"name": before, "root": None}}, tensorboard=False).close()
    with contextlib.nullcontext() if same else pytest.raises(ValueError, match=r"data\.name"):
        Workdir(tmp_path, {"data": {"name": after, "root": "/elsewhere"}}, tensorboard=False).close()
