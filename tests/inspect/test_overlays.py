"""Images under attention, and the viewer: its sprite holds every map, and the sliders show them."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import photograph, random_capture, smooth
from markup import check
from PIL import Image

from vitlab.inspect import overlays
from vitlab.inspect.capture import Capture
from vitlab.inspect.figures import PageImage
from vitlab.inspect.overlays import LEVELS, SIDE, ramp, view
from vitlab.inspect.page import page, write_page
from vitlab.models import ViTConfig, get_config

RANDOM = np.random.default_rng(0)
EVIL = "\"><script>alert('$')</script>"


def test_levels_are_of_each_map_and_one_patch_does_not_hide_the_rest() -> None:
    level = np.linspace(0.2, 0.4, 100).reshape(10, 10)
    np.testing.assert_allclose(overlays.levels(level).ravel()[:95], np.linspace(0, 99 / 94.05, 100)[:95], rtol=1e-6)
    np.testing.assert_allclose(overlays.levels(np.stack([level, 9 * level]))[1], overlays.levels(level))
    spiked = level.copy()
    spiked[0, 0] = 2.0
    assert np.abs(overlays.levels(spiked) - overlays.levels(level)).ravel()[1:].max() < 0.02
    alone = np.full((10, 10), 1e-6) * level
    alone[3, 3] = 1.0
    assert np.delete(overlays.levels(alone).ravel(), 33).max() < 1e-4, "rounding errors beside one patch with all"
    assert (overlays.levels(np.full((2, 2), 0.25)) == 0).all()


def test_masked_is_black_without_attention_and_the_image_at_the_maximum() -> None:
    attention = np.zeros((3, 3))
    attention[1, 1] = attention[1, 2] = 0.5
    masked = overlays.masked(np.full((60, 60, 3), 200, dtype=np.uint8), attention)
    assert (masked[30, 50] == 200).all()
    assert (masked[5, 5] <= 2).all()


def test_overlay_is_yellow_where_attention_is_highest_and_blue_where_lowest() -> None:
    attention = np.full((4, 4), 0.2)
    attention[0, 3], attention[3, 0] = 0.9, 0.1
    colors = overlays.overlay(np.full((64, 64, 3), 128, dtype=np.uint8), attention).astype(int)
    assert min(colors[2, 61, :2]) > colors[2, 61, 2] + 80
    assert colors[61, 2, 2] > max(colors[61, 2, :2])


def test_beside_centers_both_images_with_a_transparent_gap() -> None:
    left = RANDOM.integers(0, 256, (8, 6, 3), dtype=np.uint8)
    both = overlays.beside(left, np.full((4, 8, 3), 9, np.uint8), gap=2)
    assert both.shape == (8, 18, 4)
    assert (both[:, 1:7, :3] == left).all()
    assert (both[2:6, 10:] == [9, 9, 9, 255]).all()
    assert both[:2, 10:].any() == both[:, 8:10].any() == both[:, :1].any() == np.False_


def test_fit_makes_large_images_smaller_and_leaves_small_ones() -> None:
    large = RANDOM.integers(0, 256, (300, 200, 3), dtype=np.uint8)
    assert overlays.fit(large, 192).shape == (192, 128, 3)
    assert (overlays.fit(large[:8, :8], 192) == large[:8, :8]).all()
    assert overlays.fit(large[:8, :8], 192, enlarge=True).shape == (192, 192, 3)
    assert overlays.fit(large[:1], 50).shape == (1, 50, 3)


@pytest.mark.parametrize("channels", [3, 4])
def test_a_small_image_is_encoded_exactly_and_a_large_one_nearly(channels: int) -> None:
    small = RANDOM.integers(0, 256, (64, 7, channels), dtype=np.uint8)
    assert (np.asarray(Image.open(io.BytesIO(overlays.encoded(small)))) == small).all()
    large = np.zeros((160, 200, channels), dtype=np.uint8)
    large[..., 0], large[..., -1] = np.linspace(0, 255, 200), 255
    large[:, :50] = 0  # with four channels: transparent
    data = overlays.encoded(large)
    assert len(data) < 4000
    assert np.abs(np.asarray(Image.open(io.BytesIO(data))).astype(int) - large)[:, 64:].max() < 16


def captured(grid: tuple[int, int] = (4, 6), **other: Any) -> Capture:
    distances = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    values: dict[str, Any] = {
        "count": 1,
        "layers": ("1", "2", "3"),
        "distances": distances,
        "image_distances": distances[None],
        "heads": smooth((1, 3, 2, *grid)),
        "rollout": smooth((1, *grid), 1),
        "rollout_plain": smooth((1, *grid), 2),
        "components": RANDOM.random((1, *grid, 3), dtype=np.float32),
        "probabilities": None,
    }
    return Capture(**values | other)


def view_of(capture: Capture, name: str = "cat.png", size: tuple[int, int] = (80, 120)) -> dict[str, Any]:
    return view(capture, 0, name, photograph(size), [(name, 0.625), ("dog", 0.25)])


def page_of(*views: dict[str, Any]) -> str:
    context = {"model_numbers": {}, "details": {}, "learned_drawings": (), "unreadable_rows": (), "phases": ()}
    heads = PageImage(views[0]["input"], "every head of every layer", 96)
    return page(
        "checkpoint.html.j2", "T", "L", scripts=("viewer.js",), views=views, count=len(views), heads=heads, **context
    )


def attributes(text: str) -> dict[str, str]:
    (viewer,) = [div for div in check(text).all("div") if div.get("class") == "viewer"]
    return viewer


def decoded(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1]))).convert("RGB"))


def test_the_sprite_holds_every_map() -> None:
    capture = captured()
    sprite = decoded(attributes(page_of(view_of(capture)))["data-sprite"])
    assert sprite.shape == (4 * 4, 3 * 6, 3)
    expected = {(0, 0): capture.rollout[0], (0, 1): capture.rollout_plain[0]}
    expected |= {(1 + layer, 0): capture.heads[0, layer].mean(axis=0) for layer in range(3)}
    expected |= {(1 + layer, 1 + head): capture.heads[0, layer, head] for layer, head in np.ndindex(3, 2)}
    for (row, column), weights in expected.items():
        tile = sprite[4 * row : 4 * row + 4, 6 * column : 6 * column + 6]
        steps = np.round((LEVELS - 1) * overlays.levels(weights)).astype(int)
        assert (tile == ramp(LEVELS)[steps]).all(), (row, column)


def test_peaks_are_where_each_map_is_highest() -> None:
    heads = np.full((1, 3, 2, 4, 6), 0.01, np.float32)
    heads[0, 1, 1, 2, 5], heads[0, 2, 0, 0, 0], heads[0, 2, 1, 3, 0] = 0.5, 0.3, 0.4
    peaks = json.loads(attributes(page_of(view_of(captured(heads=heads))))["data-peaks"])
    assert len(peaks) == 4 * 3
    assert peaks[2 * 3 + 2] == [3, 6, 50.0, 3.0]
    assert peaks[3 * 3] == [4, 1, 20.5, 4.5]  # the mean of both heads, at the mean distance
    assert peaks[0][3] == 0, "a rollout has no distance"


def test_a_page_of_sixteen_images_of_a_large_model_is_under_5_mb() -> None:
    """L/16 at 384 pixels, with maps that are hard to compress."""
    config = get_config("ViT-L/16", image_size=384)
    assert isinstance(config, ViTConfig)
    files = [
        value for value in view_of(random_capture(config, 1), size=(384, 384)).values() if isinstance(value, bytes)
    ]
    assert 50_000 < 4 / 3 * sum(map(len, files)) < 5_000_000 / 16


def test_the_viewer_without_its_script() -> None:
    markup = check(page_of(view_of(captured(), name=EVIL)))
    assert EVIL in markup.words
    assert "62.5%" in markup.words
    assert "need JavaScript" in markup.words
    (static,) = [image for image in markup.all("img") if image.get("class") == "static"]
    assert re.search(r"Rollout: highest at patch row \d of 4, column \d of 6, with [\d.]+ % of it", static["alt"])
    assert decoded(static["src"]).shape == (192, 288, 3)
    assert all("hidden" in element for element in markup.all("canvas", "fieldset"))


def test_controls_are_native_labeled_and_of_one_image_each() -> None:
    markup = check(page_of(view_of(captured()), view_of(captured(), "dog.png")))
    inputs = markup.all("input")
    assert [field["name"] for field in inputs if field["type"] == "radio"] == ["map0"] * 3 + ["map1"] * 3
    ranges = [(field["min"], field["max"]) for field in inputs if field["type"] == "range"]
    assert ranges == [("1", "3"), ("0", "2")] * 2
    assert len(markup.all("label")) == len(inputs)
    assert [caption.get("aria-live") for caption in markup.all("figcaption")].count("polite") == 2


@pytest.mark.parametrize(("size", "crisp"), [((8, 12), True), ((80, 120), False)])
def test_a_tiny_image_is_shown_pixel_by_pixel(size: tuple[int, int], crisp: bool) -> None:
    images = check(page_of(view_of(captured(), size=size))).all("img")
    (image,) = [image for image in images if "input" in image.get("class", "").split()]
    assert ("crisp" in image["class"]) == crisp
    assert decoded(image["src"]).shape == (*size, 3)


# ---- in a browser, from a file ----


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Any:
    from selenium.webdriver.support.ui import WebDriverWait

    heads = smooth((1, 3, 2, 4, 6))
    heads[0, 1, 1] = 0.001
    heads[0, 1, 1, 3, 5] = 0.6
    write_page(tmp_path / "page.html", page_of(view_of(captured(heads=heads)), view_of(captured(), "dog.png")))
    browser.get_log("performance")  # of earlier pages
    browser.get_log("browser")
    browser.get((tmp_path / "page.html").as_uri())
    count = "return document.querySelectorAll('fieldset:not([hidden])').length"
    WebDriverWait(browser, 100).until(lambda driver: driver.execute_script(count) == 2, "the script has not started")
    return browser


def canvas(browser: Any, number: int = 0) -> np.ndarray:
    uri = browser.execute_script("return document.querySelectorAll('canvas')[arguments[0]].toDataURL()", number)
    return decoded(uri).astype(int)


def caption(browser: Any) -> str:
    return browser.execute_script("return document.querySelector('.stage figcaption').textContent")


def test_sliders_work_by_keyboard_and_describe_the_map(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    def press(key: str) -> Any:
        opened.switch_to.active_element.send_keys(key)
        return opened.switch_to.active_element

    rollout, other = canvas(opened), canvas(opened, 1)
    assert caption(opened).startswith("Rollout: highest")
    opened.execute_script("document.querySelector('[name=map0]').focus()")
    press(Keys.ARROW_DOWN)
    assert caption(opened).startswith("Rollout without residual: highest")
    assert np.abs(canvas(opened) - rollout).max() > 30
    assert press(Keys.TAB).get_attribute("class") == "layer"
    assert press(Keys.ARROW_LEFT).get_attribute("aria-valuetext") == "2"
    assert caption(opened).startswith("Layer 2, mean of 2 heads: highest")
    press(Keys.TAB)
    assert press(Keys.END).get_attribute("aria-valuetext") == "head 2"
    assert caption(opened) == (
        "Layer 2, head 2: highest at patch row 4 of 4, column 6 of 6, with 60 % of it. "
        "Patches gather from 3.0 pixels away on average."
    )
    outline = opened.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus is visible"
    map_ = canvas(opened)
    red, green, blue = map_[-8:, -8:].mean(axis=(0, 1))
    assert min(red, green) > blue + 40, "yellow where this head attends"
    assert map_[:40, :40, 2].mean() > map_[:40, :40, 1].mean(), "blue where it does not"
    assert (canvas(opened, 1) == other).all(), "the other image is unchanged"


def test_the_canvas_shows_what_the_still_image_shows_and_nothing_is_fetched(opened: Any) -> None:
    still = overlays.overlay(overlays.fit(photograph((80, 120)), SIDE, enlarge=True), captured().rollout[0])
    assert np.abs(canvas(opened, 1) - still.astype(int)).mean() < 12
    assert canvas(opened, 1).std() > 20
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert sum(url.startswith("file:") for url in urls) == 1
    assert {url.split(":")[0] for url in urls} <= {"file", "data"}
    assert [entry for entry in opened.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_on_a_phone_nothing_is_cut_off(opened: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    phone = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        narrow = "return document.documentElement.clientWidth <= 360"
        WebDriverWait(opened, 100).until(lambda driver: driver.execute_script(narrow), "the window is still wide")
        assert opened.execute_script("return document.documentElement.scrollWidth") <= 360
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
