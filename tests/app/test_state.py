"""What is accepted as a image, and what the page says of one."""

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

from vitlab.app import state as shown
from vitlab.app.checkpoints import Loaded, Shelf
from vitlab.app.state import FEATURES, LAYER, PLAIN, ROLLOUT, VIEWS, Limits, Seen, see
from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.weights import save_model

SMALL = ViTConfig(image_size=(16, 24), patch_size=8, width=8, depth=3, heads=2, mlp_dim=8, num_classes=7)


def loaded(tmp_path: Path, config: ModelConfig, **extra: object) -> Loaded:
    model = build_model(config)
    for parameter in model.parameters():  # the head of a new model is zero
        torch.nn.init.normal_(parameter, std=0.5)
    save_model(model, tmp_path / "model", extra=extra)
    return Shelf(tmp_path / "model", device="cpu").take("model")


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


def test_a_image_is_read_as_everywhere_else() -> None:
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
def test_what_is_no_image_is_refused_with_what_is_allowed(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says) as refused:
        Limits().read(data, "letter.png")
    assert "letter.png" in str(refused.value)
    assert str(refused.value).endswith("Allowed are images of at most 50 megapixels and 20 MB.")


def test_limits_are_those_that_were_set() -> None:
    limits = Limits(megapixels=0.001, megabytes=0.01)
    assert limits.read(png(photo(25, 40)), "a.png").shape == (40, 25, 3)
    with pytest.raises(ValueError, match=r"25 x 41 pixels, more than the 1,000 allowed.*at most 0.001 megapixels"):
        limits.read(png(photo(25, 41)), "a.png")
    with pytest.raises(ValueError, match=r"a.png has 0.0 MB. Allowed .* and 0.01 MB"):
        limits.read(bytes(limits.most_bytes + 1), "a.png")
    with pytest.raises(ValueError, match=r"a strip of 660 x 20 pixels; .* up to 32 times"):
        Limits().read(png(photo(660, 20)), "a.png")
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="the limit of megapixels is"):
            Limits(megapixels=wrong)


def test_the_answers_are_the_models(vit: Loaded) -> None:
    image = photo()
    seen = see(vit, image)
    logits = vit.model(vit.transform.apply([image]))[0].detach()
    assert seen.probabilities is not None
    np.testing.assert_allclose(seen.probabilities, logits.softmax(0).numpy(), rtol=1e-4)
    assert (seen.given, seen.image.shape) == ((40, 30), (16, 24, 3))
    html = shown.answers(vit, seen)
    said = re.findall(r"<li><span>(.*?)</span> <span class=\"share\">(.*?)%</span>.*?width: (.*?)%", html)
    order = np.argsort(-seen.probabilities)[:5]
    names = [vit.classes[i].replace("<b>", "&lt;b&gt;") for i in order]
    assert said == [(name, *[f"{100 * seen.probabilities[i]:.1f}"] * 2) for name, i in zip(names, order, strict=True)]
    assert len(said) == 5
    assert "7 classes" in html


def test_every_view_shows_its_own_map(vit: Loaded) -> None:
    seen = see(vit, photo())
    pages = [shown.inside(seen, view, 1, 0) for view in VIEWS]
    pages += [shown.inside(seen, LAYER, layer, head) for layer, head in ((1, 1), (1, 2), (3, 2))]
    assert len({re.findall(r'src="(.*?)"', page)[1] for page in pages}) == len(pages)
    assert len({re.findall(r'src="(.*?)"', page)[0] for page in pages}) == 1  # the image itself
    for view, page in zip(VIEWS, pages, strict=False):
        assert VIEWS[view][-30:] in page
        assert page.count("alt=") == 2
        assert "40 × 30 pixels were given; the model sees 24 × 16." in page


def test_a_map_is_the_looks(vit: Loaded) -> None:
    found = see(vit, photo()).capture
    assert found is not None
    cases = [
        (ROLLOUT, 1, 0, found.rollout[0], "Rollout;"),
        (PLAIN, 1, 0, found.rollout_plain[0], "Rollout without the residual;"),
        (LAYER, 2, 2, found.heads[0, 1, 1], "Layer 2 of 3, head 2 of 2;"),
        (LAYER, 3, 0, found.heads[0, 2].mean(0), "Layer 3 of 3, mean of 2 heads;"),
        (LAYER, 99, 99, found.heads[0, 2, 1], "Layer 3 of 3, head 2 of 2;"),
        (LAYER, -5, -5, found.heads[0, 0].mean(0), "Layer 1 of 3, mean of 2 heads;"),
    ]
    for view, layer, head, expected, caption in cases:
        page = shown.inside(see(vit, photo()), view, layer, head)
        row, column = np.unravel_index(expected.argmax(), expected.shape)
        assert f"highest at patch row {row + 1} of 2, column {column + 1} of 3" in page
        assert f"{caption} the brightest patch has {expected.max() / expected.sum():.1%}" in page
    with pytest.raises(ValueError, match="'Else' cannot be shown; choose one of Rollout, "):
        shown.inside(see(vit, photo()), "Else", 1, 0)


def test_the_card_and_the_distances_say_what_the_model_is(vit: Loaded) -> None:
    card = shown.card(vit)
    for part in ("Vision Transformer", "<dd>16 × 24</dd>", "<dd>2 × 3</dd>", "<dd>3 × 2</dd>", "<dd>8, 8</dd>",
                 f"{vit.model.config.num_parameters:,}", "GMACs", "7 classes"):  # fmt: skip
        assert part in card
    seen = see(vit, photo())
    assert seen.capture is not None
    far = seen.capture.image_distances[0]
    page = shown.distances(seen)
    assert "2 heads in each of 3 layers" in page
    assert f"{far[0].mean():.1f} pixels" in page
    assert page.count("data:image/") == 2
    assert "prefers-color-scheme: dark" in page
    assert shown.layers_and_heads(seen) == (("1", "2", "3"), 2)


def test_a_model_without_a_head_looks_and_does_not_answer(tmp_path: Path) -> None:
    model = loaded(tmp_path, replace(SMALL, num_classes=0))
    seen = see(model, photo())
    assert seen.probabilities is None
    assert "no head" in shown.answers(model, seen)
    assert "no head" in shown.card(model)
    assert "data:image" in shown.inside(seen, FEATURES, 1, 0)


def test_a_resnet_answers_and_has_nothing_to_look_at(tmp_path: Path) -> None:
    model = loaded(tmp_path, ResNetConfig(image_size=32, body=ResNetBody((1, 1), width=32), num_classes=4))
    seen = see(model, photo())
    assert seen.probabilities is not None
    assert seen.probabilities.sum() == pytest.approx(1)
    assert shown.answers(model, seen).count("<li>") == 4
    assert "ResNet" in shown.inside(seen, ROLLOUT, 1, 0)
    assert "ResNet" in shown.card(model)
    assert (shown.distances(seen), shown.layers_and_heads(seen)) == ("", ((), 0))


def test_damaged_weights_are_told_of(vit: Loaded) -> None:
    assert vit.model.head is not None
    with torch.no_grad():
        next(vit.model.head.parameters()).fill_(float("nan"))
    with pytest.raises(ValueError, match="not numbers"):
        see(vit, photo())


def test_nothing_has_been_seen_yet() -> None:
    assert shown.layers_and_heads(None) == ((), 0)
    assert "App. D.8" in shown.nothing_yet(ROLLOUT)
    assert "&lt;i&gt;" in shown.refusal("<i>")
    assert 'role="alert"' in shown.refusal("<i>")
    assert Seen.__doc__
