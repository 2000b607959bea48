"""Weights in pickles: what the one door for them lets in."""

import argparse
import collections
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from vitlab.errors import UserError
from vitlab.models.vit import ViT
from vitlab.weights import convert, load_metadata, load_model
from vitlab.weights.huggingface import write_huggingface
from vitlab.weights.pickled import choose, compact, describe, load, unpickle, weights_in
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
    parameters = sum(tensor.numel() for tensor in state.values())
    assert [line.partition(" holds ")[2] or line for line in lines] == [
        f"model: {len(state)} tensors, {parameters:,} parameters",
        "besides, left out: epoch, args, best, optimizer",
        "taking model",
    ]
    assert f"`vitlab convert {tmp_path / 'best.pth.tar'} OUT --to vitlab --assume.heads N`" in caplog.text  # no copy's
    assert "unpickled" not in caplog.text


def test_what_is_assumed_names_the_file_that_was_given(
    tmp_path: Path, tiny: Callable[..., ViT], caplog: pytest.LogCaptureFixture
) -> None:
    """And not the copy, which is gone when the line is read; nor does a file read directly afterwards."""
    write_timm(tiny(gelu="erf", width=192, heads=3), tmp_path / "timm", {})
    weights = tmp_path / "timm" / "model.safetensors"
    torch.save(safetensors.torch.load_file(weights), tmp_path / "best.pth")
    convert(tmp_path / "best.pth", tmp_path / "out", assume={"heads": 3})
    load_model(weights.rename(tmp_path / "bare.safetensors"), assume={"heads": 3})
    lines = [line for line in caplog.messages if "assumed" in line]
    assert [name for line in lines for name in re.findall(r"convert (\S+) OUT", line)] == [
        str(tmp_path / "best.pth"),
        str(tmp_path / "bare.safetensors"),
    ]


def test_a_hugging_face_folder_with_a_pickle(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """Its JSON files say what the weights are."""
    model, folder = tiny(), tmp_path / "hf"
    write_huggingface(model, folder, {"classes": list("abcde")})
    state = safetensors.torch.load_file(folder / "model.safetensors")
    torch.save(state, folder / "pytorch_model.bin")
    torch.save({}, folder / "training_args.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"`vitlab convert \S+/pytorch_model\.bin OUT`"):
        load_model(folder)
    convert(folder / "pytorch_model.bin", tmp_path / "out")
    images = torch.randn(2, 3, 12, 12)
    torch.testing.assert_close(load_model(tmp_path / "out")(images), model(images))
    assert load_metadata(tmp_path / "out")["classes"] == list("abcde")


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def test_hostile_files_are_refused(tmp_path: Path) -> None:
    """Code is not run, and memory is limited by the size of the file: nothing is written in either case."""
    mark, path = tmp_path / "exploded", tmp_path / "model.pth"
    torch.save({"model": WEIGHTS, "args": Bomb(mark)}, path)
    with pytest.raises(UserError, match=r"cannot be converted: it calls .*state_dict"):
        convert(path, tmp_path / "out")
    strided = torch.zeros(1).expand(2**20, 2**20)
    torch.save({"model": {"a": strided}}, path)
    with pytest.raises(UserError, match=r"its tensors take 4,398,046,511,104 bytes"):
        convert(path, tmp_path / "out")
    assert sorted(tmp_path.iterdir()) == [path]


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
        ({"model": WEIGHTS, "model_ema": WEIGHTS}, None, "model_ema"),
        ({"model": WEIGHTS, "model_ema": WEIGHTS}, "model", "model"),
        ({"student": WEIGHTS, "teacher": WEIGHTS, "epoch": 1}, None, "teacher"),
        ({"state": {"params": WEIGHTS}}, None, "state.params"),
        ({"mine": WEIGHTS, "yours": WEIGHTS}, "yours", "yours"),
    ],
)
def test_the_key_of_the_weights(content: Any, key: str | None, chosen: str) -> None:
    groups, _ = weights_in(content)
    assert choose(list(groups), key) == chosen


@pytest.mark.parametrize(
    ("content", "key", "message"),
    [
        ({"mine": WEIGHTS, "yours": WEIGHTS}, None, "choose one by --key: mine, yours"),
        ({"model": WEIGHTS}, "modle", "--key with one of model"),
        ({"epoch": 3}, None, "no dictionary of tensors"),
        ([WEIGHTS], None, "no dictionary of tensors"),
    ],
)
def test_no_key_is_guessed(content: Any, key: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose(list(weights_in(content)[0]), key)


def test_what_is_reported_is_short() -> None:
    groups = {f"{i}{'x' * 500}": WEIGHTS for i in range(500)}
    assert len(json.dumps(describe(groups, ["y" * 500] * 500))) < 30_000


def test_tensors_get_memory_of_their_own() -> None:
    whole = torch.arange(12.0)
    tensors = compact({"a": whole[:6].reshape(2, 3).T, "b": whole})
    assert tensors["a"].is_contiguous()
    assert safetensors.torch.save(tensors)
    with pytest.raises(UserError, match="not a plain dense tensor"):
        compact({"a": torch.eye(3).to_sparse()})


def test_a_key_is_for_pickles(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    write_timm(tiny(gelu="erf", width=192, heads=3), tmp_path / "timm", {})
    with pytest.raises(UserError, match="chooses the weights in a pickle"):
        convert(tmp_path / "timm", tmp_path / "out", key="model")
