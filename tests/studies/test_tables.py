"""Tables 2 and 5: the paper's rows against its other tables, and finished runs laid out beside them."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from vitlab.checksums import write_sums
from vitlab.commands.study import Study
from vitlab.errors import UserError
from vitlab.recipes import FINETUNE
from vitlab.settings import to_dict
from vitlab.studies.scaling import TABLE6, TESTS
from vitlab.studies.tables import TABLES, as_text, layout
from vitlab.studies.vtab_table import printed_mean

START = "mine.npz sha256:0123456789abcdef"


def folder_of(path: Path, settings: dict[str, Any], result: dict[str, Any]) -> Path:
    """A finished run's files."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"start": START, "command": "finetune"} | settings))
    (path / "result.json").write_text(json.dumps(result))
    write_sums(path, ["config.json", "result.json"])
    return path


def finetuned(
    path: Path, dataset: str, mean: float, sd: float | None = None, start: str = START, **changes: Any
) -> Path:
    """A run by the recipe of Table 4, with `changes`."""
    name = dataset.rpartition("/")[2]
    config = {"imagenet": FINETUNE["imagenet"], "pets": FINETUNE["pets"]}.get(name, FINETUNE["flowers"])()
    settings = to_dict(config) | {"data": {"name": dataset}, "start": start}
    settings |= {"steps": 10_000} if name.startswith("cifar") else {}
    result = {"test": {"accuracy": 0.1}, "accuracy_mean": mean, "accuracy_sd": sd}
    return folder_of(path, settings | changes, result)


def vtab_run(path: Path, mean: float | None, select: bool = False, **changes: Any) -> Path:
    result = {"mean": mean, "missing": {} if mean else {"dmlab": "no such file"}}
    settings = to_dict(FINETUNE["vtab"]()) | {"command": "vtab", "select": select, "image_size": None} | changes
    return folder_of(path, settings, result)


def test_rows_of_the_paper_agree_with_its_other_tables() -> None:
    """JFT's rows of Table 5 are those of Table 6 with the most epochs, but for H/14; Table 2's VTAB is Table 9's."""
    columns = TABLES["table5"].columns
    longest = {run.model: run for run in TABLE6}  # 7 epochs stand before 14
    for name in ("ViT-B/16", "ViT-B/32", "ViT-L/16", "ViT-L/32"):
        printed = dict(zip(columns, map(float, TABLES["table5"].rows[f"{name}, JFT"]), strict=True))
        assert printed == dict(zip(TESTS, longest[name].accuracies, strict=True))
    vtab = [float(row[-2].partition("±")[0]) for row in list(TABLES["table2"].rows.values())[:3]]
    assert vtab == pytest.approx([printed_mean(model, "all 19") for model in range(3)], abs=0.02)


def test_a_row_for_each_checkpoint(tmp_path: Path) -> None:
    other = "other.npz sha256:fedcba9876543210"
    folders = [
        finetuned(tmp_path / "a", "cifar10", 0.98765, 0.0004),
        finetuned(tmp_path / "b", "folder:/data/flowers102", 0.99),
        vtab_run(tmp_path / "c", 0.7),
        finetuned(tmp_path / "d", "shards:data/cifar10", 0.9, start=other),
    ]
    table = layout("table2", folders)
    first, second, third, *_ = table["rows"]
    assert first == {
        "model": "mine.npz", "": "here", "ImageNet": "", "ReaL": "", "CIFAR-10": "98.77±0.04", "CIFAR-100": "",
        "Pets": "", "Flowers": "99.00", "VTAB": "70.00", "TPUv3-core-days": "",
    }  # fmt: skip
    assert (second["model"], second["CIFAR-10"], second["VTAB"]) == ("other.npz", "90.00", "")
    assert (third["model"], third[""], third["ReaL"]) == ("ViT-H/14, JFT", "paper", "90.72±0.05")
    assert len(table["rows"]) == 2 + 5
    assert [row["TPUv3-core-days"] for row in table["rows"][2:]] == ["2.5k", "0.68k", "0.23k", "9.9k", "12.3k"]
    assert table["rows"][-1]["ImageNet"] == "88.4/88.5*"
    lines = [" ".join(line.split()) for line in as_text(table).splitlines()]
    assert "mine.npz here 98.77±0.04 99.00 70.00" in lines
    assert lines[-1].startswith("Table 2: fine-tuned at 384 pixels")


def test_what_a_table_refuses(tmp_path: Path) -> None:
    one = finetuned(tmp_path / "one", "cifar10", 0.9)
    for table, folders, message in (
        ("table5", [one, finetuned(tmp_path / "two", "cifar10", 0.8)], "second result of mine.npz on CIFAR-10"),
        ("table5", [finetuned(tmp_path / "digits", "digits", 0.8)], "result on digits; table5 has CIFAR-10, "),
        ("table5", [tmp_path], "no finished run"),
        ("table5", [folder_of(tmp_path / "p", {"command": "pretrain"}, {})], "a run of `vitlab pretrain`"),
        ("table2", [vtab_run(tmp_path / "some", None)], "1 are missing"),
        ("table2", [vtab_run(tmp_path / "select", 0.7, select=True)], "--select"),
        ("table2", [vtab_run(tmp_path / "vtab", 0.7, steps=5)], "steps is 5, not 2500"),
    ):
        with pytest.raises(UserError, match=message):
            layout(table, folders)
    (one / "result.json").write_text("{}")
    with pytest.raises(UserError, match="no finished run"):
        layout("table5", [one])


def test_only_runs_of_the_protocol(tmp_path: Path) -> None:
    """Those of Table 4, on ImageNet at the size and with the averaging of the table."""
    tiny = to_dict(dataclasses.replace(FINETUNE["cifar10"]().model, image_size=16, patch_size=8))
    short = finetuned(tmp_path / "short", "cifar10", 0.2333, steps=2, model=tiny)
    with pytest.raises(UserError, match="steps is 2, not 10000; image_size is 16, not 384"):
        layout("table5", [short])
    vit = dataclasses.replace(FINETUNE["cifar10"]().model, patch_size=14, image_size=392)
    layout("table5", [finetuned(tmp_path / "h14", "cifar10", 0.9, model=to_dict(vit))])
    at_512 = finetuned(tmp_path / "imagenet", "imagenet", 0.8)
    layout("table2", [at_512])
    with pytest.raises(UserError, match="--image-size 384 --average-decay None"):
        layout("table5", [at_512])


def test_the_column_of_real(tmp_path: Path) -> None:
    """What `evaluate --json` prints for the model of an ImageNet run."""
    run, file = finetuned(tmp_path / "imagenet", "imagenet", 0.85), tmp_path / "real.json"
    record = {"checkpoint": str(run), "dataset": "imagenet_real", "split": "test", "accuracy": 0.9054, "images": 46_837}
    file.write_text(json.dumps(record))
    row = layout("table2", [run, file])["rows"][0]
    assert (row["model"], row["ImageNet"], row["ReaL"]) == ("mine.npz", "85.00", "90.54")
    for changes, message in (
        ({"dataset": None}, "real.json"),
        ({"full_size": 46_837}, "a part of the test images"),
        ({"checkpoint": str(tmp_path)}, "no finished run"),
        ({"checkpoint": 3}, "real.json: checkpoint is 3"),
        ({"accuracy": None}, "real.json"),
        ({"checkpoint": str(finetuned(tmp_path / "pets", "pets", 0.9))}, "fine-tuned on Pets"),
        ({"checkpoint": str(finetuned(tmp_path / "digits", "digits", 0.9))}, "fine-tuned on digits"),
    ):
        file.write_text(json.dumps(record | changes))
        with pytest.raises(UserError, match=message):
            layout("table2", [file])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert Study("table5", (finetuned(tmp_path / "a", "pets", 0.5),), json=True).run() == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert (rows[0]["model"], rows[0]["Pets"], len(rows)) == ("mine.npz", "50.00", 15)
    with pytest.raises(UserError, match="--scale has no effect with table2"):
        Study("table2", scale="paper").run()
    with pytest.raises(UserError, match="only table2 and table5 take folders"):
        Study("positions", (tmp_path,)).run()
