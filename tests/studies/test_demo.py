"""The demo, cut short: both runs, one page that needs nothing else."""

import re
from pathlib import Path

import pytest
from inside import unrender

from vitlab.studies.demo import demo
from vitlab.weights import load_metadata, load_model


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        unrender(patch)
        return demo(tmp_path_factory.mktemp("demo") / "out", shrink=100)


def test_the_page_needs_nothing_else_and_shows_both_runs(result: dict) -> None:
    page = Path(result["page"])
    text = page.read_text()
    for accuracy in (result["pretrain_accuracy"], result["finetune_accuracy"]):
        assert 0 < accuracy <= 1
        assert f"{accuracy:.1%}" in text
    assert text.count("data:image/png;base64,") >= 10
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|\#)([^"']*)""", text) == []
    before, after = load_model(page.parent / "pretrain"), load_model(page.parent / "finetune")
    assert (before.config.image_hw, after.config.image_hw) == ((16, 16), (32, 32))
    cards = [load_metadata(page.parent / name) for name in ("pretrain", "finetune")]
    assert [card["classes"] for card in cards] == [list("01234"), list("56789")]
    assert cards[1]["test_accuracy"] == result["finetune_accuracy"]


def test_the_same_call_again_reads_the_runs(result: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed is another run."""
    monkeypatch.setattr("vitlab.studies.demo._section", lambda *_: None)  # figures take long
    monkeypatch.setattr("vitlab.studies.demo.page", lambda *_, **__: Path(result["page"]).read_text())
    assert demo(Path(result["page"]).parent, shrink=100) == result
    with pytest.raises(ValueError, match="seed: 0 -> 1"):
        demo(Path(result["page"]).parent, seed=1, shrink=100)
