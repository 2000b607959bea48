"""Points are run once, wherever they were interrupted and however many processes work on them."""

import dataclasses
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from small_study import FILES, SMALL, contents, gone, holders, kill_at, points, report, start, steps_done

from vitlab.config import FewShotConfig
from vitlab.io import lock_file
from vitlab.models.config import ViTConfig
from vitlab.pipelines import pretrain as run_module
from vitlab.studies.engine import FAILED, Plan, StudyError, plan, run_study, work
from vitlab.studies.report import write_report
from vitlab.studies.study import Done, Point, Study
from vitlab.train.loop import NonFiniteError, StoppedError
from vitlab.train.workdir import write_json


def shortened(out: Path, steps: int = 4, **changes: object) -> Plan:
    """The small study with short runs; `changes` are of the first point's config."""

    def short(scale: str) -> Sequence[Point]:
        first, *others = points("tiny", steps)
        return [dataclasses.replace(first, config=dataclasses.replace(first.config, **changes)), *others]

    return plan(Study("small", "nothing", "short", short, report), "tiny", out)


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small study, left alone in this process; its report is written."""
    whole = plan(SMALL, "tiny", tmp_path_factory.mktemp("quiet"))
    work(whole, "cpu")
    write_report(whole.study, whole.scale, [whole.done(point) for point in whole.points], whole.out)
    return whole.out


def test_every_point_is_run_and_told(quiet: Path) -> None:
    whole = plan(SMALL, "tiny", quiet)
    assert whole.open_points == []
    done = [whole.done(point) for point in whole.points]
    assert [each.point.name for each in done] == [point.name for point in SMALL.points("tiny")]
    for each in done:
        assert 0 <= each.figures["accuracy"] <= 1
        assert each.records[-1]["step"] == 40
        assert each.examples > 300
    first, tuned = done[0], done[2]
    assert first.figures["fewshot_2shot"] == first.records[-1]["fewshot_2shot"]
    assert "fewshot_2shot" not in tuned.figures
    assert tuned.exaflops > 3 * first.exaflops  # at twice the resolution
    assert not list(quiet.glob("points/*/checkpoints"))
    assert all((quiet / name).is_file() for name in FILES)


def test_killed_with_its_processes_it_ends_the_same(quiet: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    records = steps_done(quiet)
    assert kill_at(out, 2, records // 3, 0.1)
    assert holders(out)
    assert gone(holders(out), 120)  # none goes on by itself
    assert kill_at(out, 2, 2 * records // 3, 0.0)
    assert start(out, 2).wait() == 0
    assert contents(out) == contents(quiet)


def test_sigterm_saves_and_the_same_call_continues(quiet: Path, tmp_path: Path) -> None:
    life = start(tmp_path, 1)
    while steps_done(tmp_path) < 3 and life.poll() is None:
        time.sleep(0.01)
    life.send_signal(signal.SIGTERM)
    _, said = life.communicate(timeout=200)
    assert life.returncode == 1  # a traceback of StoppedError: the command line makes 143 of it
    assert "stopped and saved with" in said
    assert gone(holders(tmp_path), 60)
    assert list(tmp_path.glob("points/*/checkpoints/*"))
    work(plan(SMALL, "tiny", tmp_path), "cpu")
    assert contents_of_points(tmp_path) == contents_of_points(quiet)


def contents_of_points(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.glob("points/*/metrics.jsonl")}


def test_finished_points_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = shortened(tmp_path)
    work(short, "cpu")
    assert short.open_points == []

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a finished point was run again")

    monkeypatch.setattr("vitlab.studies.engine.pretrain", never)
    monkeypatch.setattr("vitlab.studies.engine.sweep_and_finetune", never)
    work(short, "cpu")
    found = run_study(short, device="cpu")
    assert found == json.loads((tmp_path / "study.json").read_text())


def test_a_changed_recipe_touches_its_points_and_those_that_start_from_them(tmp_path: Path) -> None:
    def changed(scale: str) -> Sequence[Point]:
        """The second point, from which the third starts, learns for longer."""
        whole = list(points("tiny", 4))
        whole[1] = dataclasses.replace(whole[1], config=dataclasses.replace(whole[1].config, steps=6))
        return whole

    before = shortened(tmp_path)
    work(before, "cpu")
    times = {path: path.stat().st_mtime_ns for path in tmp_path.glob("points/*/result.json")}
    after = plan(Study("small", "nothing", "changed", changed, report), "tiny", tmp_path)
    assert [point.name for point in after.open_points] == ["rate-0.01.seed-0", "tuned.seed-0"]
    work(after, "cpu")
    assert len(list(tmp_path.glob("points/*/result.json"))) == 8
    assert all(path.stat().st_mtime_ns == written for path, written in times.items())
    assert {path.name for path in after.leftovers()} == {
        before.folders[name].name for name in ("rate-0.01.seed-0", "tuned.seed-0")
    }


def test_a_point_in_other_hands_is_left_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short = shortened(tmp_path)
    ran: list[str] = []

    def note(plan: Plan, point: Point, device: str) -> None:
        ran.append(point.name)
        folder = plan.folders[point.name]
        write_json(folder / "result.json", {})

    monkeypatch.setattr("vitlab.studies.engine._run", note)
    claimed = short.points[1]
    other = short.folders[claimed.name].parent / ".claims" / short.folders[claimed.name].name

    def held(path: Path) -> object:
        """As if another process held it until the others are finished, and then had finished it."""
        if path == other and len(ran) < 4:
            return None
        if path == other:
            write_json(short.folders[claimed.name] / "result.json", {})
        return lock_file(path)

    monkeypatch.setattr("vitlab.studies.engine.lock_file", held)
    monkeypatch.setattr("vitlab.studies.engine.WAIT", 0.01)
    work(short, "cpu")
    assert claimed.name not in ran
    assert sorted(ran) == sorted(point.name for point in short.points if point is not claimed)


def test_a_point_that_diverges_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(plan: Plan, point: Point, device: str) -> None:
        folder = plan.folders[point.name]
        folder.mkdir(parents=True)
        if point.name == "rate-0.01.seed-1":
            raise NonFiniteError("the loss is not finite at step 3")
        write_json(folder / "result.json", {})

    monkeypatch.setattr("vitlab.studies.engine._run", run)
    short = shortened(tmp_path)
    work(short, "cpu")
    assert short.open_points == []
    assert len(list(tmp_path.glob("points/*/result.json"))) == 4
    with pytest.raises(StudyError, match="2 of 6 points") as told:
        run_study(short, device="cpu")
    assert "rate-0.01.seed-1: the loss is not finite at step 3" in str(told.value)
    assert "tuned.seed-1: it starts from rate-0.01.seed-1, which failed" in str(told.value)
    (short.folders["rate-0.01.seed-1"] / FAILED).unlink()
    assert [point.name for point in short.open_points] == ["rate-0.01.seed-1", "tuned.seed-1"]


def test_what_starts_from_what_starts_from_a_failed_point_has_failed(tmp_path: Path) -> None:
    def chain(scale: str) -> Sequence[Point]:
        """Each starts from the one before."""
        first, _, tuned, *_ = points("tiny")
        return [
            first,
            dataclasses.replace(tuned, name="second", start=first.name),
            dataclasses.replace(tuned, name="third", start="second"),
        ]

    whole = plan(Study("small", "nothing", "chain", chain, report), "tiny", tmp_path)
    write_json(whole.folders[whole.points[0].name] / FAILED, {"why": "it diverged"})
    assert whole.open_points == []
    assert whole.failure("third") == "it starts from second, which failed"


def test_a_stop_in_the_last_evaluation_of_a_run_stops_the_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not be lost between two runs."""
    short = shortened(tmp_path)
    judge = run_module.evaluate_split

    def judge_and_stop(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return judge(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "evaluate_split", judge_and_stop)
        with pytest.raises(StoppedError, match="saved at step 4/4"):
            work(short, "cpu")
    assert len(short.open_points) == len(short.points)
    work(short, "cpu")
    assert short.open_points == []


def test_the_users_folder_is_for_the_few_shots_data_too(tmp_path: Path) -> None:
    def elsewhere(scale: str) -> Sequence[Point]:
        first, *_ = points("tiny")
        fewshot = FewShotConfig(dataset="imagenet", test_split="test")
        return [dataclasses.replace(first, config=dataclasses.replace(first.config, fewshot=fewshot))]

    study = Study("small", "nothing", "elsewhere", elsewhere, report)
    (point,) = plan(study, "tiny", tmp_path, root="somewhere/").points
    assert point.config.fewshot is not None
    assert (point.config.data.root, point.config.fewshot.root) == ("somewhere", "somewhere")
    assert plan(study, "tiny", tmp_path, root="somewhere").points == (point,)
    own = plan(SMALL, "tiny", tmp_path, root="somewhere").points[0].config.fewshot
    assert own is not None
    assert own.root is None  # the run's own data brings it


def test_data_that_is_not_there_is_the_users_error(tmp_path: Path) -> None:
    wrong = plan(SMALL, "tiny", tmp_path, dataset="folder:nowhere")
    with pytest.raises(ValueError, match="nowhere"):
        run_study(wrong, processes=2, device="cpu")
    assert gone(holders(tmp_path), 60)


def test_a_process_that_dies_ends_the_study_with_its_reason(tmp_path: Path) -> None:
    life = start(tmp_path, 2)
    while not holders(tmp_path) and life.poll() is None:
        time.sleep(0.01)
    victim, *_ = holders(tmp_path)
    os.kill(victim, signal.SIGKILL)
    _, said = life.communicate(timeout=200)
    assert life.returncode == 1
    assert "a process of the study was killed by signal 9" in said
    assert gone(holders(tmp_path), 60)


def test_data_of_ones_own(tmp_path: Path) -> None:
    own = plan(SMALL, "tiny", tmp_path, dataset="fashion_mnist", root="somewhere")
    assert {(p.config.data.name, p.config.data.root) for p in own.points} == {("fashion_mnist", "somewhere")}
    assert not set(own.folders.values()) & set(plan(SMALL, "tiny", tmp_path).folders.values())

    def two_sets(scale: str) -> Sequence[Point]:
        first, *others = points("tiny")
        data = dataclasses.replace(first.config.data, name="cifar10")
        return [dataclasses.replace(first, config=dataclasses.replace(first.config, data=data)), *others]

    with pytest.raises(ValueError, match=r"several data sets.*cifar10, digits"):
        plan(Study("small", "nothing", "two", two_sets, report), "tiny", tmp_path, dataset="fashion_mnist")


@pytest.mark.parametrize(("processes", "device", "said"), [(0, "cpu", "at least 1"), (1, "tpu", "tpu")])
def test_what_cannot_be(tmp_path: Path, processes: int, device: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_study(shortened(tmp_path), processes=processes, device=device)
    assert not list(tmp_path.iterdir())


def test_what_was_run_is_known_of_a_finetuning(quiet: Path) -> None:
    whole = plan(SMALL, "tiny", quiet)
    tuned: Done = whole.done(whole.points[2])
    assert isinstance(tuned.model, ViTConfig)
    assert (tuned.model.width, tuned.model.image_size, tuned.model.num_classes) == (16, 16, 3)
