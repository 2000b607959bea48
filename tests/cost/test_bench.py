"""`vitlab bench`: every row once, kept at once; what is left out is said; the figure is Fig. 12."""

import dataclasses
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from program import call

from vitlab.cost import bench as module
from vitlab.cost.bench import CEILING, FIGURE_12, SIZES, Settings, bench, panels, table
from vitlab.cost.peers import OURS
from vitlab.inspect import figures, plots
from vitlab.models import ViTConfig
from vitlab.models import registry as models
from vitlab.weights import ParityError

TINY = ViTConfig(image_size=16, patch_size=8, width=16, depth=1, heads=2, mlp_dim=24, num_classes=5)
ONE = Settings(
    models=("Tiny/8",), sizes=(16,), batch=2, seconds=1e-6, rounds=3, largest=False, dtype="float32", memory=0.1
)
MIB = 2**20


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model of a moment; and memory that is told by a rule: 1 MiB a image, 64 MiB for a peer."""
    monkeypatch.setitem(models.MODELS, "Tiny/8", TINY)
    monkeypatch.setattr(module, "Trial", Told)
    monkeypatch.setattr(module, "copy_bandwidth", lambda _: 5e9)
    monkeypatch.setattr(module, "panels", lambda _: [])  # drawing takes longer than all the rest,
    monkeypatch.setattr("gc.collect", lambda: 0)  # but for looking through all that the tests hold
    monkeypatch.chdir(tmp_path)


class Told:
    def __init__(self, name: str, work: Any, budget: int) -> None:
        self.name, self.budget = name, budget

    def __enter__(self) -> Callable[[int], int | None]:
        def peak(batch: int) -> int | None:
            taken = batch * MIB + (0 if self.name == OURS else 64 * MIB)
            return taken if taken <= self.budget else None

        return peak

    def __exit__(self, *_: object) -> None:
        pass


def measured(monkeypatch: pytest.MonkeyPatch, rates: dict[str, list[float]]) -> list[set[str]]:
    """Has the rounds come out so; returns who took part in each row, as it fills."""
    seen: list[set[str]] = []

    def in_turn(steps: dict[str, Callable[[], object]], *_: object) -> dict[str, list[float]]:
        for step in steps.values():
            step()
        seen.append(set(steps))
        return {name: rates[name] for name in steps}

    monkeypatch.setattr(module, "in_turn", in_turn)
    return seen


def test_a_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = bench(ONE, tmp_path)
    (row,) = found["rows"]
    assert (row["model"], row["image_size"], row["mode"], row["batch"]) == ("Tiny/8", 16, "infer", 2)
    speed = row["contenders"][OURS]["images_per_s"]
    assert len(speed["all"]) == 3
    assert 0 < speed["quartiles"][0] <= speed["median"] <= speed["quartiles"][1]
    assert row["tflops"] == pytest.approx(speed["median"] * 2 * TINY.forward_macs / 1e12)
    assert row["mfu"] is None  # no CPU's peak is known
    assert row["contenders"][OURS]["peak_bytes"] == 2 * MIB
    assert 0 < row["ceiling"]["share"]["median"] < 1
    assert found["settings"]["dtype"] == "float32"
    assert found["machine"]["threads"] == torch.get_num_threads()
    assert found["copy_gb_per_s"] == 5
    assert json.loads((tmp_path / "bench.json").read_text()) == found
    assert "[1/1] Tiny/8, 16 pixels, inference: batch 2: " in capsys.readouterr().err


def test_it_says_what_it_measures_before_it_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal, too."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "build", stop)
    with pytest.raises(KeyboardInterrupt):
        bench(ONE, tmp_path / "a")
    assert "[1/1] Tiny/8, 16 pixels, inference\n" in capsys.readouterr().err
    monkeypatch.setattr(module, "copy_bandwidth", stop)
    with pytest.raises(KeyboardInterrupt):
        bench(ONE, tmp_path / "b")
    assert capsys.readouterr().err == "measuring the speed of copying\n"


def test_ratios_are_to_the_best_variant_round_by_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")
    rates = {
        OURS: [10.0, 5.0, 10.0], CEILING: [20.0, 20.0, 20.0],
        "timm, fused attention": [4.0, 4.0, 4.0], "timm, attention as products": [5.0, 2.5, 8.0],
    }  # fmt: skip
    seen = measured(monkeypatch, rates)
    settings = dataclasses.replace(ONE, mode="train", against=("timm",), profile=True)
    (row,) = bench(settings, tmp_path)["rows"]
    assert seen == [set(rates)]
    assert row["ratio"]["timm"]["to"] == "timm, attention as products"
    assert row["ratio"]["timm"]["all"] == [2.0, 2.0, 1.25]
    assert row["contenders"][OURS]["images_per_s"]["median"] == 20
    assert row["tflops"] == pytest.approx(20 * 6 * TINY.forward_macs / 1e12)
    assert row["ceiling"]["share"]["median"] == 0.5
    assert "fused_attn" not in row["contenders"][OURS]["given"]
    assert (
        row["contenders"]["timm, fused attention"]["given"]
        == "float32, fused AdamW, gradients clipped at 1, fused attention"
    )
    assert sum(row["parts"].values()) == pytest.approx(1)


def test_a_peer_that_does_not_fit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("timm")
    (row,) = bench(dataclasses.replace(ONE, against=("timm",), memory=0.05), tmp_path)["rows"]
    assert set(row["unable"]) == {"timm, fused attention", "timm, attention as products"}
    assert row["ratio"] == {}
    assert "no timm, fused attention: a batch of 2 does not fit into 0.05 GiB (--memory)" in capsys.readouterr().err


def test_a_peer_that_answers_otherwise_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("timm")

    class Otherwise(Told):
        def __enter__(self) -> Callable[[int], int | None]:
            if self.name == "timm, fused attention":
                raise ParityError("it answers otherwise")
            return lambda batch: batch * MIB

    monkeypatch.setattr(module, "Trial", Otherwise)
    (row,) = bench(dataclasses.replace(ONE, against=("timm",)), tmp_path)["rows"]
    assert row["unable"] == {"timm, fused attention": "it answers otherwise"}
    assert row["ratio"]["timm"]["to"] == "timm, attention as products"


def test_largest_and_automatic_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "warm_up", lambda *_: 1.0)  # the more images, the more a second
    (row,) = bench(dataclasses.replace(ONE, batch=None, largest=True, memory=21 / 1024), tmp_path)["rows"]
    assert row["largest"] == {"batch": 21, "peak": 21 * MIB, "fails_at": 22}
    assert (row["batch"], row["batch_is"]) == (16, "where ours is fastest")


def test_sizes_that_the_patch_divides() -> None:
    plan = Settings(models=("ViT-H/14", "ViT-B/16", "R50x1"), sizes=(64, 128, 224, 384, 512)).plan
    assert [size for _, name, size in plan if name == "ViT-H/14"] == [70, 126, 224, 378, 518]
    assert [size for _, name, size in plan if name != "ViT-H/14"] == [64, 128, 224, 384, 512] * 2


def test_what_cannot_be_is_left_out_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    too_small = bench(dataclasses.replace(ONE, memory=1 / 1024), tmp_path / "b")
    assert too_small["rows"][0]["skipped"] == "a batch of 2 does not fit into 0.000976562 GiB (--memory)"
    assert "[1/1] Tiny/8, 16 pixels, inference: left out: a batch of 2 does not fit" in capsys.readouterr().err
    assert table(too_small) == []


def test_what_does_not_fit_side_by_side_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceiling's operands count on a CPU; a GPU says so by itself, and the rows that follow are measured."""
    two, taken = dataclasses.replace(ONE, memory=2 / 1024), 2 * MIB
    taken += 4 * sum(each.numbers for each in module.products(TINY, 2, training=False))
    monkeypatch.setattr(module, "free_memory", lambda: taken)
    assert "skipped" not in bench(two, tmp_path / "a")["rows"][0]
    monkeypatch.setattr(module, "free_memory", lambda: taken - 1)
    (row,) = bench(two, tmp_path / "b")["rows"]
    assert row["skipped"] == "side by side the contenders and the ceiling take 0.0 GiB, and 0.0 are free"

    def refused(steps: dict[str, Any], *_: object) -> dict[str, list[float]]:
        if not seen:
            seen.append(1)
            raise torch.OutOfMemoryError
        return {name: [1.0] for name in steps}

    seen: list[int] = []
    monkeypatch.setattr(module, "free_memory", lambda: 2**40)
    monkeypatch.setattr(module, "in_turn", refused)
    first, second = bench(dataclasses.replace(ONE, sizes=(16, 24)), tmp_path / "c")["rows"]
    assert first["skipped"] == "the contenders and the ceiling do not fit side by side; give a smaller --batch"
    assert "skipped" not in second


@pytest.mark.parametrize("text", ["[]", "{", "{}"])
def test_a_file_of_something_else(text: str, tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_text(text)
    with pytest.raises(ValueError, match=r"bench\.json is not of `vitlab bench`; give another --out"):
        bench(ONE, tmp_path)
    assert (tmp_path / "bench.json").read_text() == text


def test_interrupted_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, real, asked = dataclasses.replace(ONE, sizes=(16, 24)), module._measured, []

    def stopped(settings: Settings, key: tuple, say: Callable[[str], None]) -> dict[str, Any]:
        asked.append(key[2])
        if len(asked) == 2:
            raise KeyboardInterrupt
        return real(settings, key, say)

    monkeypatch.setattr(module, "_measured", stopped)
    with pytest.raises(KeyboardInterrupt):
        bench(settings, tmp_path)
    first = json.loads((tmp_path / "bench.json").read_text())["rows"]
    found = bench(settings, tmp_path)
    assert asked == [16, 24, 24]
    assert found["rows"][:1] == first
    assert [row["image_size"] for row in found["rows"]] == [16, 24]
    bench(settings, tmp_path)
    assert asked == [16, 24, 24]
    with pytest.raises(ValueError, match=r"was measured otherwise \(rounds 3 -> 4\); give another --out"):
        bench(dataclasses.replace(settings, rounds=4), tmp_path)


def row(mode: str, model: str, size: int, speed: float, largest: int, fails: bool = True) -> dict[str, Any]:
    figures = {"median": speed, "quartiles": [0.9 * speed, 1.3 * speed], "all": [speed]}
    biggest = {"batch": largest, "peak": 1, "fails_at": largest + 1 if fails else None}
    ceiling = {"images_per_s": {"median": 3 * speed}, "tflops": 1.2345, "share": {"median": 1 / 3}}
    return {"mode": mode, "model": model, "image_size": size, "batch": 1, "tflops": 0.4, "mfu": None, "ratio": {},
            "contenders": {OURS: {"images_per_s": figures, "peak_bytes": 1}}, "ceiling": ceiling,
            "largest": biggest}  # fmt: skip


def test_a_search_that_ended_without_a_failure_is_marked() -> None:
    rows = [row("infer", "ViT-B/16", 64, 100, 2**15, fails=False), row("infer", "ViT-B/16", 224, 10, 512)]
    record = {"machine": {"device": "cpu", "threads": 2}, "settings": {"memory": 4.0, "against": []}, "rows": rows}
    assert [cells["largest"] for cells in table(record)] == [">= 32768", 512]
    _, largest = panels(record)
    assert list(largest.series[0].notes) == [">= 32768", ""]
    assert largest.series[0].y == [2**15, 512]
    assert min(Image.open(io.BytesIO(figures.png(plots.panels(panels(record))))).size) > 200


def test_fig_12() -> None:
    rows = [row("infer", "ViT-B/16", size, 4e4 / size, 10_000 // size) for size in (224, 64)]
    rows += [row("train", "ViT-B/16", 64, 100, 7), {"mode": "infer", "model": "x", "image_size": 1, "skipped": "why"}]
    record = {"machine": {"device": "cpu", "threads": 2}, "settings": {"memory": 4.0}, "rows": rows}
    speed, largest, *training = panels(record)
    named = "of ViT-B/16"  # there is one, and so no legend
    assert (speed.title, largest.title) == (f"Inference {named}: speed", f"Inference {named}: largest batch in 4 GiB")
    assert [panel.title for panel in training] == [
        f"Training {named}: speed",
        f"Training {named}: largest batch in 4 GiB",
    ]
    several = panels(record | {"rows": [*rows, row("infer", "ViT-S/16", 64, 100, 7)]})
    assert [panel.title for panel in several[:1]] == ["Inference: speed"]
    series, ceiling = speed.series
    assert (ceiling.name, ceiling.dashed, ceiling.x) == (CEILING, True, [64, 224])
    assert ceiling.y == [3 * y for y in series.y]
    assert [each.name for each in several[0].series] == ["ViT-B/16", "ViT-S/16"]
    assert series.x == [64, 224]
    assert series.y == [4e4 / 64 / 2, 4e4 / 224 / 2]  # of one core
    assert series.spread == pytest.approx([0.2 * y for y in series.y])
    assert largest.series[0].y == [156, 44]
    assert "core" in speed.y_label


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "panels", panels)
    words = ["--sizes", "16,20,24", "--batch", "2", "--seconds", "1e-6", "--rounds", "2", "--memory", "0.1"]
    words += ["--dtype", "float32", "--out", "out"]
    code, out, err = call(capsys, "bench", "Tiny/*", *words)
    assert code == 0
    assert out.splitlines()[0].split()[:5] == ["model", "size", "mode", "batch", "images/s"]
    assert out.splitlines()[-2] == "copying: 5 GB/s; ceiling: TFLOP/s of the products alone"
    assert {"ceiling", "largest"} < set(out.splitlines()[0].split())
    assert out.splitlines()[-1] == "figure: out/bench.png · result: out/bench.json"
    assert "[2/2] Tiny/8, 24 pixels" in err  # 20 gives way to 16, which is there
    assert min(Image.open(io.BytesIO((tmp_path / "out/bench.png").read_bytes())).size) > 500
    code, out, _ = call(capsys, "bench", "Tiny/*", *words, "--json")
    assert json.loads(out) == json.loads((tmp_path / "out/bench.json").read_text())
    assert 0.9 * 102 < json.loads(out)["rows"][0]["largest"]["batch"] <= 102  # MiB in 0.1 GiB


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("ViT-B/17", "unknown model 'ViT-B/17'; the nearest: "),
        ("--sizes 64,big", "--sizes is '64,big'; give whole numbers, with commas between several."),
        ("--sizes 0", "sizes are (0,); give sides in pixels"),
        ("--batch 0", "batch is 0; it must be positive"),
        ("--batch some", "--batch is 'some'; give one whole number, or auto."),
        ("--batch 64,128", "--batch is '64,128'; give one whole number, or auto."),
        ("--against time", "unknown peer 'time'; the nearest: timm"),
        ("--no-largest", "--batch auto has to know what fits"),
        ("--profile", "--profile tells the parts of a training step; give --mode train or both"),
        ("--seconds -1", "seconds is -1.0; it must be positive"),
        ("--memory 1e9", "a step may take 1e+09 GiB and "),
        ("--device tpu", "is unknown; give auto, cpu, cuda"),
    ],
)
def test_bad_input(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "bench", *words.split())
    assert (code, out) == (2, "")
    assert said in err.replace("\n", " ")


def test_the_models_and_sizes_of_the_figure() -> None:
    plan = Settings(mode="both").plan
    assert len(plan) == len(set(plan)) == 2 * len(FIGURE_12) * len(SIZES) == 80
    assert all(math.isfinite(models.get_config(name).forward_macs) for _, name, _ in plan)
    assert Settings(models=("ViT-B/16", "ViT-B/*"), sizes=(64,)).plan == [
        ("infer", f"ViT-B/{patch}", 70 if patch == 14 else 64) for patch in (16, 8, 14, 32)
    ]
