"""Each command as its users meet it: what it prints, for people and for programs, and what it leaves."""

import io
import json
import re
import shlex
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from program import SMALL, call
from shard_files import serving, write_folders
from small_study import SMALL as SMALL_STUDY

from vitlab.cli import parse
from vitlab.commands import Duplicates, Pretrain
from vitlab.studies import STUDIES
from vitlab.train.config import FewShotConfig


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


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
    for what in ("models", "datasets", "recipes", "studies", "vtab"):
        assert answer(capsys, "list", what)


def test_finetune_searches_and_runs(run: Path, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is left can be used as any other run, and the same command only reads it."""
    argv = [
        "finetune",
        str(run),
        "--dataset",
        "digits",
        "--data.classes",
        "0",
        "1",
        "2",
        "--steps",
        "2",
        "--device",
        "cpu",
    ]
    argv += ["--learning-rates", "0.1", "0.2", "--runs", "2"]
    tuned = answer(capsys, *argv)
    assert [each["learning_rate"] for each in tuned["sweep"]] == [0.1, 0.2]
    assert len(tuned["runs"]) == 2
    folder = Path("runs/finetune-digits")
    assert json.loads((folder / "result.json").read_text()) == tuned
    assert answer(capsys, "evaluate", str(folder), "--device", "cpu") == tuned["test"]
    assert len(answer(capsys, "predict", str(folder), str(picture), "--device", "cpu")["top"]) == 3
    code, out, err = call(capsys, *argv)
    assert code == 0
    assert "<- taken" in out
    assert "accuracy over 2 runs: " in out
    for setting in ("learning_rates = (0.1, 0.2)", "batch_size = 32", "model.image_size = 8", "held_out = 0.1"):
        assert setting in err
    assert " step " not in err  # nothing was trained


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


def test_vtab(run: Path, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 19 tasks one is there; it is found, trained, tested, and no mean is made of it."""
    for name, count in {"train800": 800, "val200": 200, "train800val200": 1000, "test": 5}.items():
        Path("data/dmlab").mkdir(parents=True, exist_ok=True)
        Path(f"data/dmlab/{name}.txt").write_text(f"{picture} 1\n" * count)
    code, out, _ = call(capsys, "list", "vtab", "d*", "--root", "data")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if " lists " in line] == ["dmlab"]
    small = ["--steps", "2", "--batch-size", "4", "--image-size", "8", "--data.workers", "0", "--device", "cpu"]
    code, out, err = call(capsys, "vtab", str(run), "--root", "data", "--no-download", *small)
    assert code == 0
    assert "DMLab structured 5 100.00%" in " ".join(out.split())
    assert "mean of all 19 none: 1 of its 19 tasks are there" in " ".join(out.split())
    assert "dmlab: 100.00% of 5" in err
    result = answer(capsys, "vtab", str(run), "--root", "data", "--no-download", *small)
    assert result == json.loads(Path("runs/vtab/result.json").read_text())
    assert len(result["missing"]) == 18
    nothing = call(capsys, "vtab", str(run), "--root", "empty", "--out", "none", "--no-download", *small)
    assert nothing[0] == 1
    assert "mean of all 19 none: 0 of its 19 tasks are there" in " ".join(nothing[1].split())


def test_few_shots_and_probes(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the same features, kept where the user says."""
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    argv = ["fewshot", str(run), "--dataset", "digits", "--shots", "5", "--device", "cpu", "--cache", "kept"]
    found = answer(capsys, *argv, "--out", "few.json")
    assert found == json.loads(Path("few.json").read_text())
    assert [row["shots"] for row in found["rows"]] == [5]
    code, out, _ = call(capsys, *argv)
    assert code == 0
    assert out.splitlines()[1].split()[:4] == ["digits", "5", "1024", f"{found['rows'][0]['mean']:.2%}"]
    probed = answer(capsys, "probe", str(run), "--dataset", "digits", "--k", "3", "--cache", "kept", "--device", "cpu")
    assert list(probed["weighted"]) == ["3"]
    assert len(list(Path("kept").iterdir())) == 3  # few of train, test, all of train
    assert not Path("elsewhere").exists()


def test_few_shots_while_training() -> None:
    command = parse(["pretrain", "tiny-digits", "--fewshot.dataset", "cifar10", "--fewshot.shots", "10", "25"])
    assert isinstance(command, Pretrain)
    assert command.config.fewshot == FewShotConfig(dataset="cifar10", shots=(10, 25))
    command = parse(["pretrain", "tiny-digits"])
    assert isinstance(command, Pretrain)
    assert command.config.fewshot is None


def test_duplicates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed and left, and an exit code that says whether all could be compared."""
    from vitlab.data.dedup import THRESHOLD

    assert Duplicates("a", "b").threshold == THRESHOLD
    random = np.random.default_rng(0)
    for split, seeds in (("train", range(6)), ("test", range(4, 8))):
        (tmp_path / "set" / split / "any").mkdir(parents=True)
        for seed in seeds:
            rough = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), dtype=np.uint8)
            picture = Image.fromarray(rough).resize((48, 48), Image.Resampling.BICUBIC)
            picture.save(tmp_path / "set" / split / "any" / f"{seed}.png")
    said = answer(capsys, "duplicates", "folder:set", "folder:set", "--train-split", "train", "--out", "found")
    assert (said["pairs"], said["unreadable"]) == (2, [])
    assert Path("found/exclude.txt").read_text() == "train/any/4.png\ntrain/any/5.png\n"
    (tmp_path / "set" / "test" / "any" / "8.png").write_bytes(random.bytes(50))
    code, out, err = call(capsys, "duplicates", "folder:set", "folder:set", "--train-split", "train", "--out", "found")
    assert code == 1
    assert "Pairs: 2\n" in out
    assert "8.png: not a picture" in out
    assert out.splitlines()[-1].endswith("to look at: found/report.html")
    assert "compared 5 of 5" in err


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


def test_inspect_leaves_a_page(run: Path, picture: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "inspect", str(run), str(picture), "--device", "cpu")
    assert code == 0
    assert "mean attention distance over 1 picture: " in out
    assert out.splitlines()[-1] == str(Path("inspect/index.html").resolve())
    Path("broken.png").write_bytes(b"no picture")
    words = ["inspect", str(run), str(picture), "broken.png", "--out", "look", "--json", "--device", "cpu"]
    code, out, _ = call(capsys, *words)
    assert code == 1  # in part
    found = json.loads(out)
    assert [each["path"] for each in found["unreadable"]] == ["broken.png"]
    assert found["page"] == str(Path("look/index.html").resolve())


def test_app_says_where_it_is(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {}

    def launch(path: str, *, announce: Callable[[str], object], **options: Any) -> None:
        asked.update(options, path=path)
        announce("http://127.0.0.1:8000/")

    monkeypatch.setattr("vitlab.app.server.launch", launch)
    assert call(capsys, "app", str(run)) == (0, "http://127.0.0.1:8000/ (Ctrl-C ends it)\n", "")
    assert call(capsys, "app", str(run), "--port", "8000", "--json") == (0, '{"url": "http://127.0.0.1:8000/"}\n', "")
    assert asked == {
        "path": str(run), "port": 8000, "max_megapixels": 50.0, "max_upload_mb": 20.0, "open_browser": False,
        "device": "auto",
    }  # fmt: skip


def test_studies_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "study", "--list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["study", *STUDIES]
    assert {row["study"]: row["paper"] for row in answer(capsys, "study", "--list")}["positions"].startswith("Table 8")


@pytest.mark.parametrize("scale", ["tiny", "gpu", "paper"])
@pytest.mark.parametrize("name", STUDIES)
def test_a_studys_cost_is_told_before_it_runs(name: str, scale: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each study has points at each scale, of different names, which start from points that come before."""
    found = answer(capsys, "study", name, "--scale", scale, "--dry-run")
    names = [row["point"] for row in found["points"]]
    assert len(set(names)) == len(names) == found["sum"]["points"] > 2
    assert found["sum"]["open_hours"] == found["sum"]["hours"] > 0
    assert not any(row["finished"] for row in found["points"])
    seen: set[str] = set()
    for point in STUDIES[name].points(scale):  # pyright: ignore[reportArgumentType]  # the three that there are
        assert re.fullmatch(r"[A-Za-z0-9_.+-]+", point.name), "no name for a folder"
        assert point.start is None or point.start in seen
        seen.add(point.name)
    assert not list(Path().iterdir())


def test_a_studys_cost_at_another_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """At twice the speed it takes half the time."""
    slow, fast = (
        answer(capsys, "study", "head", "--dry-run", "--tflops", rate)["sum"]["hours"] for rate in ("0.5", "1")
    )
    assert slow == pytest.approx(2 * fast)
    _, out, _ = call(capsys, "study", "head", "--dry-run", "--tflops", "0.5")
    assert f"{slow:.3g} hours of one core at 0.5 TFLOP/s" in out.splitlines()[-1]


def test_a_study_from_end_to_end(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by processes of its own, told for people, and only read the second time."""
    monkeypatch.setitem(STUDIES, "small", SMALL_STUDY)
    code, out, err = call(capsys, "study", "small", "--processes", "2", "--device", "cpu")
    assert code == 0, err
    assert "6/6" in err
    assert "The larger rate is ahead." in out
    assert out.splitlines()[-1].startswith("report: runs/study-small-tiny/report.md")
    again = answer(capsys, "study", "small", "--device", "cpu")
    assert again == json.loads(Path("runs/study-small-tiny/study.json").read_text())
    cost = answer(capsys, "study", "small", "--dry-run")
    assert all(row["finished"] for row in cost["points"])
    assert cost["sum"]["open_hours"] == 0


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "give the NAME of a study"),
        (["positions", "--list"], "--list alone"),
        (["--list", "--scale", "gpu"], "--list alone"),
        (["positions", "--dry-run", "--processes", "2"], "no effect with --dry-run"),
        (["postions"], "the nearest: positions"),
        (["positions", "--tflops", "3"], "no effect without --dry-run"),
        (["positions", "--dry-run", "--tflops", "0"], "tflops is 0"),
        (["positions", "--scale", "huge"], "huge"),
        (["positions", "--processes", "0"], "at least 1"),
        (["positions", "--device", "tpu"], "tpu"),
        (["positions", "--dataset", "folder:nowhere", "--dry-run"], "folder:nowhere"),
        (["data-size", "--scale", "paper", "--dataset", "digits", "--dry-run"], "several data sets"),
    ],
)
def test_what_is_no_study(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "study", *argv)
    assert code == 2
    assert said in err
    assert not list(Path().iterdir())


# -------------------------------------------------------------------------------------------------------- shards


def test_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """What is written can be trained on and checked; an unreadable picture shows in the exit code."""
    write_folders(tmp_path / "pets", {"ant": 8, "bee": 8}, side=90)
    code, out, _ = call(capsys, "shard", "folder:pets", "out", "--size", "80", "--records", "5")
    assert code == 0
    assert out.splitlines()[0].startswith("train: 12 pictures in 3 shards, 0.0 MB")
    assert out.splitlines()[-1] == "use it as shards:out"
    with tarfile.open("out/train-000000.tar") as tar:
        assert {Path(name).suffix for name in tar.getnames()} == {".cls", ".jpg"}
    code, out, _ = call(capsys, "shard", "shards:out", "--check")
    assert (code, out) == (0, "all 9 files of out are as index.json says\n")
    assert answer(capsys, "shard", "folder:pets", "test-only", "--split", "test")["splits"].keys() == {"test"}
    Path("out/val-000000.tar").write_bytes(b"")
    code, out, _ = call(capsys, "shard", "shards:out", "--check", "--json")
    assert code == 1
    assert json.loads(out)["wrong"].keys() == {"val-000000.tar"}
    (tmp_path / "pets" / "ant" / "000.jpg").write_bytes(b"no picture")
    code, out, _ = call(capsys, "shard", "folder:pets", "some", "--on-error", "skip")
    assert code == 1
    assert "; 1 could not be read" in out
    assert "ant/000.jpg: not a picture" in caplog.text


def test_pretrain_from_a_web_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a process that reads pictures; and what is said where there is no server any more."""
    monkeypatch.setattr("vitlab.data.store.PAUSE", 0.0)
    write_folders(tmp_path / "pets", {"ant": 20, "bee": 20})
    assert call(capsys, "shard", "folder:pets", "out", "--records", "8")[0] == 0
    with serving(tmp_path / "out") as server:
        small = shlex.split("--batch-size 8 --model.image-size 8 --model.width 8 --model.depth 1 --model.heads 2")
        small += shlex.split("--model.mlp-dim 8 --steps 6 --log-every 1 --device cpu --data.root kept --workdir run")
        argv = ["pretrain", "tiny-digits", "--data.name", f"shards:{server.address}", "--data.workers", "1", *small]
        done = answer(capsys, *argv)
        assert done["test"]["pictures"] == 4
        assert len(list((tmp_path / "kept").rglob("*.tar"))) == 6
    code, _, err = call(capsys, "pretrain", "tiny-digits", "--data.name", f"shards:{server.address}", *small)
    assert code == 2
    assert f"cannot fetch {server.address}/index.json" in err
    assert "tried 6 times" in err
    assert "Traceback" not in err
