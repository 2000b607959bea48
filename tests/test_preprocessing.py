"""A checkpoint's preprocessing: what is allowed, how it scales, what cards of any age say, and its line for people."""

import json
import math
import re
from typing import Any

import pytest

from vitlab.errors import UserError
from vitlab.preprocessing import Preprocessing


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resize": -3}, "resize is -3"),
        ({"image_size": (224, 10**6)}, "image_size is (224, 1000000)"),
        ({"image_size": 224, "resize": 200}, "resize=200 must be at least image_size=224"),
        ({"interpolation": "bicubic", "antialias": False}, "antialias"),
        ({"image_size": 8, "resize": 9, "antialias": False}, "antialias"),
        ({"interpolation": "area"}, "interpolation='area'"),
        ({"interpolation": "cubic"}, "interpolation is 'cubic'"),
        ({"mean": (0.5, "x")}, "mean is"),
        ({"image_size": 378, "crop_size": 370}, "crop_size=370 with image_size=378"),
        ({"image_size": 378, "crop_size": 384, "resize": 380}, "resize=380 must be at least image_size=384"),
        ({"image_size": 378, "crop_size": 384, "antialias": False}, "crop_size"),
    ],
)
def test_what_cannot_be_done_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Preprocessing(**settings)


def test_resize_keeps_its_proportion() -> None:
    dinov2 = Preprocessing(224, 256, interpolation="bicubic")
    assert dinov2.at(518) == Preprocessing(518, 592, interpolation="bicubic")
    assert dinov2.at((224, 112)) == Preprocessing((224, 112), 256, interpolation="bicubic")
    assert Preprocessing(224).at(448) == Preprocessing(448)
    assert Preprocessing.google(resize=256).at(224) == Preprocessing.google(224, 256)  # no size yet: nothing to scale


def test_another_resize_and_patches_that_do_not_divide_the_image() -> None:
    assert Preprocessing.google(480).with_resize(512) == Preprocessing.google(480, 512)
    squashed = Preprocessing(224, 256, keep_aspect=False, interpolation="bicubic")
    assert squashed.with_resize(248) == Preprocessing(224, 248, interpolation="bicubic")
    assert Preprocessing(384, 426).for_patches(16) == Preprocessing(384, 426)
    covered = Preprocessing(384, 426).for_patches(14)
    assert covered == Preprocessing(378, 426, crop_size=384)
    assert covered.at(378) == covered
    assert covered.at(448) == Preprocessing(448, 497)
    assert covered.with_resize(400) == Preprocessing(378, 400)


@pytest.mark.parametrize(
    "preprocessing",
    [
        Preprocessing(),
        Preprocessing.google((16, 24)),
        Preprocessing.google(224, 256),
        Preprocessing(
            (16, 24), 30, interpolation="bicubic", crop_offset="floor", mean=(0.4, 0.5, 0.6), std=(1.0, 0.5, 0.25)
        ),
    ],
)
def test_a_card_gives_back_what_it_was_given(preprocessing: Preprocessing) -> None:
    card = json.loads(json.dumps({"preprocessing": preprocessing.to_metadata()}))
    assert Preprocessing.read(card, "here") == preprocessing


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "card",
    [
        *(3, "squash", [], {"crop": 224}, {"image_size": [1, 2, 3]}),
        *({"resize": resize} for resize in (-3, 0, 10**12, 2.5, math.nan, "256", True, [256])),
    ],
)
def test_a_wrong_card(card: object) -> None:
    assert Preprocessing.read({}, "here", 224) == Preprocessing(224)
    with pytest.raises(UserError, match="here: its preprocessing"):
        Preprocessing.read({"preprocessing": card}, "here")


def test_the_line_for_people() -> None:
    assert Preprocessing.google(384).describe() == "squash to 384x384 (bilinear, no antialias)"
    assert Preprocessing.google(224, 256).describe() == "resize 256 (area), center crop 224x224"
    deit = Preprocessing((224, 160), 256, False, "bicubic", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    parts = ("256x256", "bicubic", "crop 224x160", "(0.485, 0.456, 0.406)", "(0.229, 0.224, 0.225)")
    assert all(part in deit.describe() for part in parts)
    assert "378x378" in Preprocessing(378, 426, crop_size=384).describe()
    assert "the model's size" in Preprocessing().describe()
