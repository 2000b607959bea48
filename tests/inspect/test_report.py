"""The page: well-formed, self-contained, escaped, and readable without eyes or a mouse."""

import base64
import io
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitlab.inspect.report import Mistakes, Phase, Rollout, Section, page, training_page, write_page

EVIL = "<script>alert(\"1\")</script> & 'co'"
VOID = {"meta", "img", "source", "link", "br", "hr", "input"}


class Page(HTMLParser):
    """Elements in order, each with its attributes; checks that tags close in the order they opened."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.words = ""
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        assert len({name for name, _ in attrs}) == len(attrs), f"an attribute twice in {tag}"
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words += data

    def all(self, *tags: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag in tags]


def phase(name: str = "Pre-training", kinds: int = 3) -> Phase:
    random = np.random.default_rng(0)
    records = [{"step": s, "epoch": s / 9, "loss": 1 / s, "lr": 1e-3} for s in range(1, 9)]
    records.append({"step": 9, "eval_accuracy": 0.75, "eval_loss": float("nan")})
    confusion = np.array([[5, 2, 0], [0, 7, 0], [1, 0, 9]])
    classes = ["cat", EVIL, "a rather long name of a class"]
    if kinds != 3:
        confusion, classes = random.integers(0, 9, (kinds, kinds)), [f"class {i}" for i in range(kinds)]
    return Phase(
        name=name,
        explanation=f"What was done.\n\nA second paragraph, with {EVIL}.",
        numbers={"Test accuracy": "87.5 %", EVIL: "<b>"},
        records=records,
        classes=classes,
        confusion=confusion,
        mistakes=Mistakes(
            random.integers(0, 256, (3, 8, 8, 3), dtype=np.uint8),
            np.array([1, 1, 0]),
            np.array([0, 0, 2]),
            np.array([0.5, 0.9, 0.7]),
        ),
        rollout=Rollout(
            random.integers(0, 256, (2, 16, 16, 3), dtype=np.uint8), ["cat", EVIL], random.random((2, 4, 4))
        ),
        filters=random.random((12, 2, 2, 3)),
        positions=random.uniform(-1, 1, (4, 4, 4, 4)),
        distances=random.random((3, 2)) * 8,
    )


@pytest.fixture(scope="module")
def text() -> str:
    return training_page("Digits & more", f"The lead. {EVIL}", [phase(), phase("Fine-tuning")])


@pytest.fixture(scope="module")
def parsed(text: str) -> Page:
    return Page(text)


def test_nothing_is_fetched(text: str, parsed: Page) -> None:
    assert not parsed.all("script", "link", "iframe", "object", "embed", "form", "base")
    for tag, attributes in parsed.elements:
        for name, value in attributes.items():
            assert not name.startswith("on"), f"a handler in {tag}"
            assert "://" not in value
            if name in ("src", "srcset"):
                assert re.match("data:image/(png|webp);base64,", value)
            if name == "href":
                assert value.startswith("#")
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert any("default-src 'none'" in meta.get("content", "") for meta in parsed.all("meta"))


def test_names_of_classes_are_escaped(text: str, parsed: Page) -> None:
    assert "<script" not in text
    assert "<b>" not in text
    assert parsed.words.count('<script>alert("1")</script>') >= 4


def test_every_picture_says_what_it_shows_and_decodes(parsed: Page) -> None:
    images = parsed.all("img")
    assert len(images) == 2 * (3 + 1 + 3 + 2 + 3)
    for image in images:
        assert len(image["alt"]) > 10
        data = base64.b64decode(image["src"].split(",", 1)[1], validate=True)
        width, height = Image.open(io.BytesIO(data)).size
        assert int(image["height"]) == pytest.approx(int(image["width"]) * height / width, abs=0.51)


def test_figures_have_a_dark_twin(parsed: Page) -> None:
    dark = parsed.all("source")
    assert len(dark) == 2 * (3 + 1 + 3)
    assert all(source["media"] == "(prefers-color-scheme: dark)" for source in dark)
    assert not {source["srcset"] for source in dark} & {image["src"] for image in parsed.all("img")}


def test_the_page_can_be_read_without_a_mouse(parsed: Page) -> None:
    assert parsed.all("html")[0]["lang"] == "en"
    assert any(meta.get("name") == "viewport" for meta in parsed.all("meta"))
    assert len(parsed.all("h1")) == len(parsed.all("main")) == 1
    levels = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch(r"h[1-6]", tag)]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    names = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(set(names)) == len(names)
    assert {link["href"][1:] for link in parsed.all("a")} <= set(names)
    assert all(head["scope"] == "col" for head in parsed.all("th"))
    scrolled = [div for div in parsed.all("div") if div.get("class") == "scroll"]
    assert scrolled
    assert all(div["tabindex"] == "0" and div["role"] == "region" and div["aria-label"] for div in scrolled)


def test_what_the_page_says(parsed: Page) -> None:
    for words in ("Digits & more", "87.5 %", "21 of 24 test pictures", "said cat\n70% sure\ntruly a rather", "28.6%"):
        assert words in parsed.words
    sure = [parsed.words.index(part) for part in ("90% sure", "70% sure", "50% sure")]
    assert sure == sorted(sure), "the surest mistake comes first"
    alts = [image["alt"] for image in parsed.all("img")]
    assert "Loss over training steps: loss ends at 0.125, eval loss ends at nan." in alts
    assert "Accuracy over training steps: eval accuracy ends at 0.75." in alts


def test_a_phase_of_few_parts_and_a_run_without_mistakes() -> None:
    bare = Page(training_page("T", "L", [Phase(name="N", explanation="E", numbers={})]))
    assert not bare.all("img", "table", "dl", "h3")
    none = np.zeros(0, dtype=np.int64)
    perfect = Phase(
        name="N",
        explanation="E",
        numbers={},
        classes=["a", "b"],
        confusion=np.eye(2, dtype=np.int64),
        mistakes=Mistakes(np.zeros((0, 8, 8, 3), dtype=np.uint8), none, none, np.zeros(0)),
    )
    shown = Page(training_page("T", "L", [perfect]))
    assert "There are none." in shown.words
    assert not shown.all("table")


def test_a_hundred_classes_stay_small() -> None:
    made = training_page("T", "L", [phase(kinds=100)])
    assert len(made) < 1_500_000
    assert len(Page(made).all("tr")) == 1 + 8


def test_names_must_fit_the_matrix() -> None:
    wrong = Phase(name="Run", explanation="", numbers={}, classes=["a"], confusion=np.eye(2, dtype=np.int64))
    with pytest.raises(ValueError, match="Run: a confusion matrix of 2 classes and 1 class names"):
        training_page("T", "L", [wrong])


def test_a_class_without_pictures_is_no_trouble() -> None:
    counts = np.array([[0, 0], [1, 2]])
    shown = Page(training_page("T", "L", [Phase("N", "E", {}, classes=["a", "b"], confusion=counts)]))
    assert "2 of 3 test pictures" in shown.words
    assert "33.3%" in shown.words


def test_sections_nest() -> None:
    made = Page(page("T", "L", [Section("A", parts=[Section("B", parts=[Section("C")])]), Section("D")]))
    headings = [(tag, attributes["id"]) for tag, attributes in made.elements if "id" in attributes and tag != "main"]
    assert headings == [("h2", "s1"), ("h3", "s1-1"), ("h4", "s1-1-1"), ("h2", "s2")]


def test_the_page_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "index.html"
    write_page(path, "first é")
    write_page(path, "second")
    assert path.read_text(encoding="utf-8") == "second"

    def broken(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", broken)
    with pytest.raises(OSError, match="No space"):
        write_page(path, "third")
    assert path.read_text(encoding="utf-8") == "second"
    assert [each.name for each in path.parent.iterdir()] == ["index.html"]


def test_records_come_from_json_lines(tmp_path: Path) -> None:
    lines = tmp_path / "metrics.jsonl"
    lines.write_text('{"step": 1, "loss": 0.5, "lr": 0.1}\n{"step": 2, "loss": null, "note": "x"}\n')
    records = [json.loads(line) for line in lines.read_text().splitlines()]
    made = Page(training_page("T", "L", [Phase("N", "E", {}, records=records)]))
    assert [image["alt"] for image in made.all("img")] == [
        "Loss over training steps: loss ends at 0.5.",
        "Learning rate over training steps: lr ends at 0.1.",
    ]
