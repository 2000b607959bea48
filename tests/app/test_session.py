"""What is accepted as an image, and what the page shows of one."""

import html
import io
import re
import struct
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.app.checkpoints import Loaded, ModelCache
from vitlab.app.session import Limits, Session, inspect_image
from vitlab.inspect.capture import capture
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.models.vit import ViT
from vitlab.weights import save_model

SMALL = ViTConfig(image_size=(16, 24), patch_size=8, width=8, depth=3, heads=2, mlp_dim=8, num_classes=7)
PHOTO = np.random.default_rng(0).integers(0, 256, (30, 40, 3), dtype=np.uint8)


def save(path: Path, config: ModelConfig, **card: object) -> Path:
    model = build_model(config)
    for parameter in model.parameters():  # the head of a new model is zero
        torch.nn.init.normal_(parameter, std=0.5)
    save_model(model, path, extra=card)
    return path


def load(path: Path, config: ModelConfig, **card: object) -> Loaded:
    return ModelCache(save(path / "model", config, **card), device="cpu").get("model")


def png(image: np.ndarray) -> bytes:
    Image.fromarray(image).save(out := io.BytesIO(), format="PNG")
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes whose header promises many pixels."""
    parts = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b"not deflated"))
    chunks = (struct.pack(">I", len(d)) + kind + d + struct.pack(">I", zlib.crc32(kind + d)) for kind, d in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"Dear all,\n", "not an image of a known format"),
        (b"", "empty"),
        (png(PHOTO)[:-400], "corrupt or truncated"),
        (bomb(10_000, 10_000), "10000 x 10000 pixels, more than the 50,000,000 allowed"),
        (bomb(50_000, 50_000), "more than the 50,000,000"),
    ],
    ids=["text", "nothing", "cut off", "100 megapixels", "2,500 megapixels"],
)
def test_other_files_are_refused_with_what_is_allowed(data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        Limits().read(data, "letter.png")
    assert "letter.png" in str(refused.value)
    assert str(refused.value).endswith("Allowed are images of at most 50 megapixels and 20 MB.")


def test_limits() -> None:
    limits = Limits(megapixels=0.0012, megabytes=0.01)
    assert (limits.read(png(PHOTO), "a.png") == PHOTO).all()
    with pytest.raises(ValueError, match=r"40 x 31 pixels, more than the 1,200 allowed.*at most 0.0012 megapixels"):
        limits.read(png(np.zeros((31, 40, 3), np.uint8)), "a.png")
    with pytest.raises(ValueError, match=r"a.png has more than 0.01 MB"):
        limits.read(bytes(limits.max_bytes + 1), "a.png")
    with pytest.raises(ValueError, match=r"a strip of 660 x 20 pixels, longer than 32 to 1"):
        Limits().read(png(np.zeros((20, 660, 3), np.uint8)), "a.png")
    for wrong in (0.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="the limit of megapixels is"):
            Limits(megapixels=wrong)


def predictions(text: str) -> list[tuple[str, str]]:
    return re.findall(r'<li><span class="name">(.*?)</span> <span class="share">(.*?)%</span>', text)


def test_the_result_holds_predictions_maps_and_distances(tmp_path: Path) -> None:
    vit = load(tmp_path, SMALL, classes=["crane", "<b>", "c", "d", "e", "f", "crane"])
    text = inspect_image(vit, PHOTO, "cat <1>.png")
    images = vit.transform.apply([PHOTO])
    assert isinstance(vit.model, ViT)
    captured = capture(vit.model, [images])
    assert captured.probabilities is not None
    order = np.argsort(-captured.probabilities[0])[:5]
    expected = [(html.escape(vit.classes[i]), f"{100 * captured.probabilities[0, i]:.1f}") for i in order]
    assert predictions(text) == expected
    row, column = np.unravel_index(captured.rollout[0].argmax(), captured.rollout[0].shape)
    for words in (
        "7 classes",
        "40 × 30 pixels were given; the model sees 24 × 16.",
        "cat &lt;1&gt;.png under its",
        f"Rollout: highest at patch row {row + 1} of 2, column {column + 1} of 3",
        f"{captured.image_distances[0, 0].mean():.1f} pixels in the first layer",
    ):
        assert words in text
    with torch.no_grad():
        assert vit.model.head is not None
        next(vit.model.head.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        inspect_image(vit, PHOTO, "a.png")


def test_a_model_without_a_head_shows_attention_alone(tmp_path: Path) -> None:
    text = inspect_image(load(tmp_path, replace(SMALL, num_classes=0)), PHOTO, "a.png")
    assert "makes no predictions" in text
    assert "data-sprite" in text


def test_a_resnet_shows_predictions_alone(tmp_path: Path) -> None:
    config = ResNetConfig(image_size=32, body=ResNetBody((1, 1), width=32), num_classes=4)
    text = inspect_image(load(tmp_path, config), PHOTO, "a.png")
    assert sum(float(share) for _, share in predictions(text)) == pytest.approx(100, abs=0.3)
    assert "no attention" in text
    assert "data-sprite" not in text


def test_the_parts_of_the_page(tmp_path: Path) -> None:
    for name, classes in (("deep", 3), ("other", 2), ("lost", 3)):
        save(tmp_path / name, replace(SMALL, num_classes=classes))
    (tmp_path / "lost" / "model.safetensors").write_bytes(b"{")
    session = Session(ModelCache(tmp_path, device="cpu"), Limits())
    parts = session.inspect("deep", "a.png", png(PHOTO))
    assert 'role="status">a.png<' in parts["message"]
    assert len(predictions(parts["result"])) == 3
    for words in ("Vision Transformer", "<dd>16 × 24</dd>", "<dd>3 × 2</dd>", "GMACs", "3 classes"):
        assert words in parts["model"]
    assert len(predictions(session.inspect("other", "a.png", png(PHOTO))["result"])) == 2
    parts = session.inspect("deep", "b <i>.jpg", b"Dear all")
    assert 'role="alert"' in parts["message"]
    assert "b &lt;i&gt;.jpg: not " in parts["message"]
    assert parts["result"] == ""
    parts = session.inspect("lost", "a.png", png(PHOTO))
    assert "lost" in parts["message"]
    assert (parts["result"], parts["model"]) == ("", "")
    parts = session.inspect("deep", "", b"")
    assert "Allowed are images" in parts["message"]
    assert parts["result"] == ""
