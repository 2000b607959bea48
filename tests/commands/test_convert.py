"""The commands that write what others read, as their users meet them."""

import json
import tarfile
from pathlib import Path

import pytest
from program import answer, call
from shard_files import write_folders
from small_disk import small_disk


def test_converted_and_exported(run: Path, image: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through timm's format and back answers and names stay; what is exported is checked before it is left."""
    done = answer(capsys, "convert", str(run), "as-timm", "--to", "timm")
    assert (done["format"], done["path"]) == ("timm", "as-timm")
    assert done["difference"] < 1e-5
    code, out, _ = call(capsys, "convert", "as-timm", "ours", "--to", "vitlab")
    assert code == 0
    assert f"{done['parameters']:,} parameters in the format of vitlab" in out
    first, last = (answer(capsys, "predict", each, str(image), "--top", "3") for each in (str(run), "ours"))
    assert [name for name, _ in first["top"]] == [name for name, _ in last["top"]]
    report = answer(capsys, "export", str(run), "--to", "torch-export", "--out", "run.pt2")
    assert report["bytes"] == Path("run.pt2").stat().st_size
    assert report["difference"] < 1e-4
    code, _, err = call(capsys, "export", str(run), "--to", "onnx", "--dynamic-size", "--no-dynamic-size")
    assert code == 2
    assert "leave out one" in err


def test_a_full_disk_is_no_invalid_input(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk():
        code, _, err = call(capsys, "convert", str(run), "deep/timm", "--to", "timm")
    assert code == 1
    assert "to " + str(Path("deep").resolve()) in err
    assert list(Path("deep").iterdir()) == []


def test_shard(tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    """What is written can be trained on and checked; an unreadable image shows in the exit code."""
    write_folders(tmp_path / "pets", {"ant": 8, "bee": 8}, side=90)
    code, out, _ = call(capsys, "shard", "folder:pets", "out", "--size", "80", "--records", "5")
    assert code == 0
    assert "train: 12 images in 3 shards" in out
    assert "shards:out" in out
    with tarfile.open("out/train-000000.tar") as tar:
        assert {Path(name).suffix for name in tar.getnames()} == {".cls", ".jpg"}
    assert answer(capsys, "shard", "folder:pets", "test-only", "--split", "test")["splits"].keys() == {"test"}
    (tmp_path / "pets" / "ant" / "000.jpg").write_bytes(b"no image")
    code, out, _ = call(capsys, "shard", "folder:pets", "some", "--on-error", "skip")
    assert code == 1
    assert "1 could not be read" in out
    assert "ant/000.jpg" in caplog.text


def test_what_a_bare_file_does_not_say_is_given(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call(capsys, "convert", str(run), "as-timm", "--to", "timm")
    Path("as-timm/model.safetensors").rename("bare.safetensors")
    given = ("--assume.heads", "1", "--assume.gelu", "quick", "--assume.mean", "0.4", "0.4", "0.4")
    answer(capsys, "convert", "bare.safetensors", "ours", "--to", "vitlab", *given)
    settings = json.loads(Path("ours/config.json").read_text())
    assert (settings["model"]["heads"], settings["model"]["variant"]["gelu"]) == (1, "quick")
    assert settings["extra"]["preprocessing"]["mean"] == [0.4] * 3
    code, _, err = call(capsys, "convert", "ours", "again", "--to", "vitlab", *given)
    assert code == 2
    assert "is for a bare .safetensors" in err
