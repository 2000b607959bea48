"""What is accepted as an image, what the page shows of one, and what its controls do."""

import html
import io
import re
import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitlab.app.checkpoints import Loaded, ModelCache
from vitlab.app.state import Dropped, Limits, Session, describe, inspect_image
from vitlab.inspect.capture import capture
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.models.vit import ViT
from vitlab.weights import save_model

SMALL = ViTConfig(image_size=(16, 24), patch_size=8, width=8, depth=3, heads=2, mlp_dim=8, num_classes=7)


def loaded(tmp_path: Path, config: ModelConfig, **extra: object) -> Loaded:
    model = build_model(config)
    for parameter in model.parameters():  # the head of a new model is zero
        torch.nn.init.normal_(parameter, std=0.5)
    save_model(model, tmp_path / "model", extra=extra)
    return ModelCache(tmp_path / "model", device="cpu").get("model")


@pytest.fixture
def vit(tmp_path: Path) -> Loaded:
    return loaded(tmp_path, SMALL, classes=["crane", "<b>", "c", "d", "e", "f", "crane"])


def photo(width: int = 40, height: int = 30) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def png(image: np.ndarray) -> bytes:
    Image.fromarray(image).save(out := io.BytesIO(), format="PNG")
    return out.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of few bytes whose header promises many pixels; what follows the header is no image."""
    parts = ((b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)), (b"IDAT", b"not deflated"))
    chunks = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_images_are_decoded_as_everywhere_else() -> None:
    assert np.array_equal(Limits().read(png(photo()), "a.png"), photo())
    Image.fromarray(photo()).convert("CMYK").save(cmyk := io.BytesIO(), format="JPEG")
    assert Limits().read(cmyk.getvalue(), "a.jpg").shape == (30, 40, 3)
    turned = Image.Exif()
    turned[0x0112] = 6
    Image.fromarray(photo()).save(upright := io.BytesIO(), format="JPEG", exif=turned)
    assert Limits().read(upright.getvalue(), "a.jpg").shape == (40, 30, 3)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"Dear all,\n", "not an image of a known format"),
        (b"", "empty"),
        (png(photo())[:-400], "corrupt or truncated"),
        (bomb(10_000, 10_000), "10000 x 10000 pixels, more than the 50,000,000 allowed"),  # not: damaged
        (bomb(50_000, 50_000), "pixels, more than the 50,000,000 allowed"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not an image"),
    ],
    ids=["text", "nothing", "cut off", "100 megapixels", "2,500 megapixels", "a drawing"],
)
def test_other_files_are_refused_with_what_is_allowed(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        Limits().read(data, "letter.png")
    assert "letter.png" in str(refused.value)
    assert str(refused.value).endswith("Allowed are images of at most 50 megapixels and 20 MB.")


def test_limits() -> None:
    limits = Limits(megapixels=0.001, megabytes=0.01)
    assert limits.read(png(photo(25, 40)), "a.png").shape == (40, 25, 3)
    with pytest.raises(ValueError, match=r"25 x 41 pixels, more than the 1,000 allowed.*at most 0.001 megapixels"):
        limits.read(png(photo(25, 41)), "a.png")
    with pytest.raises(ValueError, match=r"a.png has 0.0 MB. Allowed .* and 0.01 MB"):
        limits.read(bytes(limits.max_bytes + 1), "a.png")
    with pytest.raises(ValueError, match=r"a strip of 660 x 20 pixels; .* up to 32 times"):
        Limits().read(png(photo(660, 20)), "a.png")
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="the limit of megapixels is"):
            Limits(megapixels=wrong)


def predictions(page: str) -> list[tuple[str, str]]:
    return re.findall(r'<li><span class="name">(.*?)</span> <span class="share">(.*?)%</span>', page)


def test_the_result_holds_predictions_maps_and_distances(vit: Loaded) -> None:
    page = inspect_image(vit, photo(), "cat <1>.png")
    images = vit.transform.apply([photo()])
    probabilities = vit.model(images)[0].softmax(0).detach().numpy()
    order = np.argsort(-probabilities)[:5]
    assert predictions(page) == [(html.escape(vit.classes[i]), f"{100 * probabilities[i]:.1f}") for i in order]
    for words in ("7 classes", "40 × 30 pixels were given; the model sees 24 × 16.", "cat &lt;1&gt;.png under its"):
        assert words in page
    assert isinstance(vit.model, ViT)
    seen = capture(vit.model, [images])
    row, column = np.unravel_index(seen.rollout[0].argmax(), seen.rollout[0].shape)
    assert f"Rollout: highest at patch row {row + 1} of 2, column {column + 1} of 3" in page
    assert f"{seen.image_distances[0, 0].mean():.1f} pixels in the first layer" in page
    assert page.count('class="viewer"') == 1
    assert page.count("prefers-color-scheme: dark") == 1


def test_a_model_without_a_head_shows_attention_alone(tmp_path: Path) -> None:
    model = loaded(tmp_path, replace(SMALL, num_classes=0))
    page = inspect_image(model, photo(), "a.png")
    assert "makes no predictions" in page
    assert "data-sprite" in page
    assert "no head" in describe(model)


def test_a_resnet_shows_predictions_alone(tmp_path: Path) -> None:
    model = loaded(tmp_path, ResNetConfig(image_size=32, body=ResNetBody((1, 1), width=32), num_classes=4))
    page = inspect_image(model, photo(), "a.png")
    assert len(predictions(page)) == 4
    assert sum(float(share) for _, share in predictions(page)) == pytest.approx(100, abs=0.3)
    assert "no attention" in page
    assert "data-sprite" not in page
    assert "ResNet" in describe(model)


def test_the_card_describes_the_model(vit: Loaded) -> None:
    card = describe(vit)
    for part in ("Vision Transformer", "<dd>16 × 24</dd>", "<dd>3 × 2</dd>", "GMACs", "7 classes"):
        assert part in card
    assert f"{vit.model.config.num_parameters:,}" in card


def test_corrupt_weights_raise(vit: Loaded) -> None:
    assert vit.model.head is not None
    with torch.no_grad():
        next(vit.model.head.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="not finite"):
        inspect_image(vit, photo(), "a.png")


# ---- the controls ----


@pytest.fixture
def session(tmp_path: Path) -> Session:
    deep = ViTConfig(image_size=16, patch_size=8, width=8, depth=3, heads=2, mlp_dim=8, num_classes=3)
    save_model(build_model(deep), tmp_path / "many" / "deep", extra={"classes": ["ant", "bee", "cow"]})
    save_model(build_model(replace(deep, depth=1, num_classes=2)), tmp_path / "many" / "flat")
    save_model(build_model(deep), tmp_path / "many" / "lost")
    (tmp_path / "many" / "lost" / "model.safetensors").write_bytes(b"{")
    return Session(ModelCache(tmp_path / "many", device="cpu"), Limits())


@pytest.fixture
def upload(tmp_path: Path) -> Callable[[str, bytes], str]:
    """Puts a file into the upload folder."""
    (tmp_path / "uploads").mkdir()

    def write(name: str, data: bytes) -> str:
        (tmp_path / "uploads" / name).write_bytes(data)
        return str(tmp_path / "uploads" / name)

    return write


def test_an_uploaded_image_is_shown(session: Session, upload: Callable[[str, bytes], str], tmp_path: Path) -> None:
    dropped, message, result, card = session.drop(upload("a.png", png(photo())), tmp_path / "uploads", "deep")
    assert dropped == Dropped("a.png", png(photo()))
    assert 'role="status">a.png<' in message
    assert len(predictions(result)) == 3
    assert card is not None
    assert "<dd>3 × 2</dd>" in card
    message, result, card = session.choose(dropped, "flat")
    assert "a.png" in message
    assert len(predictions(result)) == 2
    assert "<dd>1 × 2</dd>" in card


def test_a_file_outside_of_the_uploads_is_not_opened(session: Session, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(photo()))
    for path in (str(tmp_path / "a.png"), "/dev/zero"):
        dropped, message, result, card = session.drop(path, tmp_path / "uploads", "deep")
        assert (dropped, result, card) == (None, "", None)
        assert "is not an uploaded file" in message


def test_another_file_is_refused(session: Session, upload: Callable[[str, bytes], str], tmp_path: Path) -> None:
    dropped, message, result, card = session.drop(upload("b <i>.jpg", b"Dear all"), tmp_path / "uploads", "deep")
    assert dropped is not None
    assert 'role="alert"' in message
    assert "b &lt;i&gt;.jpg: not " in message
    assert result == ""
    assert card


def test_a_corrupt_checkpoint_is_a_message_and_the_next_works(session: Session) -> None:
    message, result, card = session.choose(None, "lost")
    assert 'role="alert"' in message
    assert "lost" in message
    assert (result, card) == ("", "")
    message, result, card = session.choose(None, "deep")
    assert "Allowed are images" in message
    assert "<dd>3 × 2</dd>" in card
