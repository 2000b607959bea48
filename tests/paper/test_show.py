"""`vitlab paper`: every part has something to show, and bad requests end in errors."""

import pytest

import vitlab
from vitlab.errors import UserError
from vitlab.models.vit import ViT
from vitlab.paper.equations import EQUATIONS
from vitlab.paper.figures import PAPER_FIGURES, Request
from vitlab.paper.parts import find_parts, read_groups
from vitlab.paper.recorded import STUDIES
from vitlab.paper.sections import SECTIONS
from vitlab.paper.show import OF_A_MODEL, list_text, show
from vitlab.paper.tables import PAPER_TABLES


def test_every_part_has_something_to_show() -> None:
    keys = {part.key for group in read_groups() for part in group.parts}
    shown = {*EQUATIONS, *PAPER_TABLES, *PAPER_FIGURES}
    assert shown == {key for key in keys if not key.startswith(("sec", "app"))}
    assert {*SECTIONS, *STUDIES, *OF_A_MODEL} <= keys
    assert all(f" {key} " in f" {list_text()} ".replace("\n", " ") for key in shown)


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
    vitlab.save_model(
        ViT(vitlab.ViTConfig(image_size=16, patch_size=4, width=32, depth=1, heads=4, position="2d")),
        request_of.out / "other",
    )
    with pytest.raises(UserError, match="differs in position"):
        show("eq1", Request(str(request_of.out / "other")))
