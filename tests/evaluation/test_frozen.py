"""Frozen checkpoints: the block of `layer="auto"`, the same by its number, and files of features."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
from image_files import put
from PIL import Image
from torch import nn

from vitlab.errors import UserError
from vitlab.evaluation import readouts
from vitlab.evaluation.fewshot_checkpoint import fewshot_checkpoint
from vitlab.evaluation.frozen import FrozenModel, write_features
from vitlab.evaluation.options import FeatureOptions, FewShotProtocol
from vitlab.evaluation.probe import probe_checkpoint
from vitlab.models import ViTConfig
from vitlab.models.vit import ViT, build_model
from vitlab.train.distributed import SINGLE
from vitlab.weights import load_model, save_model

CONFIG = ViTConfig(image_size=8, patch_size=4, width=16, depth=8, heads=2, mlp_dim=32, num_classes=3, head_std=0.1)
CPU = FeatureOptions(device="cpu", batch_size=64, precision="float32")
AUTO = dataclasses.replace(CPU, layer="auto")


@pytest.fixture(scope="module")
def spoiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its last four blocks hide most of what the fourth gives. The head counts for nothing."""
    model: Any = build_model(CONFIG, generator=torch.Generator().manual_seed(0)).eval()
    generator = torch.Generator().manual_seed(1)
    for block in model.blocks[4:]:
        nn.init.normal_(block.mlp.fc2.weight, std=3.0, generator=generator)
    folder = tmp_path_factory.mktemp("spoiled") / "model"
    save_model(model, folder)
    return folder


@pytest.fixture
def model() -> ViT:
    """With a layer before the head."""
    config = dataclasses.replace(CONFIG, width=8, depth=1, mlp_dim=8, representation_size=6)
    model = ViT(config, generator=torch.Generator().manual_seed(1)).eval()
    assert model.pre_logits is not None
    nn.init.normal_(model.pre_logits.weight, generator=torch.Generator().manual_seed(2))
    return model


def test_probe(spoiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readouts, "MAX_IMAGES", 150)
    logged: list[str] = []
    given: dict[str, Any] = {"cache": tmp_path, "log": logged.append}
    last, best = (probe_checkpoint(spoiled, "digits", "knn", options=o, **given) for o in (CPU, AUTO))
    assert [last["depth"], best["depth"]] == [8, 4]
    assert best["accuracies"][5] > last["accuracies"][5] + 0.05
    assert sum(line.startswith("images: ") for line in logged) == 2
    assert any(line.startswith("block 4 of 8, ") and line.endswith(" on 150 images") for line in logged)
    same = dataclasses.replace(CPU, layer=4, pool=best["pool"])
    assert probe_checkpoint(spoiled, "digits", "knn", options=same, **given) == best
    one_pool = dataclasses.replace(AUTO, pool="gap")
    assert probe_checkpoint(spoiled, "digits", "knn", options=one_pool, **given)["pool"] == "gap"


def test_the_last_four_blocks(spoiled: Path, tmp_path: Path) -> None:
    """By their name, or if they are the best; a file of features has them all."""
    options = dataclasses.replace(CPU, layer="last4", pool="token+gap")
    given: dict[str, Any] = {"cache": tmp_path / "cache"}
    written = write_features(spoiled, "digits", tmp_path / "features.npz", "test", options, **given)
    assert (written["depth"], written["pool"], written["joined"], written["dimensions"]) == (8, "token+gap", 4, 80)
    record = probe_checkpoint(spoiled, "digits", "knn", options=options, **given)
    assert record["joined"] == 4
    cached = sorted(path.name for path in given["cache"].iterdir())
    assert probe_checkpoint(spoiled, "digits", "knn", options=options, **given) == record
    assert sorted(path.name for path in given["cache"].iterdir()) == cached


def test_what_is_not_compiled(spoiled: Path, tmp_path: Path) -> None:
    """Is an error, before any work."""
    last, auto = (dataclasses.replace(CPU, compile=True, layer=layer) for layer in ("last4", "auto"))
    with pytest.raises(UserError, match="layer='last4'"):
        probe_checkpoint(spoiled, "digits", "knn", options=last, cache=tmp_path)
    with pytest.raises(UserError, match="layer='auto'"):
        fewshot_checkpoint(spoiled, ["digits"], FewShotProtocol(shots=(5,)), options=auto, cache=tmp_path)


def test_another_size(spoiled: Path, tmp_path: Path) -> None:
    """The positions are interpolated before the class token becomes a register."""
    options = dataclasses.replace(CPU, layer=4, pool="gap", image_size=12)
    assert probe_checkpoint(spoiled, "digits", "knn", options=options, cache=tmp_path)["depth"] == 4


def test_few_shots_choose_by_their_own_images(spoiled: Path, tmp_path: Path) -> None:
    protocol = FewShotProtocol(shots=(1, 5), seeds=2)
    given: dict[str, Any] = {"cache": tmp_path}
    last, best = (fewshot_checkpoint(spoiled, ["digits"], protocol, options=o, **given)["rows"] for o in (CPU, AUTO))
    assert [row["depth"] for row in last] == [8, 8]
    assert best[0]["layers"] == 2 * [{"depth": 8, "pool": "token"}]  # one image of a class cannot be left out
    assert best[0]["accuracies"] == last[0]["accuracies"]
    assert [layer["depth"] for layer in best[1]["layers"]] == [4, 4]
    assert best[1]["mean"] > last[1]["mean"]
    # A sample that has chosen is evaluated as by the number of its block.
    pool = best[1]["layers"][0]["pool"]
    options = dataclasses.replace(CPU, layer=4, pool=pool)
    one = FewShotProtocol(shots=(5,), seeds=1)
    (row,) = fewshot_checkpoint(spoiled, ["digits"], one, options=options, cache=tmp_path)["rows"]
    assert row["accuracies"][0] == pytest.approx(best[1]["accuracies"][0], abs=0.002)


def test_features_choose_on_train(spoiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_on: list[str] = []
    at_best_readout = FrozenModel.at_best_readout
    monkeypatch.setattr(
        FrozenModel,
        "at_best_readout",
        lambda self, train: (chosen_on.append(train.split), at_best_readout(self, train))[1],
    )
    options = dataclasses.replace(AUTO, pool="token+gap")
    written = write_features(spoiled, "digits", tmp_path / "features.npz", "test", options, cache=tmp_path / "cache")
    assert (written["depth"], written["pool"], written["dimensions"]) == (4, "token+gap", 32)
    assert chosen_on == ["train"]
    assert np.load(tmp_path / "features.npz")["features"].shape == (written["images"], 32)


def test_nothing_is_chosen(spoiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    given: dict[str, Any] = {"cache": tmp_path / "cache", "log": logged.append}
    save_model(build_model(dataclasses.replace(CONFIG, pool="map")), tmp_path / "map")
    assert probe_checkpoint(tmp_path / "map", "digits", "knn", options=AUTO, **given)["depth"] == 8
    monkeypatch.setattr(readouts, "MIN_IMAGES", 10**6)
    assert probe_checkpoint(spoiled, "digits", "knn", options=AUTO, **given)["depth"] == 8
    assert sum(line.startswith("no block is chosen") for line in logged) == 2


def test_without_the_layer_before_the_head(tmp_path: Path) -> None:
    """It was trained on the last block. By default the representation is its output."""
    config = dataclasses.replace(CONFIG, representation_size=6)
    save_model(build_model(config), tmp_path / "model")
    given: dict[str, Any] = {"cache": tmp_path / "cache", "log": print, "world": SINGLE}
    widths = [
        FrozenModel.load(tmp_path / "model", dataclasses.replace(CPU, layer=layer), **given).model.config.num_features
        for layer in (None, 4)
    ]
    assert widths == [6, 16]
    assert load_model(tmp_path / "model").config.num_features == 6


def test_features_are_written_with_paths_and_labels(model: ViT, tmp_path: Path) -> None:
    """Both kinds of file hold what a plain forward pass computes; an unreadable image is skipped and counted."""
    save_model(model, tmp_path / "model")
    for number in range(6):
        put(tmp_path / "pets" / "cd"[number % 2] / f"{number}.png", 40 * number)
    (tmp_path / "pets" / "c" / "2.png").write_bytes(b"not an image")
    (tmp_path / "pets" / "c" / "4.png").rename(tmp_path / "pets" / "c" / "4\udcff.png")  # a name that is not UTF-8
    options = FeatureOptions(device="cpu", on_error="skip")
    write = functools.partial(
        write_features, tmp_path / "model", f"folder:{tmp_path / 'pets'}", options=options, cache=tmp_path / "cache"
    )
    result = write(tmp_path / "pets.npz")
    assert (result["images"], result["skipped"], result["dimensions"]) == (5, 1, 6)
    with np.load(tmp_path / "pets.npz") as file:
        arrays = dict(file)
    names = [Path(path).relative_to(tmp_path / "pets").as_posix() for path in arrays["files"]]
    assert sorted(names) == ["c/0.png", "c/4\udcff.png", "d/1.png", "d/3.png", "d/5.png"]
    assert arrays["classes"][arrays["labels"]].tolist() == [name[0] for name in names]
    images = torch.stack([torch.from_numpy(np.array(Image.open(path))) for path in arrays["files"]])
    with torch.inference_mode():
        inputs = images.permute(0, 3, 1, 2) / 127.5 - 1
        expected = model.forward_head(model.forward_features(inputs), pre_logits=True)
    np.testing.assert_allclose(arrays["features"], expected, atol=1e-5)
    write(tmp_path / "pets.parquet")
    table = pyarrow.parquet.read_table(tmp_path / "pets.parquet").to_pydict()
    escaped = [path.replace("\udcff", r"\udcff") for path in arrays["files"].tolist()]
    assert (table["file"], table["label"]) == (escaped, [name[0] for name in names])
    np.testing.assert_array_equal(np.array(table["features"], np.float32), arrays["features"])
    with pytest.raises(UserError, match=r"give a file that ends in \.npz or \.parquet"):
        write(tmp_path / "pets.csv")


def test_features_are_written_with_several_labels(model: ViT, tmp_path: Path) -> None:
    labels = {"1.png": "b|a", "2.png": "", "3.png": "a", "0.png": "c"}
    rows = "".join(f"{name},{several}\n" for name, several in labels.items())
    (tmp_path / "labels.csv").write_text("file,label\n" + rows)
    for name in labels:
        put(tmp_path / name, 9)
    save_model(model, tmp_path / "model", extra={})
    for suffix in ("npz", "parquet"):
        write_features(tmp_path / "model", f"csv:{tmp_path / 'labels.csv'}", tmp_path / f"out.{suffix}")
    with np.load(tmp_path / "out.npz") as arrays:
        names = [Path(path).name for path in arrays["files"].tolist()]
        written = ["|".join(arrays["classes"][row].tolist()) for row in arrays["labels"]]
    assert dict(zip(names, written, strict=True)) == labels | {"1.png": "a|b"}
    table = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pydict()
    assert {Path(path).name: label for path, label in zip(table["file"], table["label"], strict=True)} == labels
