"""A whole fine-tuning job: both stages, the choice between them, and several labels."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from PIL import Image
from staged_job import make_job, tune

from vitlab.config import DataConfig, FinetuneConfig, OptimConfig, TrainConfig
from vitlab.config.finetune import NO_SWEEP
from vitlab.data.exclude import write_lines
from vitlab.data.registry import load_dataset
from vitlab.evaluation import calibration
from vitlab.evaluation.accuracy import evaluate_checkpoint
from vitlab.evaluation.options import ModelOptions
from vitlab.evaluation.predict import predict
from vitlab.evaluation.suspects import read_suspects
from vitlab.finetuning import protocol, run_job
from vitlab.finetuning.protocol import sweep_and_finetune
from vitlab.finetuning.run_job import train_and_test
from vitlab.finetuning.scores import Score, format_score
from vitlab.finetuning.stages import ALPHAS
from vitlab.finetuning.sweep import RunStart, Sweep
from vitlab.inspection.finished_run import Run
from vitlab.inspection.run_section import run_section
from vitlab.models.config import ViTConfig
from vitlab.models.vit import build_model
from vitlab.runs import run as run_module
from vitlab.runs.cost import ImageCost
from vitlab.runs.run import RunResult
from vitlab.train.microbatch import StepCost
from vitlab.train.run_files import SUSPECTS
from vitlab.weights import load_metadata, load_model, save_model


@pytest.mark.usefixtures("pretrained")
def test_both_stages(workdir: Path, staged: FinetuneConfig, tmp_path: Path) -> None:
    log: list[str] = []
    done = tune(workdir, staged, tmp_path / "out", log=log.append)
    result = done.result
    linear, chosen = result["linear"], result["chosen"]
    first = evaluate_checkpoint(tmp_path / "out" / "linear")
    assert first.accuracy == linear["accuracy"] > 0.5
    assert linear["leave_one_out"] == pytest.approx(linear["accuracy"], abs=0.1)
    assert linear["held_out"]["images"] == result["sweep"][0]["images"]
    assert [score["learning_rate"] for score in result["sweep"]] == list(staged.learning_rates)
    assert chosen == "run-0"
    assert result["test"]["accuracy"] == evaluate_checkpoint(tmp_path / "out").accuracy
    for folder in ("out/linear", "out"):
        assert 0 < len(load_metadata(tmp_path / folder)["coverage_masses"]) <= 1_000
    coverage = result["test"]["coverage"]
    assert coverage["measured"] >= 0.8
    assert 1 <= coverage["mean_size"] <= 4
    best = min(result["sweep"], key=lambda score: score["loss"])
    assert (result["learning_rate"], result["alpha"]) == (best["learning_rate"], best["alpha"])
    assert any("leave-one-out accuracy" in line for line in log)
    (marked,) = [line for line in done.summary().splitlines() if "<- chosen" in line]
    assert f"learning rate {result['learning_rate']:g} " in marked


@pytest.mark.usefixtures("pretrained")
def test_wrong_labels_are_listed(workdir: Path, staged: FinetuneConfig, tmp_path: Path) -> None:
    """A folder of digits in which three labels are swapped; the list leaves them out."""
    digits = load_dataset("digits", "train", classes=(3, 4, 5, 6)).take(np.arange(120))
    assert digits.pixels is not None
    swapped = (7, 30, 60)
    for number, (pixels, label) in enumerate(zip(digits.pixels, digits.labels, strict=True)):
        name = str((label + 1) % 4) if number in swapped else str(label)
        (tmp_path / "set" / name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "set" / name / f"{number}.png")
    data = dataclasses.replace(staged.data, name=f"folder:{tmp_path / 'set'}", classes=None)
    config, logged = dataclasses.replace(staged, data=data, runs=0, **NO_SWEEP), []
    tune(workdir, config, tmp_path / "job", log=logged.append)
    listed = [row["image"] for row in read_suspects(tmp_path / "job" / SUSPECTS)]
    found = {Path(name).stem for name in listed[:6]} & {"7", "30", "60"}
    assert len(found) >= 2  # the others may be test images
    assert any(line.startswith("labels to check") for line in logged)
    assert "suspects.csv" not in (tmp_path / "job" / "SHA256SUMS").read_text()  # people edit it
    (tmp_path / "job" / SUSPECTS).write_text("image,label\n")
    result = (tmp_path / "job" / "result.json").read_bytes()
    tune(workdir, config, tmp_path / "job")
    assert (tmp_path / "job" / SUSPECTS).read_text() == "image,label\n"
    assert (tmp_path / "job" / "result.json").read_bytes() == result
    write_lines(tmp_path / "job" / SUSPECTS, ["image", *listed])
    excluding = dataclasses.replace(config, data=dataclasses.replace(data, exclude=str(tmp_path / "job" / SUSPECTS)))
    tune(workdir, excluding, tmp_path / "second")
    images = [json.loads((tmp_path / name / "config.json").read_text())["examples"] for name in ("job", "second")]
    assert images[1] == images[0] - len(listed)


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("refit", [True, False])
def test_the_temperature_is_part_of_the_head(
    refit: bool, workdir: Path, staged: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The saved model has the losses that the test reports; nothing else changes."""
    config, models, results = dataclasses.replace(staged, refit=refit), [], []
    for temperature in (1.0, 4.0):
        monkeypatch.setattr(calibration, "choose_temperature", lambda *_, t=temperature: t)
        folder = tmp_path / f"{temperature}"
        results.append(tune(workdir, config, folder).result)
        models.append(dict(load_model(folder / "model").named_parameters()))
        tested = evaluate_checkpoint(folder / "model").record()
        test = results[-1]["test"]
        assert results[-1]["chosen"] == "run-0"
        assert test["temperature"] == load_metadata(folder / "model")["temperature"] == temperature
        for name in ("loss", "expected_calibration_error", "accuracy"):
            assert tested[name] == pytest.approx(test[name], rel=1e-3)
    for name, parameter in models[0].items():
        torch.testing.assert_close(models[1][name], parameter / (4 if name.startswith("head") else 1))
    before, after = (result["test"] for result in results)
    assert after["uncalibrated_error"] == pytest.approx(before["expected_calibration_error"], rel=1e-3)
    assert after["loss"] != before["loss"]


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize("rates", [(3.0, 10.0), (1e30,)], ids=["worse", "diverged"])
def test_where_fine_tuning_does_not_help_the_head_is_the_result(
    rates: tuple[float, ...], workdir: Path, staged: FinetuneConfig, tmp_path: Path
) -> None:
    useless = dataclasses.replace(staged, learning_rates=rates)
    useless = dataclasses.replace(useless, optim=dataclasses.replace(staged.optim, name="sgd", lr=rates[0]))
    done = tune(workdir, useless, tmp_path / "out")
    result, summary = done.result, done.summary()
    assert (result["chosen"], result["runs"], result["alpha"]) == ("linear", [], 0.0)
    assert result["test"]["accuracy"] == result["accuracy_mean"] == result["linear"]["accuracy"]
    assert not (tmp_path / "out" / "run-0").exists()
    assert [line.rpartition("  ")[2] for line in summary.splitlines() if "chosen" in line] == ["<- chosen"]
    assert "least-squares head" in next(line for line in summary.splitlines() if "chosen" in line)
    model, head = (load_model(tmp_path / name).parameters() for name in ("out", "out/linear"))
    assert all(torch.equal(a, b) for a, b in zip(model, head, strict=True))


@pytest.mark.parametrize(("loss", "helps"), [(0.4, True), (0.6, False), (None, False)])
def test_the_held_out_loss_decides(
    workdir: Path, pretrained: RunResult, staged: FinetuneConfig, loss: float | None, helps: bool
) -> None:
    """Of the best rate; None is a training that diverged."""
    job = make_job(workdir, pretrained, staged)
    scores = [Score(1e-4, {})]
    if loss is not None:
        scores.append(Score(1e-3, {"accuracy": 0.7, "loss": loss, "alpha": 1.0, "images": 40}))
        scores.append(Score(1e-2, {"accuracy": 0.9, "loss": 0.7, "alpha": 1.0, "images": 40}))
    assert run_job._helps(job, scores, {"accuracy": 0.8, "loss": 0.5, "images": 40}) == helps


@pytest.mark.usefixtures("pretrained")
def test_all_runs_have_the_microbatch_of_the_first_start(
    workdir: Path, staged: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though less memory is free when the job resumes."""
    measured = [8, 4]

    def measure(config: TrainConfig, *_: Any) -> ImageCost:
        return ImageCost(StepCost(measured.pop(0), 1e-4, 1e-4, 1e-4, 0, None), config.model.forward_macs)

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(protocol, "measure_cost", measure)
    one = dataclasses.replace(staged, learning_rates=(3e-3,), sweep_steps=None)
    with monkeypatch.context() as patch:
        patch.setattr(run_job, "train_and_test", stopped)
        with pytest.raises(KeyboardInterrupt):
            tune(workdir, one, tmp_path / "out")
    tune(workdir, one, tmp_path / "out")
    sizes = {path.parent.name: json.loads(path.read_text())["microbatch"] for path in tmp_path.rglob("runtime.json")}
    assert sizes == dict.fromkeys(("out", "lr-0.003", "run-0"), 8)


@pytest.mark.usefixtures("pretrained")
def test_no_runs_end_with_the_head(workdir: Path, staged: FinetuneConfig, tmp_path: Path) -> None:
    alone = dataclasses.replace(staged, runs=0, learning_rates=(), sweep_steps=None)
    done = tune(workdir, alone, tmp_path / "out")
    assert (done.result["sweep"], done.result["chosen"]) == ([], "linear")
    assert "least-squares head" in done.summary()
    assert tune(workdir, alone, tmp_path / "out").result == done.result


@pytest.mark.usefixtures("pretrained")
@pytest.mark.parametrize(("blocks", "alpha"), [(0, None), (1, 1.0)])
def test_without_a_sweep_the_last_blocks_are_trained_and_averaged(
    blocks: int, alpha: float | None, workdir: Path, staged: FinetuneConfig, tmp_path: Path
) -> None:
    """By a quarter, unless `alpha` is given."""
    config = dataclasses.replace(staged, learning_rates=(), sweep_steps=None, steps=4)
    out = tmp_path / "out"
    result = tune(workdir, dataclasses.replace(config, trained_blocks=blocks, alpha=alpha), out).result
    before, after = load_model(workdir).state_dict(), load_model(out / "run-0").state_dict()
    changed = {n for n in after.keys() - {"head.weight", "head.bias"} if not torch.equal(before[n], after[n])}
    depth = len({name.split(".")[1] for name in before if name.startswith("blocks.")})
    assert any(name.startswith("norm.") for name in changed) == (blocks > 0)
    assert all(name.startswith(("norm.", f"blocks.{depth - 1}.")) for name in changed)
    assert any(name.startswith("blocks.") for name in changed) == (blocks > 0)
    assert result["alpha"] == load_metadata(out)["alpha"] == (alpha or 0.25)
    card = (out / "model" / "README.md").read_text()
    assert ("| weights | 25% fine-tuned, 75% those of the initial model" in card) == (alpha is None)


def test_the_weights_are_averaged_with_those_of_the_head(start: RunStart, tmp_path: Path) -> None:
    """Both runs train the same model, and what is tested is what is saved."""
    assert start.head is not None
    score = Sweep(start).score(3e-3, tmp_path / "trial").metrics
    assert score["alpha"] in (*ALPHAS, 1.0)
    assert f"{score['alpha']:.0%}" in format_score(score) or score["alpha"] == 1
    config = start.run_config(3e-3)
    results = [train_and_test(start, config, tmp_path / str(alpha), alpha) for alpha in (1.0, 0.25)]
    tuned, averaged = (load_model(tmp_path / name).state_dict() for name in ("1.0", "0.25"))
    head = start.head.create_classifier().state_dict()
    for name, weights in averaged.items():
        torch.testing.assert_close(weights, 0.75 * head[name] + 0.25 * tuned[name])
    assert not torch.equal(averaged["head.weight"], tuned["head.weight"])
    assert results[1]["test"]["loss"] == evaluate_checkpoint(tmp_path / "0.25").record()["loss"]
    assert results[0]["test"]["loss"] != results[1]["test"]["loss"]
    (tmp_path / "0.25" / "result.json").unlink()  # killed before its last line: tested again
    assert train_and_test(start, config, tmp_path / "0.25", 0.25) == results[1]


@pytest.mark.usefixtures("pretrained")
def test_without_a_refit_the_best_run_of_the_sweep_is_the_final_one(
    workdir: Path, staged: FinetuneConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its average of weights; killed at any place, the same."""
    config, out = dataclasses.replace(staged, refit=False, learning_rates=(1e-3, 3e-3)), tmp_path / "out"
    done = tune(workdir, config, out)
    lr, alpha = done.result["learning_rate"], done.result["alpha"]
    best = next(score for score in done.result["sweep"] if score["learning_rate"] == lr)
    assert (done.result["chosen"], alpha) == ("run-0", best["alpha"])
    trained = load_model(out / f"sweep/lr-{lr}" / "model").state_dict()
    for folder in (out, out / "run-0"):
        assert all(torch.equal(weights, trained[name]) for name, weights in load_model(folder).state_dict().items())
    assert done.result["test"]["accuracy"] == evaluate_checkpoint(out).accuracy
    logs = [(out / f / "metrics.jsonl").read_text() for f in ("run-0", f"sweep/lr-{lr}")]
    assert logs[0] == logs[1] != ""
    monkeypatch.setattr(run_module, "train", lambda *_, **__: pytest.fail("trains again"))
    for killed in ("result.json", "run-0/result.json"):
        (out / killed).unlink()
        assert tune(workdir, config, out).result == done.result
    assert (out / "run-0/metrics.jsonl").read_text() == logs[1]


@pytest.mark.usefixtures("pretrained")
def test_without_a_refit_and_without_a_head(workdir: Path, staged: FinetuneConfig, tmp_path: Path) -> None:
    config = dataclasses.replace(staged, refit=False, head=None, sweep_steps=None, learning_rates=(3e-3, 1e-2), steps=2)
    result = tune(workdir, config, tmp_path / "out").result
    trained = load_model(tmp_path / f"out/sweep/lr-{result['learning_rate']}" / "model").state_dict()
    assert all(torch.equal(weights, trained[n]) for n, weights in load_model(tmp_path / "out").state_dict().items())
    assert len(result["runs"]) == 1


@pytest.fixture
def photos(tmp_path: Path) -> str:
    """48 images of 8 pixels that all have the label `photo`; each color is a label of about half of them."""
    rng = np.random.default_rng(0)
    rows = []
    for i in range(48):
        hot = rng.random(3) < 0.5
        pixels = rng.integers(0, 150, (8, 8, 3)) + 100 * hot
        Image.fromarray(pixels.astype(np.uint8)).save(tmp_path / f"{i}.png")
        names = ["photo", *np.array(["red", "green", "blue"])[hot]]
        rows.append(f"{i}.png,{'|'.join(names)}")
    (tmp_path / "photos.csv").write_text("\n".join(["file,label", *rows]))
    return f"csv:{tmp_path / 'photos.csv'}"


@pytest.mark.parametrize("rate", [1e-3, 30.0], ids=["fine-tuned", "head"])
def test_a_label_that_all_images_have(rate: float, photos: str, tmp_path: Path) -> None:
    """The highest label is right for every image, which is no headline anywhere; thresholds are those of held-out
    images, and decide in the test, on the page and in `predict`."""
    model = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8)
    save_model(build_model(model, generator=torch.Generator().manual_seed(0)), tmp_path / "tiny")
    data = DataConfig(name=photos, crop="none", flip=False, train_split="trainval", eval_split="test")
    settings: dict[str, Any] = {"precision": "float32", "head": "least_squares", "loss": "sigmoid"}
    settings |= {"learning_rates": (rate,), "sweep_steps": 4, "steps": 4, "batch_size": 16, "held_out": 0.4}
    config = FinetuneConfig(model=model, data=data, optim=OptimConfig(name="adam", lr=rate), **settings)
    log: list[str] = []
    done = sweep_and_finetune(
        tmp_path / "tiny", config, tmp_path / "out", device="cpu", tensorboard=False, log=log.append
    )
    test, metadata = done.result["test"], load_metadata(tmp_path / "out")
    assert done.result["chosen"] == ("run-0" if rate < 1 else "linear")
    assert test["accuracy"] == 1.0 > test["mean_average_precision"]
    precision = f"mean average precision {test['mean_average_precision']:.2%}"
    assert done.result["mean_average_precision_mean"] == test["mean_average_precision"]
    card = (tmp_path / "out" / "model" / "README.md").read_text()
    for text in (done.summary(), *log, card):
        assert "accuracy" not in text.replace("makes the least-squares", "")
    assert precision in done.summary()
    assert f"{test['mean_average_precision']:.2%}" in card
    (code,) = re.findall(r"^```python\n(.*?)^```$", card, re.MULTILINE | re.DOTALL)
    with contextlib.chdir(tmp_path / "out" / "model"):
        exec(code, names := {})
    assert names["model"].config == load_model(tmp_path / "out").config
    data: Any = ModelCard(card).data
    assert data.eval_results[0].metric_type == "mean_average_precision"

    thresholds = [row["threshold"] for row in test["per_class"]]
    assert metadata["label_thresholds"] == thresholds != [0.5] * 4
    assert "reject_below" not in metadata
    evaluation = evaluate_checkpoint(tmp_path / "out")
    assert evaluation.as_table() in done.summary()
    assert {f"test_{name}" for name in ("f1", "exact_match")} < metadata.keys()
    images = [str(tmp_path / name) for name in Run.read(tmp_path / "out" / done.result["chosen"]).names]
    assert evaluation.predicted_sets is not None
    for row, prediction in enumerate(predict(tmp_path / "out", images, ModelOptions(device="cpu"), top=1)):
        chosen = {evaluation.classes[label] for label in evaluation.predicted_sets.of_image(row)}
        assert chosen == set(prediction.labels or ())

    section = run_section(Run.read(tmp_path / "out" / done.result["chosen"]))
    assert next(iter(section.numbers.items())) == ("Mean average precision", f"{test['mean_average_precision']:.1%}")
    assert "Test accuracy" not in section.numbers
    assert section.calibration is section.confusion is None
    assert section.class_table is not None
    assert section.class_table["head"][2:] == ("average precision", "precision", "recall", "f1", "threshold")
    wrong = np.flatnonzero(evaluation.wrong_labels).tolist()
    wrong = sorted(wrong, key=lambda row: (-evaluation.wrong_labels[row], -evaluation.losses[row]))
    assert section.mistakes is not None
    assert len(section.mistakes) == len(wrong) > 0
    for row, image in zip(wrong, section.mistakes, strict=True):
        labels, chosen = (
            {evaluation.classes[c] for c in sets.of_image(row)}
            for sets in (evaluation.all_labels, evaluation.predicted_sets)
        )
        lines = dict(line.split(": ") for line in image.caption.splitlines())
        shown = {title: set(lines.get(title, "").split(", ")) - {""} for title in ("missing", "too many")}
        assert shown == {"missing": labels - chosen, "too many": chosen - labels}
