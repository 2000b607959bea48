"""The layout of the page, without a browser."""

import sys
from pathlib import Path
from typing import Any

import pytest

from vitlab.app.page import build_page, gradio
from vitlab.models import ViTConfig, build_model
from vitlab.weights import save_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("many")
    config = ViTConfig(image_size=16, patch_size=4, width=8, depth=1, heads=4, mlp_dim=8, num_classes=2)
    for name in ("flat", "other"):
        save_model(build_model(config), place / name)
    return place


def parts_of(page: Any) -> dict[str, Any]:
    parts = page.get_config_file()["components"]
    return {part["props"]["elem_id"]: part["props"] for part in parts if part["props"].get("elem_id")}


def test_the_page_keeps_to_itself_and_has_one_queue(folder: Path) -> None:
    page = build_page(folder, device="cpu")
    config, parts = page.get_config_file(), parts_of(page)
    assert [name for name, _ in parts["checkpoint"]["choices"]] == ["flat", "other"]
    assert parts["checkpoint"]["visible"]
    assert parts["upload"]["type"] == "filepath"
    assert {event["api_visibility"] for event in config["dependencies"]} == {"private"}
    assert not config["analytics_enabled"]
    assert {(event.concurrency_id, event.concurrency_limit) for event in page.fns.values()} == {("model", 1)}
    assert page._queue.max_size == 64
    assert not page.api_open


def test_one_checkpoint_leaves_no_choice_and_shows_its_card(folder: Path) -> None:
    parts = parts_of(build_page(folder / "flat", device="cpu"))
    assert not parts["checkpoint"]["visible"]
    assert "<dd>1 × 4</dd>" in parts["card"]["value"]


def test_without_gradio_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ValueError, match=r"pip install 'vitlab\[app\]'"):
        gradio()
