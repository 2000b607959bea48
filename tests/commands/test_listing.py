"""What `vitlab list` shows, and `docs/models.md`."""

import io
import json
import runpy
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch

from vitlab.commands import listing
from vitlab.data.registry import DATASETS, load_dataset
from vitlab.data.vtab.tasks import TASKS
from vitlab.display import format_table
from vitlab.models import MODELS, create_model, get_config
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.studies import STUDIES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


@pytest.mark.parametrize("name", MODELS)
def test_models_are_counted_right(name: str) -> None:
    with torch.device("meta"):
        model = create_model(name)
    (row,) = listing.models(name)
    assert row["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_models_have_the_papers_size() -> None:
    """Table 1 rounds to millions, and does not say for which patch."""
    for size, millions in (("B", 86), ("L", 307), ("H", 632)):
        counts = {name: get_config(name).num_parameters / 1e6 for name in MODELS if name.startswith(f"ViT-{size}/")}
        assert all(count == pytest.approx(millions, rel=0.03) for count in counts.values())
        assert any(abs(count - millions) < 0.6 for count in counts.values()), counts


@pytest.mark.parametrize(
    ("name", "epochs", "exaflops", "tolerance"),
    [
        ("ViT-B/32", 7, 55, 0.025),
        ("ViT-B/16", 7, 224, 0.005),
        ("ViT-L/32", 7, 196, 0.005),
        ("ViT-L/16", 14, 1567, 0.005),
        ("ViT-H/14", 14, 4262, 0.005),
        ("R50+ViT-B/32", 7, 106, 0.02),
        ("R50+ViT-B/16", 7, 274, 0.005),
        ("R50+ViT-L/32", 7, 246, 0.005),
        ("R50+ViT-L/16", 14, 1668, 0.005),
        ("R50x1", 7, 50, 0.045),
        ("R50x2", 7, 199, 0.045),
        ("R101x1", 7, 96, 0.045),
        ("R152x1", 7, 141, 0.045),
        ("R152x2", 14, 1126, 0.045),
        ("R200x3", 14, 3306, 0.045),
    ],
)
def test_models_cost_what_the_paper_says(name: str, epochs: int, exaflops: float, tolerance: float) -> None:
    """Table 6: 6 x multiply-accumulates x 303 million images x epochs."""
    (row,) = listing.models(name)
    assert 6 * row["gmacs"] * 1e9 * 303e6 * epochs / 1e18 == pytest.approx(exaflops, rel=tolerance)


def test_every_model_has_a_row() -> None:
    assert [row["model"] for row in listing.models()] == list(MODELS)
    assert [row["model"] for row in listing.models("ViT-[BL]/16")] == ["ViT-B/16", "ViT-L/16"]
    assert listing.models("resnet*") == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ViT-B/16", ["ViT", 12, 768, 3072, 12, 16, 16, 197]),
        ("R50+ViT-B/16", ["hybrid", 12, 768, 3072, 12, 1, 16, 197]),
        ("R+ViT-Ti/16", ["hybrid", 12, 192, 768, 3, 8, 32, 50]),
        ("R152x4", ["ResNet", 152, 256, "-", "-", "-", 32, 49]),
        ("R26x1", ["ResNet", 26, 64, "-", "-", "-", 32, 49]),
        ("Axial-ViT-B/32", ["axial", 12, 768, 3072, 12, 32, 32, 50]),
        ("AxialResNet50", ["axial", 50, 64, "-", 8, "-", 32, 49]),
    ],
)
def test_what_a_row_says(name: str, expected: list[Any]) -> None:
    (row,) = listing.models(name)
    assert list(row.values())[1:-2] == expected


def test_the_page_about_models_is_what_is_generated(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(PAGE.parents[1] / "benchmarks" / "models_page.py"), run_name="__main__")
    assert capsys.readouterr().out == PAGE.read_text(), "run `python benchmarks/models_page.py > docs/models.md`"


def test_the_page_about_models_names_all_with_their_counts() -> None:
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    counts = {name: int(rest[-2].replace(",", "")) for name, *rest in rows if name in MODELS}
    assert list(counts) == list(MODELS)
    assert counts == {name: config.num_parameters for name, config in MODELS.items()}


def test_every_data_set_has_a_row() -> None:
    rows = {row["dataset"]: row for row in listing.datasets()}
    assert list(rows) == list(DATASETS)
    assert rows["digits"]["splits"] == "train 1,259, val 179, test 359"
    assert (rows["digits"]["classes"], rows["digits"]["size"], rows["digits"]["license"]) == (10, "8x8", "CC BY 4.0")
    assert rows["folder:PATH"]["classes"] == rows["folder:PATH"]["splits"] == "yours"
    assert rows["vtab:TASK"]["classes"] == rows["vtab:TASK"]["size"] == "varied"
    assert rows["folder:PATH"]["held out"] == "val 10 %, test 10 %"
    assert rows["digits"]["held out"] == "val 12.5 %"
    assert list(rows["digits"])[-2:] == ["license", "source"], "what is long comes last"
    assert all(row["license"] and row["source"] for row in rows.values())
    assert len(load_dataset("digits", "val")) == 179


def test_how_the_paper_fine_tunes_on_a_data_set() -> None:
    expected = {row["dataset"]: row["fine-tuning"] for row in listing.datasets()}
    assert expected["pets"] == "Table 4: 500 steps, batch 512, 384 px, rates 0.001-0.03, 10 % held out"
    assert expected["imagenet"] == "Table 4: 20,000 steps, batch 512, 512 px, rates 0.003-0.06, 1 % held out"
    assert expected["vtab:TASK"] == "Table 4: 2,500 steps, batch 512, 384 px, rate 0.01, 20 % held out"
    assert expected["dtd"] == "Table 4 (VTAB): 2,500 steps, batch 512, 384 px, rate 0.01, 20 % held out"
    assert {expected[name][:8] for name in ("cifar10", "cifar100", "flowers102")} == {"Table 4:"}
    assert {expected[name][:8] for name in TASKS if name in expected} == {"Table 4:", "Table 4 "}
    assert expected["digits"] == expected["fashion_mnist"] == expected["objectnet"] == expected["folder:PATH"] == "-"


def test_where_imagenet_21k_and_jft_go(tmp_path: Path) -> None:
    """As the row says: tars whose .cls hold several classes."""
    (row,) = listing.datasets("shards:*")
    assert all(part in row["source"] for part in ("ImageNet-21k", "JFT", "KEY.cls", "several (3 17 42)", "train"))
    with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
        for name, data in (("n.ppm", b"P6 1 1 255 abc"), ("n.cls", b"3 17 42")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    dataset = load_dataset(f"shards:{tmp_path}", "train")
    assert dataset.label_sets is not None
    assert dataset.label_sets.of(0).tolist() == [3, 17, 42]


def test_tasks_of_vtab(tmp_path: Path) -> None:
    rows = {row["task"]: row for row in listing.vtab()}
    assert list(rows) == list(TASKS)
    assert (rows["eurosat"]["called"], rows["eurosat"]["classes"], rows["eurosat"]["test"]) == ("EuroSAT", 10, 5_400)
    ways = {name: rows[name]["data"] for name in ("svhn", "clevr_count", "kitti_distance")}
    assert ways == {"svhn": "automatic", "clevr_count": "by hand", "kitti_distance": "license"}
    assert all(row["license"] and row["source"] and "found" not in row for row in rows.values())
    (row,) = listing.vtab("resisc*", tmp_path)
    assert row["found"] == "-"


def test_every_recipe_has_a_row() -> None:
    rows = listing.recipes()
    assert [row["recipe"] for row in rows if row["command"] == "pretrain"] == list(PRETRAIN)
    assert [row["recipe"] for row in rows if row["command"] == "finetune"] == list(FINETUNE)
    named = {(row["command"], row["recipe"]): row for row in rows}
    assert named["pretrain", "imagenet"]["length"] == "300 epochs"
    assert named["finetune", "imagenet"]["length"] == "20,000 steps"
    assert named["finetune", "cifar10"]["about"] == "Table 4, cifar10."
    assert all(row["about"] for row in rows)
    assert {row["command"] for row in listing.recipes("imagenet21k")} == {"pretrain"}


def test_rows_can_be_said_in_json() -> None:
    for rows in (listing.models(), listing.datasets(), listing.recipes()):
        assert json.loads(json.dumps(rows)) == rows


def test_table() -> None:
    rows = [{"name": "a", "count": 1234567, "share": 0.5}, {"name": "longer", "count": 1, "share": 12.25}]
    assert format_table(rows).splitlines() == [
        "name        count  share",
        "a       1,234,567    0.5",
        "longer          1  12.25",
    ]
    rows = [{"name": "a", "heads": "-"}, {"name": "b", "heads": 12}]
    assert format_table(rows).splitlines() == ["name  heads", "a         -", "b        12"]
    assert format_table([]) == ""
    rows = [{"name": "a", "finished": True}, {"name": "b", "finished": False}]
    assert [line.split() for line in format_table(rows).splitlines()] == [
        ["name", "finished"],
        ["a", "yes"],
        ["b"],
    ]


def test_studies_by_name() -> None:
    assert [row["study"] for row in listing.studies()] == list(STUDIES)
    (row,) = listing.studies("pos*")
    assert row["paper"] == "Table 8, App. D.4"
