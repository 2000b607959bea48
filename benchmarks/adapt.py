"""Does self-supervised learning on unlabeled images of a domain beat the best block of the checkpoint as it is?

    python benchmarks/adapt.py DATA S14 --blood-cells BLOOD_CELLS --seconds 600 --out benchmarks/results/adapt.jsonl

The method is LeJEPA (Balestriero and LeCun 2025) with two views: embeddings of two crops of an image come together, and
those of all images approach a standard normal distribution. It starts from the model cut at its best block
(`evaluation/readouts.py`), and trains all of it for `--seconds`. Before and after, the block and the pooling of least
leave-one-out loss are chosen on 10 or 50 labeled images of each class, and the least-squares head on them is tested.

DATA is a folder of `finetune_peers.py --prepare`; BLOOD_CELLS has train/CLASS and test/CLASS, with the number of the
original image before the first `_` of a name. Rows that the file has are not computed again.
"""

import copy
import dataclasses
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import tyro
from finetune_peers import read_rows
from run_record import describe_run
from torch import Tensor, nn
from tyro.conf import Positional

from vitlab.config import OptimConfig
from vitlab.data.dataset import Dataset
from vitlab.data.registry import load_dataset
from vitlab.data.transforms import EvalTransform, TrainTransform
from vitlab.evaluation.features import frozen_preprocessing
from vitlab.evaluation.linear_head import least_squares_head
from vitlab.evaluation.options import LoaderOptions
from vitlab.evaluation.readouts import Readout, candidates, compare_readouts, readout_features
from vitlab.preprocessing import Preprocessing
from vitlab.train.cpu_speed import cpu_is_faster_in_bfloat16
from vitlab.train.optim import parameter_groups
from vitlab.train.precision import frozen_dtype, keep_freed_memory, prepare_for_inference
from vitlab.weights import load_metadata, load_model

DOMAINS = ("flowers102", "cifar10", "fashion_mnist", "blood_cells")
SHOTS = (10, 50)
MAX_UNLABELED, TEST_IMAGES = 5_000, 1_000
BATCH, VIEWS = 64, 2
PROJECTED, HIDDEN = 64, 512
"""Widths of the projector, which is thrown away."""
DIRECTIONS, KNOTS, LAST_KNOT = 256, 17, 3.0
NORMALITY_WEIGHT = 0.05
"""Of the distance to a normal distribution; the views' distance has the rest."""
OPTIM = OptimConfig(lr=1e-4, weight_decay=0.0, layer_decay=0.75)
PROJECTOR_LR, WARMUP, CLIP_NORM = 1e-3, 0.1, 5.0


@dataclass(frozen=True)
class Arguments:
    data: Positional[Path]
    checkpoint: Positional[str]
    blood_cells: Path | None = None
    domains: tuple[str, ...] = DOMAINS
    seeds: tuple[int, ...] = (0, 1)
    seconds: float = 600.0
    """Of training."""
    image_size: int = 84
    lr: float = OPTIM.lr
    out: Path | None = None


# ------------------------------------------------------------------------------------------------------- the objective


class Projector(nn.Sequential):
    """Representation -> the embedding z that the loss is on."""

    def __init__(self, width: int) -> None:
        layers: list[nn.Module] = []
        for inputs in (width, HIDDEN):
            layers += [nn.Linear(inputs, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU()]
        super().__init__(*layers, nn.Linear(HIDDEN, PROJECTED))


def lejepa_loss(z: Tensor, generator: torch.Generator) -> Tensor:
    """Of embeddings z [V, B, d]: the views of an image agree, and each view's batch is normally distributed.

    By Cramer and Wold, z is standard normal if its projection on every direction a is; that is tested by the empirical
    characteristic function, E exp(i t a.z) against exp(-t^2 / 2), integrated over t with the same weight.
    """
    views_apart = (z - z.mean(dim=0)).square().mean()  # over V, B and d
    directions = F.normalize(torch.randn(z.shape[-1], DIRECTIONS, generator=generator), dim=0)
    t = torch.linspace(0, LAST_KNOT, KNOTS)
    normal = torch.exp(-t.square() / 2)
    angles = (z @ directions)[..., None] * t  # [V, B, A, T]
    real, imaginary = angles.cos().mean(dim=1), angles.sin().mean(dim=1)  # [V, A, T]
    errors = ((real - normal).square() + imaginary.square()) * normal
    far_from_normal = z.shape[1] * torch.trapezoid(errors, t).mean()
    return (1 - NORMALITY_WEIGHT) * views_apart + NORMALITY_WEIGHT * far_from_normal


def jitter(images: Tensor, generator: torch.Generator) -> Tensor:
    """Brightness, contrast and saturation by 0.6 to 1.4, and a tenth of the images gray; images in [0, 1]."""
    factor = iter(0.6 + 0.8 * torch.rand(3, len(images), 1, 1, 1, generator=generator))
    images = images * next(factor)
    images = torch.lerp(images.mean(dim=(1, 2, 3), keepdim=True), images, next(factor))
    gray = images.mean(dim=1, keepdim=True)
    images = torch.lerp(gray, images, next(factor))
    is_gray = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.1
    return torch.where(is_gray, gray, images).clamp(0, 1)


def adapt(model: Any, pixels: Tensor, given: Arguments, seed: int) -> int:
    """Trains `model`, which has no head, on uint8 images [N, H, W, 3] for `given.seconds`; returns the steps."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    projector = Projector(model.config.num_features)
    groups = parameter_groups(model.named_parameters(), dataclasses.replace(OPTIM, lr=given.lr))
    named = [(f"projector.{name}", parameter) for name, parameter in projector.named_parameters()]
    groups.append({"params": named, "lr": PROJECTOR_LR, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(groups)
    rates = [group["lr"] for group in optimizer.param_groups]  # with the layer decay
    transform = TrainTransform((given.image_size, given.image_size), min_area=0.3)
    model.train()
    started, step = time.monotonic(), 0
    while (done := (time.monotonic() - started) / given.seconds) < 1:
        # The clock drives the schedule: warm-up, then cosine decay.
        scale = min(done / WARMUP, 0.5 * (1 + math.cos(math.pi * max(done - WARMUP, 0) / (1 - WARMUP))))
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = scale * rate
        rows = rng.choice(len(pixels), min(BATCH, len(pixels)), replace=False)
        crops = [transform.augment(pixels[rows], seed, VIEWS * step + view, rows) / 255 for view in range(VIEWS)]
        images = 2 * jitter(torch.cat(crops), generator) - 1
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cpu_is_faster_in_bfloat16()):
            representation = model(images)
        z = projector(representation.float()).unflatten(0, (VIEWS, len(rows)))
        optimizer.zero_grad()
        lejepa_loss(z, generator).backward()
        nn.utils.clip_grad_norm_([*model.parameters(), *projector.parameters()], CLIP_NORM)
        optimizer.step()
        step += 1
    model.eval()
    return step


# ---------------------------------------------------------------------------------------------------------- the images


def load(given: Arguments, domain: str) -> tuple[Dataset, Dataset]:
    """All training images, and at most TEST_IMAGES test images, evenly spaced."""
    folder = given.data / domain if domain != "blood_cells" else given.blood_cells
    train, test = (load_dataset(f"folder:{folder}", split) for split in ("trainval", "test"))
    return train, test.take(np.arange(min(TEST_IMAGES, len(test))) * len(test) // min(TEST_IMAGES, len(test)))


def original(path: str, domain: str) -> str:
    """The image that a file is a copy of."""
    name = Path(path).name
    return name.partition("_")[0] if domain == "blood_cells" else name


def draw(train: Dataset, domain: str, shots: int, seed: int) -> np.ndarray | None:
    """Indices of `shots` images of each class, of different originals; None if a class has fewer."""
    rng, chosen = np.random.default_rng(seed), []
    for label in range(len(train.classes)):
        seen: dict[str, int] = {}
        for index in rng.permutation(np.flatnonzero(train.labels == label)).tolist():
            seen.setdefault(original(train.path(index), domain), index)
        if len(seen) < shots:
            return None
        chosen += list(seen.values())[:shots]
    return np.array(chosen)


def pixels_of(dataset: Dataset, size: int, preprocessing: Preprocessing) -> Tensor:
    """uint8 [N, S, S, 3] for crops of `size`, a quarter larger."""
    side = round(1.25 * size)
    transform = EvalTransform((side, side), preprocessing.at((side, side)))
    images = [transform.apply([dataset.image(index)]) for index in range(len(dataset))]
    return ((torch.cat(images) + 1) * 127.5).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()


# ------------------------------------------------------------------------------------------------------ the comparison


def evaluate(
    model: Any, labeled: Dataset, test: Dataset, preprocessing: Preprocessing, layers: tuple[Readout, ...] = ()
) -> tuple[Readout, float]:
    """The layer of least leave-one-out loss (of `layers`, or of all), and the test accuracy of the head on it."""
    layers, options = layers or candidates(model.config), LoaderOptions(64)
    model, cpu = copy.deepcopy(model), torch.device("cpu")
    prepare_for_inference(model, cpu, frozen_dtype("auto", cpu))
    train_x, test_x = (
        readout_features(model, part, layers, options, preprocessing=preprocessing) for part in (labeled, test)
    )
    xs = {layer: each.x for layer, each in train_x.items()}
    labels, classes = train_x[layers[-1]].labels, len(labeled.classes)
    chosen = compare_readouts(xs, labels, classes).chosen
    head = least_squares_head(xs[chosen][None], labels, classes)
    return chosen, float((head.logits(test_x[chosen].x).argmax(axis=1) == test.labels).mean())


def measure(given: Arguments, domain: str, seed: int) -> dict[str, Any]:
    train, test = load(given, domain)
    options: dict[str, Any] = {"image_size": given.image_size, "num_classes": 0}
    whole: Any = load_model(given.checkpoint, **options)
    metadata = load_metadata(given.checkpoint, image_size=given.image_size)
    preprocessing = frozen_preprocessing(Preprocessing.read(metadata, given.checkpoint), whole.config.image_hw)
    labeled = {shots: train.take(rows) for shots in SHOTS if (rows := draw(train, domain, shots, seed)) is not None}
    before = {shots: evaluate(whole, images, test, preprocessing) for shots, images in labeled.items()}
    start, _ = before[min(before)]  # the labels of the larger sets have no part in it
    model = load_model(given.checkpoint, **options, depth=start.depth, pool=start.pool)
    unlabeled = np.random.default_rng(seed).permutation(len(train))[:MAX_UNLABELED]
    steps = adapt(model, pixels_of(train.take(unlabeled), given.image_size, preprocessing), given, seed)
    rows = []
    for shots, images in labeled.items():
        _, same_layer = evaluate(whole, images, test, preprocessing, (start,))
        _, adapted = evaluate(model, images, test, preprocessing, (start,))
        layer, best = evaluate(model, images, test, preprocessing)
        row = {"labels": shots, "best_before": before[shots][1], "layer_before": before[shots][0]._asdict()}
        row |= {"before": same_layer, "after": adapted, "best_after": best, "layer_after": layer._asdict()}
        rows.append(row)
    return {"start": start._asdict(), "unlabeled": len(unlabeled), "steps": steps, "accuracies": rows}


def main() -> None:
    given = tyro.cli(Arguments, description=__doc__)
    keep_freed_memory()
    rows = read_rows(given.out) if given.out else []
    lines = [json.dumps({"environment": describe_run(given, torch)})]
    for domain in given.domains:
        for seed in given.seeds:
            keys = {"checkpoint": Path(given.checkpoint).name, "domain": domain, "seed": seed}
            keys |= {"seconds": given.seconds, "image_size": given.image_size, "lr": given.lr}
            if any(row | keys == row for row in rows):
                continue
            rows.append(keys | measure(given, domain, seed))
            for row in rows[-1]["accuracies"]:
                text = f"{row['labels']} labels: best block {row['best_before']:.1%} -> {row['best_after']:.1%}, "
                text += f"block {rows[-1]['start']['depth']} {row['before']:.1%} -> {row['after']:.1%}"
                print(f"{domain}, seed {seed}, {text}", flush=True)
            lines.append(json.dumps(rows[-1]))
            if given.out is not None:
                with given.out.open("a") as file:
                    file.write("\n".join(lines) + "\n")
                lines = []


if __name__ == "__main__":
    main()
