import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vitlab.cost import doctor
from vitlab.evaluate.accuracy import choose_device
from vitlab.models import attention


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return doctor.diagnose(tmp_path_factory.mktemp("disk"))


@pytest.fixture
def healthy(report: dict[str, Any]) -> dict[str, Any]:
    """A report in which nothing is wrong, for tests that break one thing."""
    healthy = copy.deepcopy(report)
    healthy["versions"]["torchvision"] = "0.29.2"
    healthy["cpu"].update(cores=2, threads=2)
    healthy["devices"] = [{"type": "cpu", "device": "cpu", "name": "a CPU", "memory_gib": 16.0}]
    healthy["matmul_tflops"] = {"cpu": {"float32": 0.3, "bfloat16": 2.0}}
    healthy["disk"].update(free_gib=100.0, write_mib_per_second=500.0)
    healthy["shared_memory_gib"], healthy["compiler"] = 8.0, "/usr/bin/g++"
    return healthy


def test_report_is_json_and_its_numbers_are_plausible(report: dict[str, Any]) -> None:
    assert json.loads(json.dumps(report)) == report
    assert report["devices"][0]["type"] == "cpu"
    paths = report["attention"]["cpu"]
    assert (paths["training"], paths["inference"]) == ("matmul", "fused")
    assert paths["bfloat16 inference"] == ("fused" if attention.HAS_AMX else "matmul")
    for speeds in report["matmul_tflops"].values():
        assert all(1e-4 < tflops < 1e4 for tflops in speeds.values())
    for decoder in ("simplejpeg", "Pillow"):
        assert 1 < report["jpegs_per_second_per_core"][decoder] < 10_000
    assert report["disk"]["free_gib"] > 0
    assert report["disk"]["write_mib_per_second"] > 0


def test_the_disk_test_leaves_nothing(tmp_path: Path) -> None:
    doctor._disk(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_text_shows_the_versions_and_every_device(report: dict[str, Any]) -> None:
    text = doctor.format_diagnosis(report)
    for version in report["versions"].values():
        assert version in text
    for device in report["devices"]:
        assert device["name"] in text


def test_only_devices_that_commands_take_are_offered(report: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert [str(choose_device(device["device"])) for device in report["devices"]][:1] == ["cpu"]
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: True)
    monkeypatch.setattr("torch.mps.recommended_max_memory", lambda: 2**34, raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ValueError, match="device 'mps' is not supported"):
        choose_device("mps")
    assert doctor._accelerators() == []
    assert "Apple GPU (mps): vitlab computes on CPUs" in doctor.format_diagnosis(
        report | {"not_used": doctor._unused()}
    )


def test_no_problem_is_said(healthy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    healthy["problems"] = doctor.find_problems(healthy)
    assert healthy["problems"] == []
    assert doctor.format_diagnosis(healthy).endswith("No problem found.")


@pytest.mark.parametrize(
    ("part", "change", "advice"),
    [
        (
            "versions",
            {"torchvision": "RuntimeError: operator torchvision::nms does not exist"},
            "the same place",
        ),
        ("cpu", {"threads": 64}, "OMP_NUM_THREADS=2"),
        ("matmul_tflops", {"cpu": {"float32": 0.3, "bfloat16": 0.1}}, "precision float32"),
        ("disk", {"free_gib": 0.5}, "free some"),
        ("disk", {"write_mib_per_second": 8.0}, "seldom"),
        ("disk", {"write_mib_per_second": None}, "give a folder that can"),
    ],
)
def test_each_problem_says_what_to_do(
    healthy: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    change: dict[str, Any],
    advice: str,
) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    healthy[part].update(change)
    (problem,) = doctor.find_problems(healthy)
    assert advice in problem
    assert f"Problem: {problem}" in doctor.format_diagnosis({**healthy, "problems": [problem]})


def test_little_shared_memory_is_a_problem(healthy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    healthy["shared_memory_gib"] = 0.06
    (problem,) = doctor.find_problems(healthy)
    assert "--shm-size" in problem


def test_a_missing_compiler_is_a_problem(healthy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "/usr/bin/g++" in doctor.format_diagnosis({**healthy, "problems": []})
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    healthy["compiler"] = doctor._compiler()
    (problem,) = doctor.find_problems(healthy)
    assert "--compile needs one: install g++" in problem
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    for given, taken in (("clang++", "clang++"), (" ", "clang++" if sys.platform == "darwin" else "g++")):
        monkeypatch.setenv("CXX", given)
        assert doctor._compiler() == f"/bin/{taken}"


def test_a_gpu_that_torch_does_not_see_is_a_problem(healthy: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    (problem,) = doctor.find_problems(healthy)
    assert "driver" in problem


def test_torchvision_that_cannot_be_imported_is_reported_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise RuntimeError(f"operator {name}::nms does not exist\nand more")

    monkeypatch.setattr(doctor.importlib, "import_module", fail)
    assert doctor._versions()["torchvision"] == "RuntimeError: operator torchvision::nms does not exist"


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"missing is not a folder; give an existing one"):
        doctor.diagnose(tmp_path / "missing")
