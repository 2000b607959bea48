"""What `vitlab list` shows, against the things themselves."""

import json

import pytest
import torch

from vitlab import catalogue
from vitlab.data.datasets import DATASETS, load_dataset
from vitlab.models import MODELS, create_model
from vitlab.recipes import FINETUNE, PRETRAIN


@pytest.mark.parametrize("name", ["ViT-Ti/16", "ViT-S/32", "ViT-B/16", "ViT-L/14"])
def test_models_are_counted_right(name: str) -> None:
    with torch.device("meta"):
        model = create_model(name)
    (row,) = catalogue.models(name)
    assert row["parameters"] == sum(parameter.numel() for parameter in model.parameters())
    assert (row["layers"], row["width"]) == (len(model.blocks), model.norm.weight.numel())
    assert row["tokens"] == (224 // row["patch"]) ** 2 + 1


@pytest.mark.parametrize(
    ("name", "epochs", "exaflops"), [("ViT-B/16", 7, 224), ("ViT-L/32", 7, 196), ("ViT-L/16", 14, 1567)]
)
def test_models_cost_what_the_paper_says(name: str, epochs: int, exaflops: float) -> None:
    """Table 6: 6 x multiply-accumulates x 303 million pictures x epochs."""
    (row,) = catalogue.models(name)
    assert 6 * row["gmacs"] * 1e9 * 303e6 * epochs / 1e18 == pytest.approx(exaflops, rel=0.005)


def test_every_model_has_a_row() -> None:
    assert [row["model"] for row in catalogue.models()] == list(MODELS)
    assert [row["model"] for row in catalogue.models("ViT-[BL]/16")] == ["ViT-B/16", "ViT-L/16"]
    assert catalogue.models("resnet*") == []


def test_every_data_set_has_a_row() -> None:
    rows = {row["dataset"]: row for row in catalogue.datasets()}
    assert list(rows) == list(DATASETS)
    assert rows["digits"]["splits"] == "train 1,259, val 179, test 359"
    assert (rows["digits"]["classes"], rows["digits"]["size"], rows["digits"]["licence"]) == (10, "8x8", "CC BY 4.0")
    assert rows["folder:PATH"]["classes"] == rows["folder:PATH"]["splits"] == "yours"
    assert rows["folder:PATH"]["held out"] == "val 10%, test 10%"
    assert len(load_dataset("digits", "val")) == 179


def test_every_recipe_has_a_row() -> None:
    rows = catalogue.recipes()
    assert [row["recipe"] for row in rows if row["command"] == "pretrain"] == list(PRETRAIN)
    assert [row["recipe"] for row in rows if row["command"] == "finetune"] == list(FINETUNE)
    named = {(row["command"], row["recipe"]): row for row in rows}
    assert named["pretrain", "imagenet"]["length"] == "300 epochs"
    assert named["finetune", "imagenet"]["length"] == "20,000 steps"
    assert named["finetune", "cifar10"]["about"] == "Table 4, cifar10."
    assert all(row["about"] for row in rows)
    assert {row["command"] for row in catalogue.recipes("imagenet21k")} == {"pretrain"}


def test_rows_can_be_said_in_json() -> None:
    for rows in (catalogue.models(), catalogue.datasets(), catalogue.recipes()):
        assert json.loads(json.dumps(rows)) == rows


def test_table() -> None:
    rows = [{"name": "a", "count": 1234567, "share": 0.5}, {"name": "longer", "count": 1, "share": 12.25}]
    assert catalogue.as_table(rows).splitlines() == [
        "name        count  share",
        "a       1,234,567    0.5",
        "longer          1  12.25",
    ]
    assert catalogue.as_table([]) == "nothing has such a name"
