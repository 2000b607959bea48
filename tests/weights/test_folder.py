import copy
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file
from small_disk import small_disk
from states import same
from torch import nn
from torch.optim.swa_utils import AveragedModel

from vitlab.errors import RunError, UserError, WriteError
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_metadata, load_model, save_model
from vitlab.weights.folder import processed_size


@pytest.fixture
def saved(tmp_path: Path, tiny: Callable[..., ViT]) -> Path:
    save_model(tiny(), tmp_path / "saved")
    return tmp_path / "saved"


@pytest.mark.parametrize(
    "settings", [{"pool": "gap", "position": "none", "image_size": (8, 16)}, {"representation_size": 6, "dropout": 0.1}]
)
def test_a_model_is_saved_and_loaded(tmp_path: Path, tiny: Callable[..., ViT], settings: dict[str, Any]) -> None:
    model, folder = tiny(**settings), tmp_path / "a" / "saved"
    save_model(model, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    # The weights have the permissions of the folder.
    assert (folder / "model.safetensors").stat().st_mode == (folder / "config.json").stat().st_mode
    loaded = load_model(folder)
    assert loaded.config == model.config
    assert same(loaded.state_dict(), model)
    images = torch.randn(2, 3, *model.config.image_hw)
    assert torch.equal(loaded(images), model(images))


def test_the_card_holds_extra(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    prepared = Preprocessing(12, 16, interpolation="bicubic").to_metadata()
    classes = [os.fsdecode(b"\xff"), "b", "ç", "d", "e"]  # also names that are not valid text
    extra = {"classes": classes, "preprocessing": prepared, "source": "digits", "more": {"x": [None]}}
    save_model(tiny(), tmp_path / "saved", extra=extra)
    assert load_metadata(tmp_path / "saved") == extra
    card = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (card["format"], card["version"]) == ("vitlab model", 1)
    assert card["model"] == dataclasses.asdict(tiny().config)


@pytest.mark.parametrize(("crop", "expected"), [(None, 12), (12, 12), (15, 15), (16, 12), ((13, 20), 12)])
def test_a_crop_of_which_patches_cover_more_warns(
    tiny: Callable[..., ViT], caplog: pytest.LogCaptureFixture, crop: Any, expected: int
) -> None:
    assert processed_size(Preprocessing(12, crop_size=crop), tiny().config) == (expected, expected)
    assert ("is not written" in caplog.text) == (expected == 12 and crop not in (None, 12))


def test_a_corrupt_copy_is_replaced_beside_its_card(saved: Path, tiny: Callable[..., ViT]) -> None:
    """Whichever of its files is corrupt; what a killed process has left there is removed."""
    model = copy.deepcopy(load_model(saved))  # not in the file, which is damaged
    (saved / "README.md").write_text("edited")
    for damage in ("model.safetensors", "config.json"):
        (saved / damage).write_bytes(b"{")
        (saved / ".README.md.0123456789abcdef.new").touch()
        save_model(model, saved)
        assert (saved / "README.md").read_text() == "edited"
        assert {path.name for path in saved.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    assert load_model(saved).config == model.config


def test_only_a_saved_model_is_replaced(saved: Path, tiny: Callable[..., ViT]) -> None:
    """A full disk, where safetensors writes, leaves the earlier model."""
    other = tiny(width=16)
    (saved / "README.md").write_text("of the model that is replaced")
    save_model(other, saved)
    assert {path.name for path in saved.iterdir()} == {"model.safetensors", "config.json"}
    with pytest.raises(WriteError, match=r"\(File too large\): [\d,]+ bytes are required"), small_disk():
        save_model(tiny(width=64), saved)
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    (saved / "notes.txt").write_text("mine")
    (saved.parent / "project").mkdir()
    (saved.parent / "project" / "README.md").write_text("of no model")
    for path, problem in ((saved, "notes.txt"), (saved.parent / "project", "README.md"), (saved / "notes.txt", "file")):
        with pytest.raises(UserError, match=problem):
            save_model(tiny(), path)
    assert load_model(saved).config == other.config
    assert (saved / "notes.txt").read_text() == "mine"


def changed(model: ViT, **parts: Any) -> ViT:
    """The model with other submodules or parameters, by their names with _ in place of the dot."""
    for name, part in parts.items():
        module, _, attribute = name.rpartition("_")
        setattr(model.get_submodule(module.replace("_", ".")), attribute, part)
    return model


def tied(model: ViT) -> ViT:
    first, second = model.blocks
    second.mlp.fc1.weight = first.mlp.fc1.weight  # pyright: ignore
    return model


@pytest.mark.parametrize(
    "wrap",
    [
        AveragedModel,
        lambda model: torch.compile(nn.DataParallel(model)),
        lambda model: changed(model, blocks_1=torch.compile(model.blocks[1])),
        tied,
        lambda model: changed(model, head=nn.Linear(8, 7)),
        lambda model: changed(model, head=nn.Identity()),
        lambda model: changed(model, head=None),
        lambda model: model.to(memory_format=torch.channels_last),
        lambda model: model.bfloat16(),
    ],
)
def test_a_wrapped_or_changed_model_is_saved(tmp_path: Path, tiny: Callable[..., ViT], wrap: Any) -> None:
    model, images = tiny(), torch.randn(2, 3, 12, 12)
    wrapped = wrap(model)
    save_model(wrapped, tmp_path / "saved")
    loaded = load_model(tmp_path / "saved")
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(loaded(images), model.float()(images))
    parts = {name.partition(".")[0] for name in load_file(tmp_path / "saved" / "model.safetensors")}
    assert parts <= {"cls", "embedding", "position", "blocks", "norm", "head"}


def adapted(model: ViT) -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["qkv"]))


INT8 = nn.Parameter(torch.ones(8, dtype=torch.int8), requires_grad=False)


@pytest.mark.parametrize(
    ("change", "extra", "problem"),
    [
        (adapted, {}, r"blocks.0.attention.qkv.lora_A.*merge_and_unload"),
        (lambda model: changed(model, head=nn.Sequential(nn.Linear(8, 5))), {}, "head is a .*Sequential"),
        (lambda model: changed(model, head=nn.Linear(8, 5, bias=False)), {}, "missing: head.bias"),
        (lambda model: changed(model, norm_bias=nn.Parameter(torch.full((8,), torch.nan))), {}, "norm.bias .*finite"),
        (lambda model: changed(model, norm_weight=INT8), {}, "norm.weight is .*torch.int8"),
        (lambda model: model.to("meta"), {}, "meta device"),
        (lambda model: nn.Sequential(model), {}, "Sequential is not a model of vitlab"),
        (lambda model: model, {"classes": ["a", "b"]}, "2 names.* 5 outputs"),
        (lambda model: model, {"x": float("nan")}, "JSON"),
    ],
)
def test_a_model_that_could_not_be_read_replaces_nothing(
    saved: Path, tiny: Callable[..., ViT], change: Any, extra: dict[str, Any], problem: str
) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(UserError, match=problem):
        save_model(change(tiny()), saved, extra=extra)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_is_written_is_read_before_it_replaces(
    saved: Path, tiny: Callable[..., ViT], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a file system that loses data without an error."""
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def write_and_cut(path: Path, text: str, **options: Any) -> int:
        if path.name == "config.json":
            lost = path.parent / name
            path.write_bytes(text.encode())
            lost.write_bytes(lost.read_bytes()[:-100])
        return len(text)

    monkeypatch.setattr(Path, "write_text", write_and_cut)
    with pytest.raises(RunError, match=r"cannot be read again.*check the disk"):
        save_model(tiny(), saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def edit_card(folder: Path, **changes: Any) -> None:
    """`...` removes an entry of config.json."""
    card = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in card.items() if value is not ...}))


def test_corrupt_or_missing_weights(saved: Path) -> None:
    weights = saved / "model.safetensors"
    data = weights.read_bytes()
    state = safetensors.torch.load(data)
    for content in (data[:-3] + bytes([data[-3] ^ 1]) + data[-2:], data[:100]):
        weights.write_bytes(content)
        with pytest.raises(UserError, match=r"model\.safetensors is corrupt"):
            load_model(saved)
    del state["norm.bias"]
    other = safetensors.torch.save({**state, "fc.weight": torch.zeros(2), "cls": torch.zeros(1, 1, 7)})
    for content, problem in (
        (other, r"1 missing: norm.bias; 1 unknown: fc.weight; .*cls has shape \(1, 1, 7\)"),
        (b"nonsense" * 1000, "cannot be read as safetensors"),
    ):
        weights.write_bytes(content)
        edit_card(saved, sha256=hashlib.sha256(content).hexdigest())
        with pytest.raises(UserError, match=problem):
            load_model(saved)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"version": 2}, "version 2"),
        ({"sha256": ...}, "sha256"),
        ({"model": {"width": 8, "widht": 9}}, "widht"),
        ({"extra": {"classes": ["a", "b"]}}, "2 names, and the model has 5 outputs"),
        ({"format": "other"}, "of another program"),
        *((text, r"config\.json") for text in ("", "[1]", "\x00")),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_an_invalid_card_is_refused(saved: Path, changes: Any, problem: str) -> None:
    (saved / "config.json").write_text(changes) if isinstance(changes, str) else edit_card(saved, **changes)
    with pytest.raises(UserError, match=problem):
        load_model(saved)
