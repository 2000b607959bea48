"""`vitlab paper` as a command."""

import json
from pathlib import Path

import pytest
from program import call


def test_the_list_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "paper")
    assert code == 0
    assert all(f"\n{name} " in out for name in ("eq1", "table9", "fig14", "sec4.5", "appd.10"))
    parts = json.loads(call(capsys, "paper", "--json")[1])
    assert {"key", "part", "text", "code", "run", "known"} == parts[0].keys()


def test_a_part_by_its_name_in_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "paper", "Table 1")
    assert code == 0
    assert "ViT-Huge" in out
    assert "632M" in out
    code, _, err = call(capsys, "paper", "fig2", "photo.png")
    assert (code, "no file or folder photo.png" in err) == (2, True)
    code, _, err = call(capsys, "paper", "fig99")
    assert code == 2
    assert "`vitlab paper` lists all" in err


def test_an_image_without_a_checkpoint(image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "paper", "fig1", str(image))
    assert (code, "figure: paper/fig1.png" in out) == (0, True)
    code, _, err = call(capsys, "paper", "fig2", str(image))
    assert (code, f"fig2 shows no image; leave {image} out" in err) == (2, True)
