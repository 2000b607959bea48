"""Shows that two commits compute the same, to the bit, on the same machine.

    python benchmarks/checksums.py --source OLD_CHECKOUT --out before.json
    python benchmarks/checksums.py --out after.json --compare before.json

Each case runs a short command of `python -m vitlab` (or, where no command shows it, a public Python name) of the given
source tree and hashes what it computed: tensors by name, dtype, shape and bytes; JSON and CSV by their numbers, without
the names of the keys. The file maps each case to a SHA-256, or to the error that it ended with. `--compare` prints one
line per case and exits with 1 if any differs, except the cases marked `(may change)`.

Commands run in forks of one process that has imported torch, with one thread and relative paths in a temporary folder.
`--images DIR` adds cases on real photographs: WebDataset tars, `DIR/train-*.tar` and others.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch
from checksum_data import write_data, write_published
from checksum_hashes import digest, file_tensors, json_lines, numbers, run_files, tar_members, tensors

SAME = "--device cpu --precision float32 --microbatch 32 --log-every 2 --checkpoint-every 4"
DIGITS = f"pretrain tiny-digits --steps 12 --optim.warmup-steps 3 {SAME}"
PHOTOS = f"pretrain tiny-digits --data.name folder:jpegs --model.image-size 32 --steps 4 --batch-size 16 {SAME}"
RUNS = {  # name of the run and of its folder -> its command
    "digits": f"{DIGITS} --eval-every 6 --fewshot.shots 1 5 --fewshot.test-images 50 --fewshot.test-split test",
    "masked": f"pretrain tiny-masked-digits --steps 6 --eval-every 3 {SAME}",
    "masked-downsized": f"pretrain tiny-masked-digits --steps 3 --masking.target downsized {SAME}",
    "masked-regression": f"pretrain tiny-masked-digits --steps 3 --masking.target regression {SAME}",
    "sgd": f"{DIGITS} --optim.name sgd --optim.lr 0.1 --optim.schedule linear --optim.end-lr 1e-5 --mixup 0 "
    "--label-smoothing 0.1 --model.dropout 0.1 --model.stochastic-depth 0.2 --seed 3",
    "sigmoid": f"{DIGITS} --loss sigmoid --model.pool map --model.head-bias -6.9 --model.position sincos2d "
    "--optim.decay-on kernels --model.representation-size 24 --model.variant.gelu tanh --data.crop none --data.flip",
    "tokens": f"{DIGITS} --model.pool token --model.variant.registers 2 --model.variant.distilled "
    "--model.variant.layer-scale 0.1 --model.variant.no-class-position --data.subset-fraction 0.3 "
    "--data.subset-seed 1 --data.crop random --data.crop-resize 20",
    "axial": f"{DIGITS} --model.encoder axial --model.position 2d --model.position-at shared --data.classes 1 3 5",
    "relative": f"{DIGITS} --model.position relative --model.position-at every --activation-checkpointing",
    "autocast": f"{DIGITS} --precision autocast",
    "bfloat16": f"{DIGITS} --precision bfloat16",
    "hybrid": f"pretrain tiny-fashion --data.name digits --steps 3 --batch-size 16 {SAME}",
    "resnet": f"pretrain tiny-digits --model R26x1 --model.image-size 32 --steps 2 --batch-size 8 {SAME}",
    "photos": f"{PHOTOS} --data.crop inception --data.flip",
    "photos-fast": f"{PHOTOS} --data.crop inception --data.fast-decode --data.workers 2 --data.exclude exclude.txt",
    "photos-random": f"{PHOTOS} --data.crop random --data.crop-resize 40 --data.eval-resize 40",
    "photos-skip": f"{PHOTOS} --data.name folder:broken --data.crop inception --data.on-error skip",
    "randaugment (may change)": f"{PHOTOS} --data.crop inception --data.randaugment-layers 2",
    "shards": f"{PHOTOS} --data.name shards:tars --data.crop inception --steps 6",
    "multi-label": f"{PHOTOS} --data.name shards:labels --data.crop inception --loss sigmoid --mixup 0",
    "finetune": "finetune digits --recipe tiny-digits --image-size 32 --steps 4 --sweep-steps 3 --runs 2 "
    f"--learning-rates 0.003 0.03 --optim.warmup-steps 1 --average-decay 0.9 {SAME}",
    "finetune-photos": "finetune digits --dataset folder:jpegs --image-size 32 --steps 4 --batch-size 16 "
    f"--learning-rates 0.01 0.03 --data.workers 0 {SAME}",
    "finetune-fresh": "finetune digits --recipe tiny-digits --image-size 24 --steps 3 --optim.lr 0.01 --head-std 0.1 "
    f"--optim.warmup-steps 1 --fresh-positions {SAME}",
    "vtab": f"vtab digits --root lists --tasks kitti_distance patch_camelyon --steps 3 --batch-size 16 "
    f"--optim.warmup-steps 1 --image-size 32 --data.workers 0 {SAME}",
}
ANSWERS = {  # commands that print JSON, of which the numbers count
    "evaluate": "evaluate digits",
    "evaluate at another size": "evaluate digits --split val --image-size 24 --resize 28",
    "evaluate folder": "evaluate photos --dataset folder:jpegs --split all",
    "evaluate bfloat16": "evaluate digits --precision bfloat16",
    "fewshot": "fewshot digits --dataset digits --shots 1 5 --cache features",
    "fewshot original": "fewshot digits --dataset digits folder:jpegs --shots 2 --original --cache features",
    "probe knn": "probe digits --dataset digits --cache features",
    "probe linear": "probe digits --dataset digits --kind linear --l2 0.01 1 --cache features",
    "predict": "predict photos jpegs/test variants --top 2",
    "duplicates": "duplicates folder:jpegs folder:variants --train-split all --test-split all --out duplicates",
    "plan (may change)": "plan imagenet --model ViT-Ti/16 --device h100",
    "list models": "list models",
    "list vtab": "list vtab",
}
MODELS = {  # small models whose weights go through the other libraries' formats
    "vit": ("ViT-Ti/16", "google timm huggingface", {"image_size": 64, "depth": 2}),
    "registers": ("ViT-S/14", "timm huggingface", {"image_size": 56, "depth": 2, "registers": 4, "layer_scale": 0.1}),
    "gap": ("ViT-Ti/16", "google timm", {"image_size": 64, "depth": 2, "pool": "gap"}),
    "hybrid": ("R+ViT-Ti/16", "google", {"image_size": 64, "depth": 2}),
    "resnet": ("R26x1", "google", {"image_size": 64}),
    "resnet50": ("R50x1", "timm", {"image_size": 64}),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the hashes")
    parser.add_argument("--source", type=Path, default=Path(__file__).parents[1], help="checkout to run")
    parser.add_argument("--compare", type=Path, help="JSON file of another commit")
    parser.add_argument("--images", type=Path, help="folder of WebDataset tars of photographs")
    parser.add_argument("--only", default="", help="regular expression for the cases' groups")
    arguments = parser.parse_args()
    source, out = (arguments.source / "src").resolve(), arguments.out.resolve()
    before = json.loads(arguments.compare.read_text()) if arguments.compare else None
    images = arguments.images.resolve() if arguments.images else None
    sys.path.insert(0, str(source))
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        os.environ.update(PYTHONPATH=str(source), OMP_NUM_THREADS="1", XDG_CACHE_HOME=f"{folder}/cache")
        hashes = run_all(arguments.only, images)
    out.write_text(json.dumps(hashes, indent=1) + "\n")
    return 0 if before is None else compare(before, hashes)


def run_all(only: str, images: Path | None) -> dict[str, str]:
    """The hash of every case of the groups that match `only`, in a fresh current folder."""
    import vitlab

    torch.set_num_threads(1)
    print(f"vitlab from {vitlab.__file__}")
    for name in ("create_model", "load_model", "load_dataset"):  # imported before the forks
        getattr(vitlab, name)
    write_data()
    groups: dict[str, Callable[[], Mapping[str, str]]] = {"shard": shards}
    groups |= {name: lambda name=name: train(name) for name in RUNS}
    groups |= {name: lambda name=name: {"": numbers(run(f"{ANSWERS[name]} --json"))} for name in ANSWERS}
    groups |= {"duplicates files": duplicates, "inspect": inspect, "two processes": two_processes}
    groups |= {name: lambda name=name: interrupted(signal.Signals[name]) for name in ("SIGKILL", "SIGTERM")}
    groups |= {"formats": formats, "models": models, "vtab order": vtab_order}
    if images:
        groups["images"] = lambda: photographs(images)
    hashes: dict[str, str] = {}
    for name, group in groups.items():
        if not re.search(only, name):
            continue
        start = time.monotonic()
        try:
            hashes |= {f"{name}: {part}" if part else name: value for part, value in group().items()}
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, OSError) as error:
            hashes[name] = f"{type(error).__name__}: {error}"
            print(hashes[name])
        print(f"{time.monotonic() - start:6.1f} s  {name}", flush=True)
    return hashes


def compare(before: Mapping[str, str], after: Mapping[str, str]) -> int:
    """Prints a line per case; returns 1 if a case that must not change differs, is missing or ended with an error."""
    valid = {name: value for name, value in after.items() if len(value) == 64}
    verdicts = {name: name in valid and valid[name] == before.get(name) for name in {**before, **after}}
    for name, same in verdicts.items():
        print(f"{'same   ' if same else 'DIFFERS'}  {name}")
    return int(any(not same and "(may change)" not in name for name, same in verdicts.items()))


# ------------------------------------------------------------------------------------------------ running


def start(command: str) -> ForkProcess:
    """A fork that runs `python -m vitlab COMMAND` with its output in the files `stdout` and `stderr`."""

    def child() -> None:
        sys.argv = ["vitlab", *command.split()]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, file in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = (io.TextIOWrapper(os.fdopen(n, "wb"), line_buffering=True) for n in (1, 2))
        runpy.run_module("vitlab", run_name="__main__", alter_sys=True)

    process = ForkProcess(target=child)
    process.start()
    return process


def run(command: str) -> Any:
    """The JSON values that the command prints, or its text. Raises RuntimeError with its last line if it fails."""
    process = start(command)
    process.join()
    if process.exitcode:
        raise RuntimeError(f"vitlab {command}: {Path('stderr').read_text().strip()[-300:]}")
    text = Path("stdout").read_text()
    if "--json" not in command:
        return text
    decoder, values = json.JSONDecoder(), []
    while text := text.lstrip():  # `predict` prints one object per image
        value, end = decoder.raw_decode(text)
        values, text = [*values, value], text[end:]
    return values


def torchrun(command: str) -> subprocess.Popen[bytes]:
    words = f"-m torch.distributed.run --standalone --nproc-per-node 2 -m vitlab {command}".split()
    return subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def after_checkpoint(folder: str, is_running: Callable[[], bool]) -> None:
    """Returns when the run has written its first checkpoint."""
    while not any(Path(folder).glob("checkpoints/step-*")):
        if not is_running():
            raise RuntimeError(f"{folder} ended before its first checkpoint")
        time.sleep(0.002)


# ------------------------------------------------------------------------------------------------ cases


def train(name: str) -> dict[str, str]:
    folder = name.split()[0]
    run(f"{RUNS[name]} {'--out' if name == 'vtab' else '--workdir'} {folder}")
    return run_files(Path(folder))


def interrupted(number: signal.Signals) -> dict[str, str]:
    """The run `digits`, ended by a signal after its first checkpoint and continued: the same hashes as `digits`."""
    folder, process = number.name, start(f"{RUNS['digits']} --workdir {number.name}")
    after_checkpoint(folder, process.is_alive)
    assert process.pid
    os.kill(process.pid, number)
    process.join()
    return resumed(folder, lambda: run(f"{RUNS['digits']} --workdir {folder}"))


def two_processes() -> dict[str, str]:
    """DDP from beginning to end; FSDP ended by SIGTERM and continued."""
    if torchrun(f"{DIGITS} --model.dropout 0.1 --workdir ddp").wait():
        raise RuntimeError("torchrun failed")
    command = f"{DIGITS} --fsdp --workdir fsdp"
    process = torchrun(command)
    after_checkpoint("fsdp", lambda: process.poll() is None)
    process.send_signal(signal.SIGTERM)
    process.wait()
    hashes = {f"DDP {name}": value for name, value in run_files(Path("ddp")).items()}
    return hashes | {f"FSDP {name}": v for name, v in resumed("fsdp", torchrun(command).wait).items()}


def resumed(folder: str, command: Callable[[], object]) -> dict[str, str]:
    """The hashes of a run after `command` has continued it."""
    if Path(folder, "result.json").exists():
        raise RuntimeError(f"{folder} was over before it could be interrupted")
    command()
    return {name: v for name, v in run_files(Path(folder)).items() if "checkpoints" not in name}


def shards() -> dict[str, str]:
    run("shard folder:jpegs tars --size 40 --records 8")
    return {"": digest(part for file in sorted(Path("tars").glob("*.tar")) for part in tar_members(file))}


def duplicates() -> dict[str, str]:
    excluded = Path("duplicates/exclude.txt").read_bytes()
    return {"pairs": json_lines(Path("duplicates/duplicates.jsonl")), "list": digest([excluded])}


def inspect() -> dict[str, str]:
    """The arrays behind the figures of a ViT, of an axial one and of a hybrid; and all attention maps."""
    import vitlab

    hashes = {}
    for name in ("digits", "axial", "hybrid"):
        hashes[f"{name} result"] = numbers(run(f"inspect {name} jpegs/test --out look-{name} --json"))
        hashes |= {
            f"{name} {file.stem}": file_tensors(file) for file in sorted(Path().glob(f"look-{name}/figures/*.npz"))
        }
        model = vitlab.load_model(name)
        images = torch.rand(2, 3, *model.config.image_hw, generator=torch.Generator().manual_seed(0)) * 2 - 1
        maps = vitlab.inspection.attention_maps(model, images)
        hashes[f"{name} maps"] = tensors({str(i): each for i, each in enumerate(maps)})
        hashes[f"{name} tokens"] = tensors({"": model.eval().forward_features(images).detach()})
    return hashes


def formats() -> dict[str, str]:
    """Small models with random weights, written in each format, read back, and at another size."""
    import vitlab

    hashes = {}
    for name, (model_name, libraries, settings) in MODELS.items():
        model = vitlab.create_model(model_name, num_classes=5, **settings)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(0)
            for parameter in model.parameters():
                parameter.normal_(0, 0.1, generator=generator)
        vitlab.save_model(model, f"model-{name}")
        hashes[f"{name} saved"] = file_tensors(Path(f"model-{name}/model.safetensors"))
        for library in libraries.split():
            written = Path(f"{name}-{library}{'.npz' if library == 'google' else ''}")
            run(f"convert model-{name} {written} --to {library}")
            run(f"convert {written} {name}-{library}-back --to vitlab --image-size 224")
            file = written if library == "google" else written / "model.safetensors"
            hashes[f"{name} {library}"] = file_tensors(file)
            hashes[f"{name} {library} back"] = file_tensors(Path(f"{name}-{library}-back/model.safetensors"))
    return hashes


def models() -> dict[str, str]:
    """Names and shapes of every model's state; the initial weights and the outputs of some."""
    import vitlab

    hashes = {}
    for name in vitlab.list_models():
        with torch.device("meta"):
            hashes[f"{name} names"] = tensors(vitlab.create_model(name).state_dict())
    for name in ("ViT-Ti/16", "R+ViT-Ti/16", "R26x1", "AxialResNet50"):
        torch.manual_seed(0)
        model = vitlab.create_model(name, image_size=64, num_classes=5).eval()
        hashes[f"{name} weights"] = tensors(model.state_dict())
        hashes[f"{name} features"] = tensors({"": model.forward_features(torch.rand(2, 3, 64, 64) * 2 - 1).detach()})
    return hashes


def vtab_order() -> dict[str, str]:
    """The labels and, of images in files, the names of the parts of tasks read from imitations of published sets."""
    import vitlab

    write_published()
    hashes = {}
    in_files = ["caltech101", "dtd", "flowers102", "pets"]
    in_arrays = ["cifar100", "smallnorb_azimuth", "smallnorb_elevation"]
    for task, split in itertools.product(in_files + in_arrays, ("train", "val", "trainval", "test")):
        data = vitlab.load_dataset(f"vtab:{task}", split, root="published", download=False)
        names = [data.path(i).rpartition("/")[2].encode() for i in range(len(data))] if task in in_files else []
        hashes[f"{task} {split}"] = digest([data.labels.tobytes(), *names])
    return hashes


def photographs(images: Path) -> dict[str, str]:
    """A run and predictions on real photographs in WebDataset tars."""
    Path("real").mkdir()
    with tarfile.open(min(images.glob("test-*.tar"))) as tar:
        for member in [m for m in tar if m.name.endswith(".jpg")][:24]:
            tar.extract(member, "real", filter="data")
    run(f"{PHOTOS} --data.name shards:{images} --data.crop inception --data.flip --data.train-split train "
        f"--data.subset-fraction 0.1 --workdir photographs")  # fmt: skip
    hashes = run_files(Path("photographs"))
    return hashes | {"predict": numbers(run("predict photographs real --top 3 --json"))}


if __name__ == "__main__":
    sys.exit(main())
