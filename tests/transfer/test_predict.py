"""Answers for pictures without a label, wherever they come from."""

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from irregular import irregular
from PIL import Image

from vitlab.data.datasets import load_dataset
from vitlab.data.transforms import EvalTransform
from vitlab.transfer.predict import Answer, predict
from vitlab.transfer.run import Outcome
from vitlab.weights import load_model, save_model
from vitlab.weights.google import write_google


@pytest.fixture
def pictures(tmp_path: Path) -> list[str]:
    """Seven digits as PNG files of their own size, two of them in a folder below."""
    dataset = load_dataset("digits", "test", classes=(0, 1, 2))
    (tmp_path / "pictures" / "more").mkdir(parents=True)
    paths = [tmp_path / "pictures" / ("more" if i > 4 else "") / f"{i}.png" for i in range(7)]
    for i, path in enumerate(paths):
        Image.fromarray(dataset.picture(i)).save(path)
    return [str(path) for path in paths]


def ask(checkpoint: Path, *sources: str, top: int = 5, batch_size: int = 32) -> list[Answer]:
    return list(predict(checkpoint, sources, top=top, batch_size=batch_size, device="cpu"))


def standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize("batch_size", [3, 32])
def test_files(pretrained: Outcome, workdir: Path, pictures: list[str], batch_size: int) -> None:
    answers = ask(workdir, *pictures, batch_size=batch_size)
    pixels = [np.array(Image.open(path)) for path in pictures]
    with torch.no_grad():
        shares = pretrained.model(EvalTransform(8).apply(pixels)).softmax(dim=1)
    assert [answer.path for answer in answers] == pictures
    for answer, row in zip(answers, shares.tolist(), strict=True):
        expected = sorted(zip("012", row, strict=True), key=lambda pair: -pair[1])
        assert [name for name, _ in answer.top] == [name for name, _ in expected]
        assert [share for _, share in answer.top] == pytest.approx([share for _, share in expected], rel=1e-5)
        assert answer.error is None


def test_with_mirror_images(pretrained: Outcome, workdir: Path, pictures: list[str]) -> None:
    """The mean of the two, whichever of them is named."""
    flipped = [str(Path(path).with_stem(f"{Path(path).stem}-flipped")) for path in pictures]
    for path, other in zip(pictures, flipped, strict=True):
        Image.open(path).transpose(Image.Transpose.FLIP_LEFT_RIGHT).save(other)
    alone, across = ([dict(each.top) for each in ask(workdir, *paths)] for paths in (pictures, flipped))
    for paths in (pictures, flipped):
        both = list(predict(workdir, paths, mirror=True, device="cpu"))
        for answer, one, two in zip(both, alone, across, strict=True):
            assert dict(answer.top) == pytest.approx({name: (one[name] + two[name]) / 2 for name in one}, rel=1e-4)
            assert one != pytest.approx(two, rel=1e-4)


@pytest.mark.usefixtures("pretrained")
def test_top(workdir: Path, pictures: list[str]) -> None:
    (first,) = ask(workdir, pictures[0], top=1)
    (most,) = ask(workdir, pictures[0], top=9)
    assert len(first.top) == 1
    assert len(most.top) == 3
    assert first.top == most.top[:1]
    assert sum(share for _, share in most.top) == pytest.approx(1)
    with pytest.raises(ValueError, match="top is 0; ask for at least 1"):
        ask(workdir, pictures[0], top=0)


@pytest.mark.usefixtures("pretrained")
def test_folder_is_searched_through(workdir: Path, pictures: list[str]) -> None:
    folder = Path(pictures[0]).parent
    (folder / "notes.txt").write_text("no picture")
    assert ask(workdir, str(folder)) == ask(workdir, *pictures)


@pytest.mark.usefixtures("pretrained")
def test_folder_is_searched_as_for_training(workdir: Path, pictures: list[str], tmp_path: Path) -> None:
    """Links are followed, but not in circles, and what is hidden is left out."""
    folder = tmp_path / "linked"
    (folder / ".hidden").mkdir(parents=True)
    (folder / ".hidden" / "0.png").symlink_to(pictures[0])
    (folder / "below").symlink_to(Path(pictures[0]).parent)
    (folder / "again").symlink_to(folder)
    found = [answer.path for answer in ask(workdir, str(folder))]
    assert found == [str(folder / "below" / Path(path).relative_to(Path(pictures[0]).parent)) for path in pictures]


@pytest.mark.usefixtures("pretrained")
def test_picture_on_the_standard_input(workdir: Path, pictures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    standard_input(monkeypatch, Path(pictures[2]).read_bytes())
    (answer,) = ask(workdir, "-")
    assert answer.path == "<stdin>"
    assert answer.top == ask(workdir, pictures[2])[0].top


@pytest.mark.usefixtures("pretrained")
def test_paths_on_the_standard_input(workdir: Path, pictures: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    standard_input(monkeypatch, "\n".join([pictures[3], "", f"  {pictures[1]}  ", ""]).encode())
    assert ask(workdir, pictures[0], "-") == ask(workdir, pictures[0], pictures[3], pictures[1])


@pytest.mark.usefixtures("pretrained")
def test_broken_picture_is_an_answer_too(workdir: Path, pictures: list[str], tmp_path: Path) -> None:
    broken, empty = tmp_path / "broken.jpg", tmp_path / "empty.png"
    broken.write_bytes(Path(pictures[0]).read_bytes()[:60])
    empty.touch()
    answers = {answer.path: answer for answer in ask(workdir, pictures[0], str(broken), str(empty), pictures[1])}
    assert answers.keys() == {pictures[0], str(broken), str(empty), pictures[1]}
    for path in (broken, empty):
        answer = answers[str(path)]
        assert answer.error
        assert answer.top == ()
        assert answer.as_line() == f"{path}: cannot be read: {answer.error}"
    assert answers[pictures[1]] == ask(workdir, pictures[1])[0]


@pytest.mark.usefixtures("pretrained")
def test_nothing_to_answer_for(workdir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no picture was named; give pictures, folders of them, or -"):
        ask(workdir)
    standard_input(monkeypatch, b"\n\n")
    with pytest.raises(ValueError, match="no picture was named"):
        ask(workdir, "-")
    with pytest.raises(ValueError, match=r"there is no file or folder .*nowhere\.png; give pictures"):
        ask(workdir, str(tmp_path / "nowhere.png"))
    with pytest.raises(ValueError, match=r"the folder .* holds no picture \(.*\.jpg"):
        ask(workdir, str(tmp_path))


@pytest.mark.usefixtures("pretrained")
def test_pictures_are_brought_to_size_as_in_the_test(workdir: Path, tmp_path: Path) -> None:
    """With the resize of the card: a mark at the edge of a wide picture lies outside the central crop."""
    model = load_model(workdir)
    save_model(model, tmp_path / "crops", extra={"eval_resize": 8})
    save_model(model, tmp_path / "squashes")
    for name, colour in (("plain", (0, 0, 0)), ("marked", (255, 255, 255))):
        picture = Image.new("RGB", (32, 8))
        picture.paste(colour, (0, 0, 6, 8))
        picture.save(tmp_path / f"{name}.png")
    for checkpoint, same in (("crops", True), ("squashes", False)):
        plain, marked = ask(tmp_path / checkpoint, str(tmp_path / "plain.png"), str(tmp_path / "marked.png"))
        assert (plain.top == marked.top) == same


def test_classes_without_names_are_numbers(pretrained: Outcome, pictures: list[str], tmp_path: Path) -> None:
    write_google(pretrained.model, tmp_path / "vit.npz")
    (answer,) = ask(tmp_path / "vit.npz", pictures[0])
    assert {name for name, _ in answer.top} == {"0", "1", "2"}


@pytest.mark.usefixtures("pretrained")
def test_checkpoint_without_a_head(workdir: Path, pictures: list[str], tmp_path: Path) -> None:
    save_model(load_model(workdir, num_classes=0), tmp_path / "headless")
    with pytest.raises(ValueError, match="has no head, so it has no answers"):
        ask(tmp_path / "headless", pictures[0])


@pytest.mark.usefixtures("pretrained")
def test_what_is_no_regular_file_is_an_answer_too(workdir: Path, pictures: list[str], tmp_path: Path) -> None:
    irregular("pipe", tmp_path / "pictures" / "x.jpg", tmp_path)
    irregular("link to a device", tmp_path / "pictures" / "y.jpg", tmp_path)
    for sources in ([str(tmp_path / "pictures")], [str(tmp_path / "pictures" / f"{name}.jpg") for name in "xy"]):
        errors = {Path(each.path).name: each.error for each in ask(workdir, *sources) if each.error}
        assert errors == {
            "x.jpg": "it is a named pipe, not a regular file",
            "y.jpg": "it is a device, not a regular file",
        }


def test_line_of_a_name_with_escapes() -> None:
    assert Answer("a\nb.png", (("\x1b[31mcat", 0.5),)).as_line() == "'a\\nb.png': '\\x1b[31mcat' 50.0%"


def test_line() -> None:
    assert Answer("a.png", (("cat", 0.91234), ("dog", 0.08))).as_line() == "a.png: cat 91.2%, dog 8.0%"


@pytest.mark.usefixtures("pretrained")
def test_missing_path_is_told_before_any_work(workdir: Path, pictures: list[str], tmp_path: Path) -> None:
    answers = predict(workdir, [*pictures, str(tmp_path / "nowhere.png")], batch_size=1, device="cpu")
    with pytest.raises(ValueError, match="there is no file or folder"):
        next(answers)
