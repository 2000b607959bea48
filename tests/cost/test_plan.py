"""What a run would cost: the paper's own figures, the arithmetic of hours, and what is said of unknown names."""

import dataclasses
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from program import call

from vitlab.config import DataConfig, TrainConfig
from vitlab.cost import plan
from vitlab.cost.plan import as_text, core_days, tell
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.recipes.tiny import digits
from vitlab.studies.scaling import SCALING, TABLE6
from vitlab.train.progress import DEVICES

ask = functools.partial(tell, device="h100", count=1, mfu="0.4")
SMALL = dataclasses.replace(digits(), model=dataclasses.replace(digits().model, depth=2), batch_size=64, epochs=10.0)
IMAGES = 1438  # digits' trainval


@pytest.fixture
def _no_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory has tests of its own (cost/test_memory.py), and of large models it takes seconds to count."""
    monkeypatch.setattr(plan, "process_bytes", lambda config, sizes, images, **how: {"activations": images})


# ------------------------------------------------------------------------------------------------------------ in time


@pytest.mark.usefixtures("_no_counting")
@pytest.mark.parametrize(
    ("config", "printed"),
    [
        pytest.param(point.config, run.exaflops, id=f"{run.model}-{run.epochs}")
        for point, run in zip(SCALING.points("paper"), TABLE6, strict=True)
        if (run.model, run.epochs) != ("R50+ViT-L/16", 7)  # see docs/paper.md
    ],
)
def test_exaflops_of_table_6(config: TrainConfig, printed: int) -> None:
    """Within 2 %, and the half that a figure without decimals leaves open; it is what people read, too."""
    found = ask(config, count=256)
    assert abs(found["exaflops"] - printed) <= 0.02 * printed + 0.5
    read = re.search(r"([\d,.]+) exaFLOPs of training", as_text(found))
    assert read
    assert float(read[1].replace(",", "")) == pytest.approx(found["exaflops"], rel=1e-3)


@pytest.mark.usefixtures("_no_counting")
def test_hours() -> None:
    """ViT-L/16 for 14 epochs: 1,567 exaFLOPs at 256 x 989 TFLOP/s x 0.4 are 4.3 hours."""
    config = PRETRAIN["jft"]("ViT-L/16")
    found = ask(config, count=256)
    assert found["steps"] == round(14 * 303e6 / 4096)
    assert found["hours"] == pytest.approx(found["exaflops"] * 1e18 / (256 * 989e12 * 0.4) / 3600)
    assert found["hours"] == pytest.approx(4.3, abs=0.01)
    assert found["device_hours"] == pytest.approx(256 * found["hours"])
    assert (found["tflops"], found["mfu"], found["mfu_is"]) == (pytest.approx(395.6), 0.4, "assumed")
    assert found["images_per_s"] == pytest.approx(14 * 303e6 / (found["hours"] * 3600), rel=1e-5)
    assert found["images_per_s_each"] == pytest.approx(found["images_per_s"] / 256)
    assert found["bytes_per_s"] == pytest.approx(found["images_per_s"] * 110e3)
    assert ask(config, count=256, image_kb=29.0)["bytes_per_s"] == pytest.approx(found["images_per_s"] * 29e3)
    assert ask(config, count=128)["hours"] == pytest.approx(2 * found["hours"])
    assert ask(config, count=256, mfu="0.2")["hours"] == pytest.approx(2 * found["hours"])
    slower = ask(config, count=256, device="a100")
    assert slower["hours"] / found["hours"] == pytest.approx(989 / 312)


def test_core_days_of_table_2() -> None:
    """The three runs took 19.7, 26.7 and 23.8 TFLOP/s of a core; all three together come out as printed."""
    found = [core_days(plan._papers_exaflops(recipe, model)) for recipe, model, _ in plan.TABLE2]
    assert sum(each["days"] for each in found) == pytest.approx(2500 + 680 + 230)
    assert (found[0]["lowest_tflops"], found[0]["highest_tflops"]) == pytest.approx((19.7, 26.7), abs=0.05)
    assert 19.7 < found[0]["tflops"] < 26.7 < DEVICES["tpuv3-core"].tflops
    assert found[0]["days"] == pytest.approx(2500, rel=0.1)


@pytest.mark.usefixtures("_no_counting")
@pytest.mark.parametrize("recipe", PRETRAIN)
def test_every_recipe_of_pretraining(recipe: str) -> None:
    found = ask(PRETRAIN[recipe](), count=4)
    assert found["model"]["parameters"] > 0
    assert found["hours"] > 0
    assert as_text(found).count("\n") > 8


@pytest.mark.usefixtures("_no_counting")
def test_finetuning_is_counted_with_its_search() -> None:
    """Four rates and a final run of 10,000 steps; and with 10 classes in place of the recipe's."""
    found = ask(FINETUNE["cifar10"]())
    assert (found["steps"], found["examples"]) == (50_000, 50_000)
    assert (
        found["model"]["parameters"] == dataclasses.replace(FINETUNE["cifar10"]().model, num_classes=10).num_parameters
    )
    once = dataclasses.replace(FINETUNE["cifar10"](), learning_rates=())
    assert found["exaflops"] == pytest.approx(5 * ask(once)["exaflops"])
    folder = dataclasses.replace(once, data=DataConfig(name="folder:mine"))  # so many steps, whatever is in it
    unknown = ask(folder)
    assert (unknown["steps"], unknown["examples"], unknown["epochs"]) == (10_000, None, None)
    assert "epochs of" not in as_text(unknown)


@pytest.mark.usefixtures("_no_counting")
def test_ones_own_images() -> None:
    """How many they are has to be said where it decides the length."""
    own = FINETUNE["own"]()
    with pytest.raises(ValueError, match="goes by the number of training images; give it with --examples"):
        ask(own)
    assert (ask(own, examples=1000)["steps"], ask(own, examples=30_000)["steps"]) == (800, 16_000)  # three rates
    folder = dataclasses.replace(SMALL, data=DataConfig(name="folder:mine"))
    with pytest.raises(ValueError, match=r"how many images folder:mine has is not known.*--examples"):
        ask(folder)
    assert ask(folder, examples=6400)["steps"] == 1000


# ---------------------------------------------------------------------------------------------------------- in memory


def test_ways_to_share() -> None:
    """Side by side, each the sum of its parts; what more share is less for each."""
    found, more = (ask(SMALL, count=count)["memory"] for count in (2, 8))
    assert list(found) == ["ddp", "fsdp"]
    for way in found.values():
        assert way["total"] == sum(way["parts"].values())
        assert way["fits"]
        assert "largest_microbatch" not in way
    assert more["fsdp"]["parts"]["weights"] == pytest.approx(found["fsdp"]["parts"]["weights"] / 4, abs=2)
    assert more["ddp"]["parts"]["weights"] == found["ddp"]["parts"]["weights"]
    assert more["fsdp"]["parts"]["activations"] < found["fsdp"]["parts"]["activations"] / 3  # 8 images each, not 32
    assert list(ask(SMALL)["memory"]) == ["alone"]


def test_what_does_not_fit_is_told_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ask(SMALL)
    total = whole["memory"]["alone"]["total"]
    small = dataclasses.replace(DEVICES["l4"], gigabytes=0)
    monkeypatch.setitem(DEVICES, "l4", small)
    monkeypatch.setattr(type(small), "memory", property(lambda device: total - 1 if device is small else 10**12))
    found = ask(SMALL, device="l4")
    way = found["memory"]["alone"]
    assert not way["fits"]
    most = way["largest_microbatch"]
    assert 32 < most < 64
    assert f"alone: --microbatch {most} would fit." in as_text(found)
    assert ask(dataclasses.replace(SMALL, microbatch=most), device="l4")["memory"]["alone"]["fits"]
    assert not ask(dataclasses.replace(SMALL, microbatch=most + 1), device="l4")["memory"]["alone"]["fits"]
    monkeypatch.setattr(type(small), "memory", property(lambda device: 10))
    assert "alone: not even one image at once fits." in as_text(ask(SMALL, device="l4"))


@pytest.mark.usefixtures("_no_counting")
def test_checkpoint_and_precision(tmp_path: Path) -> None:
    """Weights, Adam's two moments and the average are what a run really leaves, up to the file's own words."""
    from vitlab.pipelines.pretrain import pretrain

    config = dataclasses.replace(SMALL, epochs=None, steps=1, data=dataclasses.replace(SMALL.data, classes=(0, 1)))
    found = ask(config)
    assert found["precision"] == "autocast"
    assert ask(dataclasses.replace(config, precision="float32"))["precision"] == "float32"
    pretrain(config, tmp_path, device="cpu", tensorboard=False)
    (state,) = tmp_path.glob("checkpoints/*/*.safetensors")
    assert state.stat().st_size == pytest.approx(found["checkpoint_bytes"], rel=0.02)
    assert found["checkpoint_bytes"] == 4 * 4 * found["model"]["parameters"]


# --------------------------------------------------------------------------------------------------- how fast it goes


def test_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the processor, whose peak nobody knows: hours come from images a second."""
    monkeypatch.setattr(plan, "SECONDS", 0.05)
    said: list[str] = []
    found = ask(SMALL, device="cpu", mfu="measured", say=said.append)
    assert found["mfu"] is None
    assert found["mfu_is"] == "measured here, on cpu, with 64 images at once"
    assert 1e-5 < found["tflops"] < 100
    assert found["hours"] == pytest.approx(found["exaflops"] * 1e6 / found["tflops"] / 3600)
    assert any("round 3 of 3" in line for line in said)
    assert found["memory_bytes"] > 1e9
    monkeypatch.setattr(plan, "_measured", lambda *_: (found["tflops"] * 1e12, ""))
    two = ask(SMALL, device="cpu", count=2, mfu="measured")  # two such machines: of each the speed and the memory
    assert (two["hours"], two["memory_bytes"]) == (pytest.approx(found["hours"] / 2), found["memory_bytes"])


def test_another_device_than_the_one_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="this machine has cpu, and --device is h100; give the device that is meant"):
        ask(SMALL, mfu="measured")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    with pytest.raises(ValueError, match="this machine has NVIDIA L4, and --device is h100"):
        ask(SMALL, mfu="measured")


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """What `vitlab bench` leaves, as far as it is read here."""
    row = {"mode": "train", "model": "ViT-B/16", "image_size": 224, "batch": 256, "tflops": 494.5}
    rows = [
        {**row, "mode": "infer", "tflops": 700.0},
        {"mode": "train", "model": "R50x1", "image_size": 224, "skipped": "why"},
        {**row, "model": "R50+ViT-B/16", "tflops": 300.0},
    ]
    machine, settings = {"device": "NVIDIA H100 80GB HBM3"}, {"dtype": "bfloat16"}
    record = {"machine": machine, "settings": settings, "rows": [*rows, row]}
    (tmp_path / "bench.json").write_text(json.dumps(record))
    return tmp_path / "bench.json"


@pytest.mark.usefixtures("_no_counting")
def test_measured_before(measured: Path) -> None:
    config = PRETRAIN["jft"]()
    found = ask(config, mfu=str(measured), model_name="ViT-B/16")
    assert (found["tflops"], found["mfu"]) == (494.5, pytest.approx(0.5))
    assert found["mfu_is"].startswith("measured on NVIDIA H100 80GB HBM3 in bfloat16 with 256 images at once")
    hybrid = PRETRAIN["jft"]("R50+ViT-B/16")
    work = ask(hybrid, mfu=str(measured), model_name="R50+ViT-B/16")
    images = work["images_per_s"] * 6 * hybrid.model.forward_macs  # a bench counts what a device multiplies
    assert images / work["count"] == pytest.approx(300e12)
    with pytest.raises(ValueError, match=r"no training of R50x1 at 224x224 pixels; it has R50\+ViT-B/16 at 224, ViT"):
        ask(config, mfu=str(measured), model_name="R50x1")
    with pytest.raises(ValueError, match="was measured on NVIDIA H100 80GB HBM3, and --device is h200"):
        ask(config, mfu=str(measured), model_name="ViT-B/16", device="h200")
    measured.write_text("{}")
    with pytest.raises(ValueError, match=r"is no bench\.json of `vitlab bench`"):
        ask(config, mfu=str(measured), model_name="ViT-B/16")


# ------------------------------------------------------------------------------------------------------ as a command


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "tiny-digits", "--device", "a100", "--count", "8", "--fsdp", "--activation-checkpointing"]
    code, out, _ = call(capsys, *words)
    assert code == 0
    assert "10 epochs" not in out
    assert "of 8 a100 at 125 TFLOP/s each (MFU 40.0%, assumed)" in out
    assert re.search(r"^ +DDP +FSDP$", out, re.MULTILINE)
    assert "in MB (autocast, blocks computed again; 8 of its 8 images at once; this run: FSDP)" in out
    code, out, _ = call(capsys, *words, "--json")
    found = json.loads(out)
    assert (found["chosen"], found["count"], found["activation_checkpointing"]) == ("fsdp", 8, True)
    assert (found["model"]["name"], found["examples"]) == (None, IMAGES)


def test_model_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The name is the recipe's unless given; a model with other settings has none."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(plan, "tell", lambda config, **how: asked.append({"config": config, **how}) or {})
    monkeypatch.setattr(plan, "as_text", str)
    for words in (
        "jft",
        "jft --model ViT-L/16 --microbatch 8",
        "jft --model.depth 3",
        "flowers --finetune --model R50x1",
        "imagenet --finetune --model ViT-H/14 --model.image-size 518",
    ):
        assert call(capsys, "plan", *words.split())[0] == 0
    assert [each["model_name"] for each in asked] == ["ViT-B/16", "ViT-L/16", None, "R50x1", "ViT-H/14"]
    assert (asked[1]["config"].microbatch, asked[1]["config"].model.depth) == (8, 24)
    assert [each["config"].model.image_size for each in asked] == [224, 224, 224, 384, 518]
    assert asked[3]["config"].learning_rates == FINETUNE["flowers"]().learning_rates


def test_what_is_said_of_a_finetuning_counts(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """As `vitlab finetune` takes it: a rate is not sought, and what a flag says is not left to the data."""
    asked: list[Any] = []
    monkeypatch.setattr(plan, "tell", lambda config, **how: asked.append(config) or {})
    monkeypatch.setattr(plan, "as_text", str)
    words = ["own", "--finetune", "--steps", "7", "--optim.lr", "0.01", "--examples", "900"]
    assert call(capsys, "plan", *words)[0] == 0
    (config,) = asked
    assert (config.steps, config.learning_rates) == (7, ())
    assert config.automatic == ("warmup_steps", "mixup", "batch_size", "sweep_steps", "image_size", "preprocessing")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("jtf", ["unknown recipe 'jtf'; the nearest: jft", "`vitlab list recipes`"]),
        ("cifar10", ["cifar10 is a recipe of `vitlab finetune`; add --finetune"]),
        ("cifar11 --finetune", ["unknown recipe 'cifar11'; the nearest: cifar10"]),
        ("jft --model ViT-B/15", ["no row for 'ViT-B/15' on JFT"]),
        ("jft --device h10", ["unknown device 'h10'; the nearest: h100", "All: h200", "tpuv3-core", "cpu"]),
        ("jft --count 0", ["count is 0; a batch of 4096 can be shared by 1 to 4096 processes"]),
        ("tiny-digits --count 65", ["count is 65; a batch of 64"]),
        ("jft --count 255", ["count is 255; a batch of 4096", "The nearest counts that divide it: 64, 128, 256."]),
        ("own --finetune --batch-size 48 --examples 9000 --count 9", ["count is 9; a batch of 48", ": 6, 8, 12."]),
        ("cifar10 --finetune --optim.lr 0.1 --learning-rates 0.1 0.2", ["--optim.lr is one learning rate"]),
        ("jft --optim.momentum 0.8", ["optim.momentum=0.8 has no effect with optim.name='adam'"]),
        ("jft --mfu 40", ["--mfu is 40; it is a share of the device's peak, in (0, 1]"]),
        ("jft --mfu fast", ["--mfu is 'fast'; give a share such as 0.4, measured, or a bench.json"]),
        ("jft --mfu nowhere.json", ["nowhere.json is no bench.json", "No such file"]),
        ("tiny-digits --device cpu", ["no data sheet gives the peak of a CPU; give --mfu measured"]),
        ("jft --image-kb 0", ["image_kb=0.0 and examples=None must be more than 0"]),
        ("jft --model.num-classes 5", ["--model.num-classes has no effect here"]),
        ("tiny-digits --masking.share 0.5", ["--masking.* has no effect in tiny-digits"]),
        ("--device h100 jft", ["write the recipe first and --model once: `vitlab plan jft"]),
    ],
)
@pytest.mark.usefixtures("_no_counting")
def test_bad_input(words: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "plan", *words.split())
    assert (code, out) == (2, "")
    for text in expected:
        assert text in err


def test_its_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom vitlab.cli import main\n"
        "try: main(['plan', '--help-all'])\nexcept SystemExit: pass\nsys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0
    assert "tpuv3-core" in done.stdout
