"""The program as its users meet it: what it prints, what it leaves, and its errors."""

import contextlib
import functools
import io
import itertools
import json
import multiprocessing
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

import pytest
import torch
from PIL import Image
from program import SMALL, call

from vitlab.cli import main
from vitlab.commands import command_type, print_result
from vitlab.train.stopping import NonFiniteError, StoppedError
from vitlab.weights import ParityError


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def raise_in(patch: pytest.MonkeyPatch, error: BaseException, command: str = "list") -> None:

    def fail(_: Any) -> int:
        raise error

    patch.setattr(command_type(command), "run", fail)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (StoppedError("saved at step 5"), 143, "vitlab: saved at step 5"),
        (NonFiniteError("not finite at step 5"), 1, "vitlab: error: not finite at step 5"),
        (ParityError("the file differs"), 1, "vitlab: error: the file differs"),
        (PermissionError(13, "Permission denied", "runs"), 2, "vitlab: error: [Errno 13] Permission denied: 'runs'"),
        (KeyboardInterrupt(), 130, "vitlab: interrupted."),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_in(monkeypatch, error)
    assert call(capsys, "list", "models") == (code, "", message)


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("pretrain tiny-digits", ("--microbatch", "--model.image-size")),
        ("finetune m --dataset digits", ("--microbatch", "--image-size")),
        ("evaluate m", ("--batch-size", "--image-size")),
        ("bench", ("--batch",)),
        ("list models", ()),
    ],
)
def test_a_full_memory_names_the_flags_of_the_command(
    words: str, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raise_in(monkeypatch, torch.OutOfMemoryError("tried 9 GB"), words.split()[0])
    code, out, err = call(capsys, *words.split())
    assert (code, out, "tried 9 GB" in err) == (1, "", True)
    assert tuple(re.findall(r"--[a-z.-]+\b", err)) == flags


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What torch.compile prints without one is recognized; an error that nobody expects keeps its traceback."""
    builder = pytest.importorskip("torch._inductor.cpp_builder")
    builder.cpp_compiler_search.cache_clear()
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", (None, "no-such-compiler"))
    monkeypatch.setattr(command_type("list"), "run", lambda _: builder.get_cpp_compiler())
    code, out, err = call(capsys, "list", "models")
    assert (code, out) == (2, "")
    assert "--compile False" in err
    builder.cpp_compiler_search.cache_clear()
    for kind in (RuntimeError, ValueError):
        raise_in(monkeypatch, kind("a bug"))
        with pytest.raises(kind, match="a bug"):
            main(["list", "models"])


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", rb"\xdcbung \u732b \ud800" + b" \xff"),
        ("cp1252", b"\xdcbung " + rb"\u732b \ud800" + b" \xff"),
        ("utf-8", "Übung 猫 ".encode() + rb"\ud800" + b" \xff"),
    ],
)
def test_results_are_printed_in_any_encoding(encoding: str, expected: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it lacks is escaped, as are control characters; the bytes of names that are not text stay."""

    def result(_: Any) -> int:
        print_result({}, False, "Übung 猫 \ud800 \udcff\n\x1b[2J\u202e")
        return 0

    monkeypatch.setattr(command_type("list"), "run", result)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), encoding, errors="strict"))
    with pytest.raises(SystemExit) as ended:
        main(["list", "models"])
    assert ended.value.code == 0
    assert written.getvalue().splitlines() == [expected, rb"\x1b[2J\u202e"]


def test_a_closed_output_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As `>&-`. Without a standard error, its lines do not join the results."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)
        with pytest.raises(SystemExit) as ended:
            main(["list", "models"])
    assert ended.value.code == 2
    assert "redirect it" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(SystemExit) as ended:
        main(["predict", "nowhere", "a.png"])
    assert (ended.value.code, capsys.readouterr().out) == (2, "")


@pytest.mark.parametrize(
    "words",
    [
        "predict nowhere a.png --csv LONG",
        "finetune nowhere --dataset digits --workdir LONG",
        "pretrain tiny-digits --workdir LONG",
        "features nowhere --dataset digits --out LONG",
        "inspect nowhere --out LONG",
        "convert nowhere LONG --to timm",
        "export nowhere --to onnx --out LONG.onnx",
        "shard digits LONG",
        "study positions --out LONG",
    ],
)
def test_an_output_that_cannot_be_written_is_found_first(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before a checkpoint is looked for: a name that is too long, and a file where a folder should be."""
    code, out, err = call(capsys, *words.replace("LONG", "ä" * 125).split())
    assert (code, out, "ää" in err) == (2, "", True)
    Path("file").touch()
    code, out, err = call(capsys, *words.replace("LONG", "file/x").split())
    assert (code, out, "file" in err) == (2, "", True)
    assert list(Path().iterdir()) == [Path("file")]


def test_another_runs_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    argv = ["pretrain", "tiny-digits", "--workdir", str(run), "--steps", "3", *SMALL, "--optim.lr", "0.5"]
    code, _, err = call(capsys, *argv)
    assert code == 2
    assert "optim.lr: 0.002 -> 0.5" in err
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_name_that_is_not_text(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is printed as it is; a failure exits with 1."""
    (tmp_path / os.fsdecode(b"b\xff.png")).write_bytes(b"no image")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written := io.BytesIO(), "utf-8", errors="strict"))
    with pytest.raises(SystemExit) as ended:
        main(["predict", str(run), str(tmp_path), "--device", "cpu"])
    assert b"b\xff.png: cannot be read" in written.getvalue()
    assert ended.value.code == 1


@pytest.mark.parametrize("words", [("list", "models"), ("--help",)])
def test_a_reader_that_has_ended(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As `| head`: the program ends well, with nothing on the standard error."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "")  # or nothing is left to be written at the end
    command = [sys.executable, "-c", f"input(); from vitlab.cli import main; main({words})"]
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert started.stdout is not None
    started.stdout.close()
    assert started.communicate(b"\n")[1] == b""
    assert started.returncode == 0


@pytest.mark.usefixtures("unchecked")
def test_several_processes_print_once(
    run: Path,
    in_ranks: Callable[[int, Callable[[], Any]], list[Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What torchrun does, without its start: both test their share, one prints what a single process prints; an error
    ends both; a command for one process is refused."""

    def job(checkpoint: object) -> tuple[str, Any]:
        message = io.StringIO()
        with contextlib.redirect_stdout(message), pytest.raises(SystemExit) as ended:
            main(["evaluate", str(checkpoint), "--json", "--device", "cpu"])
        return message.getvalue(), ended.value.code

    (whole,) = in_ranks(1, functools.partial(job, run))
    assert len(json.loads(whole[0])["per_class"]) == 3
    assert in_ranks(2, functools.partial(job, run)) == [whole, ("", 0)]
    assert [code for _, code in in_ranks(2, functools.partial(job, "nowhere"))] in ([2, 2], [2, 1], [1, 2])
    monkeypatch.setenv("WORLD_SIZE", "4")
    code, _, err = call(capsys, "list", "models")
    assert (code, "4" in err) == (2, True)


def files_of(folder: Path) -> list[str]:
    """What a run has left, without TensorBoard's files, whose names tell the time."""
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    return sorted(path.as_posix() for path in files if "tensorboard" not in path.parts)


@pytest.mark.usefixtures("unrendered", "unchecked")  # each process would compile the checks anew
def test_several_processes_train(
    tmp_path: Path, run: Path, in_ranks: Callable[[int, Callable[[], Any]], list[Any]]
) -> None:
    """Two of them pre-train, and fine-tune with a search; what is written and printed is what one alone
    writes and prints, up to the rounding of sums, and only one of them prints."""
    fewshot = ["--eval-every", "1", "--fewshot.shots", "2", "--fewshot.test-split", "test"]
    single = ["--precision", "float32", "--json", "--device", "cpu"]
    tuned = shlex.split(
        "--dataset digits --data.classes 0 1 --learning-rates 0.01 0.03 --steps 3 --batch-size 8 --runs 1"
    )
    words = [
        ["pretrain", "tiny-digits", "--steps", "2", *SMALL, *fewshot, *single],
        ["finetune", str(run), *tuned, "--image-size", "16", *single],
    ]

    def job(which: int, folder: Path) -> tuple[str, str]:
        message, log_text = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(message), contextlib.redirect_stderr(log_text), pytest.raises(SystemExit):
            main([*words[which], "--workdir", str(folder)])
        return message.getvalue(), log_text.getvalue()

    for which in range(2):
        ((alone, _),) = in_ranks(1, lambda which=which: job(which, tmp_path / f"one-{which}"))
        (message, log_text), silent = in_ranks(2, lambda which=which: job(which, tmp_path / f"two-{which}"))
        assert silent == ("", "")
        assert "by 2 processes" in log_text
        given, expected = json.loads(message), json.loads(alone)
        assert given["test"]["images"] == expected["test"]["images"]
        assert given["test"]["loss"] == pytest.approx(expected["test"]["loss"], abs=1e-4)
        names = [files_of(tmp_path / f"{count}-{which}") for count in ("one", "two")]
        assert names[0] == names[1]
    records = (tmp_path / "two-0/metrics.jsonl").read_text()
    assert records.count("fewshot_2shot") == 2


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_process_of_torchrun_is_killed() -> None:
    for split, name, i in itertools.product(("train", "test"), "012", range(8)):  # digits need scikit-learn, twice
        path = Path("photos", split, name, f"{i}.png")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (20 * i, 80 * int(name), 0)).save(path)
    torchrun = [str(Path(sys.executable).parent / "torchrun"), "--nproc-per-node", "2", "-m", "vitlab"]
    command = [*torchrun, "pretrain", "tiny-digits", "--steps", "2000", *SMALL, "--checkpoint-every", "2"]
    command += ["--dataset", "folder:photos"]
    with Path("message.txt").open("wb") as message:
        started = subprocess.Popen([*command, "--workdir", "run"], stdout=subprocess.DEVNULL, stderr=message)
    log, children = Path("run/metrics.jsonl"), Path(f"/proc/{started.pid}/task/{started.pid}/children")
    try:
        wait_until(lambda: started.poll() is not None or (log.exists() and log.read_text().count("\n") > 4))
        assert started.poll() is None, "ended before it was killed"
        os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
        assert started.wait(200) == 1
    finally:
        started.terminate()  # it ends its processes
    assert "forcefully exiting" not in Path("message.txt").read_text()  # as torchrun prints after a timeout
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps == list(range(1, len(steps) + 1))
    assert any(Path("run/checkpoints").glob("step-*"))


@pytest.mark.usefixtures("unrendered", "unchecked")
def test_terminated_and_continued(capsys: pytest.CaptureFixture[str]) -> None:
    """SIGTERM saves and ends with 143; the same command resumes, to the same bytes as a run left alone."""
    argv = ["pretrain", "tiny-digits", "--steps", "20", *SMALL, "--mixup", "0.2", "--average-decay", "0.9"]
    argv += ["--model.dropout", "0.1", "--microbatch", "5", "--eval-every", "8"]

    def job() -> None:
        with Path("err.txt").open("w") as sys.stderr:
            main([*argv, "--workdir", "stopped"])

    started = multiprocessing.get_context("fork").Process(target=job)  # all that takes long to import is there already
    started.start()
    log = Path("stopped/metrics.jsonl")
    wait_until(lambda: not started.is_alive() or (log.exists() and log.read_text().count("\n") > 5))
    started.terminate()
    started.join()
    err = Path("err.txt").read_text()
    assert started.exitcode == 143, err
    assert re.search(r"vitlab: stopped and saved at step \d+/20; ", err)
    assert "Traceback" not in err
    code, _, err = call(capsys, *argv, "--workdir", "stopped")
    assert code == 0
    assert "step-000000" in err
    assert call(capsys, *argv, "--workdir", "quiet")[0] == 0
    for name in ("metrics.jsonl", "result.json", "model/model.safetensors"):
        assert Path("stopped", name).read_bytes() == Path("quiet", name).read_bytes()


def wait_until(true: Callable[[], bool]) -> None:
    while not true():
        time.sleep(0.005)
