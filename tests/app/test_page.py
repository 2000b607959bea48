"""What the controls of the page do, without a browser."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitlab.app.checkpoints import Shelf
from vitlab.app.page import Desk, Dropped, build_page, gradio
from vitlab.app.state import LAYER, ROLLOUT, Limits, Seen
from vitlab.models import ViTConfig, build_model
from vitlab.weights import save_model

SMALL = ViTConfig(image_size=16, patch_size=8, width=8, depth=3, heads=2, mlp_dim=8, num_classes=3)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(build_model(SMALL), tmp_path / "many" / "deep", extra={"classes": ["ant", "bee", "cow"]})
    flat = ViTConfig(image_size=16, patch_size=4, width=8, depth=1, heads=4, mlp_dim=8, num_classes=2)
    save_model(build_model(flat), tmp_path / "many" / "flat")
    save_model(build_model(flat), tmp_path / "many" / "lost")
    (tmp_path / "many" / "lost" / "model.safetensors").write_bytes(b"{")
    return tmp_path / "many"


@pytest.fixture
def desk(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """Uploads lie in `tmp_path`."""
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    return Desk(Shelf(folder, device="cpu"), Limits())


@pytest.fixture
def photo(tmp_path: Path) -> str:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    return str(tmp_path / "a.png")


def test_a_image_is_answered_and_its_file_let_go(desk: Desk, photo: str) -> None:
    upload, dropped, seen, message, answers, inside, layer, head, distance, card = desk.drop(
        photo, "deep", ROLLOUT, 12, 0
    )
    assert upload is None
    assert (dropped.name, dropped.data) == ("a.png", Path(photo).read_bytes())
    assert isinstance(seen, Seen)
    assert "a.png" in message
    assert answers.count("<li>") == 3
    assert "bee" in answers
    assert "Rollout;" in inside
    assert "data:image" in distance
    assert "<dd>3 × " in card
    assert (layer["visible"], head["visible"]) == (False, False)


def test_the_controls_fit_the_model(desk: Desk, photo: str) -> None:
    *_, inside, layer, head, _, _ = desk.drop(photo, "deep", LAYER, 12, 4)
    assert "Layer 3 of 3, head 2 of 2" in inside
    assert (layer["visible"], layer["maximum"], layer["value"]) == (True, 3, 3)
    assert (head["choices"], head["value"]) == ([("mean of all heads", 0), ("head 1", 1), ("head 2", 2)], 2)


def test_turning_a_control_computes_nothing_anew(desk: Desk, photo: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = desk.drop(photo, "deep", ROLLOUT, 1, 0)[2]
    monkeypatch.setattr(desk.shelf, "take", lambda name: pytest.fail(f"{name} was asked for"))
    assert "Layer 2 of 3, mean of 2 heads" in desk.turn(seen, LAYER, 2, 0)[0]
    assert "Layer 2 of 3, head 1 of 2" in desk.turn(seen, LAYER, 2.0, 1)[0]
    assert "App. D.8" in desk.turn(None, ROLLOUT, 2, None)[0]


def test_another_checkpoint_sees_the_same_image(desk: Desk, photo: str) -> None:
    dropped = Dropped("a.png", Path(photo).read_bytes())
    seen, message, answers, inside, layer, *_ = desk.choose(dropped, "flat", LAYER, 3, 4)
    assert isinstance(seen, Seen)
    assert "a.png" in message
    assert answers.count("<li>") == 2
    assert "Layer 1 of 1, head 4 of 4" in inside
    assert not layer["visible"]
    assert "maximum" not in layer  # Gradio refuses a slider of one place


def test_a_broken_checkpoint_is_a_message_and_the_next_works(desk: Desk, photo: str) -> None:
    seen, message, answers, *_, card = desk.choose(None, "lost", ROLLOUT, 1, 0)
    assert seen is None
    assert 'role="alert"' in message
    assert "lost" in message
    assert (answers, card) == ("", "")
    seen, message, *_, card = desk.choose(None, "deep", ROLLOUT, 1, 0)
    assert seen is None
    assert "Allowed are images" in message
    assert "<dd>3 × " in card
    assert isinstance(desk.drop(photo, "deep", ROLLOUT, 1, 0)[2], Seen)


def test_a_file_that_was_not_uploaded_is_not_opened(
    desk: Desk, photo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path / "uploads"))
    for path in (photo, "/dev/zero"):
        upload, dropped, seen, message, *_ = desk.drop(path, "deep", ROLLOUT, 1, 0)
        assert (upload, dropped, seen) == (None, None, None)
        assert "is no file that was dropped here" in message


def test_a_text_file_is_refused_and_what_was_shown_goes(desk: Desk, tmp_path: Path) -> None:
    (tmp_path / "letter.jpg").write_text("Dear all")
    upload, dropped, seen, message, answers, inside, _, _, distance, card = desk.drop(
        str(tmp_path / "letter.jpg"), "deep", ROLLOUT, 1, 0
    )
    assert (upload, seen, answers, distance) == (None, None, "", "")
    assert 'role="alert"' in message
    assert "letter.jpg: not an image" in message
    assert "data:image" not in inside
    assert "<dd>3 × " in card
    assert dropped.name == "letter.jpg"


def test_no_file_changes_nothing(desk: Desk) -> None:
    assert len(desk.drop(None, "deep", ROLLOUT, 1, 0)) == 10


def test_the_page_is_built_and_keeps_to_itself(folder: Path) -> None:
    page = build_page(folder, device="cpu")
    config: dict[str, Any] = page.get_config_file()
    parts = {part["props"].get("label"): part["props"] for part in config["components"]}
    assert [name for name, _ in parts["Checkpoint"]["choices"]] == ["deep", "flat", "lost"]
    assert parts["Checkpoint"]["visible"]
    assert parts["Drop a image here"]["type"] == "filepath"
    assert {event["api_visibility"] for event in config["dependencies"]} == {"private"}
    assert not config["analytics_enabled"]
    events = list(page.fns.values())
    assert {(event.concurrency_id, event.concurrency_limit) for event in events} == {("model", 1)}
    assert page._queue.max_size == 64
    assert not page.api_open


def test_one_checkpoint_leaves_no_choice_and_shows_its_card(folder: Path) -> None:
    config = build_page(folder / "flat", device="cpu").get_config_file()
    parts = {part["props"].get("elem_id") or part["props"].get("label"): part["props"] for part in config["components"]}
    assert not parts["checkpoint"]["visible"]
    assert "<dd>1 × 4</dd>" in parts["card"]["value"]


def test_without_gradio_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    with pytest.raises(ValueError, match=r"pip install 'vitlab\[app\]'"):
        gradio()
