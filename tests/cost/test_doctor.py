"""`vitlab doctor`: plausible measurements, and a remedy for each problem."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from vitlab.cost import doctor


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setitem(doctor.MATRIX_SIDES, "cpu", 128)
        return doctor.diagnose(tmp_path_factory.mktemp("disk"))


@pytest.fixture
def healthy(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A report without problems."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    healthy = copy.deepcopy(report)
    healthy["versions"]["torchvision"] = "0.29.2"
    healthy["cpu"].update(cores=2, threads=2)
    healthy["disk"].update(free_gib=100.0, writable=True)
    return healthy | {"gpus": [], "shared_memory_gib": 8.0, "compiler": "/usr/bin/g++"}


def test_the_report_is_plausible(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report)) == report
    assert report["attention"]["cpu"] == {"training": "matmul", "inference": "fused"}
    assert all(1e-5 < tflops < 1e4 for tflops in report["matmul_tflops"]["cpu"].values())
    assert report["disk"]["writable"]
    text = doctor.format_diagnosis(report)
    assert all(version in text for version in report["versions"].values())


@pytest.mark.parametrize(
    ("part", "change", "advice"),
    [
        ("versions", {"torchvision": "RuntimeError: operator torchvision::nms does not exist"}, "in one command"),
        ("cpu", {"threads": 3}, "OMP_NUM_THREADS=2"),
        ("disk", {"free_gib": 0.5}, "free some"),
        ("disk", {"writable": False}, "another folder"),
        ("shared_memory_gib", 0.06, "--shm-size"),
        ("compiler", None, "install g++"),
        ("nvidia-smi", True, "driver"),  # there is a GPU that torch does not see
    ],
)
def test_every_problem_has_a_remedy(
    healthy: dict[str, Any], part: str, change: Any, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert doctor.find_problems(healthy) == []
    if part == "nvidia-smi":
        monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    else:
        healthy[part] = {**healthy[part], **change} if isinstance(change, dict) else change
    (problem,) = doctor.find_problems(healthy)
    assert advice in problem
    assert problem in doctor.format_diagnosis({**healthy, "problems": [problem]})


def test_packages_that_are_missing_or_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError(f"operator {name}::nms does not exist\nand more")

    version = doctor.metadata.version
    monkeypatch.setattr(doctor.importlib, "import_module", fail)
    monkeypatch.setattr(
        doctor.metadata, "version", lambda name: version("no-such-package" if name == "simplejpeg" else name)
    )
    versions = doctor._versions()
    assert versions["torchvision"] == "RuntimeError: operator torchvision::nms does not exist"
    assert versions["simplejpeg"] == "not installed"


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="missing is not a folder"):
        doctor.diagnose(tmp_path / "missing")
