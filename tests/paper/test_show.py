"""`vitlab paper`: each equation, table and figure is shown, and what an equation shows is what the model computes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.errors import UserError
from vitlab.models.vit import ViT
from vitlab.paper import equations, sections, tables
from vitlab.paper.equations import EQUATIONS, MODEL, TOLERANCE
from vitlab.paper.figures import PAPER_FIGURES, Request
from vitlab.paper.parts import find_parts, read_groups
from vitlab.paper.recorded import STUDIES, read_record
from vitlab.paper.sections import SECTIONS, bias_rows, rank_correlation
from vitlab.paper.show import OF_A_MODEL, list_text, show
from vitlab.paper.tables import HERE, PAPER_TABLES

SIZES: dict[str, Any] = {
    "image_size": 16,
    "patch_size": 4,
    "width": 32,
    "depth": 3,
    "heads": 4,
    "mlp_dim": 48,
    "num_classes": 5,
}


@pytest.fixture
def vit() -> ViT:
    return ViT(vitlab.ViTConfig(**SIZES, head_std=0.5, position_std=0.5)).eval()


@pytest.fixture
def request_of(vit: ViT, tmp_path: Path) -> Request:
    """A checkpoint and two photos."""
    vitlab.save_model(vit, tmp_path / "checkpoint")
    rng = np.random.default_rng(0)
    photos = []
    for number in range(2):
        Image.fromarray(rng.integers(0, 255, (30, 24, 3), np.uint8)).save(path := tmp_path / f"{number}.png")
        photos.append(str(path))
    return Request(str(tmp_path / "checkpoint"), photos, tmp_path / "out")


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


def test_every_part_has_something_to_show() -> None:
    keys = {part.key for group in read_groups() for part in group.parts}
    shown = {*EQUATIONS, *PAPER_TABLES, *PAPER_FIGURES}
    assert shown == {key for key in keys if not key.startswith(("sec", "app"))}
    assert {*SECTIONS, *STUDIES, *OF_A_MODEL} <= keys
    assert all(f" {key} " in f" {list_text()} ".replace("\n", " ") for key in shown)


@pytest.mark.parametrize("name", [*PAPER_FIGURES, "sec3.1"])
def test_a_figure_is_written(name: str, request_of: Request) -> None:
    request = request_of if name in OF_A_MODEL or name in SECTIONS else Request(out=request_of.out)
    shown = show(name, request)
    assert shown.files
    for path in shown.files:
        if path.suffix == ".png":
            pixels = np.asarray(Image.open(path).convert("L"))
            assert min(pixels.shape) > 100
            assert pixels.std() > 5
    assert json.loads(json.dumps(shown.as_dict()))["files"]


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


def test_the_recorded_studies_are_shown() -> None:
    for key, study in STUDIES.items():
        claims = read_record(study)["claims"]
        assert all(claim["verdict"] in show(key, Request()).text for claim in claims) or key in PAPER_FIGURES


@pytest.mark.parametrize("name", ["fig7", "Fig. 7", "figure 7", "FIG7"])
def test_a_part_is_found_by_its_name(name: str) -> None:
    assert [part.part for part in find_parts(name)] == ["Fig. 7, left", "Fig. 7, center", "Fig. 7, right"]


@pytest.mark.parametrize(
    ("name", "message"), [("fig15", "fig15"), ("table0", "table"), ("eq", "eq"), ("sec9", "no part 'sec9'")]
)
def test_an_unknown_part(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_parts(name)


def test_a_checkpoint_that_is_of_no_use(request_of: Request) -> None:
    with pytest.raises(UserError, match="table6 shows no model"):
        show("table6", request_of)
    vitlab.save_model(ViT(vitlab.ViTConfig(**SIZES, position="2d")), request_of.out / "other")
    with pytest.raises(UserError, match="differs in position"):
        show("eq1", Request(str(request_of.out / "other")))


def test_inductive_bias(vit: ViT) -> None:
    """Without positions patches are a set; the MLP sees each alone."""
    rows = bias_rows(vit, torch.rand(2, 3, 16, 16))
    assert [row[""] for row in rows] == ["the same"] * 3 + ["not the same"] * 2
    assert all(row["difference"] > 0.05 for row in rows[3:])


def test_what_was_learned_is_read_from_the_model(request_of: Request, vit: ViT) -> None:
    """Positions made to be similar nearby are found so, and random ones are not."""
    assert rank_correlation(np.array([1, 2, 3, 3]), np.array([10, 20, 40, 40])) == pytest.approx(1)
    with torch.no_grad():
        place = torch.stack(torch.meshgrid(torch.arange(4.0), torch.arange(4.0), indexing="ij")).flatten(1).T
        waves = torch.cat([(place / 3).cos(), (place / 3).sin()], dim=1)
        assert vit.position.table is not None
        vit.position.table[0, 1:] = torch.cat([waves, torch.zeros(16, 28)], dim=1)
    near, rows = sections.position_rows(vit)
    assert (near[""], rows[""]) == ("holds", "holds")
    text = show("sec4.5", request_of).text
    assert text.count("holds") + text.count("does not hold") >= 4
