"""The contenders `huggingface` and `timm` of `finetune_peers.py`: the training loops of example scripts."""

import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from job import PROBE, Fitted, ImageFiles, Job, time_images


def fit_huggingface(job: Job) -> Fitted:
    """transformers' Trainer at the defaults of TrainingArguments; the transforms of run_image_classification.py."""
    import torch
    import transformers
    from torchvision import transforms

    folder, size = job.checkpoints / "huggingface", job.image_size
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    last = [transforms.ToTensor(), transforms.Normalize(processor.image_mean, processor.image_std)]
    train = transforms.Compose([transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip(), *last])
    test = transforms.Compose([transforms.Resize(size), transforms.CenterCrop(size), *last])
    transformers.set_seed(job.seed)
    model = transformers.AutoModelForImageClassification.from_pretrained(folder, num_labels=len(job.classes))
    data: Any = ImageFiles(job.examples, train, as_dict=True)
    sample = [i * len(data) // PROBE for i in range(PROBE)]
    out = tempfile.TemporaryDirectory()
    settings = transformers.TrainingArguments(
        out.name, seed=job.seed, bf16=job.bfloat16, use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    settings.learning_rate *= job.factor
    batch = settings.per_device_train_batch_size
    seconds = time_images(model, lambda: torch.stack([data[i]["pixel_values"] for i in sample]), batch, job.bfloat16)
    settings.max_steps = job.steps(batch, *seconds)

    class Deadline(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop |= time.time() > job.stop(seconds[1])

    trainer = transformers.Trainer(model, settings, train_dataset=data, callbacks=[Deadline()])
    trainer.train()

    def predict(files: Sequence[Path], _out: Any = out) -> list[int]:
        asked: Any = ImageFiles([(file, 0) for file in files], test, as_dict=True)
        logits: Any = trainer.predict(asked).predictions
        return logits.argmax(-1).tolist()

    epochs, rest = divmod(trainer.state.global_step, math.ceil(len(data) / batch))  # the last batch is smaller
    return Fitted(predict, trainer.state.global_step, epochs * len(data) + rest * batch)


def fit_timm(job: Job) -> Fitted:
    """The defaults of timm's train.py, put together from timm's parts: the package does not contain the script.

    SGD at 0.1 x batch / 256 with momentum 0.9, five epochs of warm-up, cosine, label smoothing 0.1, random crops and
    color jitter. Deviations: the batch is smaller than 128 where there are fewer images, the rate changes at each step
    (`--sched-on-updates`), and the warm-up is at most half of a run.
    """
    import timm
    import torch
    from timm.data.config import resolve_data_config
    from timm.data.loader import create_loader
    from timm.data.transforms_factory import create_transform
    from timm.loss.cross_entropy import LabelSmoothingCrossEntropy
    from timm.optim._optim_factory import create_optimizer_v2
    from timm.scheduler.scheduler_factory import create_scheduler_v2
    from timm.utils.random import random_seed

    random_seed(job.seed)
    name, size, cpu = f"local-dir:{job.checkpoints / 'timm'}", job.image_size, torch.device("cpu")
    model = timm.create_model(name, pretrained=True, num_classes=len(job.classes), img_size=size)
    config = resolve_data_config({"img_size": size}, model=model)
    normalize: dict[str, Any] = {"mean": config["mean"], "std": config["std"]}
    batch = min(128, len(job.examples))
    data: Any = ImageFiles(job.examples)
    loader = create_loader(
        data, config["input_size"], batch, is_training=True, interpolation="random", num_workers=4, device=cpu,
        **normalize,
    )  # fmt: skip
    test = create_transform(**config)
    probe, sample = ImageFiles(job.examples, test), [i * len(data) // PROBE for i in range(PROBE)]
    seconds = time_images(model, lambda: torch.stack([probe[i][0] for i in sample]), batch, job.bfloat16)
    steps, per_epoch = job.steps(batch, *seconds), len(loader)
    rate = 0.1 * batch / 256 * job.factor
    optimizer = create_optimizer_v2(model, "sgd", lr=rate, weight_decay=2e-5, momentum=0.9)
    warmup = min(5 * per_epoch, steps // 2)
    scheduler, _ = create_scheduler_v2(
        optimizer, "cosine", num_epochs=steps, warmup_epochs=warmup, warmup_lr=min(1e-5, rate)
    )
    assert scheduler is not None

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    loss_of, step = LabelSmoothingCrossEntropy(0.1), 0
    model.train()
    for step, (images, labels) in enumerate(batches(), 1):
        with torch.autocast("cpu", torch.bfloat16, enabled=job.bfloat16):
            loss = loss_of(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step(step)
        if step == steps or time.time() + batch * seconds[0] > job.stop(seconds[1]):
            break

    @torch.inference_mode()
    def predict(files: Sequence[Path]) -> list[int]:
        asked: Any = ImageFiles([(file, 0) for file in files])
        loader = create_loader(
            asked, config["input_size"], 128, interpolation=config["interpolation"], num_workers=4, device=cpu,
            crop_pct=config["crop_pct"], **normalize,
        )  # fmt: skip
        model.eval()
        with torch.autocast("cpu", torch.bfloat16, enabled=job.bfloat16):
            return [index for images, _ in loader for index in model(images).argmax(1).tolist()]

    return Fitted(predict, step, step * batch)
