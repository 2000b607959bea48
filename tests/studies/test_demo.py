"""The demo, cut short: both runs, one page that needs nothing else."""

import re
from pathlib import Path

import pytest

from vitlab.studies.demo import demo
from vitlab.weights import load_metadata, load_model


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return demo(tmp_path_factory.mktemp("demo") / "out", shrink=100)


def test_page_needs_nothing_else(result: dict) -> None:
    page = Path(result["page"])
    assert page.is_absolute()
    assert page.name == "index.html"
    assert page.stat().st_size < 3_000_000
    text = page.read_text()
    for accuracy in (result["pretrain_accuracy"], result["finetune_accuracy"]):
        assert 0 < accuracy <= 1
        assert f"{accuracy:.1%}" in text
    assert text.count("data:image/png;base64,") >= 10
    assert re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|\#)([^"']*)""", text) == []
    for shown in ("onfusion", "ollout", "osition", "Pre-training on the digits 0 to 4", "twice the resolution"):
        assert shown in text


def test_other_classes_at_twice_the_resolution(result: dict) -> None:
    out = Path(result["page"]).parent
    before, after = load_model(out / "pretrain"), load_model(out / "finetune")
    assert (before.config.image_hw, after.config.image_hw) == ((16, 16), (32, 32))
    assert load_metadata(out / "pretrain")["classes"] == list("01234")
    assert load_metadata(out / "finetune")["classes"] == list("56789")
    assert load_metadata(out / "finetune")["test_accuracy"] == result["finetune_accuracy"]


def test_the_same_call_again_reads_the_runs(result: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.studies.demo._section", lambda *_: None)  # figures take long
    monkeypatch.setattr("vitlab.studies.demo.training_page", lambda *_: Path(result["page"]).read_text())
    assert demo(Path(result["page"]).parent, shrink=100) == result


def test_another_seed_is_another_run(result: dict) -> None:
    with pytest.raises(ValueError, match=r"seed: 0 -> 1"):
        demo(Path(result["page"]).parent, seed=1, shrink=100)
