"""A folder of photographs, fine-tuned on by `vitlab finetune`, by Hugging Face's Trainer and by timm's recipe.

    python benchmarks/finetune_folder.py CHECKPOINT FOLDER --steps 50 --out benchmarks/results/finetune_folder.json

CHECKPOINT is a Hugging Face folder of a ViT (DINOv2) and FOLDER has train/CLASS/ and test/CLASS/. All start from the
same weights, see `steps` batches of `batch_size` images of the same size, and are tested once on the same images.

- `vitlab`: `vitlab finetune` with its defaults; `search` also tries three learning rates on a held-out part, whose
  images are counted.
- `huggingface`: `transformers.Trainer` with its default optimizer, rate and schedule (AdamW, 5e-5, linear), and the
  transforms of its image classification example.
- `timm`: the defaults of timm's train.py (SGD at 0.1 x batch / 256, cosine, five epochs of warm-up, label smoothing
  0.1, color jitter), put together from timm's parts, for the package does not contain the script.
- `timm-adamw`: the same with AdamW at 5e-5, Hugging Face's rate.

Needs timm, transformers and accelerate. Every contender runs in a separate process, one after the other.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from PIL import Image
from run_record import describe_run
from tyro.conf import Positional

CONTENDERS = ("vitlab", "search", "huggingface", "timm", "timm-adamw")


@dataclasses.dataclass(frozen=True)
class Arguments:
    checkpoint: Positional[Path]
    folder: Positional[Path]
    steps: int = 50
    batch_size: int = 32
    image_size: int = 224
    seeds: tuple[int, ...] = (0, 1, 2)
    contenders: tuple[str, ...] = CONTENDERS
    bfloat16: bool = True
    """Compute in bfloat16 where the contender has a setting for it (vitlab chooses by itself)."""
    out: Path | None = None
    """JSON file for the figures, to which runs are added."""
    only: Annotated[str | None, tyro.conf.arg(help="Internal: run this contender in this process.")] = None


class Folder(torch.utils.data.Dataset[Any]):
    """Images of one split with their labels, transformed; a dictionary or a pair each."""

    def __init__(self, folder: Path, transform: Any, as_dict: bool) -> None:
        self.classes = sorted(path.name for path in folder.iterdir())
        self.files = sorted(path for path in folder.glob("*/*"))
        self._transform, self._as_dict = transform, as_dict

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        path = self.files[index]
        pixels = self._transform(Image.open(path).convert("RGB"))
        label = self.classes.index(path.parent.name)
        return {"pixel_values": pixels, "labels": label} if self._as_dict else (pixels, label)


def by_vitlab(given: Arguments, seed: int, search: bool) -> float:
    with tempfile.TemporaryDirectory() as out:
        rate = [] if search else ["--optim.lr", "0.01"]
        command = [
            sys.executable, "-m", "vitlab", "finetune", str(given.checkpoint), "--dataset", f"folder:{given.folder}",
            "--steps", str(given.steps), "--batch-size", str(given.batch_size), "--image-size", str(given.image_size),
            "--seed", str(seed), "--workdir", f"{out}/run", "--json", *rate,
        ]  # fmt: skip
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout)["test"]["accuracy"]


def by_huggingface(given: Arguments, seed: int) -> float:
    import transformers
    from torchvision.transforms import v2

    processor = transformers.AutoImageProcessor.from_pretrained(given.checkpoint)
    mean, std = processor.image_mean, processor.image_std
    last = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)]
    train = v2.Compose([v2.RandomResizedCrop(given.image_size), v2.RandomHorizontalFlip(), *last])
    test = v2.Compose([v2.Resize(given.image_size), v2.CenterCrop(given.image_size), *last])
    data = Folder(given.folder / "train", train, as_dict=True), Folder(given.folder / "test", test, as_dict=True)
    model = transformers.AutoModelForImageClassification.from_pretrained(
        given.checkpoint, num_labels=len(data[0].classes)
    )
    with tempfile.TemporaryDirectory() as out:
        settings = transformers.TrainingArguments(
            out, max_steps=given.steps, per_device_train_batch_size=given.batch_size, seed=seed, bf16=given.bfloat16,
            save_strategy="no", report_to=[], dataloader_num_workers=2, logging_steps=10, use_cpu=True,
        )  # fmt: skip
        trainer = transformers.Trainer(model, settings, train_dataset=data[0], eval_dataset=data[1])
        trainer.train()
        predictions = trainer.predict(data[1])
    return float((np.argmax(predictions.predictions, -1) == predictions.label_ids).mean())


def by_timm(given: Arguments, seed: int, adamw: bool) -> float:
    import timm
    from timm.data.config import resolve_data_config
    from timm.data.transforms_factory import create_transform
    from timm.loss.cross_entropy import LabelSmoothingCrossEntropy
    from timm.optim._optim_factory import create_optimizer_v2
    from timm.scheduler.scheduler_factory import create_scheduler_v2

    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-m", "vitlab", "convert", str(given.checkpoint), f"{out}/timm", "--to", "timm"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        classes = len(list((given.folder / "train").iterdir()))
        model = timm.create_model(
            f"local-dir:{out}/timm", pretrained=True, img_size=given.image_size, num_classes=classes
        )
    usual = resolve_data_config({"img_size": given.image_size}, model=model)
    train = create_transform(**usual, is_training=True, color_jitter=0.4, auto_augment=None)
    data = Folder(given.folder / "train", train, as_dict=False)
    test = Folder(given.folder / "test", create_transform(**usual), as_dict=False)
    name, rate = ("adamw", 5e-5) if adamw else ("sgd", 0.1 * given.batch_size / 256)
    optimizer = create_optimizer_v2(model, name, lr=rate, weight_decay=2e-5, momentum=0.9)
    per_epoch = max(len(data) // given.batch_size, 1)
    epochs = -(-given.steps // per_epoch)
    scheduler, _ = create_scheduler_v2(
        optimizer, sched="cosine", num_epochs=epochs, warmup_epochs=min(5, epochs // 2), warmup_lr=min(1e-5, rate),
        updates_per_epoch=per_epoch, step_on_epochs=False,
    )  # fmt: skip
    assert scheduler is not None
    loss_of = LabelSmoothingCrossEntropy(0.1)
    loader = torch.utils.data.DataLoader(data, given.batch_size, shuffle=True, drop_last=True, num_workers=2)
    step = 0
    model.train()
    while step < given.steps:
        for images, labels in loader:
            if step == given.steps:
                break
            with torch.autocast("cpu", torch.bfloat16, enabled=given.bfloat16):
                loss = loss_of(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            scheduler.step_update(step)
    model.eval()
    right = 0
    with torch.inference_mode():
        for images, labels in torch.utils.data.DataLoader(test, given.batch_size, num_workers=2):
            right += int((model(images).argmax(1) == labels).sum())
    return right / len(test)


def run_one(given: Arguments) -> None:
    """One contender in this process; prints its accuracy last."""
    (seed,) = given.seeds
    match given.only:
        case "vitlab" | "search":
            accuracy = by_vitlab(given, seed, given.only == "search")
        case "huggingface":
            accuracy = by_huggingface(given, seed)
        case _:
            accuracy = by_timm(given, seed, given.only == "timm-adamw")
    print(json.dumps({"accuracy": accuracy}), flush=True)


def main(given: Arguments) -> None:
    if given.only:
        run_one(given)
        return
    record: dict[str, Any] = {"environment": describe_run(given), "runs": []}
    if given.out and given.out.exists():
        record = json.loads(given.out.read_text())
    for seed in given.seeds:
        for name in given.contenders:
            started = time.perf_counter()
            options = [
                "--steps", str(given.steps), "--batch-size", str(given.batch_size), "--image-size",
                str(given.image_size), "--seeds", str(seed), "--only", name,
                "--bfloat16" if given.bfloat16 else "--no-bfloat16",
            ]  # fmt: skip
            command = [sys.executable, __file__, str(given.checkpoint), str(given.folder), *options]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            row = {
                "contender": name, "seed": seed, "steps": given.steps, "batch_size": given.batch_size,
                "image_size": given.image_size, **json.loads(done.stdout.splitlines()[-1]),
                "seconds": round(time.perf_counter() - started, 1),
            }  # fmt: skip
            record["runs"].append(row)
            print(row, flush=True)
            if given.out:
                given.out.write_text(json.dumps(record, indent=1) + "\n")
    for name in given.contenders:
        scores = [row["accuracy"] for row in record["runs"] if row["contender"] == name]
        spread = f" +- {statistics.stdev(scores):.2%}" if len(scores) > 1 else ""
        print(f"{name:12} {statistics.fmean(scores):.2%}{spread}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
