import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from vitlab.errors import UserError
from vitlab.io import write_sums
from vitlab.models import ViTConfig
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights import convert, load_card, load_checkpoint, load_model, save_model
from vitlab.weights.google import write_google

ALLOWED = r"give a Google \.npz, a folder of save_model, timm or Hugging Face"


def test_every_door_opens_the_same_model(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model = tiny()
    write_google(model, tmp_path / "vit.npz")
    (tmp_path / "unknown_suffix").write_bytes((tmp_path / "vit.npz").read_bytes())
    save_model(model, tmp_path / "run" / "model", extra={"source": "a test"})
    (tmp_path / "run" / "config.json").write_text('{"model": {}}')  # a run's own settings
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    images = torch.randn(2, 3, 12, 12)
    paths = ("vit.npz", "unknown_suffix", "run", "run/model", "run/model/model.safetensors")
    for path in paths:
        loaded = load_model(tmp_path / path)
        assert loaded.config == model.config
        assert not loaded.training
        assert torch.equal(loaded(images), model(images))
    assert load_model(str(tmp_path / "vit.npz")).config == model.config
    cards = [load_card(tmp_path / path) for path in paths]
    google, saved = ({"preprocessing": each.to_card()} for each in (Preprocessing.google(), Preprocessing(12)))
    assert cards == 2 * [google] + 3 * [{"source": "a test"} | saved]


def test_what_is_asked_reaches_the_model(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    save_model(tiny(representation_size=6), tmp_path / "saved")
    model = load_model(
        tmp_path / "saved", image_size=20, reset_head=True, pre_logits="drop", head_bias=-2.0, dropout=0.25
    )
    assert model.config == tiny(image_size=20, head_bias=-2.0, dropout=0.25).config
    assert isinstance(model, ViT)
    assert model.dropout.p == 0.25
    assert torch.equal(model(torch.randn(2, 3, 20, 20)), torch.full((2, 5), -2.0))
    with pytest.raises(ValueError, match=r"dropout is 1\.5"):
        load_model(tmp_path / "saved", dropout=1.5)


def test_loaded_weights_are_trainable_and_their_own(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    write_google(tiny(), tmp_path / "vit.npz")
    model = load_model(tmp_path / "vit.npz")
    model(torch.randn(2, 3, 12, 12)).sum().backward()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    assert len(set(places)) == len(places)
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.is_contiguous()
        assert parameter.device.type == "cpu"


def test_loading_draws_no_random_numbers(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    save_model(tiny(), tmp_path / "saved")
    before = torch.get_rng_state()
    load_model(tmp_path / "saved")
    assert torch.equal(torch.get_rng_state(), before)


# --- what is refused ---------------------------------------------------------------------------------------------


def test_nothing_there(tmp_path: Path) -> None:
    for door in (load_model, load_card):
        with pytest.raises(ValueError, match=rf"there is nothing at .*absent; {ALLOWED}"):
            door(tmp_path / "absent")


@pytest.mark.parametrize("name", ["empty", "text.txt", "half.npz", "image.png"])
def test_no_checkpoint(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes({"empty": b"", "image.png": b"\x89PNG\r\n\x1a\n"}.get(name, b"some words"))
    with pytest.raises(ValueError, match=rf"{name} is no checkpoint, or a damaged one; {ALLOWED}"):
        load_model(tmp_path / name)


def test_a_damaged_npz(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    write_google(tiny(), tmp_path / "vit.npz")
    data = (tmp_path / "vit.npz").read_bytes()
    (tmp_path / "vit.npz").write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"vit\.npz cannot be read.*damaged"):
        load_model(tmp_path / "vit.npz")


class Bomb:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


@pytest.mark.parametrize("name", ["model.pt", "model.pth", "pytorch_model.bin", "last.ckpt", "model", "model.npz"])
@pytest.mark.parametrize("writer", ["torch", "old torch", "pickle"])
def test_a_pickle_is_never_loaded(tmp_path: Path, name: str, writer: str) -> None:
    path, mark = tmp_path / name, tmp_path / "exploded"
    if writer == "pickle":
        path.write_bytes(pickle.dumps(Bomb(mark)))
    else:
        torch.save({"weights": Bomb(mark)}, path, _use_new_zipfile_serialization=writer == "torch")
    with pytest.raises(ValueError, match=r"is a pickle.*never loaded; convert it to safetensors"):
        load_model(path)
    assert not mark.exists()


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"holds no checkpoint; {ALLOWED}"):
        load_model(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="a training that has not ended"):
        load_model(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        load_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle"):
        load_model(tmp_path)


def test_weights_alone_do_not_say_of_which_model(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    save_model(tiny(), tmp_path / "saved")
    weights = (tmp_path / "saved" / "model.safetensors").read_bytes()
    for name in ("loose.safetensors", "loose"):
        (tmp_path / name).write_bytes(weights)
        with pytest.raises(ValueError, match=r"without the config\.json"):
            load_model(tmp_path / name)


def test_a_lone_array_is_no_checkpoint(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ValueError, match="no checkpoint"):
        load_model(tmp_path / "array.npy")


# --- convert -----------------------------------------------------------------------------------------------------


def test_what_is_converted_is_not_destroyed(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """Neither the source, nor a file that is no checkpoint."""
    save_model(tiny(), tmp_path / "run" / "model", extra={"source": "here"})
    (tmp_path / "notes.npz").write_text("mine")
    before = (tmp_path / "run" / "model" / "config.json").read_bytes()
    for source, place in (("run/model", "run/model"), ("run", "run/model"), ("run/model", "run/../run/model")):
        with pytest.raises(ValueError, match="is what is to be converted; give another place"):
            convert(tmp_path / source, tmp_path / place, to="timm")
    with pytest.raises(ValueError, match=r"is a folder, and Google's format is one file"):
        convert(tmp_path / "run" / "model", tmp_path, to="google")
    with pytest.raises(ValueError, match=r"notes\.npz is there already and no \.npz"):
        convert(tmp_path / "run", tmp_path / "notes.npz", to="google")
    assert (tmp_path / "notes.npz").read_text() == "mine"
    assert (tmp_path / "run" / "model" / "config.json").read_bytes() == before


def test_converted_at_another_size(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    save_model(tiny(), tmp_path / "saved", extra={"eval_resize": 16, "classes": list("abcde")})
    done = convert(tmp_path / "saved", tmp_path / "wide", to="vitlab", image_size=(12, 20))
    assert load_model(tmp_path / "wide").config.image_size == (12, 20)
    prepared = Preprocessing.google((12, 20), 27)  # 16 of 12 pixels
    card = {"classes": list("abcde"), "source": str(tmp_path / "saved"), "preprocessing": prepared.to_card()}
    assert load_card(tmp_path / "wide") == card
    assert done["difference"] == 0


@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_missing_blocks_are_noticed(tmp_path: Path, tiny: Callable[..., ViT], to: Any) -> None:
    """The depth is counted from the tensors, and must be what the card says."""
    save_model(tiny(), tmp_path / "saved")
    convert(tmp_path / "saved", tmp_path / "theirs", to=to)
    weights = tmp_path / "theirs" / "model.safetensors"
    state = safetensors.torch.load_file(weights)
    last = ("blocks.1.", "encoder.layer.1.")
    kept = {name: tensor for name, tensor in state.items() if not any(each in name for each in last)}
    safetensors.torch.save_file(kept, weights)
    with pytest.raises(ValueError, match=r"(depth|num_hidden_layers)=2 and the (tensors|arrays) are for 1"):
        load_model(tmp_path / "theirs")


@pytest.mark.usefixtures("unchecked")
def test_a_kind_that_is_none_is_refused(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    save_model(tiny(), tmp_path / "saved")
    with pytest.raises(ValueError, match="to is 'keras'; allowed: 'google'"):
        convert(tmp_path / "saved", tmp_path / "out", to="keras")  # pyright: ignore[reportArgumentType]


def test_a_folder_whose_writer_was_killed(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    """Between moving the old model away and moving the new one to its place; and with only the old one left."""
    model, images = tiny(), torch.randn(2, 3, 12, 12)
    for leftover in ("new", "old"):
        folder = tmp_path / leftover / "run" / "model"
        save_model(model, folder)
        folder.rename(folder.with_name(f".model.0123456789abcdef.{leftover}"))
        if leftover == "new":
            save_model(tiny(), folder.with_name(".model.0123456789abcdef.old"))
        loaded = load_model(folder.parent if leftover == "new" else folder)
        assert torch.equal(loaded(images), model(images))
        assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_a_damaged_card_of_a_run(tmp_path: Path, tiny: Callable[..., ViT], caplog: pytest.LogCaptureFixture) -> None:
    save_model(tiny(), tmp_path / "model", extra={"source": "a test"})
    write_sums(tmp_path, ["model/config.json", "model/model.safetensors"])
    load_model(tmp_path)
    assert caplog.text == ""
    card = tmp_path / "model" / "config.json"
    card.write_text(card.read_text().replace("a test", "a text"))
    load_model(tmp_path)
    assert "model/config.json does not match its checksum" in caplog.text


# --- cards -------------------------------------------------------------------------------------------------------


def test_a_card_is_read_without_the_weights(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    prepared = Preprocessing(12, 16, interpolation="bicubic")
    save_model(tiny(), tmp_path / "saved", extra={"preprocessing": prepared.to_card()})
    (tmp_path / "saved" / "model.safetensors").write_bytes(b"damaged")
    assert load_card(tmp_path / "saved", image_size=24) == {"preprocessing": prepared.at(24).to_card()}


@pytest.mark.parametrize("card", [{"eval_resize": -3}, {"eval_resize": 10**12}, {"preprocessing": {"resize": -3}}])
@pytest.mark.usefixtures("unchecked")
def test_a_card_that_no_image_can_be_prepared_by(
    tmp_path: Path, tiny: Callable[..., ViT], card: dict[str, Any]
) -> None:
    save_model(tiny(), tmp_path / "saved", extra=card)
    with pytest.raises(
        UserError, match=r"saved: its (eval_resize|preprocessing) cannot be used: resize is -?\d+; allowed"
    ):
        load_card(tmp_path / "saved")


def test_a_checkpoint_is_loaded_at_its_evaluation_size(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    model = tiny(image_size=20, position_interpolation="bicubic")
    save_model(model, tmp_path / "saved", extra={"preprocessing": Preprocessing(12, 16).to_card(), "source": "here"})
    found = load_checkpoint(tmp_path / "saved")
    assert (found.model.config.image_size, found.preprocessing) == (12, Preprocessing(12, 16))
    assert found.card["source"] == "here"
    images = torch.randn(2, 3, 12, 12)
    expected = load_model(tmp_path / "saved", image_size=12, interpolation="bicubic")
    assert torch.equal(found.model(images), expected(images))
    asked = load_checkpoint(tmp_path / "saved", image_size=24, interpolation="corners")
    assert asked.preprocessing == Preprocessing(24, 32)
    assert asked.model.config == dataclasses.replace(model.config, image_size=24, position_interpolation="corners")
    assert load_model(tmp_path / "saved").config == model.config  # as it is


def test_a_hub_is_asked_once(tmp_path: Path, tiny: Callable[..., ViT], monkeypatch: pytest.MonkeyPatch) -> None:
    """Though a new commit comes in between: card and weights are of the same one."""
    asked: list[str] = []

    def fetch(spec: str) -> Path:
        asked.append(spec)
        save_model(tiny(width=8 * len(asked)), tmp_path / f"{len(asked)}", extra={"source": f"commit {len(asked)}"})
        return tmp_path / f"{len(asked)}"

    monkeypatch.setattr("vitlab.weights.hub.download_checkpoint", fetch)
    found = load_checkpoint("hub:a/asked-once")
    again, card = load_model("hub:a/asked-once", image_size=24), load_card("hub:a/asked-once", image_size=24)
    assert asked == ["hub:a/asked-once"]
    assert found.card["source"] == card["source"] == "commit 1"
    assert isinstance(again.config, ViTConfig)
    assert again.config.width == 8


@pytest.mark.parametrize("length", [0x280, 0x380, 0x480, 0x580, 0x680])
def test_the_length_of_a_header_is_no_pickle(tmp_path: Path, length: int) -> None:
    """A safetensors file whose first byte, and second, are those of a pickle."""
    data = safetensors.torch.save({"patch_embed.proj.weight": torch.zeros(8, 3, 2, 2)})
    end = 8 + int.from_bytes(data[:8], "little")
    path = tmp_path / "weights.safetensors"
    path.write_bytes(
        length.to_bytes(8, "little") + data[8:end].ljust(length) + data[end:]
    )  # a header may end in blanks
    assert path.read_bytes()[0] == 0x80
    with pytest.raises(UserError, match=r"blocks\.0\.mlp\.fc1\.weight is missing"):  # it is read
        load_model(path)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_pickle_is_refused(tmp_path: Path, protocol: int) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(bytes([0x80, protocol]) + b"}q\x00{{{{{{{{.")
    with pytest.raises(UserError, match="is a pickle"):
        load_model(path)
