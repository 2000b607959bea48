"""The program as its users meet it: what it prints, what it leaves, and what it says of bad input."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab import cli
from vitlab.cli import COMMANDS, Finetune, Pretrain, main, parse
from vitlab.data.datasets import load_dataset
from vitlab.models import ViTConfig
from vitlab.models.vit import ViT
from vitlab.recipes import FINETUNE, PRETRAIN
from vitlab.train.loop import NonFiniteError, StoppedError
from vitlab.weights import ParityError, save_model

SMALL = shlex.split("""
    --batch-size 8 --model.image-size 8 --model.width 8 --model.depth 1 --model.heads 2 --model.mlp-dim 8
    --data.classes 0 1 2 --data.crop none --log-every 1 --checkpoint-every 50 --device cpu
""")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def call(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `vitlab argv`; boxes and line breaks taken out of the last."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert isinstance(ended.value.code, int)
    out, err = capsys.readouterr()
    return ended.value.code, out, " ".join(re.sub(r"[─│╭╮╰╯]", " ", err).split())


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small run that has ended."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with pytest.raises(SystemExit) as ended:
        main(["pretrain", "tiny-digits", "--workdir", str(folder), "--steps", "3", *SMALL])
    assert ended.value.code == 0
    return folder


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    path = tmp_path / "one.png"
    Image.fromarray(load_dataset("digits", "test", classes=(1,)).picture(0)).save(path)
    return path


# ------------------------------------------------------------------------------------------------- parsing


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: vitlab {name} ")
    purpose = (COMMANDS[name].__doc__ or "").split()
    assert " ".join(purpose) in " ".join(out.split())
    assert "--json" in out


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "--help")
    assert code == 0
    assert all(re.search(rf"• {name} ", out) for name in COMMANDS)


@pytest.mark.parametrize("recipe", PRETRAIN)
def test_recipe_gives_the_defaults(recipe: str) -> None:
    command = parse(["pretrain", recipe])
    assert isinstance(command, Pretrain)
    assert command.config == PRETRAIN[recipe]()


@pytest.mark.parametrize("recipe", FINETUNE)
def test_recipe_gives_the_defaults_of_finetuning(recipe: str) -> None:
    command = parse(["finetune", "model.npz", "--recipe", recipe])
    assert isinstance(command, Finetune)
    assert (command.checkpoint, command.recipe, command.config) == ("model.npz", recipe, FINETUNE[recipe]())


def test_settings_override_the_recipe() -> None:
    argv = "finetune m --recipe=cifar10 --image-size 224 --optim.lr 0.003 --data.name folder:x --data.no-flip"
    command = parse(argv.split())
    assert isinstance(command, Finetune)
    assert (command.recipe, command.image_size) == ("cifar10", 224)
    assert (command.config.optim.lr, command.config.optim.momentum, command.config.steps) == (0.003, 0.9, 10_000)
    assert (command.config.data.name, command.config.data.flip) == ("folder:x", False)


def test_length_is_said_in_steps_or_epochs() -> None:
    steps, epochs = parse(["pretrain", "jft", "--steps=7"]), parse(["pretrain", "jft", "--epochs", "0.5"])
    assert isinstance(steps, Pretrain)
    assert isinstance(epochs, Pretrain)
    assert (steps.config.steps, steps.config.epochs) == (7, None)
    assert (epochs.config.steps, epochs.config.epochs) == (None, 0.5)


def test_model_by_name() -> None:
    command = parse(["pretrain", "jft", "--model", "ViT-L/16", "--model.dropout", "0.2"])
    assert isinstance(command, Pretrain)
    assert isinstance(command.config.model, ViTConfig)
    assert (command.config.model.depth, command.config.optim.lr) == (24, 4e-4)
    assert command.config.model.dropout == 0.2


# -------------------------------------------------------------------------------------------------- output


def test_pretrain_says_what_it_did(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Called again on its finished folder it only tests: the answer is the same."""
    code, out, err = call(capsys, "pretrain", "tiny-digits", "--workdir", str(run), "--steps", "3", *SMALL)
    assert code == 0
    assert out.splitlines()[0].split() == ["class", "pictures", "recall", "precision"]
    assert out.splitlines()[-1] == f"model: {run / 'model'} · curves: {run / 'metrics.jsonl'}"
    assert f"settings (kept in {run / 'config.json'}):" in err
    for setting in ("model.width = 8", "model.num_classes = 3", "optim.beta2 = 0.999", "steps = 3"):
        assert setting in err
    settings = json.loads((run / "config.json").read_text())
    assert (settings["model"]["num_classes"], settings["optim"]["lr"]) == (3, 0.002)


def test_json_for_programs(run: Path, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but the answer on the standard output."""
    again = ["pretrain", "tiny-digits", "--workdir", str(run), "--steps", "3", *SMALL]
    pretrained = answer(capsys, *again)
    assert pretrained == json.loads((run / "result.json").read_text())
    assert answer(capsys, "evaluate", str(run), "--device", "cpu") == pretrained["test"]
    small = ["--batch-size", "8", "--steps", "1", "--device", "cpu"]
    tuned = answer(capsys, "finetune", str(run), "--recipe", "tiny-digits", "--image-size", "16", *small)
    assert len(tuned["test"]["per_class"]) == 10
    assert json.loads(Path("runs/finetune-tiny-digits/result.json").read_text()) == tuned
    said = answer(capsys, "predict", str(run), str(picture), "--top", "2", "--device", "cpu")
    assert (said["path"], said["error"]) == (str(picture), None)
    assert len(said["top"]) == 2
    for what in ("models", "datasets", "recipes"):
        assert answer(capsys, "list", what)


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    code, out, _ = call(capsys, *argv, "--json")
    assert code == 0
    return json.loads(out)


def test_json_of_demo_and_doctor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Their own tests are elsewhere; here, that they are called and their answers printed."""
    import vitlab.doctor
    from vitlab.studies import demo

    result = {"pretrain_accuracy": 0.985, "finetune_accuracy": 0.97, "page": "out/index.html"}
    seen: list[Any] = []
    monkeypatch.setattr(demo, "demo", lambda out, seed: seen.append((out, seed)) or result)
    assert answer(capsys, "demo", "--out", "there", "--seed", "5") == result
    assert seen == [(Path("there"), 5)]
    _, out, _ = call(capsys, "demo")
    assert "98.5%" in out
    assert out.splitlines()[-1] == "out/index.html"
    monkeypatch.setattr(vitlab.doctor, "diagnose", lambda path: {"path": str(path)})
    monkeypatch.setattr(vitlab.doctor, "format_diagnosis", str)
    assert answer(capsys, "doctor", "--path", "there") == {"path": "there"}


def test_converted_and_exported(run: Path, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through timm's format and back answers and names stay; what is exported is checked before it is left."""
    done = answer(capsys, "convert", str(run), "as-timm", "--to", "timm")
    assert (done["format"], done["path"]) == ("timm", "as-timm")
    assert done["difference"] < 1e-5
    code, out, _ = call(capsys, "convert", "as-timm", "ours", "--to", "vitlab")
    assert code == 0
    assert f"{done['parameters']:,} parameters in vitlab's format" in out
    first, last = (answer(capsys, "predict", each, str(picture), "--top", "3") for each in (str(run), "ours"))
    assert [name for name, _ in first["top"]] == [name for name, _ in last["top"]]
    report = answer(capsys, "export", str(run), "--to", "torch-export", "--out", "run.pt2")
    assert report["bytes"] == Path("run.pt2").stat().st_size
    assert report["difference"] < 1e-4


def test_list_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "list", "models", "ViT-B/*")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["model", "ViT-B/8", "ViT-B/14", "ViT-B/16", "ViT-B/32"]
    assert "86,567,656" in out


def test_predict_counts_what_it_could_not_read(
    run: Path, picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.png").touch()
    code, out, err = call(capsys, "predict", str(run), "empty.png", str(picture), "--device", "cpu")
    assert code == 1
    lines = out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("empty.png: cannot be read: ")
    assert lines[1].startswith(f"{picture}: ")
    assert err == "vitlab: 1 pictures could not be read (named above)."


def test_predict_from_the_standard_input(
    run: Path, picture: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(picture.read_bytes())))
    code, out, _ = call(capsys, "predict", str(run), "-", "--top", "1", "--device", "cpu")
    assert code == 0
    assert re.fullmatch(r"<stdin>: [012] \d+\.\d%\n", out)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (StoppedError("saved at step 5"), 143, "vitlab: saved at step 5"),
        (NonFiniteError("not finite at step 5"), 1, "vitlab: not finite at step 5"),
        (ParityError("the file differs"), 1, "vitlab: the file differs"),
        (
            torch.OutOfMemoryError("tried 9 GB"),
            1,
            "vitlab: the device's memory is full. Give a smaller --microbatch or --image-size. (tried 9 GB)",
        ),
        (PermissionError(13, "Permission denied", "runs"), 2, "vitlab: [Errno 13] Permission denied: 'runs'"),
        (KeyboardInterrupt(), 130, "vitlab: interrupted."),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: Any) -> int:
        raise error

    monkeypatch.setattr(cli.List, "run", fail)
    assert call(capsys, "list", "models") == (code, "", said)


def test_errors_of_our_own_making_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Any) -> int:
        raise RuntimeError("a bug")

    monkeypatch.setattr(cli.List, "run", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["list", "models"])


# ----------------------------------------------------------------------------------------------- bad input

WORDS: list[tuple[str, list[str]]] = [
    ("", ["Expected one of {demo, list, pretrain"]),
    ("pretrian", ["unknown command 'pretrian'; the nearest: pretrain"]),
    ("--jsn", ["Unrecognized options: --jsn", "pretrain"]),
    ("list", ["{models,datasets,recipes}", "required"]),
    ("list modls", ["'modls'", "'models', 'datasets', 'recipes'"]),
    ("list models --jsn", ["Unrecognized options: --jsn", "--json"]),
    ("demo --seed x", ["--seed", "'x'"]),
    ("pretrain", ["RECIPE", "`vitlab list recipes`"]),
    ("pretrain tiny-digit", ["unknown recipe 'tiny-digit'; the nearest: tiny-digits", "`vitlab list recipes`"]),
    ("pretrain --steps 5 jft", ["write the recipe first", "`vitlab pretrain jft"]),
    ("pretrain jft --model ViT-B/15", ["no row for 'ViT-B/15' on JFT", "ViT-B/16, ViT-B/32", "`--model.*`"]),
    ("pretrain imagenet --model ViT-Q/16", ["unknown model 'ViT-Q/16'; the nearest: ViT-", "`vitlab list models`"]),
    ("pretrain tiny-digits --model.patch-sze 4", ["--model.patch-sze", "Perhaps you meant", "--model.patch-size"]),
    ("pretrain tiny-digits --optim.lr fast", ["--optim.lr", "'fast'"]),
    ("pretrain tiny-digits --optim.lr -1", ["optim", "lr is -1.0; it must be 0 or more, and finite"]),
    ("pretrain tiny-digits --steps 0", ["steps is 0; it must be positive"]),
    ("pretrain tiny-digits --steps 1.5", ["--steps", "1.5"]),
    ("pretrain tiny-digits --steps", ["--steps"]),
    ("pretrain tiny-digits --steps 2 --epochs 3", ["steps=2 and epochs=3.0: give exactly one"]),
    ("pretrain tiny-digits --data.crop inceptoin", ["'inceptoin'", "'inception', 'random', 'pad', 'none'"]),
    ("pretrain tiny-digits --data.crop random", ["crop='random' with crop_resize=None", "needs a size"]),
    ("pretrain tiny-digits --model.image-size 18", ["18x18", "patches of 4x4", "the nearest: 16, 20"]),
    ("pretrain tiny-digits --model.heads 5", ["heads=5 does not divide width=96", "the nearest"]),
    ("pretrain tiny-digits --model.num-classes 7", ["--model.num-classes has no effect", "the data set's classes"]),
    ("pretrain tiny-digits --data.name digit", ["unknown data set 'digit'; the nearest: digits"]),
    ("pretrain tiny-digits --data.name pictures", ["unknown data set 'pictures'; for your own", "folder:pictures"]),
    ("pretrain tiny-digits --data.name folder:nowhere", ["nowhere does not exist", "give a folder of class folders"]),
    ("pretrain tiny-digits --data.name shards:pictures", ["pictures has no train-*.tar"]),
    ("pretrain tiny-digits --data.name folder:pictures", ["class folder pictures/dogs holds no pictures", "add some"]),
    ("pretrain tiny-digits --data.train-split tset", ["train, val, test, trainval", "'tset'"]),
    ("pretrain tiny-digits --data.classes 3 12", ["numbers from 0 to 9 of digits", "(3, 12)"]),
    ("pretrain tiny-digits --data.eval-resize 8", ["resize=8 must be at least image_size=(16, 16)"]),
    ("pretrain tiny-digits --device quantum", ["device 'quantum' is unknown; give auto, cpu, cuda"]),
    ("pretrain tiny-digits --device mps", ["device 'mps' is not supported; give auto, cpu, cuda"]),
    ("pretrain tiny-digits --device cuda:99", ["device 'cuda:99'", "`vitlab doctor`"]),
    ("pretrain tiny-digits --workdir pictures", ["work folder pictures is not empty and holds no run", "empty folder"]),
    ("pretrain tiny-digits --workdir notes.txt", ["notes.txt is a file; give the name of a folder"]),
    ("finetune", ["CHECKPOINT", "Google .npz"]),
    ("finetune nowhere.npz", ["there is nothing at nowhere.npz; give a Google .npz"]),
    ("finetune RUN --recipe tinny", ["unknown recipe 'tinny'; the nearest: tiny"]),
    ("finetune RUN --model.mlp-dim 64", ["--model.mlp-dim has no effect here: the checkpoint brings", "--image-size"]),
    ("finetune RUN --image-size 18", ["18x18", "the nearest: 16, 20"]),
    ("finetune RUN --data.nme x", ["--data.nme", "--data.name"]),
    ("finetune model.pt", ["model.pt is a pickle", "never loaded", "convert it to safetensors"]),
    ("finetune notes.txt", ["notes.txt is no checkpoint", "give a Google .npz"]),
    ("finetune other.npz", ["other.npz is no Vision Transformer", "It holds weight"]),
    ("finetune cut.npz", ["cut.npz"]),
    ("finetune lone.safetensors", ["without the config.json"]),
    ("finetune pictures", ["pictures holds no checkpoint; give a Google .npz"]),
    ("finetune unfinished", ["training that has not ended", "Run its command again"]),
    ("finetune mixed", ["mixed/model.safetensors is damaged", "checksums differ"]),
    ("evaluate", ["CHECKPOINT", "Google .npz"]),
    ("evaluate RUN --split tset", ["'tset'", "'train', 'val', 'test', 'trainval'"]),
    ("evaluate RUN --image-size 18", ["18x18", "the nearest: 16, 20"]),
    ("evaluate RUN --dataset folder:other", ["knows the classes 0, 1, 2 and folder:other has ants, bees", "fine-tune"]),
    ("evaluate RUN --batch-size 0", ["batch_size=0", "positive"]),
    ("evaluate headless --dataset digits", ["headless has no head", "`vitlab finetune`"]),
    ("evaluate headless", ["does not say what it was trained on; name a data set with --dataset"]),
    ("predict RUN", ["no picture was named; give pictures, folders of them, or -"]),
    ("predict RUN nowhere.png", ["there is no file or folder nowhere.png; give pictures"]),
    ("predict RUN pictures/dogs", ["the folder pictures/dogs holds no picture", ".jpg"]),
    ("predict RUN notes.txt --top 0", ["top is 0; ask for at least 1"]),
    ("predict model.pt notes.txt", ["model.pt is a pickle"]),
    ("pretrain tiny-digits --model R50x9", ["unknown model 'R50x9'; the nearest: R50x"]),
    ("pretrain tiny-digits --model.position relative", ["give position_at='every' or 'shared'"]),
    ("pretrain tiny-digits --model.pool mean", ["'mean'", "'token', 'gap', 'map', 'token+gap'"]),
    ("pretrain tiny-digits --model.registers -1", ["registers is -1; it must be 0 (none) or more"]),
    ("pretrain tiny-digits --model R50x1 --model.body.width 48", ["48 channels", "a multiple of 32"]),
    ("convert RUN", ["DESTINATION", "--to"]),
    ("convert RUN out --to onnx", ["'onnx'", "'google', 'timm', 'huggingface', 'vitlab'"]),
    ("convert nowhere.npz out --to timm", ["there is nothing at nowhere.npz; give a Google .npz"]),
    ("convert RUN out.npz --to google", ["gelu='erf'"]),
    ("convert RUN out --to huggingface", ["pool='gap'", "`--to vitlab`"]),
    ("convert RUN pictures --to timm", ["pictures already holds cats, dogs; give a new folder"]),
    ("convert RUN notes.txt --to vitlab", ["notes.txt is a file; give the name of a folder"]),
    ("export RUN --to tflite", ["'tflite'", "'onnx', 'torch-export'"]),
    ("export RUN --to onnx --out notes.txt", ["notes.txt", ".onnx"]),
    ("export model.pt --to onnx", ["model.pt is a pickle"]),
    ("evaluate hub:nobody", ["hub:OWNER/NAME"]),
]  # fmt: skip


@pytest.fixture
def wrong_things(tmp_path: Path, run: Path) -> None:
    """What the words of the table stand for, in the working folder."""
    for name, count in (("pictures/cats", 3), ("pictures/dogs", 0), ("other/ants", 5), ("other/bees", 5)):
        (tmp_path / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
    (tmp_path / "notes.txt").write_text("no checkpoint, no picture")
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    np.savez(tmp_path / "other.npz", weight=np.zeros(3))
    (tmp_path / "cut.npz").write_bytes((tmp_path / "other.npz").read_bytes()[:100])
    weights = (run / "model" / "model.safetensors").read_bytes()
    (tmp_path / "lone.safetensors").write_bytes(weights)
    tiny = ViTConfig(image_size=8, patch_size=4, width=8, depth=1, heads=2, mlp_dim=8, num_classes=0)
    save_model(ViT(tiny), tmp_path / "headless")
    save_model(ViT(tiny), tmp_path / "mixed")
    (tmp_path / "mixed" / "model.safetensors").write_bytes(weights)
    (tmp_path / "unfinished" / "checkpoints").mkdir(parents=True)
    (tmp_path / "unfinished" / "config.json").write_text("{}")


@pytest.mark.usefixtures("wrong_things")
@pytest.mark.parametrize(("words", "expected"), WORDS, ids=[words or "nothing" for words, _ in WORDS])
def test_bad_input(words: str, expected: list[str], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Says what was given, what is allowed and what to do; exit code 2, no traceback, nothing trained."""
    code, out, err = call(capsys, *(str(run) if word == "RUN" else word for word in words.split()))
    assert (code, out) == (2, "")
    for text in expected:
        assert text in err
    assert "Traceback" not in err
    assert "tyro" not in err.lower()
    assert not any(log.stat().st_size for log in Path().glob("runs/*/metrics.jsonl"))


def test_bad_option_speaks_of_its_own_command(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, err = call(capsys, "pretrain", "tiny-digits", "--optim.lrr", "1")
    assert "--optim.lr FLOAT" in err
    assert "finetune" not in err


def test_another_runs_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    argv = ["pretrain", "tiny-digits", "--workdir", str(run), "--steps", "3", *SMALL, "--optim.lr", "0.5"]
    code, _, err = call(capsys, *argv)
    assert code == 2
    assert (
        f"the work folder {run} holds a run with other settings: optim.lr: 0.002 -> 0.5 Give another --workdir" in err
    )
    assert (run / "metrics.jsonl").read_bytes() == before


# ---------------------------------------------------------------------------------------------- as a process


def process(*argv: str, **options: Any) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-m", "vitlab", *argv]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options)


def test_bad_input_as_a_process() -> None:
    started = process("evaluate", "nowhere")
    out, err = started.communicate()
    assert (started.returncode, out) == (2, b"")
    assert err.startswith(b"vitlab: there is nothing at nowhere; give a Google .npz")


def test_terminated_and_continued(capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM saves and ends with 143; the same command continues, to the same bytes as a run left alone."""
    argv = ["pretrain", "tiny-digits", "--steps", "300", *SMALL, "--mixup", "0.2", "--average-decay", "0.9"]
    argv += ["--model.dropout", "0.1", "--microbatch", "5", "--eval-every", "25"]
    started = process(*argv, "--workdir", "stopped")
    log = Path("stopped/metrics.jsonl")
    wait_until(lambda: started.poll() is not None or (log.exists() and log.read_text().count("\n") > 8))
    started.send_signal(signal.SIGTERM)
    _, err = started.communicate()
    assert started.returncode == 143, err.decode()
    assert re.search(r"vitlab: stopped and saved at step \d+/300; the same command continues\.", err.decode())
    assert b"Traceback" not in err
    code, _, err = call(capsys, *argv, "--workdir", "stopped")
    assert code == 0
    assert "continues from step-000000" in err
    assert call(capsys, *argv, "--workdir", "quiet")[0] == 0
    for name in ("metrics.jsonl", "result.json", "model/model.safetensors"):
        assert Path("stopped", name).read_bytes() == Path("quiet", name).read_bytes()


def wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.005)
