"""The demo, cut short: three runs, one page that needs nothing else."""

import re
from pathlib import Path

import numpy as np
import pytest
from inside import unrender

from vitlab.inspection.finished_run import Run
from vitlab.inspection.report import RunSection
from vitlab.studies.demo import demo
from vitlab.weights import load_metadata, load_model


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    with pytest.MonkeyPatch.context() as patch:
        unrender(patch)
        patch.setattr("jaxtyping.config.jaxtyping_disable", True)
        return demo(tmp_path_factory.mktemp("demo") / "out", shrink=100)


def test_the_page_needs_nothing_else_and_shows_all_runs(result: dict) -> None:
    page = Path(result["page"])
    text = page.read_text()
    for name in ("pretrain", "finetune", "scratch"):
        assert f"{result[f'{name}_accuracy']:.1%}" in text
    assert text.index(result["sentence"]) < text.index("<img") < text.index('<h2 id="phase-1"')
    assert text.count("data:image/png;base64,") >= 10
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|\#)([^"']*)""", text) == []
    assert load_model(page.parent / "pretrain").config.image_hw == (16, 16)
    assert load_model(page.parent / "finetune").config == load_model(page.parent / "scratch").config
    cards = [load_metadata(page.parent / name) for name in ("pretrain", "finetune", "scratch")]
    assert [card["classes"] for card in cards] == [list("01234"), list("56789"), list("56789")]
    assert cards[1]["test_accuracy"] == result["finetune_accuracy"]


def test_both_contenders_have_the_same_images(result: dict) -> None:
    """And the difference and its interval are those of the test images, in pairs."""
    tuned, scratch = (Run.read(Path(result["page"]).with_name(name)) for name in ("finetune", "scratch"))
    assert tuned.settings["examples"] == scratch.settings["examples"] == 50
    np.testing.assert_array_equal(tuned.test.labels, scratch.test.labels)
    assert result["difference"] == pytest.approx(tuned.test.accuracy - scratch.test.accuracy)
    low, high = result["interval"]
    assert low <= result["difference"] <= high


def test_the_same_call_again_reads_the_runs(result: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed is another run."""
    monkeypatch.setattr("vitlab.studies.demo._section", lambda *_: RunSection("", "", {}))  # figures take long
    monkeypatch.setattr("vitlab.studies.demo.page", lambda *_, **__: Path(result["page"]).read_text())
    assert demo(Path(result["page"]).parent, shrink=100) == result
    with pytest.raises(ValueError, match="seed: 0 -> 1"):
        demo(Path(result["page"]).parent, seed=1, shrink=100)
