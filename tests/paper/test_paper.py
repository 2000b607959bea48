"""`vitlab paper`: every part has something to show, which is what the model computes and what was recorded."""

import json
import runpy
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.errors import UserError
from vitlab.models.vit import ViT
from vitlab.paper import equations, figures, sections, tables
from vitlab.paper.equations import EQUATIONS, MODEL, TOLERANCE
from vitlab.paper.figures import PAPER_FIGURES, Request
from vitlab.paper.parts import find_parts, list_text, read_groups
from vitlab.paper.recorded import STUDIES, read_panels, read_record
from vitlab.paper.sections import SECTIONS
from vitlab.paper.show import OF_A_MODEL, show
from vitlab.paper.tables import HERE, PAPER_TABLES
from vitlab.studies.statistics import Verdict

SIZES: dict[str, Any] = {"image_size": 16, "patch_size": 4, "width": 32, "heads": 4, "mlp_dim": 48, "num_classes": 5}
RECORDS = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "paper_records.py"))["RECORDS"]


@pytest.fixture
def vit() -> ViT:
    """A small model of the paper's plain kind."""
    return ViT(vitlab.ViTConfig(**SIZES, depth=3, head_std=0.5, position_std=0.5)).eval()


@pytest.fixture
def request_of(vit: ViT, tmp_path: Path) -> Request:
    """To show it on two photos."""
    vitlab.save_model(vit, tmp_path / "checkpoint")
    photos = [str(tmp_path / f"{number}.png") for number in range(2)]
    for path in photos:
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 24, 3), np.uint8)).save(path)
    return Request(str(tmp_path / "checkpoint"), photos, tmp_path / "out")


def test_every_part_has_something_to_show() -> None:
    keys = {part.key for group in read_groups() for part in group.parts}
    shown = {*EQUATIONS, *PAPER_TABLES, *PAPER_FIGURES}
    assert shown == {key for key in keys if not key.startswith(("sec", "app"))}
    assert {*SECTIONS, *STUDIES, *OF_A_MODEL} <= keys
    assert all(f" {key} " in f" {list_text()} ".replace("\n", " ") for key in shown)


@pytest.mark.parametrize("name", ["fig7", "Fig. 7", "figure 7", "FIG7"])
def test_a_part_is_found_by_its_name(name: str) -> None:
    assert [part.part for part in find_parts(name)] == ["Fig. 7, left", "Fig. 7, center", "Fig. 7, right"]


def test_what_cannot_be_shown(request_of: Request) -> None:
    other = ViT(vitlab.ViTConfig(**SIZES, depth=1, position="2d"))
    vitlab.save_model(other, request_of.out / "other")
    for name, asked, word in (
        ("fig15", Request(), "fig15"),
        ("eq", Request(), "eq"),
        ("sec9", Request(), "'sec9'"),
        ("table6", request_of, "table6"),
        ("table6", Request(images=request_of.images), "0.png"),
        ("eq1", Request(str(request_of.out / "other")), "position"),
    ):
        with pytest.raises(UserError, match=word):
            show(name, asked)


# Equations and sections


@pytest.mark.parametrize("name", EQUATIONS)
def test_an_equation_is_what_the_model_computes(name: str, vit: ViT) -> None:
    images = torch.rand(2, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        *_, (_, ours), (last, reference) = EQUATIONS[name](vit, images)
    assert last == MODEL
    assert ours.shape == reference.shape
    assert (ours - reference).abs().max() <= TOLERANCE * reference.square().mean().sqrt()
    assert reference.std() > 0


def test_another_equation_is_said_to_differ(request_of: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ": equal, " in show("eq4", request_of).text
    monkeypatch.setattr(equations, "layer_norm", lambda z, norm: z)
    assert ": DIFFERENT, " in show("eq4", request_of).text


def test_inductive_bias(vit: ViT) -> None:
    """Without positions patches are a set; the MLP sees each alone."""
    rows = sections.bias_rows(vit, torch.rand(2, 3, 16, 16))
    assert [row[""] for row in rows] == ["the same"] * 3 + ["not the same"] * 2
    assert all(row["difference"] > 0.05 for row in rows[3:])


def test_what_was_learned_is_read_from_the_model(request_of: Request, vit: ViT) -> None:
    """Positions made to be similar nearby are found so, and random ones are not."""
    with torch.no_grad():
        place = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")).flatten(1).T
        waves = torch.cat([(place / 3).cos(), (place / 3).sin()], dim=1)
        assert vit.position.table is not None
        vit.position.table[0, 1:] = torch.cat([waves, torch.zeros(16, 28)], dim=1)
    near, rows = sections.position_rows(vit)
    assert (near[""], rows[""]) == ("holds", "holds")
    text = show("sec4.5", request_of).text
    assert text.count("holds") + text.count("does not hold") >= 4


# Tables, figures and records


def test_tables_count_what_the_paper_prints() -> None:
    """Millions of parameters, exaFLOPs and core-days that the code counts, beside the printed ones."""
    for row in tables.table1():
        printed, counts = int(row["parameters"].rstrip("M")), row[f"{HERE}parameters"]
        here = [float(count.split(": ")[1].rstrip("M")) for count in counts.split(", ")]
        assert min(abs(count - printed) for count in here) < 1
    ratios = [row[f"{HERE}exaFLOPs"] / row["exaFLOPs"] for row in tables.table6()]
    assert sorted(ratios)[1:] == pytest.approx([1] * 17, abs=0.08)
    days = [(row["TPUv3-core-days"], row[f"{HERE}TPUv3-core-days"]) for row in tables.table2()]
    assert [here for _, here in days][3:] == ["", ""]
    assert all(abs(float(a[:-1]) / float(b[:-1]) - 1) < 0.25 for a, b in days[:3])


@pytest.mark.parametrize("name", PAPER_TABLES)
def test_a_table_is_shown(name: str) -> None:
    text = show(name, Request()).as_text()
    rows = PAPER_TABLES[name]()
    assert all(str(value) in text for value in rows[0].values() if not isinstance(value, int))
    claims = read_record(STUDIES[name])["claims"] if name in STUDIES else []
    assert all(f"{claim['verdict']}: {claim['claim']}" in text for claim in claims)


@pytest.mark.parametrize("name", [*PAPER_FIGURES, "sec3.1"])
def test_a_figure_is_written(name: str, request_of: Request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.paper.show.svg", lambda _: b"")
    shown = show(name, request_of if name in {*OF_A_MODEL, *SECTIONS} else Request(out=request_of.out))
    for path in shown.files:
        if path.suffix == ".png":
            pixels = np.asarray(Image.open(path).convert("L"))
            assert min(pixels.shape) > 100
            assert pixels.std() > 5
    assert json.loads(json.dumps(shown.as_dict()))["files"]


@pytest.mark.usefixtures("unchecked")
def test_trainings_are_compared_without_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three of Fig. 10, a ViT and a hybrid of Fig. 11; the ViT is trained once."""
    monkeypatch.setattr(figures, "DIGITS_EPOCHS", 0.1)
    monkeypatch.setattr(figures, "POSITION_EPOCHS", 0.1)
    monkeypatch.setattr(figures, "AVERAGED", 10)
    request = Request(out=tmp_path)
    assert {*figures.fig10(request)} == {"fig10-left", "fig10-center", "fig10-right"}
    assert {*figures.fig11(request)} == {"fig11-left", "fig11-right"}
    runs = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("*/config.json")}
    assert {*runs} == {"digits", "digits-left", "digits-center", "digits-right", "digits-hybrid"}
    assert runs["digits-left"]["optim"]["lr"] == runs["digits-right"]["optim"]["lr"] / 2
    assert runs["digits-left"]["epochs"] == runs["digits-center"]["epochs"] == runs["digits-right"]["epochs"] / 2
    assert runs["digits-right"]["model"]["position_std"] == 0.02
    assert runs["digits-hybrid"]["model"]["stem"] is not None


@pytest.mark.parametrize("name", RECORDS)
def test_speeds_are_those_of_the_benchmark(name: str) -> None:
    assert read_record(name) == json.loads(json.dumps(RECORDS[name](), default=list)), (
        "run `python benchmarks/paper_records.py`"
    )


@pytest.mark.parametrize("name", sorted({*STUDIES.values(), *RECORDS}))
def test_a_record_has_a_figure_and_verdicts(name: str) -> None:
    assert all(panel.series for panel in read_panels(name))
    assert all(claim["verdict"] in get_args(Verdict) for claim in read_record(name).get("claims", []))
