"""Judging in bfloat16: as near to float32 as its 8 bits allow, said wherever it is not float32, and never mixed up."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vitlab.data.registry import load_dataset
from vitlab.evaluate.accuracy import Evaluation, evaluate, evaluate_checkpoint
from vitlab.evaluate.features import features
from vitlab.evaluate.fewshot import fewshot_checkpoint
from vitlab.evaluate.precision import computes_in, load_for_judging
from vitlab.evaluate.predict import predict
from vitlab.evaluate.probe import probe_checkpoint
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.pipelines.pretrain import Outcome
from vitlab.train.distributed import init_distributed
from vitlab.weights import load_model, save_model

CPU = torch.device("cpu")
BIT = ResNetBody(layers=(1, 2), width=32, version="v2", weight_eps=1e-10, weight_eps_on="variance")
VIT: dict[str, Any] = {"image_size": 32, "width": 64, "depth": 3, "heads": 4, "mlp_dim": 128, "num_classes": 10}
KINDS: dict[str, ModelConfig] = {
    "ViT": ViTConfig(**VIT, patch_size=8),
    "MAP head": ViTConfig(**VIT, patch_size=8, pool="map"),
    "relative positions": ViTConfig(**VIT, patch_size=8, position="relative", position_at="every", registers=2),
    "axial": ViTConfig(**VIT, patch_size=8, encoder="axial", position="sincos2d", class_position=False),
    "hybrid": ViTConfig(**VIT, patch_size=1, stem=ResNetBody(layers=(1, 2), width=32)),
    "BiT": ResNetConfig(image_size=32, num_classes=10, body=BIT),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def units(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """A processor that multiplies bfloat16 in hardware, or one that does not."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": there}, raising=False)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_kind_of_model(kind: str, tmp_path: Path) -> None:
    """The error's rms is at most 3 % of the logits', which is some roundings to 8 bits (0.4 % each) in a row."""
    model = build_model(KINDS[kind], generator=torch.Generator().manual_seed(0)).eval()
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight, std=0.1)
    save_model(model, tmp_path / "model")
    images = torch.rand(4, 3, 32, 32) * 2 - 1
    exact, rounded = (load_for_judging(tmp_path / "model", CPU, each).model for each in ("float32", "bfloat16"))
    assert (computes_in(exact), computes_in(rounded)) == ("float32", "bfloat16")
    assert (exact.training, rounded.training) == (False, False)
    with torch.inference_mode():
        expected, found = exact(images), rounded(images)
        assert torch.equal(expected, model(images))
    assert found.dtype == torch.bfloat16
    error = ((found - expected).square().mean() / expected.square().mean()).sqrt()
    assert 1e-4 < error < 0.03


def test_answers_on_real_images(pretrained: Outcome, workdir: Path) -> None:
    """They change where two classes were nearly alike, and nowhere else."""
    exact = evaluate_checkpoint(workdir, device="cpu")
    rounded = evaluate_checkpoint(workdir, precision="bfloat16", device="cpu")
    np.testing.assert_allclose(rounded.confidences, exact.confidences, atol=0.02)
    np.testing.assert_allclose(rounded.losses, exact.losses, atol=0.05)
    assert not np.array_equal(rounded.losses, exact.losses)
    assert rounded.losses.dtype == np.float32
    changed = rounded.predictions != exact.predictions
    assert changed.mean() < 0.03
    assert (exact.confidences[changed] < 0.52).all()
    assert exact.record() == pretrained.test.record()
    assert "computed_in" not in exact.record()
    assert rounded.record()["computed_in"] == "bfloat16"
    assert rounded.as_table().splitlines()[-1].endswith(" · computed in bfloat16")
    assert "float32" not in exact.as_table()


@pytest.mark.usefixtures("pretrained")
def test_several_ranks(workdir: Path, in_ranks: Callable[..., list[Any]]) -> None:
    """Also where a process has no image of its own; sums are rounded differently in smaller batches."""
    dataset = load_dataset("digits", "test", classes=(0, 1, 2)).take(np.arange(5))
    alone = evaluate(load_for_judging(workdir, CPU, "bfloat16").model, dataset, (8, 8))

    def job() -> tuple[Evaluation, Evaluation]:
        with init_distributed() as world:
            model = load_for_judging(workdir, CPU, "bfloat16", world=world).model
            few, none = (evaluate(model, dataset.take(np.arange(n)), (8, 8), world=world) for n in (5, 1))
            return few, none

    for few, none in in_ranks(2, job):
        assert few.computed_in == none.computed_in == "bfloat16"
        assert (few.indices.tolist(), none.indices.tolist()) == ([0, 1, 2, 3, 4], [0])
        np.testing.assert_allclose(few.losses, alone.losses, atol=0.05)
        np.testing.assert_allclose(none.losses, alone.losses[:1], atol=0.05)


@pytest.mark.usefixtures("pretrained")
def test_kept_features_know_their_precision(workdir: Path, tmp_path: Path) -> None:
    """What float32 has kept stays found; bfloat16 keeps its own, in float32 as well, also of the same weights."""
    save_model(load_model(workdir).bfloat16(), tmp_path / "model")
    dataset, cache = load_dataset("digits", "test", classes=(0, 1, 2)), tmp_path / "kept"
    plain = features(load_model(tmp_path / "model"), dataset, cache=cache)
    kept = set(cache.glob("*.npz"))
    exact, rounded, again = (
        features(load_for_judging(tmp_path / "model", CPU, each).model, dataset, cache=cache)
        for each in ("float32", "bfloat16", "bfloat16")
    )
    assert (len(kept), len(set(cache.glob("*.npz")) - kept)) == (1, 1)
    assert np.array_equal(exact.x, plain.x)
    assert np.array_equal(again.x, rounded.x)
    assert rounded.x.dtype == np.float32
    assert 0 < np.abs(rounded.x - exact.x).max() < 0.05


@pytest.mark.usefixtures("pretrained")
def test_few_shots_and_probes(workdir: Path) -> None:
    few, exact = (
        fewshot_checkpoint(workdir, ["digits"], shots=(5,), device="cpu", precision=each)
        for each in ("bfloat16", "float32")
    )
    assert few.settings == exact.settings | {"computed_in": "bfloat16"}
    assert few.rows[0].mean == pytest.approx(exact.rows[0].mean, abs=0.03)
    assert few.as_table().splitlines()[-1] == "computed in bfloat16"
    assert "computed" not in exact.as_table()
    probe, exact = (
        probe_checkpoint(workdir, "digits", "knn", ks=[5], device="cpu", precision=each)
        for each in ("bfloat16", "float32")
    )
    assert probe.record().keys() - exact.record().keys() == {"computed_in"}
    assert probe.record()["weighted"][5] == pytest.approx(exact.record()["weighted"][5], abs=0.03)
    assert probe.as_table().endswith(" test images · computed in bfloat16")


@pytest.mark.usefixtures("pretrained")
def test_predictions(workdir: Path, image: Path) -> None:
    (exact,), (rounded,) = (
        list(predict(workdir, [str(image)], device="cpu", precision=each)) for each in ("float32", "bfloat16")
    )
    assert [name for name, _ in rounded.top] == [name for name, _ in exact.top]
    shares, expected = ([share for _, share in each.top] for each in (rounded, exact))
    assert shares == pytest.approx(expected, abs=0.02)
    assert shares != expected
    assert sum(shares) == pytest.approx(1, abs=1e-6)


@pytest.mark.usefixtures("pretrained")
def test_slow_processor_is_told_once(
    workdir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    in_ranks: Callable[..., list[Any]],
) -> None:
    units(monkeypatch, there=True)
    load_for_judging(workdir, CPU, "bfloat16")
    units(monkeypatch, there=False)
    load_for_judging(workdir, CPU, "float32")
    assert caplog.messages == []

    def job() -> list[str]:
        with init_distributed() as world, caplog.at_level(logging.WARNING):
            load_for_judging(workdir, CPU, "bfloat16", world=world)
        return caplog.messages

    said = ["this CPU is not faster in bfloat16: float32 takes no longer, and is exact"]
    assert in_ranks(2, job) == [said, []]


@pytest.mark.parametrize("given", ["auto", "float16", "autocast"])
def test_other_precisions_are_refused(given: str) -> None:
    with pytest.raises(ValueError, match=f"precision is '{given}'; a checkpoint is judged in float32 or bfloat16"):
        load_for_judging("nowhere", CPU, given)
