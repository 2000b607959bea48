"""What commands print, for people and for programs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from program import SMALL, answer, call

from vitlab.commands import COMMANDS, print_note, print_result


def test_a_finished_run_is_printed_again(run: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For people, and for programs: nothing but the answer on the standard output."""
    again = ["pretrain", "tiny-digits", "--workdir", str(run), "--steps", "3", *SMALL]
    code, out, _ = call(capsys, *again)
    assert code == 0
    assert out.splitlines()[0].split() == ["class", "images", "recall", "precision"]
    assert str(run / "model") in out
    pretrained = answer(capsys, *again)
    assert pretrained == json.loads((run / "result.json").read_text())
    source = {"checkpoint": str(run), "dataset": None, "split": "test"}
    assert answer(capsys, "evaluate", str(run), "--device", "cpu") == source | pretrained["test"]
    predicted = answer(capsys, "predict", str(run), str(image), "--top", "2", "--device", "cpu")
    assert (predicted["path"], predicted["error"], len(predicted["top"])) == (str(image), None, 2)


BEGINNINGS = {
    "demo": ("demo", "training on handwritten digits"),
    "pretrain": ("pretrain tiny-digits", "reading digits"),
    "finetune": ("finetune there --dataset digits", "loading there"),
    "vtab": ("vtab there", "loading there"),
    "evaluate": ("evaluate there", "loading there"),
    "fewshot": ("fewshot there --dataset digits", "loading there"),
    "probe": ("probe there --dataset digits", "loading there"),
    "features": ("features there --dataset digits", "loading there"),
    "predict": ("predict there a.png", "loading there"),
    "inspect": ("inspect there", "loading there"),
    "paper": ("paper eq1", "showing eq1"),
    "app": ("app there", "loading there"),
    "study": ("study positions", "planning the study positions at scale small"),
    "bench": ("bench ViT-B/16", "measuring ViT-B/16"),
    "plan": ("plan jft", "planning jft"),
    "duplicates": ("duplicates digits folder:x", "reading digits and folder:x"),
    "shard": ("shard folder:nowhere out", "reading folder:nowhere"),  # which needs no torch, and ends at once
    "convert": ("convert there out --to timm", "loading there"),
    "export": ("export there --to onnx", "loading there"),
    "doctor": ("doctor", "measuring this machine"),
}


def test_a_command_says_what_it_does_before_it_imports_torch() -> None:
    """Which takes seconds; only names are listed in a moment. Here torch cannot be imported: nothing comes after."""
    assert set(BEGINNINGS) == set(COMMANDS) - {"list"}
    lines = without_torch([words for words, _ in BEGINNINGS.values()], ("no torch", "2"))
    begun = [line for line in lines if line.endswith(" ...")]
    assert begun == [f"vitlab: {text} ..." for _, text in BEGINNINGS.values()]


def without_torch(commands: list[str], ends: tuple[str, ...]) -> list[str]:
    """What the commands print on the standard error where torch cannot be imported. `ends`: as each of them may end."""
    code = (
        "import sys\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': raise ImportError('no torch')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from vitlab.cli import main\n"
        f"for words in {commands}:\n"
        "    try: main(words.split())\n"
        f"    except (ImportError, SystemExit) as error: assert str(error) in {ends}, (words, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    return done.stderr.splitlines()


def test_inputs_are_checked_before_torch_is_imported(run: Path) -> None:
    """Checkpoints, data sets, columns of tables and images: each error names what was given and what to give."""
    Path("table.csv").write_text("photo,label\na.png,cat\n")
    found = {
        "finetune nothing-here": "there is nothing at nothing-here; give a Google .npz",
        "finetune table.csv --dataset digits": "table.csv is not a checkpoint",
        f"finetune {run} --dataset csv:table.csv": "has the columns photo, label; none of them is named as a column of",
        f"finetune {run} --dataset digits --budget soon": "'soon' is not a time",
        "predict missing x.jpg": "there is nothing at missing",
        f"predict {run} x.jpg": "there is no file or folder x.jpg",
        f"evaluate {run} --dataset cifar11": "unknown data set 'cifar11'; the nearest: cifar10",
        f"probe {run} --dataset folder:nowhere": "nowhere does not exist",
        "export missing --to onnx": "there is nothing at missing",
        "pretrain tiny-digits --dataset digit": "unknown data set 'digit'",
        "paper fig6 missing": "there is nothing at missing",
    }
    errors = [line for line in without_torch(list(found), ("2",)) if "error:" in line]
    assert len(errors) == len(found)
    for (words, message), error in zip(found.items(), errors, strict=True):
        assert message in error, words


def test_only_rank_0_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "10":
        monkeypatch.setenv("RANK", rank)
        print_note(f"reading as {rank}")
    assert capsys.readouterr().err == "vitlab: reading as 0\n"


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    print_result({"a": [float("nan"), 1.5], "b": {"c": float("-inf")}}, as_json=True, text="")
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail) == {"a": [None, 1.5], "b": {"c": None}}
