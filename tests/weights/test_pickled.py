"""Weights in pickles: what the one door for them lets in."""

import argparse
import collections
import io
import pickle
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from states import Bomb

from vitlab.errors import UserError
from vitlab.models.vit import ViT
from vitlab.weights import convert, load_metadata, load_model
from vitlab.weights.huggingface import write_huggingface
from vitlab.weights.pickled import choose, compact, load, unpickle, weights_in
from vitlab.weights.timm import write_timm

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, dtype=torch.float16)}


def pickled(content: Any, **options: Any) -> io.BytesIO:
    torch.save(content, file := io.BytesIO(), **options)
    file.seek(0)
    return file


def test_a_training_s_file_through_the_door(
    tmp_path: Path, tiny: Callable[..., ViT], caplog: pytest.LogCaptureFixture
) -> None:
    """What DeiT's and MAE's scripts save, in a process of its own, to a model that computes the same."""
    model = tiny(gelu="erf", width=192, heads=3)
    write_timm(model, tmp_path / "timm", {})
    state = safetensors.torch.load_file(tmp_path / "timm" / "model.safetensors")
    args = argparse.Namespace(lr=1e-3, output=Path("out"))
    content = {"model": state, "epoch": 3, "args": args, "best": np.float64(0.5), "optimizer": {"state": {0: state}}}
    torch.save(content, tmp_path / "best.pth.tar")
    lines: list[str] = []
    convert(tmp_path / "best.pth.tar", tmp_path / "out", log=lines.append)
    images = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(load_model(tmp_path / "out")(images), model(images))
    assert load_metadata(tmp_path / "out")["source"] == str(tmp_path / "best.pth.tar")
    for fact in (f"{len(state)} tensors", "epoch, args, best, optimizer", "taking model"):
        assert fact in "\n".join(lines)
    assert f"convert {tmp_path / 'best.pth.tar'} OUT" in caplog.text  # and not the copy, which is gone by then
    with pytest.raises(UserError, match="chooses the weights in a pickle"):
        convert(tmp_path / "timm", tmp_path / "out", key="model")


def test_a_hugging_face_folder_with_a_pickle(
    tmp_path: Path, tiny: Callable[..., ViT], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its JSON files say what the weights are; they are read here as the process would write them."""
    model, folder = tiny(), tmp_path / "hf"
    write_huggingface(model, folder, {"classes": list("abcde")})
    state = safetensors.torch.load_file(folder / "model.safetensors")
    torch.save(state, folder / "pytorch_model.bin")
    torch.save({}, folder / "training_args.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"`vitlab convert \S+/pytorch_model\.bin OUT`"):
        load_model(folder)
    (tmp_path / "answer").write_bytes(b'{"chosen": "all of them"}\n' + safetensors.torch.save(state))
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: popen(["cat", tmp_path / "answer"], **options))
    convert(folder / "pytorch_model.bin", tmp_path / "out")
    images = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(load_model(tmp_path / "out")(images), model(images))
    assert load_metadata(tmp_path / "out")["classes"] == list("abcde")


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    """Code is not run, and memory is limited by the size of the file: nothing is written in either case."""
    mark, path = tmp_path / "exploded", tmp_path / "model.pth"
    torch.save({"model": WEIGHTS, "args": Bomb(mark)}, path)
    with pytest.raises(UserError, match="cannot be converted: it calls"):
        convert(path, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [path]
    with pytest.raises(UserError, match="take 4,398,046,511,104 bytes"):
        compact({"a": torch.zeros(1).expand(2**20, 2**20)})
    with pytest.raises(UserError, match="not a plain dense tensor"):
        compact({"a": torch.eye(3).to_sparse()})


@pytest.mark.slow
def test_memory_is_limited(tmp_path: Path) -> None:
    """A file of a megabyte that unpacks to a gigabyte."""
    whole = pickled({"a": torch.zeros(2**28)})
    with zipfile.ZipFile(whole) as archive, zipfile.ZipFile(tmp_path / "model.pth", "w", zipfile.ZIP_DEFLATED) as bomb:
        for member in archive.infolist():
            bomb.writestr(member.filename, archive.read(member))
    with pytest.raises(UserError, match="requires more memory than its size allows"):
        unpickle(tmp_path / "model.pth", tmp_path / "out")


@pytest.mark.parametrize("new", [True, False])
def test_both_formats_of_torch_save(new: bool) -> None:
    args = argparse.Namespace(a=collections.defaultdict(list), when=np.arange(3))
    content = load(pickled({"state_dict": WEIGHTS, "args": args}, _use_new_zipfile_serialization=new))
    groups, others = weights_in(content)
    assert others == ["args"]
    assert all(torch.equal(groups["state_dict"][name], tensor) for name, tensor in WEIGHTS.items())


@pytest.mark.parametrize("content", [Bomb(Path("x")), torch.nn.Linear(1, 1), {"a": print}])
def test_no_code_is_imported(content: Any) -> None:
    with pytest.raises(pickle.UnpicklingError, match="GLOBAL"):
        load(pickled(content))


@pytest.mark.parametrize(
    ("content", "key", "chosen"),
    [
        (WEIGHTS, None, ""),
        ({"model": WEIGHTS, "optimizer": {"a": WEIGHTS["a"]}}, None, "model"),
        ({"model": WEIGHTS, "model_ema": WEIGHTS, "epoch": 1}, None, "model_ema"),
        ({"model": WEIGHTS, "model_ema": WEIGHTS}, "model", "model"),
        ({"state": {"params": WEIGHTS}}, None, "state.params"),
        ({"mine": WEIGHTS, "yours": WEIGHTS}, None, UserError("--key: mine, yours")),
        ({"model": WEIGHTS}, "modle", UserError("--key with one of model")),
        ([WEIGHTS], None, UserError("no dictionary of tensors")),
    ],
)
def test_the_key_of_the_weights(content: Any, key: str | None, chosen: str | UserError) -> None:
    """None is guessed."""
    if isinstance(chosen, str):
        assert choose(list(weights_in(content)[0]), key) == chosen
        return
    with pytest.raises(UserError, match=str(chosen)):
        choose(list(weights_in(content)[0]), key)
