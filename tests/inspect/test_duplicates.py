"""The page of near-duplicates: pairs side by side, with their names, labels and distances."""

import base64
import io
import os
import re
from typing import Any

import numpy as np
from markup import check
from PIL import Image

from vitlab.inspect.duplicates import HEIGHT, ShownPair, duplicates_page

EVIL = "<b>& 'cat'"


def pair(test: tuple[int, int] = (8, 8), train: tuple[int, int] = (8, 8), **other: Any) -> ShownPair:
    values: dict[str, Any] = {
        "test": np.full((*test, 3), 30, np.uint8), "train": np.full((*train, 3), 220, np.uint8),
        "test_name": "test/1.png", "train_name": "train/2.png", "test_label": "cat", "train_label": "cat",
        "distance": 0.1234, "bits": 7, "flipped": False, "conflict": False,
    }  # fmt: skip
    return ShownPair(**values | other)


def images(page: str) -> list[np.ndarray]:
    found = re.findall(r'src="data:image/\w+;base64,([^"]+)"', page)
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGBA")) for data in found]


def test_pairs_stand_side_by_side() -> None:
    page = duplicates_page("Lead.", {}, [pair(test=(8, 6), train=(4, 8))], [], [], total=1)
    (shown,) = images(page)
    assert shown.shape == (8, 17, 4)
    assert (shown[3, 3, :3] == 30).all()
    assert (shown[3, 12, :3] == 220).all()
    assert shown[0, 12, 3] == shown[3, 8, 3] == shown[3, 0, 3] == 0  # see-through around them
    (large,) = images(duplicates_page("", {}, [pair(test=(400, 300), train=(900, 900))], [], [], total=1))
    assert large.shape[0] == HEIGHT


def test_what_the_page_says() -> None:
    found = [pair(), pair(flipped=True, distance=0.2, bits=3)]
    wrong = pair(test_label=EVIL, train_label="dog", conflict=True, test_name=os.fsdecode(b"\xff.png"))
    page = duplicates_page(
        "A lead.", {"Pairs": "1,234"}, [*found, wrong], [pair(distance=0.31)], [wrong], total=1234,
        unreadable=[("bad.png", "cut off")],
    )  # fmt: skip
    for said in (
        "A lead.", "1,234", "distance 0.123, 7 bits\n", "distance 0.200, 3 bits, mirrored", "test/1.png", "train/2.png",
        "LABELS CONFLICT", "Conflicting labels", "Just beyond the threshold", "distance 0.310", "bad.png", "cut off",
        "&lt;b&gt;&amp; &#39;cat&#39; | dog", "3 nearest test images",
        "Of these 3 pairs, by distance: 0 up to 0.05",
    ):  # fmt: skip
        assert said in page
    assert EVIL not in page
    check(page)
    assert len(images(page)) == 5


def test_nothing_found() -> None:
    page = duplicates_page("", {"Pairs": "0"}, [], [], [], total=0)
    assert "There are none." in page
    for absent in ("Conflicting labels", "Just beyond", "Unreadable"):
        assert absent not in page
