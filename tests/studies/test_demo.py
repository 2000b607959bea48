"""The demo, cut short: both runs, one page that needs nothing else."""

import re
from pathlib import Path

import pytest
import torch

from vitlab.data.registry import load_dataset
from vitlab.studies.demo import demo, one_thread
from vitlab.weights import load_card, load_model


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> dict:
    return demo(tmp_path_factory.mktemp("demo") / "out", shrink=40)


def test_result(result: dict) -> None:
    assert result.keys() == {"pretrain_accuracy", "finetune_accuracy", "page"}
    assert 0.2 < result["pretrain_accuracy"] <= 1
    assert 0 < result["finetune_accuracy"] <= 1
    assert Path(result["page"]).is_absolute()
    assert Path(result["page"]).name == "index.html"


def test_page_is_whole_and_small(result: dict) -> None:
    page = Path(result["page"])
    assert page.stat().st_size < 3_000_000
    text = page.read_text()
    for accuracy in (result["pretrain_accuracy"], result["finetune_accuracy"]):
        assert f"{accuracy:.1%}" in text
    assert text.count("data:image/png;base64,") >= 10
    outside = re.findall(r"""(?:src|href)\s*=\s*["'](?!data:|\#)([^"']*)""", text)
    assert outside == []
    for shown in ("Loss", "onfusion", "ollout", "osition", "Pre-training on the digits 0 to 4", "twice the resolution"):
        assert shown in text


def test_other_classes_at_twice_the_resolution(result: dict) -> None:
    out = Path(result["page"]).parent
    before, after = load_model(out / "pretrain"), load_model(out / "finetune")
    assert (before.config.image_hw, after.config.image_hw) == ((16, 16), (32, 32))
    assert load_card(out / "pretrain")["classes"] == list("01234")
    assert load_card(out / "finetune")["classes"] == list("56789")
    assert load_card(out / "finetune")["test_accuracy"] == result["finetune_accuracy"]
    assert len(load_dataset("digits", "test", classes=(5, 6, 7, 8, 9))) > 100


def test_the_same_call_again_is_the_same_page(result: dict) -> None:
    page = Path(result["page"])
    before = page.read_bytes()
    assert demo(page.parent, shrink=40) == result
    assert page.read_bytes() == before


def test_another_seed_is_another_run(result: dict) -> None:
    with pytest.raises(ValueError, match=r"holds a run with other settings:\n  seed: 0 -> 1"):
        demo(Path(result["page"]).parent, seed=1, shrink=40)


def test_threads_are_as_before_afterwards() -> None:
    @one_thread()
    def broken_off() -> None:
        assert torch.get_num_threads() == 1
        raise KeyboardInterrupt

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                broken_off()
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
