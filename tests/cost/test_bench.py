"""`vitlab bench`: every row is measured once and saved at once; what is skipped has a reason."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from program import call

from vitlab.cost import bench as module
from vitlab.cost.bench import (
    CEILING,
    FIGURE_12,
    MAX_BATCH,
    MODEL,
    bench,
    fastest_batch,
    largest_batch,
    panels,
    peak_bytes,
    row_keys,
    table,
)
from vitlab.cost.options import BenchOptions
from vitlab.cost.step import Mode, StepSpec
from vitlab.models import ViTConfig
from vitlab.models import registry as models

TINY = ViTConfig(image_size=16, patch_size=8, width=16, depth=1, heads=2, mlp_dim=24, num_classes=5)
ONE = BenchOptions(sizes=(16,), batch=2, seconds=1e-6, rounds=3, largest=False, dtype="float32", memory=0.1)
NAMES = ["Tiny/8"]
MIB = 2**20


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(models.MODELS, "Tiny/8", TINY)
    monkeypatch.setattr(module, "peak_bytes", lambda spec: spec.batch * MIB)
    monkeypatch.setattr(module, "panels", lambda _: [])  # drawing takes longer than everything else,
    monkeypatch.setattr("gc.collect", lambda: 0)  # except for a collection among the objects of all tests
    monkeypatch.chdir(tmp_path)


def test_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = bench(NAMES, ONE, tmp_path)
    (row,) = record["rows"]
    assert (row["model"], row["image_size"], row["mode"], row["batch"]) == ("Tiny/8", 16, "infer", 2)
    assert len(row["images_per_s"]["all"]) == 3
    assert row["mfu"] is None  # the peak of a CPU is unknown
    assert row["peak_bytes"] == 2 * MIB
    assert 0 < row["ceiling"]["share"]["median"] < 1
    assert (record["settings"]["dtype"], record["machine"]["threads"]) == ("float32", torch.get_num_threads())
    assert json.loads((tmp_path / "bench.json").read_text()) == record
    assert "[1/1] Tiny/8, 16 pixels, inference\n" in capsys.readouterr().err  # before it is measured


def test_speed_and_share_of_the_ceiling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {MODEL: [10.0, 5.0, 10.0], CEILING: [20.0, 20.0, 20.0]}

    def time_interleaved(steps: dict[str, Callable[[], object]], *_: object) -> dict[str, list[float]]:
        for step in steps.values():
            step()
        return {name: rates[name] for name in steps}

    monkeypatch.setattr(module.measure, "time_interleaved", time_interleaved)
    (row,) = bench(NAMES, dataclasses.replace(ONE, mode="train"), tmp_path)["rows"]
    assert row["images_per_s"]["all"] == [20, 10, 20]
    assert row["tflops"] == pytest.approx(20 * 6 * TINY.forward_macs / 1e12)
    assert row["ceiling"]["share"]["median"] == 0.5


def test_what_does_not_fit_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into the given memory, or into the free memory; the next row is measured, and the command fails."""
    rooms = [1000, 2**30]
    with monkeypatch.context() as patch:
        patch.setattr(module, "free_memory", lambda _: rooms.pop(0))
        record = bench(NAMES, dataclasses.replace(ONE, sizes=(16, 24)), tmp_path)
    assert "a batch of 2 does not fit" in record["rows"][0]["skipped"]
    assert "skipped" not in record["rows"][1]
    assert len(table(record)) == 1
    monkeypatch.setattr(module, "peak_bytes", lambda spec: spec.config.image_hw[0] * MIB)
    words = "Tiny/8 --batch 2 --seconds 1e-6 --rounds 2 --memory 0.02 --dtype float32 --no-largest --sizes 16"
    assert call(capsys, "bench", *words.split())[0] == 0
    code, out, _ = call(capsys, "bench", *words.split(), "24", "--out", "both")
    assert code == 1
    assert "Tiny/8, 24 pixels, infer: a batch of 2 does not fit" in out
    assert "skipped: Tiny/8, 16" not in out


def test_an_interrupted_bench_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, measure, sizes = dataclasses.replace(ONE, sizes=(16, 24)), module._measure, []

    def interrupted(options: BenchOptions, key: tuple) -> dict[str, Any]:
        sizes.append(key[2])
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return measure(options, key)

    monkeypatch.setattr(module, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(NAMES, settings, tmp_path)
    first = json.loads((tmp_path / "bench.json").read_text())["rows"]
    record = bench(NAMES, settings, tmp_path)
    assert record["rows"][:1] == first
    assert [row["image_size"] for row in record["rows"]] == [16, 24]
    assert bench(NAMES, settings, tmp_path) == record
    assert sizes == [16, 24, 24]
    with pytest.raises(ValueError, match="other settings"):
        bench(NAMES, dataclasses.replace(settings, rounds=4), tmp_path)
    for text in ("[]", "{", "{}"):
        (tmp_path / "bench.json").write_text(text)
        with pytest.raises(ValueError, match=r"bench\.json"):
            bench(NAMES, settings, tmp_path)
        assert (tmp_path / "bench.json").read_text() == text


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "panels", panels)
    words = ["--sizes", "16", "20", "24", "--batch", "2", "--seconds", "1e-6", "--rounds", "2", "--memory", "0.1"]
    words += ["--dtype", "float32", "--out", "out"]
    code, out, err = call(capsys, "bench", "Tiny/*", *words)
    assert code == 0
    assert out.splitlines()[0].split()[:5] == ["model", "size", "mode", "batch", "images/s"]
    assert "out/bench.png" in out
    assert "[2/2] Tiny/8, 24 pixels" in err  # 20 becomes 16, which is there already
    with Image.open(tmp_path / "out/bench.png") as image:
        assert min(image.size) > 300
    code, out, _ = call(capsys, "bench", "Tiny/*", *words, "--json")
    assert code == 0
    assert json.loads(out) == json.loads((tmp_path / "out/bench.json").read_text())
    assert 0.9 * 102 < json.loads(out)["rows"][0]["largest"] <= 102  # MiB in 0.1 GiB


def test_models_and_sizes() -> None:
    rows = row_keys(FIGURE_12, BenchOptions(mode="both"))
    assert len(rows) == len(set(rows)) == 2 * len(FIGURE_12) * 5 == 80
    assert row_keys(["ViT-B/16", "ViT-B/*"], BenchOptions(sizes=(64,))) == [
        ("infer", f"ViT-B/{patch}", 70 if patch == 14 else 64) for patch in (16, 8, 14, 32)
    ]
    assert [size for _, _, size in row_keys(["ViT-H/14"], BenchOptions())] == [70, 140, 224, 392, 518]
    assert [size for _, _, size in row_keys(["R50x1"], BenchOptions())] == [64, 128, 224, 384, 512]


@pytest.mark.parametrize("limit", [0, 1, 3, 17, 100, 5000, 2**15, 10**6])
def test_the_largest_batch(limit: int) -> None:
    tried: list[int] = []
    batch = largest_batch(lambda batch: tried.append(batch) or batch <= limit)
    assert min(limit, MAX_BATCH) * 15 / 16 <= batch <= min(limit, MAX_BATCH)
    assert len(tried) == len(set(tried)) < 24


@pytest.mark.parametrize(
    ("rates", "most", "best"),
    [
        ({1: 10, 2: 20, 4: 30, 8: 30.5, 16: 30.8, 32: 99}, 64, 4),  # tried up to 16
        ({1: 10, 2: 9, 4: 30, 8: 10, 16: 10}, 64, 4),  # one doubling without a gain is skipped
        ({1: 10, 2: 20, 4: 40}, 5, 4),
    ],
)
def test_the_fastest_batch(rates: dict[int, float], most: int, best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(module, "build", lambda spec: seen.append(spec.batch))
    timing = SimpleNamespace(timeit=lambda _: SimpleNamespace(mean=seen[-1] / rates[seen[-1]]))
    monkeypatch.setattr(module.measure, "timer", lambda step: timing)
    assert fastest_batch(StepSpec(TINY, "infer", 1, "float32"), lambda batch: batch <= most) == best
    assert seen == [batch for batch in rates if batch <= 16]


def test_peak_on_a_cpu() -> None:
    """In training with gradients and Adam's two moments; it grows with the batch."""
    cases: tuple[tuple[Mode, int], ...] = (("infer", 4), ("train", 16))
    for mode, weights in cases:
        one, many = (peak_bytes(StepSpec(TINY, mode, batch, "float32")) or 0 for batch in (1, 65))
        images = 64 * 3 * 16 * 16 * 4
        assert weights * TINY.num_parameters < one < weights * TINY.num_parameters + 2**16
        assert one + images < many < one + 20 * images


def test_panels_of_fig_12() -> None:
    def row(mode: str, model: str, size: int, speed: float, largest: int | None) -> dict[str, Any]:
        speeds = {"median": speed}
        return {"mode": mode, "model": model, "image_size": size, "images_per_s": speeds, "largest": largest}

    rows = [row("infer", "ViT-B/16", 224, 10.0, 44), row("infer", "ViT-B/16", 64, 100.0, 156)]
    rows += [row("train", "R50x1", 64, 50.0, None), {"mode": "infer", "image_size": 1, "skipped": "why"}]
    speed, largest, training = panels({"settings": {"memory": 4.0}, "rows": rows})
    assert (speed.title, largest.title) == ("Inference: speed", "Inference: largest batch in 4 GiB")
    assert [(line.name, line.x, line.y) for line in speed.series] == [("ViT-B/16", [64, 224], [100.0, 10.0])]
    assert largest.series[0].y == [156, 44]
    assert training.title == "Training: speed"
    (alone, _) = panels({"settings": {"memory": 4.0}, "rows": rows[:1]})
    assert alone.title == "Inference of ViT-B/16: speed"
