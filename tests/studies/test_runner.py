"""Runs are run once, wherever they were interrupted and however many processes work on them."""

import dataclasses
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_study import SMALL, contents, have_ended, holders, steps_done, variants

from vitlab.config import FewShotConfig
from vitlab.io import lock_file
from vitlab.models.config import ViTConfig
from vitlab.runs import run as run_module
from vitlab.studies import runner
from vitlab.studies.report import write_report
from vitlab.studies.runner import StudyError, StudyPlan, plan, run_study, run_unfinished
from vitlab.studies.spec import StudyRun, changed
from vitlab.train import loop
from vitlab.train.stopping import NonFiniteError, StoppedError
from vitlab.train.workdir import write_json

pytestmark = pytest.mark.usefixtures("unchecked")


def planned(out: Path, change: Callable[[list[StudyRun]], Sequence[StudyRun]] = list, **settings: Any) -> StudyPlan:
    """The small study with short runs, its runs changed."""
    study = dataclasses.replace(SMALL, variants=lambda scale: change(variants(scale, steps=4)), seeds=2)
    return plan(study, "small", out, **settings)


def with_config(runs: list[StudyRun], index: int, **changes: Any) -> list[StudyRun]:
    runs[index] = dataclasses.replace(runs[index], config=changed(runs[index].config, **changes))
    return runs


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small study, undisturbed in this process; its report is written."""
    whole = plan(SMALL, "small", tmp_path_factory.mktemp("quiet"))
    run_unfinished(whole, "cpu")
    write_report(SMALL, whole.scale, whole.results, whole.out)
    return whole.out


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Runs end at once; the names of those that ran."""
    ran: list[str] = []

    def train(plan: StudyPlan, run: StudyRun, device: str) -> None:
        ran.append(run.name)
        write_json(plan.folders[run.name] / "result.json", {})

    monkeypatch.setattr(runner, "_train", train)
    monkeypatch.setattr(runner, "POLL_SECONDS", 0.01)
    return ran


@pytest.fixture
def unreported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated runs have no results to report."""
    monkeypatch.setattr(runner, "write_report", lambda *_: {})
    monkeypatch.setattr(StudyPlan, "results", None)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers start at once, without importing torch again."""
    monkeypatch.setattr(runner, "SPAWN", multiprocessing.get_context("fork"))


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A study that cannot end before a signal reaches it."""
    step = loop.train_step

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return step(*args, **options)

    monkeypatch.setattr(loop, "train_step", slow)


def test_every_point_is_run_and_reported(quiet: Path) -> None:
    whole = plan(SMALL, "small", quiet)
    results = whole.results.runs
    assert [result.run for result in results] == SMALL.runs("small")
    for result in results:
        assert 0 <= result.metrics["accuracy"] <= 1
        assert result.records[-1]["step"] == 12
        assert result.examples > 300
    first, tuned = results[0], results[2]
    assert first.metrics["fewshot_2shot"] == first.records[-1]["fewshot_2shot"]
    assert "fewshot_2shot" not in tuned.metrics
    assert tuned.exaflops > 3 * first.exaflops  # at twice the resolution
    assert isinstance(tuned.model, ViTConfig)
    assert (tuned.model.width, tuned.model.image_size, tuned.model.num_classes) == (16, 16, 3)
    assert not list(quiet.glob("points/*/checkpoints"))


def once(condition: Callable[[], Any], action: Callable[[], None]) -> None:
    """In a thread: waits for the condition, then acts."""

    def wait() -> None:
        while not condition():
            time.sleep(0.01)
        action()

    threading.Thread(target=wait, daemon=True).start()


@pytest.mark.usefixtures("forked", "slow_steps")
def test_a_killed_study_ends_its_workers_and_then_the_same(quiet: Path, tmp_path: Path) -> None:
    unfinished = plan(SMALL, "small", tmp_path)
    options = {"processes": 1, "device": "cpu"}
    study = multiprocessing.get_context("fork").Process(target=run_study, args=(SMALL, unfinished), kwargs=options)
    study.start()
    while steps_done(tmp_path) < 3 and study.is_alive():
        time.sleep(0.005)
    study.kill()
    study.join()
    assert have_ended(holders(tmp_path), 120)  # none continues by itself
    assert unfinished.unfinished_runs
    run_unfinished(unfinished, "cpu")
    run_study(SMALL, unfinished, device="cpu")
    assert contents(tmp_path) == contents(quiet)


@pytest.mark.usefixtures("forked")
def test_a_killed_worker_ends_the_study(tmp_path: Path) -> None:
    once(lambda: holders(tmp_path), lambda: os.kill(next(iter(holders(tmp_path))), signal.SIGKILL))
    with pytest.raises(StudyError, match="killed"):
        run_study(SMALL, plan(SMALL, "small", tmp_path), processes=1, device="cpu")


@pytest.mark.usefixtures("forked", "slow_steps")
def test_sigterm_saves_and_the_same_call_continues(quiet: Path, tmp_path: Path) -> None:
    whole = plan(SMALL, "small", tmp_path)
    once(lambda: steps_done(tmp_path) >= 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedError):
        run_study(SMALL, whole, processes=1, device="cpu")
    assert have_ended(holders(tmp_path), 60)
    assert list(tmp_path.glob("points/*/checkpoints/*"))
    run = whole.unfinished_runs[0]
    run_unfinished(dataclasses.replace(whole, runs=(run,)), "cpu")
    metrics = Path("points") / whole.folders[run.name].name / "metrics.jsonl"
    assert (tmp_path / metrics).read_bytes() == (quiet / metrics).read_bytes()


@pytest.mark.usefixtures("unrendered")
def test_finished_points_are_not_run_again(quiet: Path, tmp_path: Path, simulated: list[str]) -> None:
    whole = dataclasses.replace(plan(SMALL, "small", quiet), out=tmp_path)
    assert run_study(SMALL, whole, device="cpu") == json.loads((quiet / "study.json").read_bytes())
    assert simulated == []
    assert (tmp_path / "study.json").read_bytes() == (quiet / "study.json").read_bytes()


def test_a_changed_recipe_runs_its_points_and_those_that_start_from_them(tmp_path: Path, simulated: list[str]) -> None:
    run_unfinished(planned(tmp_path), "cpu")
    after = planned(tmp_path, lambda runs: with_config(runs, 1, steps=6))
    simulated.clear()
    run_unfinished(after, "cpu")
    names = [f"{name}.seed-{seed}" for seed in (0, 1) for name in ("rate-0.01", "tuned")]
    assert simulated == names


def test_a_point_that_another_process_holds_is_left_to_it(
    tmp_path: Path, simulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = planned(tmp_path)
    name = short.runs[1].name
    held = short.folders[name].parent / ".claims" / short.folders[name].name

    def lock(path: Path) -> object:
        """As if another process held it until the others are finished, and then had finished it."""
        if path == held and len(simulated) < 4:
            return None
        if path == held:
            write_json(short.folders[name] / "result.json", {})
        return lock_file(path)

    monkeypatch.setattr(runner, "lock_file", lock)
    run_unfinished(short, "cpu")
    assert sorted(simulated) == sorted(run.name for run in short.runs if run.name != name)


@pytest.mark.usefixtures("unreported")
def test_a_point_that_diverges_stops_no_other(
    tmp_path: Path, simulated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, as are the runs that start from it, directly or not; the next study runs them again."""
    train, fails = runner._train, [True]

    def diverging(plan: StudyPlan, run: StudyRun, device: str) -> None:
        if run.name == "rate-0.01.seed-0" and fails:
            simulated.append(run.name)
            raise NonFiniteError("the loss is not finite at step 3")
        train(plan, run, device)

    monkeypatch.setattr(runner, "_train", diverging)
    short = planned(tmp_path, lambda runs: [*runs, dataclasses.replace(runs[2], name="third", init_from="tuned")])
    for _ in range(2):  # the second has nothing to run
        with pytest.raises(StudyError, match="3 of 8") as raised:
            run_unfinished(short, "cpu")
        assert "rate-0.01.seed-0: the loss is not finite at step 3" in str(raised.value)
        assert "tuned.seed-0: it starts from rate-0.01.seed-0, which failed" in str(raised.value)
        assert "third.seed-0: it starts from tuned.seed-0, which failed" in str(raised.value)
        assert (len(simulated), len(short.unfinished_runs)) == (6, 3)
    fails.clear()
    monkeypatch.setattr(runner, "_run_workers", lambda plan, *_: run_unfinished(plan, "cpu"))
    run_study(SMALL, short, device="cpu")
    assert (len(simulated), short.unfinished_runs) == (9, [])


@pytest.mark.usefixtures("forked")
def test_any_error_of_a_worker_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(plan: StudyPlan, run: StudyRun, device: str) -> None:
        raise torch.OutOfMemoryError("tried 9 GB")

    monkeypatch.setattr(runner, "_train", train)
    with pytest.raises(StudyError, match="OutOfMemoryError: tried 9 GB"):
        run_study(SMALL, planned(tmp_path), processes=1, device="cpu")


@pytest.mark.usefixtures("unreported")
@pytest.mark.parametrize(("device", "count"), [("cpu", 6), ("cuda", 4)])
def test_processes_by_default(device: str, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []
    monkeypatch.setattr(runner, "choose_device", torch.device)
    monkeypatch.setattr(runner, "available_cores", lambda: 9)
    monkeypatch.setattr(runner, "_run_workers", lambda plan, count, *_: counts.append(count))
    run_study(SMALL, planned(tmp_path), device=device)  # six runs
    assert counts == [count]


@pytest.fixture
def single(tmp_path: Path) -> StudyPlan:
    """One run of one step."""
    short = planned(tmp_path, lambda runs: with_config(runs[:1], 0, steps=1, fewshot=None, eval_every=None))
    return dataclasses.replace(short, runs=short.runs[:1])


def test_a_point_with_a_corrupt_result_is_run_again(single: StudyPlan) -> None:
    run_unfinished(single, "cpu")
    file = single.folders[single.runs[0].name] / "result.json"
    content = file.read_bytes()
    file.write_bytes(content.replace(b"0.", b"1.", 1))
    assert single.unfinished_runs == list(single.runs)
    run_unfinished(single, "cpu")
    assert (single.unfinished_runs, file.read_bytes()) == ([], content)


def test_a_stop_in_the_last_evaluation_of_a_run_stops_the_study(
    single: StudyPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not be lost between two runs."""
    evaluate = run_module.evaluate_split

    def evaluate_and_stop(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return evaluate(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "evaluate_split", evaluate_and_stop)
        with pytest.raises(StoppedError, match="step 1/1"):
            run_unfinished(single, "cpu")
    assert single.unfinished_runs == list(single.runs)
    run_unfinished(single, "cpu")
    assert single.unfinished_runs == []


def test_data_of_the_user(tmp_path: Path) -> None:
    moved = planned(tmp_path, dataset="fashion_mnist", root="somewhere/")
    assert {(p.config.data.name, p.config.data.root) for p in moved.runs} == {("fashion_mnist", "somewhere")}
    assert not set(moved.folders.values()) & set(planned(tmp_path).folders.values())
    assert moved.runs[0].config.fewshot is not None
    assert moved.runs[0].config.fewshot.root is None  # it takes the data set of the run, which has its folder
    with pytest.raises(ValueError, match="cifar10, digits"):
        planned(tmp_path, lambda runs: with_config(runs, 0, data={"name": "cifar10"}), dataset="fashion_mnist")
    fewshot = FewShotConfig(dataset="imagenet", test_split="test")
    run, *_ = planned(tmp_path, lambda runs: with_config(runs, 0, fewshot=fewshot), root="somewhere").runs
    assert run.config.fewshot is not None
    assert (run.config.data.root, run.config.fewshot.root) == ("somewhere", "somewhere")


def test_missing_data_is_an_error_of_the_user(tmp_path: Path) -> None:
    """The worker of this test is spawned, as outside of the tests."""
    wrong = plan(SMALL, "small", tmp_path, dataset="folder:nowhere")
    with pytest.raises(ValueError, match="nowhere"):
        run_study(SMALL, wrong, processes=1, device="cpu")
    assert have_ended(holders(tmp_path), 60)
