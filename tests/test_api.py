"""docs/quickstart.ipynb runs from its first cell to its last; and the functions of `vitlab.api` that it calls."""

import ast
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.api import Predictions
from vitlab.evaluation.options import ModelOptions
from vitlab.finetuning.result import Finetuned
from vitlab.models import ViTConfig
from vitlab.models.vit import ViT

NOTEBOOK = Path(__file__).parents[1] / "docs" / "quickstart.ipynb"


@pytest.fixture
def flowers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes, bright and dark, in a folder; and three new images."""
    rng = np.random.default_rng(0)
    for name, level in (("day", 160), ("night", 60)):
        for number in range(12):
            path = tmp_path / "flowers" / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(level - 30, level + 30, (16, 20, 3), dtype=np.uint8)).save(path)
    (tmp_path / "new-images").mkdir()
    for number, level in enumerate((170, 165, 50)):
        Image.new("RGB", (30, 30), (level,) * 3).save(tmp_path / "new-images" / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def tiny(num_classes: int) -> ViT:
    sizes: dict[str, Any] = {"image_size": 16, "patch_size": 4, "width": 16, "depth": 2, "heads": 2, "mlp_dim": 24}
    return ViT(ViTConfig(**sizes, num_classes=num_classes, head_std=0.5))


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    vitlab.save_model(tiny(0), tmp_path / "checkpoint")
    return str(tmp_path / "checkpoint")


def shown(cell: str, names: dict[str, Any]) -> str | None:
    """Runs a cell; the HTML of its last expression, as a notebook shows it."""
    *statements, last = ast.parse(cell).body
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    if not isinstance(last, ast.Expr):
        exec(compile(ast.Module([last], []), "cell", "exec"), names)
        return None
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return value._repr_html_() if hasattr(value, "_repr_html_") else str(value)


@pytest.mark.usefixtures("unrendered")
def test_the_notebook_runs(flowers: Path, checkpoint: str) -> None:
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in cells]
    for given, tested in (('"vit-s14"', repr(checkpoint)), ("folder:digits", "folder:flowers"), ('"3m"', '"45s"')):
        assert given in sources[0]
        sources[0] = sources[0].replace(given, tested)
    names: dict[str, Any] = {}
    html = [shown(source, names) for source in sources]
    assert names["run"].result["test"]["accuracy"] == 1.0
    assert "least-squares head" in (html[2] or "")
    assert "day" in (html[3] or "")
    assert (html[4] or "").count("<img") == 2
    assert float(html[6] or "nan") < 1e-4
    assert (flowers / "runs" / "finetune-flowers" / "report" / "index.html").is_file()
    assert (flowers / "digits-timm" / "model.safetensors").is_file()


def test_images_from_memory(flowers: Path) -> None:
    """Also from an iterator, in order; a broken image does not end the call."""
    vitlab.save_model(tiny(2), "model", extra={"classes": ["<day>", "night"]})
    file = flowers / "new-images" / "0.png"
    image = Image.open(file)
    options = ModelOptions(device="cpu")
    several = vitlab.predict("model", [image, np.array(image), file], options=options)
    assert isinstance(several, Predictions)
    assert [prediction.path for prediction in several[:2]] == ["image 0", "image 1"]
    assert several[0].top == several[1].top == several[2].top
    (alone,) = vitlab.predict("model", image, options=options)
    assert dict(alone.top) == pytest.approx(dict(several[0].top))
    assert "&lt;day&gt;" in several._repr_html_()
    assert "not sure (" in vitlab.predict("model", image, reject_below=1.0, options=options)._repr_html_()
    mixed = iter([file, b"no image", "nowhere.png", np.zeros((4, 4)), str(file)])
    result = vitlab.predict("model", mixed, options=options)
    assert [prediction.error is None for prediction in result] == [True, False, False, False, True]
    assert [prediction.path for prediction in result[1:4]] == ["image 1", "nowhere.png", "image 3"]
    batch = vitlab.predict("model", torch.zeros(2, 3, 8, 8), options=options)
    assert [prediction.path for prediction in batch] == ["image 0", "image 1"]
    with pytest.raises(ValueError, match=r"float64 \[4, 4\]"):
        vitlab.predict("model", np.zeros((4, 4)), options=options)


def test_what_is_no_image_is_one_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose error says what is allowed."""
    monkeypatch.setattr("vitlab.api.predict_images", lambda _, sources, *args, **kwargs: sources)
    for images in (42, None):
        assert inspect.unwrap(vitlab.predict)("model", images) == (images,)  # pyright: ignore[reportArgumentType]


def test_inspect_writes_into_the_folder_of_the_run(flowers: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And into the current folder for a checkpoint that is not one."""
    monkeypatch.setattr("vitlab.api.inspect_checkpoint", lambda *_, **__: {})
    assert vitlab.inspect(run).folder == run / "inspect"
    vitlab.save_model(tiny(2), "model")
    assert vitlab.inspect("model").folder == Path("inspect")


@pytest.mark.usefixtures("unrendered")
def test_settings_of_finetune(flowers: Path, checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They keep the data set; what the recipe leaves open stays open."""
    configs: list[Any] = []
    left_open: list[set[str]] = []

    def finetune(checkpoint: str, config: Any, folder: Path, open_settings: set[str], **_: Any) -> Finetuned:
        configs.append(config)
        left_open.append(open_settings)
        return Finetuned(config, {}, folder)

    run = vitlab.finetune(checkpoint, "folder:flowers", workdir="out", steps=2, learning_rates=(), sweep_steps=None)
    assert (run.config.steps, run.config.data.on_error) == (2, "skip")
    assert (flowers / "out" / "run-0").is_dir()
    monkeypatch.setattr("vitlab.api.sweep_and_finetune", finetune)
    optim = vitlab.OptimConfig(lr=1e-3, warmup_steps=1)
    recipe = vitlab.DataConfig(train_split="trainval", eval_split="test", eval_interpolation="bilinear")
    given: tuple[tuple[str, dict[str, Any]], ...] = (
        ("folder:x", {"optim": optim, "steps": 2}),
        ("folder:x", {"learning_rates": (3e-5, 5e-5), "epochs": 0.5}),
        ("folder:x", {"data": dataclasses.replace(recipe, crop="none")}),
        ("digits", {"data": dataclasses.replace(recipe, eval_resize=40, subset_fraction=0.5)}),
    )
    for name, settings in given:
        vitlab.finetune(None, name, **settings)
    single, swept, own, named = configs
    assert (single.optim, single.tried_rates) == (optim, ())
    assert (swept.tried_rates, swept.steps, swept.epochs) == ((3e-5, 5e-5), None, 0.5)
    assert own.data == dataclasses.replace(recipe, name="folder:x", crop="none", on_error="skip")
    assert {"data.eval_resize", "data.subset_fraction"} <= left_open[2]
    assert (named.data.name, named.data.on_error, named.data.subset_fraction) == ("digits", "raise", 0.5)
    assert not {"data.eval_resize", "data.subset_fraction"} & left_open[3]
    invalid: dict[str, dict[str, Any]] = {
        "epochs, steps": {"budget": 60.0, "steps": 2, "epochs": 3.0},
        "stagd": {"recipe": "stagd"},
        "soon": {"budget": "soon"},
    }
    for message, wrong in invalid.items():
        with pytest.raises(ValueError, match=message):
            vitlab.finetune(checkpoint, "folder:flowers", **wrong)
