"""The viewer of an image: its sprite holds every map, and the sliders show them."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import photograph, smooth
from markup import check
from PIL import Image

from vitlab.inspection import figures
from vitlab.inspection.capture import Capture
from vitlab.inspection.figures import PageImage, colormap
from vitlab.inspection.page import page
from vitlab.inspection.viewer import COLORS, view

RANDOM = np.random.default_rng(0)
EVIL = "\"><script>alert('$')</script>"


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
        "logits": np.zeros((1, 0), np.float32),
    }
    return Capture(**values | other)


def view_of(capture: Capture, name: str = "cat.png", size: tuple[int, int] = (80, 120)) -> dict[str, Any]:
    return view(capture, 0, name, photograph(size), [(name, 0.625), ("dog", 0.25)])


def page_of(*views: dict[str, Any]) -> str:
    context = {
        "model_numbers": {},
        "details": {},
        "embedding_figures": (),
        "unreadable_rows": (),
        "runs": (),
        "data": None,
    }
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
        steps = np.round((COLORS - 1) * figures.scale_maps(weights)).astype(int)
        assert (tile == colormap(COLORS)[steps]).all(), (row, column)


def test_peaks_are_where_each_map_is_highest() -> None:
    heads = np.full((1, 3, 2, 4, 6), 0.01, np.float32)
    heads[0, 1, 1, 2, 5], heads[0, 2, 0, 0, 0], heads[0, 2, 1, 3, 0] = 0.5, 0.3, 0.4
    peaks = json.loads(attributes(page_of(view_of(captured(heads=heads))))["data-peaks"])
    assert len(peaks) == 4 * 3
    assert peaks[2 * 3 + 2] == [3, 6, 50.0, 3.0]
    assert peaks[3 * 3] == [4, 1, 20.5, 4.5]  # the mean of both heads, at the mean distance
    assert peaks[0][3] == 0, "a rollout has no distance"


def test_controls_are_native_labeled_and_of_one_image_each() -> None:
    """Hidden without the script."""
    markup = check(page_of(view_of(captured(), EVIL), view_of(captured(), "dog.png", size=(8, 12))))
    assert all(words in markup.words for words in (EVIL, "62.5%", "JavaScript"))
    canvas, _ = markup.all("canvas")
    assert (canvas["width"], canvas["height"]) == ("288", "192")
    assert all("hidden" in element for element in markup.all("fieldset"))
    inputs = markup.all("input")
    assert [field["name"] for field in inputs if field["type"] == "radio"] == ["map0"] * 3 + ["map1"] * 3
    ranges = [(field["min"], field["max"]) for field in inputs if field["type"] == "range"]
    assert ranges == [("1", "3"), ("0", "2")] * 2
    assert len(markup.all("label")) == len(inputs)
    assert [caption.get("aria-live") for caption in markup.all("figcaption")].count("polite") == 2
    large, tiny = [image for image in markup.all("img") if "input" in image.get("class", "").split()]
    assert ("crisp" in large["class"], "crisp" in tiny["class"]) == (False, True)
    assert decoded(tiny["src"]).shape == (8, 12, 3)


# ---- in a browser, from a file ----


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Any:
    """The browser with a page of two viewers."""
    from selenium.webdriver.support.ui import WebDriverWait

    heads = smooth((1, 3, 2, 4, 6))
    heads[0, 1, 1] = 0.001
    heads[0, 1, 1, 3, 5] = 0.6
    text = page_of(view_of(captured(heads=heads)), view_of(captured(), "dog.png"))
    (tmp_path / "page.html").write_bytes(text.encode())
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
        "Layer 2, head 2: highest at patch row 4 of 4, column 6 of 6, with 60.0% of it. "
        "Patches gather from 3.0 pixels away on average."
    )
    outline = opened.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus is visible"
    map_ = canvas(opened)
    red, green, blue = map_[-8:, -8:].mean(axis=(0, 1))
    assert min(red, green) > blue + 40, "yellow where this head attends"
    assert map_[:40, :40, 2].mean() > map_[:40, :40, 1].mean(), "blue where it does not"
    assert (canvas(opened, 1) == other).all(), "the other image is unchanged"


def test_nothing_is_fetched_and_on_a_phone_nothing_is_cut_off(opened: Any) -> None:
    from selenium.webdriver.support.ui import WebDriverWait

    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    urls = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert sum(url.startswith("file:") for url in urls) == 1
    assert {url.split(":")[0] for url in urls} <= {"file", "data"}
    assert [entry for entry in opened.get_log("browser") if entry["level"] == "SEVERE"] == []
    phone = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    try:
        narrow = "return document.documentElement.clientWidth <= 360"
        WebDriverWait(opened, 100).until(lambda driver: driver.execute_script(narrow), "the window is still wide")
        assert opened.execute_script("return document.documentElement.scrollWidth") <= 360
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
