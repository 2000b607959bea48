"""`vitlab bench`: every row is measured once and saved at once; what is skipped has a reason."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from program import call

from vitlab.cost import bench as module
from vitlab.cost.bench import FIGURE_12, SIZES, Settings, bench
from vitlab.cost.peers import OURS
from vitlab.cost.report import CEILING, panels, table
from vitlab.models import ViTConfig
from vitlab.models import registry as models
from vitlab.weights import ParityError

TINY = ViTConfig(image_size=16, patch_size=8, width=16, depth=1, heads=2, mlp_dim=24, num_classes=5)
ONE = Settings(
    models=("Tiny/8",), sizes=(16,), batch=2, seconds=1e-6, rounds=3, largest=False, dtype="float32", memory=0.1
)
MIB = 2**20


class FakePeakMemory:
    """1 MiB per image, and 64 MiB more for a peer."""

    def __init__(self, name: str, work: Any, budget: int) -> None:
        self.name, self.budget = name, budget

    def __enter__(self) -> Callable[[int], int | None]:
        def peak(batch: int) -> int | None:
            taken = batch * MIB + (0 if self.name == OURS else 64 * MIB)
            return taken if taken <= self.budget else None

        return peak

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(models.MODELS, "Tiny/8", TINY)
    monkeypatch.setattr(module, "PeakMemory", FakePeakMemory)
    monkeypatch.setattr(module, "copy_bandwidth", lambda _: 5e9)
    monkeypatch.setattr(module, "panels", lambda _: [])  # drawing takes longer than everything else,
    monkeypatch.setattr("gc.collect", lambda: 0)  # except for a collection among the objects of all tests
    monkeypatch.chdir(tmp_path)


def fake_rates(monkeypatch: pytest.MonkeyPatch, rates: dict[str, list[float]]) -> list[set[str]]:
    """Makes these the rates of every row; returns a list that fills with the contenders of each row."""
    seen: list[set[str]] = []

    def time_interleaved(steps: dict[str, Callable[[], object]], *_: object) -> dict[str, list[float]]:
        for step in steps.values():
            step()
        seen.append(set(steps))
        return {name: rates[name] for name in steps}

    monkeypatch.setattr(module, "time_interleaved", time_interleaved)
    return seen


def test_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = bench(ONE, tmp_path)
    (row,) = record["rows"]
    assert (row["model"], row["image_size"], row["mode"], row["batch"]) == ("Tiny/8", 16, "infer", 2)
    speed = row["contenders"][OURS]["images_per_s"]
    assert len(speed["all"]) == 3
    assert 0 < speed["quartiles"][0] <= speed["median"] <= speed["quartiles"][1]
    assert row["tflops"] == pytest.approx(speed["median"] * 2 * TINY.forward_macs / 1e12)
    assert row["mfu"] is None  # the peak of a CPU is unknown
    assert row["contenders"][OURS]["peak_bytes"] == 2 * MIB
    assert 0 < row["ceiling"]["share"]["median"] < 1
    assert record["settings"]["dtype"] == "float32"
    assert record["machine"]["threads"] == torch.get_num_threads()
    assert record["copy_gb_per_s"] == 5
    assert json.loads((tmp_path / "bench.json").read_text()) == record
    progress = capsys.readouterr().err
    assert "measuring the speed of copying\n" in progress
    assert "[1/1] Tiny/8, 16 pixels, inference\n" in progress  # before it is measured
    assert "[1/1] Tiny/8, 16 pixels, inference: batch 2: " in progress


def test_ratios_are_to_the_best_variant_of_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    rates = {
        OURS: [10.0, 5.0, 10.0], CEILING: [20.0, 20.0, 20.0],
        "timm, fused attention": [4.0, 4.0, 4.0], "timm, attention as products": [5.0, 2.5, 8.0],
    }  # fmt: skip
    seen = fake_rates(monkeypatch, rates)
    settings = dataclasses.replace(ONE, mode="train", against=("timm",), profile=True)
    (row,) = bench(settings, tmp_path)["rows"]
    assert seen == [set(rates)]
    assert row["ratio"]["timm"]["to"] == "timm, attention as products"
    assert row["ratio"]["timm"]["all"] == [2.0, 2.0, 1.25]
    assert row["contenders"][OURS]["images_per_s"]["median"] == 20
    assert row["tflops"] == pytest.approx(20 * 6 * TINY.forward_macs / 1e12)
    assert row["ceiling"]["share"]["median"] == 0.5
    assert "fused AdamW" in row["contenders"]["timm, fused attention"]["given"]
    assert sum(row["parts"].values()) == pytest.approx(1)


def test_a_peer_that_cannot_take_part_is_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    settings = dataclasses.replace(ONE, against=("timm",))
    (row,) = bench(dataclasses.replace(settings, memory=0.05), tmp_path / "a")["rows"]
    too_large = "a batch of 2 does not fit into 0.05 GiB (--memory)"
    assert row["unable"] == {"timm, fused attention": too_large, "timm, attention as products": too_large}
    assert row["ratio"] == {}

    class Different(FakePeakMemory):
        def __enter__(self) -> Callable[[int], int | None]:
            if self.name == "timm, fused attention":
                raise ParityError("different logits")
            return super().__enter__()

    monkeypatch.setattr(module, "PeakMemory", Different)
    (row,) = bench(settings, tmp_path / "b")["rows"]
    assert row["unable"] == {"timm, fused attention": "different logits"}
    assert row["ratio"]["timm"]["to"] == "timm, attention as products"


def test_largest_and_automatic_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "seconds_per_step", lambda _: 1.0)  # the larger the batch, the more images/s
    (row,) = bench(dataclasses.replace(ONE, batch=None, largest=True, memory=21 / 1024), tmp_path)["rows"]
    assert row["largest"] == {"batch": 21, "peak": 21 * MIB, "fails_at": 22}
    assert (row["batch"], row["batch_is"]) == (16, "where ours is fastest")


def test_what_does_not_fit_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = bench(dataclasses.replace(ONE, memory=1 / 1024), tmp_path)
    assert "a batch of 2 does not fit" in record["rows"][0]["skipped"]
    assert "[1/1] Tiny/8, 16 pixels, inference: skipped: a batch of 2 does not fit" in capsys.readouterr().err
    assert table(record) == []


def test_what_does_not_fit_side_by_side_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceiling's operands count on a CPU. A GPU raises an error, and the next rows are measured."""
    settings = dataclasses.replace(ONE, memory=2 / 1024)
    taken = 2 * MIB + 4 * sum(product.numel for product in module.count_products(TINY, 2, training=False))
    monkeypatch.setattr(module, "free_memory", lambda: taken)
    assert "skipped" not in bench(settings, tmp_path / "a")["rows"][0]
    monkeypatch.setattr(module, "free_memory", lambda: taken - 1)
    (row,) = bench(settings, tmp_path / "b")["rows"]
    assert "side by side" in row["skipped"]

    outcomes = [torch.OutOfMemoryError(), None]

    def time_interleaved(steps: dict[str, Any], *_: object) -> dict[str, list[float]]:
        if error := outcomes.pop(0):
            raise error
        return {name: [1.0] for name in steps}

    monkeypatch.setattr(module, "free_memory", lambda: 2**40)
    monkeypatch.setattr(module, "time_interleaved", time_interleaved)
    first, second = bench(dataclasses.replace(ONE, sizes=(16, 24)), tmp_path / "c")["rows"]
    assert "give a smaller --batch" in first["skipped"]
    assert "skipped" not in second


@pytest.mark.parametrize("text", ["[]", "{", "{}"])
def test_a_file_of_something_else(text: str, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(ValueError, match=r"bench\.json is not a record of `vitlab bench`; give another --out"):
        bench(ONE, tmp_path)
    assert (tmp_path / "bench.json").read_text() == text


def test_an_interrupted_bench_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, measure, sizes = dataclasses.replace(ONE, sizes=(16, 24)), module._measure, []

    def interrupted(settings: Settings, key: tuple, say: Callable[[str], None]) -> dict[str, Any]:
        sizes.append(key[2])
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return measure(settings, key, say)

    monkeypatch.setattr(module, "_measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bench(settings, tmp_path)
    first = json.loads((tmp_path / "bench.json").read_text())["rows"]
    record = bench(settings, tmp_path)
    assert sizes == [16, 24, 24]
    assert record["rows"][:1] == first
    assert [row["image_size"] for row in record["rows"]] == [16, 24]
    assert bench(settings, tmp_path) == record
    assert sizes == [16, 24, 24]
    with pytest.raises(ValueError, match=r"was measured differently \(rounds 3 -> 4\); give another --out"):
        bench(dataclasses.replace(settings, rounds=4), tmp_path)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "panels", panels)
    words = ["--sizes", "16,20,24", "--batch", "2", "--seconds", "1e-6", "--rounds", "2", "--memory", "0.1"]
    words += ["--dtype", "float32", "--out", "out"]
    code, out, err = call(capsys, "bench", "Tiny/*", *words)
    assert code == 0
    assert out.splitlines()[0].split()[:5] == ["model", "size", "mode", "batch", "images/s"]
    assert "copying: 5 GB/s" in out
    assert "out/bench.png" in out
    assert "[2/2] Tiny/8, 24 pixels" in err  # 20 becomes 16, which is there already
    with Image.open(tmp_path / "out/bench.png") as image:
        assert min(image.size) > 500
    code, out, _ = call(capsys, "bench", "Tiny/*", *words, "--json")
    assert json.loads(out) == json.loads((tmp_path / "out/bench.json").read_text())
    assert 0.9 * 102 < json.loads(out)["rows"][0]["largest"]["batch"] <= 102  # MiB in 0.1 GiB


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("ViT-B/17", "unknown model 'ViT-B/17'"),
        ("--sizes 64,big", "--sizes is '64,big'"),
        ("--sizes 0", "sizes"),
        ("--batch 0", "batch is 0"),
        ("--batch some", "--batch is 'some'"),
        ("--against time", "unknown peer 'time'; the nearest: timm"),
        ("--against openvino", "unknown peer 'openvino'"),
        ("--no-largest", "--batch auto requires"),
        ("--profile", "--profile reports the parts of a training step"),
        ("--seconds -1", "seconds is -1.0"),
        ("--memory 1e9", "a step may take 1e+09 GiB"),
        ("--device tpu", "'tpu'"),
    ],
)
def test_bad_input(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "bench", *words.split())
    assert (code, out) == (2, "")
    assert message in err.replace("\n", " ")


def test_models_and_sizes() -> None:
    rows = Settings(mode="both").rows
    assert len(rows) == len(set(rows)) == 2 * len(FIGURE_12) * len(SIZES) == 80
    assert Settings(models=("ViT-B/16", "ViT-B/*"), sizes=(64,)).rows == [
        ("infer", f"ViT-B/{patch}", 70 if patch == 14 else 64) for patch in (16, 8, 14, 32)
    ]
    assert [size for _, _, size in Settings(models=("ViT-H/14",)).rows] == [70, 126, 224, 378, 518]
    assert [size for _, _, size in Settings(models=("R50x1",)).rows] == list(SIZES)
