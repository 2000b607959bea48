"""The cost of a run before it starts: the paper's own numbers, hours, memory, measured speeds, invalid arguments."""

import dataclasses
import functools
from typing import Any

import pytest
from program import answer, call

from vitlab.config import DataConfig
from vitlab.cost import plan
from vitlab.cost.plan import core_days, estimate, format_estimate
from vitlab.models.registry import get_config
from vitlab.recipes import FINETUNE, OPEN, PRETRAIN
from vitlab.recipes.tiny import digits
from vitlab.studies.spec import changed, exaflops
from vitlab.train.throughput import DEVICES

on_h100 = functools.partial(estimate, device="h100", count=1, mfu="0.4")
SMALL = changed(digits(), model={"depth": 2}, batch_size=64, epochs=10.0)


@pytest.fixture
def _no_counting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting the memory of large models takes seconds; test_memory.py tests it."""
    monkeypatch.setattr(plan, "rank_bytes", lambda _, images, *__: {"activations": images})


@pytest.mark.usefixtures("_no_counting")
def test_hours() -> None:
    """ViT-L/16 for 14 epochs: 1,567 exaFLOPs at 256 x 989 TFLOP/s x 0.4 are 4.3 hours."""
    config = PRETRAIN["jft"]("ViT-L/16")
    cost = on_h100(config, count=256)
    hours, images_per_s = cost["hours"], cost["images_per_s"]
    assert cost["steps"] == round(14 * 303e6 / 4096)
    assert hours == pytest.approx(cost["exaflops"] * 1e18 / (256 * 989e12 * 0.4) / 3600)
    assert hours == pytest.approx(4.3, abs=0.01)
    assert cost["device_hours"] == pytest.approx(256 * hours)
    assert (cost["tflops"], cost["mfu"], cost["mfu_source"]) == (pytest.approx(395.6), pytest.approx(0.4), "assumed")
    assert images_per_s == pytest.approx(14 * 303e6 / (hours * 3600), rel=1e-5)
    assert cost["bytes_per_s"] == pytest.approx(images_per_s * 110e3)
    assert on_h100(config, count=256, image_kb=29.0)["bytes_per_s"] == pytest.approx(images_per_s * 29e3)
    assert (cost["precision"], cost["checkpoint_bytes"]) == ("autocast", 4 * 3 * cost["model"]["parameters"])
    assert on_h100(config, count=128)["hours"] == pytest.approx(2 * hours)
    assert on_h100(config, count=256, mfu="0.2")["hours"] == pytest.approx(2 * hours)
    assert on_h100(config, count=256, device="a100")["hours"] / hours == pytest.approx(989 / 312)


@pytest.mark.usefixtures("_no_counting")
def test_core_days_of_table_2() -> None:
    """The days of the three runs sum to those printed, at 19.7 to 26.7 TFLOP/s of a core. These stand beside the
    estimates of the three, and of no other run."""
    runs = [recipe(model) for recipe, model, _ in plan.TABLE2]
    days = [core_days(exaflops(config, plan.PAPER_IMAGES[config.data.name])) for config in runs]
    assert sum(run["days"] for run in days) == pytest.approx(2500 + 680 + 230)
    assert 19.7 < days[0]["tflops"] < 26.7 < DEVICES["tpuv3-core"].tflops
    assert days[0]["days"] == pytest.approx(2500, rel=0.1)
    for recipe, model, epochs, printed in (
        ("jft", "ViT-H/14", 14.0, 2500),
        ("jft", "ViT-L/16", 14.0, 680),
        ("imagenet21k", "ViT-L/16", 90.0, 230),
        ("jft", "R50x1", 7.0, None),
        ("jft", "ViT-L/16", 7.0, None),
    ):
        cost = on_h100(dataclasses.replace(PRETRAIN[recipe](model), epochs=epochs), model_name=model)
        assert cost["tpuv3_core_days"]["printed"] == printed
        assert ("prints" in format_estimate(cost)) == (printed is not None)


@pytest.mark.usefixtures("_no_counting")
def test_what_devices_need_not_to_wait() -> None:
    """By hand: a ring of four sends 1.5 times 4 bytes of each gradient in 2/3 of a step."""
    config = PRETRAIN["jft"]("ViT-B/16")
    cost = on_h100(config, count=4, price=2.0)
    step = 3600 * cost["hours"] / cost["steps"]
    parameters = cost["model"]["parameters"]
    assert cost["needs"]["exchange_bytes_per_s"] == pytest.approx(1.5 * 4 * parameters / (2 / 3 * step))
    assert cost["needs"]["cores"] == pytest.approx(config.batch_size / step / 4 / 873)
    assert cost["needs"]["checkpoint_bytes_per_s"] == pytest.approx(cost["checkpoint_bytes"] / (1000 * step))
    assert cost["price"] == pytest.approx(2 * cost["device_hours"])
    assert {"network", "price"} <= {line.split()[0] for line in format_estimate(cost).splitlines() if line}
    alone = on_h100(config)
    assert (alone["needs"]["exchange_bytes_per_s"], alone["price"]) == (0, None)
    assert not {"network", "price"} & {line.split()[0] for line in format_estimate(alone).splitlines() if line}
    with pytest.raises(ValueError, match="price is -1"):
        on_h100(config, price=-1.0)


@pytest.mark.usefixtures("_no_counting")
def test_finetuning_counts_with_its_search() -> None:
    """Four learning rates and a final run of 10,000 steps; the head has 10 classes."""
    config = FINETUNE["cifar10"]()
    cost = on_h100(config)
    assert (cost["steps"], cost["examples"]) == (50_000, 50_000)
    assert cost["model"]["parameters"] == dataclasses.replace(config.model, num_classes=10).num_parameters
    once = dataclasses.replace(config, learning_rates=())
    assert cost["exaflops"] == pytest.approx(5 * on_h100(once)["exaflops"])
    unknown = on_h100(dataclasses.replace(once, data=DataConfig(name="folder:mine")))  # the steps are fixed
    assert (unknown["steps"], unknown["examples"], unknown["epochs"]) == (10_000, None, None)


@pytest.mark.usefixtures("_no_counting")
def test_the_number_of_your_own_images() -> None:
    """Is required where it decides the length of the run."""
    recipe, options = FINETUNE["custom"](), {"open_settings": OPEN["custom"]}
    with pytest.raises(ValueError, match="--examples"):
        on_h100(recipe, **options)
    assert [on_h100(recipe, examples=count, **options)["steps"] for count in (1000, 30_000)] == [800, 16_000]  # 3 rates
    with pytest.raises(ValueError, match="folder:mine"):
        on_h100(dataclasses.replace(SMALL, data=DataConfig(name="folder:mine")))


def test_ddp_and_fsdp() -> None:
    of_two, of_eight = (on_h100(SMALL, count=count)["memory"] for count in (2, 8))
    assert list(of_two) == ["ddp", "fsdp"]
    for strategy in of_two.values():
        assert strategy["total"] == sum(strategy["parts"].values())
        assert strategy["fits"]
    weights = {name: of_two[name]["parts"]["weights"] for name in of_two}
    assert of_eight["fsdp"]["parts"]["weights"] == pytest.approx(weights["fsdp"] / 4, abs=2)
    assert of_eight["ddp"]["parts"]["weights"] == weights["ddp"]


def test_the_microbatch_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = on_h100(SMALL)["memory"]
    assert list(alone) == ["alone"]
    available = [alone["alone"]["total"] - 1]
    monkeypatch.setattr(type(DEVICES["l4"]), "memory", property(lambda _: available[0]))
    cost = on_h100(SMALL, device="l4")
    assert not cost["memory"]["alone"]["fits"]
    assert "alone: --microbatch 32 would fit." in format_estimate(cost)
    assert on_h100(dataclasses.replace(SMALL, microbatch=32), device="l4")["memory"]["alone"]["fits"]
    available[0] = 10
    assert "alone: one image at once does not fit." in format_estimate(on_h100(SMALL, device="l4"))


@pytest.mark.usefixtures("_no_counting")
def test_measured_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, whose peak is unknown. Of 1,000 images it takes batches of 32 where a GPU takes 64, as `finetune`
    would there."""
    monkeypatch.setattr(plan, "SECONDS", 0.01)
    monkeypatch.setattr(plan, "free_memory", lambda _: 2 * 10**9)  # as in a container with a limit
    cost = on_h100(SMALL, device="cpu", mfu="measured")
    assert cost["mfu"] is None
    assert 1e-5 < cost["tflops"] < 100
    assert cost["hours"] == pytest.approx(cost["exaflops"] * 1e6 / cost["tflops"] / 3600)
    assert cost["memory_bytes"] == 2 * 10**9
    monkeypatch.setattr(plan, "_measured_flops", lambda *_: (cost["tflops"] * 1e12, ""))
    two = on_h100(SMALL, device="cpu", count=2, mfu="measured")  # two machines, each with its speed and memory
    assert (two["hours"], two["memory_bytes"]) == (pytest.approx(cost["hours"] / 2), cost["memory_bytes"])
    custom = dataclasses.replace(FINETUNE["custom"](), model=get_config("ViT-B/16"))
    options = {"mfu": "measured", "examples": 1000, "open_settings": OPEN["custom"]}
    assert [on_h100(custom, device=name, **options)["batch_size"] for name in ("cpu", "h100")] == [32, 64]
    monkeypatch.undo()
    monkeypatch.setattr(plan, "device_name", lambda _: "NVIDIA L4")
    with pytest.raises(ValueError, match="NVIDIA L4"):
        on_h100(SMALL, mfu="measured")


@pytest.mark.usefixtures("_no_counting")
def test_settings_of_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A flag fixes what the recipe leaves open."""
    words = ["tiny-digits", "--device", "a100", "--count", "8", "--fsdp", "--activation-checkpointing"]
    cost = answer(capsys, "plan", *words)
    assert (cost["chosen"], cost["count"], cost["activation_checkpointing"]) == ("fsdp", 8, True)
    assert (cost["model"]["name"], cost["examples"]) == (None, 1438)  # digits' trainval
    assert "of 8 a100 at 125 TFLOP/s each" in call(capsys, "plan", *words)[1]
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(plan, "estimate", lambda config, **how: calls.append({"config": config, **how}) or cost)
    for line in (
        "jft",
        "jft --model ViT-L/16 --microbatch 8",
        "jft --model.depth 3",
        "flowers --finetune --model R50x1",
        "imagenet --finetune --model ViT-H/14 --model.image-size 518",
        "custom --finetune --steps 7 --optim.lr 0.01 --examples 900",
    ):
        assert call(capsys, "plan", *line.split())[0] == 0
    assert [call["model_name"] for call in calls] == [None, "ViT-L/16", None, "R50x1", "ViT-H/14", None]
    configs = [call["config"] for call in calls]
    assert (configs[1].microbatch, configs[1].model.depth) == (8, 24)
    assert [config.model.image_size for config in configs[:5]] == [224, 224, 224, 384, 518]
    assert configs[3].learning_rates == FINETUNE["flowers"]().learning_rates
    assert (configs[5].steps, configs[5].learning_rates) == (7, ())
    assert calls[5]["open_settings"] == {*OPEN["custom"]} - {"steps"}


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("jft", {"device": "h10"}, "the nearest: h100"),
        ("tiny-digits", {"count": 65}, "count is 65"),
        ("jft", {"mfu": "40"}, "40"),
        ("jft", {"mfu": "fast"}, "fast"),
        ("tiny-digits", {"device": "cpu"}, "CPU"),
        ("jft", {"image_kb": 0.0}, "image_kb=0.0"),
    ],
)
@pytest.mark.usefixtures("_no_counting")
def test_invalid_arguments(recipe: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        on_h100(PRETRAIN[recipe](), **options)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("plan jtf", "the nearest: jft"),
        ("plan jft --precision float32", "--mfu measured"),
        ("plan staged --finetune --examples 900 --runs 0", "runs is 0"),
        ("bench ViT-B/17", "unknown model 'ViT-B/17'"),
        ("bench --device tpu", "'tpu'"),
    ],
)
def test_invalid_commands(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, *words.split())
    assert (code, out) == (2, "")
    assert message in err
