"""Every field of the JSON files of checkpoints, with values of every wrong type: loaded, or an error that names it."""

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vitlab.errors import UserError
from vitlab.models import Rotary
from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights import class_names, load_checkpoint, save_model
from vitlab.weights.huggingface import write_huggingface
from vitlab.weights.json_fields import HUGGINGFACE_IMAGES, HUGGINGFACE_MODEL, TIMM
from vitlab.weights.timm import write_timm

WRONG = ("x", [], {}, None, -1, 1e308, True, "\ud800", float("nan"), [1, 2, 3])
NAMED_OTHERWISE = {
    *("model_type", "architecture", "sha256", "layer_scale", "image_size", "input_size", "test_input_size"),
    *("use_swiglu_ffn", "use_gated_mlp", "swiglu", "attention_norm", "mlp_norm"),
}
"""Fields of which the error names what follows from a value of the right type: another family, arrays that are missing,
an image smaller than a patch."""


def write_vitlab(model: ViT, folder: Path, metadata: dict[str, Any]) -> None:
    extra = {"dataset": "folder:x", "reject_below": 0.5, "multi_label": False, "source": "a test"}
    prepared = Preprocessing(12, 14, mean=(0.5,) * 3, std=(0.5,) * 3).to_metadata()
    save_model(model, folder, extra=metadata | extra | {"preprocessing": prepared})


def paths(settings: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in settings.items():
        yield (*above, name)
        if isinstance(value, dict) and name not in ("label2id", "rotary"):
            yield from paths(value, (*above, name))


def known(fields: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    return ((name,) for name, hint in fields.items() if not isinstance(hint, dict))


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("write", "settings", "optional"),
    [
        (write_vitlab, {"rotary": Rotary()}, [("model", "variant", "rotary", name) for name in ("base", "reference")]),
        (write_huggingface, {"layer_scale": 1.0, "mlp_dim": 32}, [*known(HUGGINGFACE_MODEL)]),
        (write_timm, {"gelu": "erf"}, [("model_args", *path) for path in known(TIMM["model_args"])]),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_every_field(
    write: Callable[..., None], settings: Any, optional: Any, tmp_path: Path, tiny: Callable[..., ViT], step: int
) -> None:
    """With one in three of the values, other ones for each field, or with all."""
    logging.disable(logging.WARNING)
    write(tiny(**settings, num_classes=3, depth=1), tmp_path / "saved", {"classes": ["a", "b", "c"]})
    unnamed = []
    for file in sorted((tmp_path / "saved").glob("*.json")):
        original = file.read_text()
        more = known(HUGGINGFACE_IMAGES) if file.name != "config.json" else optional
        for i, path in enumerate(dict.fromkeys([*paths(json.loads(original)), *more])):
            for value in WRONG[i % step :: step]:
                changed = json.loads(original)
                inner = changed
                for name in path[:-1]:
                    inner = inner[name]
                was, inner[path[-1]] = inner.get(path[-1]), value
                file.write_text(json.dumps(changed))
                try:
                    loaded = load_checkpoint(tmp_path / "saved")
                    "".join(class_names(loaded.metadata, 3)).encode(errors="surrogateescape")
                except UserError as error:
                    as_missing = value is None or (value == {} and isinstance(was, dict))
                    named = any(name in str(error) for name in path[-2:]) or path[-1] in NAMED_OTHERWISE
                    if not named and not as_missing:
                        unnamed.append((path, value, str(error)))
        file.write_text(original)
    logging.disable(logging.NOTSET)
    assert unnamed == []
