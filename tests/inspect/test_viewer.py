"""The viewer: its sprite holds every map, and the sliders show them."""

import base64
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inside import photograph, smooth
from markup import check
from PIL import Image

from vitlab.inspect import figures, overlays
from vitlab.inspect.capture import Capture
from vitlab.inspect.page import PageImage, page, write_page
from vitlab.inspect.viewer import CELLS, LEVELS, SIDE, pooling, view

EVIL = "\"><script>alert('$')</script>"


def captured(grid: tuple[int, int] = (4, 6), **other: Any) -> Capture:
    random = np.random.default_rng(0)
    distances = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    values: dict[str, Any] = {
        "count": 1, "layers": ("1", "2", "3"), "distances": distances, "image_distances": distances[None],
        "heads": smooth((1, 3, 2, *grid)), "rollout": smooth((1, *grid), 1), "rollout_plain": smooth((1, *grid), 2),
        "components": random.random((1, *grid, 3), dtype=np.float32), "probabilities": None,
    }  # fmt: skip
    return Capture(**values | other)


def shown(
    capture: Capture | None = None,
    name: str = "cat.png",
    size: tuple[int, int] = (80, 120),
    predictions: tuple[tuple[str, float], ...] = (("cat", 0.75), ("dog", 0.25)),
    pool: int = 1,
) -> dict[str, Any]:
    return view(capture or captured(), 0, name, photograph(size), predictions, pool=pool)


def written(*views: dict[str, Any]) -> str:
    context = {"model_numbers": {}, "details": {}, "learned_drawings": (), "unreadable_rows": (), "phases": ()}
    image = PageImage(views[0]["input"], "every head of every layer", 96)
    return page(
        "checkpoint.html.j2", "T", "L", viewers=True, views=views, pool=1, count=len(views), heads=image, **context
    )


def attributes(text: str) -> dict[str, str]:
    (found,) = [each for each in check(text).all("div") if each.get("class") == "viewer"]
    return found


def decoded(uri: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",", 1)[1]))).convert("RGB"))


def test_the_sprite_holds_every_map_in_its_place() -> None:
    given = captured()
    sprite = decoded(attributes(written(shown(given)))["data-sprite"])
    assert sprite.shape == (4 * 4, 3 * 6, 3)
    expected = {(0, 0): given.rollout[0], (0, 1): given.rollout_plain[0]}
    expected |= {(1 + layer, 0): given.heads[0, layer].mean(axis=0) for layer in range(3)}
    expected |= {(1 + layer, 1 + head): given.heads[0, layer, head] for layer, head in np.ndindex(3, 2)}
    colors = figures.ramp(LEVELS)
    for (row, column), weights in expected.items():
        tile = sprite[4 * row : 4 * row + 4, 6 * column : 6 * column + 6]
        steps = np.round((LEVELS - 1) * overlays.levels(weights)).astype(int)
        assert (tile == colors[steps]).all(), (row, column)


def test_peaks_are_where_each_map_is_highest() -> None:
    heads = np.full((1, 3, 2, 4, 6), 0.01, np.float32)
    heads[0, 1, 1, 2, 5], heads[0, 2, 0, 0, 0], heads[0, 2, 1, 3, 0] = 0.5, 0.3, 0.4
    peaks = json.loads(attributes(written(shown(captured(heads=heads))))["data-peaks"])
    assert len(peaks) == 4 * 3
    assert peaks[2 * 3 + 2] == [3, 6, 50.0, 3.0]
    assert peaks[3 * 3 + 1] == [1, 1, 30.0, 4.0]
    assert peaks[3 * 3] == [4, 1, 20.5, 4.5]  # the mean of both heads, at the mean distance
    assert peaks[0][3] == 0, "a rollout has no distance"


def test_pooled_maps_are_means_and_peaks_stay() -> None:
    heads = np.zeros((1, 3, 2, 5, 6), np.float32)
    heads[:, :, :, 4, 3] = 0.8
    rollout = np.arange(30, dtype=np.float32).reshape(1, 5, 6)
    found = attributes(written(shown(captured((5, 6), heads=heads, rollout=rollout), pool=2)))
    sprite = decoded(found["data-sprite"])
    assert sprite.shape == (4 * 3, 3 * 3, 3)
    means = [[3.5, 5.5, 7.5], [15.5, 17.5, 19.5], [24.5, 26.5, 28.5]]  # the last row is of one row of patches
    steps = np.round((LEVELS - 1) * overlays.levels(np.array(means))).astype(int)
    assert (sprite[:3, :3] == figures.ramp(LEVELS)[steps]).all()
    assert json.loads(found["data-peaks"])[4][:2] == [5, 4]
    assert (found["data-rows"], found["data-down"], found["data-across"]) == ("3", "5", "6")


@pytest.mark.parametrize(
    ("images", "layers", "heads", "grid", "expected"),
    [(16, 24, 16, (24, 24), 1), (16, 12, 12, (14, 14), 1), (16, 32, 16, (37, 37), 2), (900, 32, 16, (37, 37), 19)],
)
def test_only_the_maps_of_many_large_grids_are_pooled(
    images: int, layers: int, heads: int, grid: tuple[int, int], expected: int
) -> None:
    found = pooling(images, layers, heads, grid)
    assert found == expected
    cells = images * (layers + 1) * (heads + 1) * int(np.prod([-(-side // found) for side in grid]))
    assert cells <= CELLS


def test_what_stands_there_without_the_script() -> None:
    text = written(shown(name=EVIL, predictions=((EVIL, 0.625),)))
    found = check(text)
    assert EVIL in found.words
    assert "62.5%" in found.words
    assert len(found.all("script")) == 1
    (static,) = [image for image in found.all("img") if image.get("class") == "static"]
    assert "hidden" not in static
    assert "hidden" in found.all("canvas")[0]
    assert "hidden" in found.all("fieldset")[0]
    assert "need JavaScript" in found.words
    assert re.search(r"Rollout: highest at patch row \d of 4, column \d of 6, with [\d.]+ % of it", static["alt"])
    assert decoded(static["src"]).shape == (192, 288, 3)


def test_controls_are_native_labeled_and_of_one_image_each() -> None:
    found = check(written(shown(), shown(name="dog.png")))
    inputs = found.all("input")
    assert [each["type"] for each in inputs] == ["radio", "radio", "radio", "range", "range"] * 2
    assert [each["name"] for each in inputs if each["type"] == "radio"] == ["map0"] * 3 + ["map1"] * 3
    assert [(each["min"], each["max"]) for each in inputs if each["type"] == "range"] == [("1", "3"), ("0", "2")] * 2
    assert len(found.all("label")) == len(inputs)
    assert len(found.all("legend")) == 2
    assert [each.get("aria-live") for each in found.all("figcaption")].count("polite") == 2


def test_a_tiny_image_is_shown_pixel_by_pixel() -> None:
    (small,) = [i for i in check(written(shown(size=(8, 12)))).all("img") if "input" in i.get("class", "").split()]
    assert "crisp" in small["class"]
    assert decoded(small["src"]).shape == (8, 12, 3)
    (large,) = [i for i in check(written(shown())).all("img") if "input" in i.get("class", "").split()]
    assert "crisp" not in large["class"]


# ---- in a browser, from the disk ----


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Any:
    heads = smooth((1, 3, 2, 4, 6))
    heads[0, 1, 1] = 0.001
    heads[0, 1, 1, 3, 5] = 0.6
    write_page(tmp_path / "page.html", written(shown(captured(heads=heads)), shown(name="dog.png")))
    from selenium.webdriver.support.ui import WebDriverWait

    browser.get_log("performance")  # what was asked for until now
    browser.get_log("browser")
    browser.get((tmp_path / "page.html").as_uri())
    count = "return document.querySelectorAll('fieldset:not([hidden])').length"
    WebDriverWait(browser, 100).until(lambda it: it.execute_script(count) == 2, "the script has not started")
    return browser


def drawn(browser: Any, number: int = 0) -> np.ndarray:
    uri = browser.execute_script("return document.querySelectorAll('canvas')[arguments[0]].toDataURL()", number)
    return decoded(uri).astype(int)


def caption(browser: Any, number: int = 0) -> str:
    return browser.execute_script(
        "return document.querySelectorAll('.stage figcaption')[arguments[0]].textContent", number
    )


def test_sliders_work_by_keyboard_and_say_what_they_show(opened: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    first, other = drawn(opened), drawn(opened, 1)
    assert caption(opened).startswith("Rollout: highest")
    opened.execute_script("document.querySelector('[name=map0]').focus()")
    opened.switch_to.active_element.send_keys(Keys.ARROW_DOWN)
    assert caption(opened).startswith("Rollout without residual: highest")
    plain = drawn(opened)
    assert np.abs(plain - first).max() > 30
    opened.switch_to.active_element.send_keys(Keys.TAB)  # from the radio buttons to the layers
    assert opened.switch_to.active_element.get_attribute("class") == "layer"
    opened.switch_to.active_element.send_keys(Keys.ARROW_LEFT)
    assert caption(opened).startswith("Layer 2, mean of 2 heads: highest")
    assert opened.switch_to.active_element.get_attribute("aria-valuetext") == "2"
    opened.switch_to.active_element.send_keys(Keys.TAB)
    opened.switch_to.active_element.send_keys(Keys.END)
    assert opened.switch_to.active_element.get_attribute("aria-valuetext") == "head 2"
    assert caption(opened) == (
        "Layer 2, head 2: highest at patch row 4 of 4, column 6 of 6, with 60 % of it. "
        "Patches gather from 3.0 pixels away on average."
    )
    outline = opened.execute_script("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the focus can be seen"
    seen = drawn(opened)
    red, green, blue = seen[-8:, -8:].mean(axis=(0, 1))
    assert min(red, green) > blue + 40, "yellow where this head looks"
    assert seen[:40, :40, 2].mean() > seen[:40, :40, 1].mean(), "blue where it does not"
    assert (drawn(opened, 1) == other).all(), "the other image is as it was"
    assert "cat.png" in opened.find_element("css selector", "canvas").get_attribute("aria-label")


def test_the_canvas_shows_what_the_still_image_shows(opened: Any) -> None:
    still = overlays.overlay(overlays.fit(photograph((80, 120)), SIDE, enlarge=True), captured().rollout[0])
    difference = np.abs(drawn(opened, 1) - still.astype(int))
    assert difference.mean() < 12
    assert drawn(opened, 1).std() > 20


def test_from_the_disk_it_asks_for_nothing_else_and_logs_no_error(opened: Any) -> None:
    events = [json.loads(entry["message"])["message"] for entry in opened.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert asked
    assert {url.split(":")[0] for url in asked} <= {"file", "data"}
    assert sum(url.startswith("file:") for url in asked) == 1
    assert [entry for entry in opened.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_on_a_phone_nothing_is_cut_off(opened: Any) -> None:
    opened.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    )
    from selenium.webdriver.support.ui import WebDriverWait

    try:
        narrow = "return document.documentElement.clientWidth <= 360"
        WebDriverWait(opened, 100).until(lambda it: it.execute_script(narrow), "the window is as wide as before")
        assert opened.execute_script("return document.documentElement.scrollWidth") <= 360
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
