"""Writes docs/results.md from the records: `python benchmarks/results_page.py > docs/results.md`.

Every number comes from a JSON file of `benchmarks/results` or `src/vitlab/paper/recorded`, or, where there is none,
from a table of `docs/records`.
"""

import collections
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vitlab.display import format_table

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
RECORDED = Path(__file__).parents[1] / "src" / "vitlab" / "paper" / "recorded"
PEERS = {
    "vitlab": "vitlab",
    "huggingface": "Hugging Face's Trainer",
    "fastai": "fastai",
    "autogluon": "AutoGluon",
    "timm": "timm's train.py",
}
STAGES = {
    "head of 5 views": "least-squares head on frozen features",
    "head, AdamW 1e-4, chosen augmentation": "fine-tuned from this head",
    "default": "average of both: the default",
}
MACHINES = {
    "A: AMD EPYC, bfloat16": ("train_cpu", "infer_cpu", "loader"),
    "B: Intel Xeon": ("train_cpu_intel", "", "loader_intel"),
    "C: AMD EPYC, AVX2 only, float32": ("train_cpu_avx2", "infer_cpu_avx2", "loader_avx2"),
    "D: Intel Xeon, AMX": ("train_cpu_amx", "infer_cpu_amx", "loader_amx"),
}
"""Processor -> its files of `benchmarks/results`: training, inference, loader."""
LOADERS = {
    "crops of 224 pixels": (224, "vitlab"),
    "the same, `--data.fast-decode`": (224, "vitlab-fast"),
    "the same, by torchvision": (224, "torchvision"),
    "crops of 32 pixels": (32, "vitlab"),
}
VERDICTS = ("supported", "inconclusive", "contradicted", "not tested")


def read(name: str) -> Any:
    """A JSON file of `benchmarks/results`."""
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def runs(name: str) -> Iterator[dict[str, Any]]:
    """The runs of a file of JSON lines, each with the commit of the line of the environment before it."""
    commit = ""
    for line in (ROOT / "benchmarks" / "results" / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "environment" in row:
            commit = row["environment"]["commit"]
        else:
            yield row | {"commit": commit}


def recorded(page: str, heading: str) -> list[dict[str, str]]:
    """The rows of the first table below a heading of a page of `docs/records`."""
    section = (DOCS / "records" / f"{page}.md").read_text().partition(f"\n## {heading}\n")[2]
    table = next(part for part in section.split("\n\n") if part.startswith("|"))
    rows = [[cell.strip().replace("](../", "](") for cell in line[1:-1].split("|")] for line in table.splitlines()]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def percent(values: Sequence[float]) -> str:
    """Their mean in per cent, or a dash."""
    return f"{100 * statistics.mean(values):.1f}" if values else "-"


def equality() -> list[dict[str, str]]:
    return [
        {name: row[name] for name in ("what", "error", "allowed")}
        for row in recorded("equality", "Equality with Google's code")
        if not row["what"].startswith(("their", "real", "its features"))
    ]


def peers() -> list[dict[str, Any]]:
    """Accuracy of every contender by protocol; of runs that were repeated, the last counts."""
    files = {name: list(runs(name)) for name in ("finetune_peers", "finetune_peers_amx")}
    few = ("flowers102:5", "cifar10:10", "fashion_mnist:10", "digits:10")
    many = ("flowers102:10", "cifar10:100", "fashion_mnist:100", "digits:100", "cifar10:1000")
    protocols = {
        "two minutes, one core": ((*few, *many), 3, (120,), 500, "finetune_peers"),
        "ten minutes, one core": (("cifar10:100", "digits:10"), 1, (600,), 500, "finetune_peers"),
        "the same, peers with a search": (("cifar10:100", "digits:10"), 1, (600,), 500, "finetune_peers"),
        "six to ten epochs, 84 pixels": (few, 3, (1000, 3060), 500, "finetune_peers"),
        "three epochs, 84 pixels": (many, 2, (3000, 30000), 500, "finetune_peers_amx"),
        "the same, 10,000 images, a larger test": (many[-1:], 2, (30000,), 5000, "finetune_peers_amx"),
    }
    table = []
    for protocol, (sets, seeds, amounts, test_images, file) in protocols.items():
        row = {"after": protocol, "sets": len(sets), "seeds": seeds}
        for contender, title in PEERS.items():
            accuracies = {name: dict[int, float]() for name in sets}
            for run in files["finetune_peers_amx" if contender in ("autogluon", "timm") else file]:
                searched = contender != "vitlab" and protocol.endswith("search")  # of the learning rate
                same = (run["contender"], run["test_images"], run["variant"] == "sweep")
                if same == (contender, test_images, searched) and run["amount"] in amounts and run["dataset"] in sets:
                    accuracies[run["dataset"]][run["seed"]] = run["accuracy"]
            measured = all(accuracies.values())
            row[title] = percent([statistics.mean(each.values()) for each in accuracies.values()] if measured else [])
        table.append(row)
    return table


def stages() -> list[dict[str, str]]:
    table = []
    for variant, title in STAGES.items():
        of = collections.defaultdict[str, list[float]](list)
        for run in runs("finetune_stages"):
            if (run["variant"], run["commit"]) == (variant, "2c7a0dd"):
                of[run["dataset"]].append(run["accuracy"])
        means = {name: percent(values) for name, values in of.items()}
        table.append({"classifier": title} | means | {"mean": percent([x for values in of.values() for x in values])})
    return table


def gpu() -> list[dict[str, str]]:
    train, eager, infer = (read(name) for name in ("gpu", "gpu_eager", "gpu_infer"))
    table = []
    for model in ("ViT-B/16", "ViT-L/16", "ViT-H/14"):
        training, inference = train[f"{model}, train, compiled"], infer[f"{model}, infer"]
        table.append(
            {
                "model": model,
                "training, images/s": f"{training['images_per_s']['vitlab']['median']:,.0f}",
                "MFU": f"{100 * training['mfu']:.0f} %",
                "times timm": times(training["ratio"].get("timm")),
                "training in eager mode, times timm": times(eager[f"{model}, train eager"]["ratio"]["timm"]),
                "inference, images/s": f"{inference['images_per_s']['vitlab']['median']:,.0f}",
                "inference, times timm": times(inference["ratio"]["timm"]),
            }
        )
    return table


def times(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else f"{ratio['median']:.2f}"


def cpu() -> list[dict[str, str]]:
    table = []
    for machine, (train, infer, _) in MACHINES.items():
        small, large = (result["ratio"] for result in read(train)["results"])
        plain = next(name for name in small if name.startswith("timm") and "fused" not in name)
        inference = [row["ratio"] for row in read(infer)["rows"] if row["model"] == "ViT-S/16"] if infer else []
        table.append(
            {
                "times as fast as": machine,
                "timm, small ViT, training": times(small["timm, fused attention"]),
                "timm without fused attention": times(small[plain]),
                "timm, S/16 (C: Ti/16), training": times(large["timm, fused attention"]),
                "timm, S/16, inference": times(inference[0]["timm"]) if inference else "-",
                "Hugging Face": times(inference[0].get("huggingface")) if inference else "-",
                "OpenVINO": times(inference[0].get("openvino")) if inference else "-",
            }
        )
    return table


def loader() -> list[dict[str, str]]:
    table = []
    for title, (size, kind) in LOADERS.items():
        row = {"loader": title}
        for machine, (_, _, name) in MACHINES.items():
            ratios = [result["ratio_to_timm"][kind] for result in read(name)["results"] if result["size"] == size]
            row[machine.partition(":")[0]] = times(ratios[0] if ratios else None)
        table.append(row)
    return table


def duplicates() -> list[dict[str, str]]:
    changes = {"JPEG 30": "JPEG quality 30", "half size": "resized to 50 %", "gray": "grey", "flipped": "flipped"}
    changes |= {"cropped by 4 %": "cropped by 4 %", "by 8 %": "cropped by 8 %"}
    table = []
    for name, result in read("dedup")["planted"].items():
        if name != "environment":
            found = {title: percent([result["by_change"][change]["found"]]) for title, change in changes.items()}
            table.append({"detected, %": name.rpartition("/")[2]} | found)
    return table


def studies() -> list[dict[str, Any]]:
    of = {verdict: collections.Counter[str]() for verdict in VERDICTS}
    for path in sorted(RECORDED.glob("*.json")):
        for claim in json.loads(path.read_text()).get("claims", ()):
            of[claim["verdict"]][path.stem] += 1
    return [
        {
            "verdict": verdict,
            "claims": count.total(),
            "studies": ", ".join(f"[{name}](studies/{name}/report.md) {n}" for name, n in count.items()),
        }
        for verdict, count in of.items()
    ]


def budgets() -> list[dict[str, Any]]:
    lines = (ROOT / "benchmarks" / "results" / "budget.jsonl").read_text().splitlines()
    groups: dict[tuple[int, str], list[dict[str, Any]]] = collections.defaultdict(list)
    for row in map(json.loads, lines):
        if "environment" not in row:
            groups[row["budget"], row["machine"]].append(row)
    return [
        {
            "budget, s": budget,
            "other work": "on all of its cores, from a random moment on" if machine == "busy" else "none",
            "jobs": len(rows),
            "shortest, s": round(min(row["seconds"] for row in rows)),
            "longest, s": round(max(row["seconds"] for row in rows)),
        }
        for (budget, machine), rows in groups.items()
    ]


def training() -> list[dict[str, str]]:
    rows = recorded("training", "Training")
    return [{name: row[name] for name in ("recipe", "minutes", "mean")} for row in rows if row["minutes"]]


def interruptions() -> list[dict[str, str]]:
    return [{name: row[name] for name in ("command", "kills")} for row in recorded("training", "Interrupted runs")]


class Claim(NamedTuple):
    """A section of the page."""

    heading: str
    command: str
    """Empty where the table has the commands."""
    meaning: str
    record: str
    """Of `docs/records`, with the heading's anchor."""
    table: Callable[[], list[dict[str, Any]]]


CLAIMS = (
    Claim(
        "It computes what Google's code, timm and Hugging Face compute",
        "python -m pytest tests/weights tests/train/test_optim.py",
        "Largest error over the rms of the outputs, in float32 and mostly with random weights: rounding, but for "
        "torchvision's resizing.",
        "equality.md#equality-with-googles-code",
        equality,
    ),
    Claim(
        "With little data or time, `finetune` is more accurate than peers at their defaults",
        "python benchmarks/finetune_peers.py DATA --checkpoints CHECKPOINTS --budget 120 --test-images 500",
        "Mean test accuracy in %, from the same ViT-S/14. The difference shrinks with time and images: in the last row "
        "AutoGluon is on a par. By epochs AutoGluon and timm have one seed of most sets.",
        "finetuning.md#a-classifier-in-two-minutes",
        peers,
    ),
    Claim(
        "`--budget` keeps its time, whatever else the machine does",
        "python benchmarks/budget.py DATA CHECKPOINT",
        "Seconds of the whole process, imports and report included, on four data sets.",
        "finetuning.md#a-budget-that-holds",
        budgets,
    ),
    Claim(
        "The average of head and fine-tuned model is better than either",
        "python benchmarks/finetune_stages.py DATA --checkpoint CHECKPOINT",
        "Test accuracy in %, three seeds. Fine-tuning helps photographs and harms digits; the average does not.",
        "finetuning.md#stages-of-fine-tuning",
        stages,
    ),
    Claim(
        "On an H200 it is as fast as timm, or faster",
        "python benchmarks/gpu.py --no-correct",
        "At 224 pixels in bfloat16, compiled but for one column. With larger models the difference becomes smaller.",
        "speed.md#training-speed-on-a-gpu",
        gpu,
    ),
    Claim(
        "On a CPU it trains faster than timm's default, and infers as fast",
        "python benchmarks/train_cpu.py && python benchmarks/peer_speed.py ViT-S/16",
        "Most of it is the choice of attention: without its fused one, timm trains the small ViT as fast on three of "
        "four machines. OpenVINO infers faster.",
        "speed.md#training-speed-on-a-cpu",
        cpu,
    ),
    Claim(
        "The loader reads about twice as many images as timm's default",
        "python benchmarks/loader.py shards:data/flowers102",
        "Images/s and core, times timm's, on four machines. Plain torchvision is as fast.",
        "speed.md#loader",
        loader,
    ),
    Claim(
        "A run that was killed ends with the same bytes",
        "",
        "Every file of the killed and resumed runs equals an uninterrupted run's.",
        "training.md#interrupted-runs",
        interruptions,
    ),
    Claim(
        "Near-duplicates are found after compression, mirroring and small crops",
        "python benchmarks/dedup.py",
        "Of 400 changed images of each set. CIFAR-10's own test images have near-duplicates in train.",
        "evaluation.md#near-duplicates",
        duplicates,
    ),
    Claim(
        "In small, more of the paper's claims hold than fail",
        "vitlab study NAME",
        "Ten studies of core-hours, by 95 % intervals over seeds. A verdict is about this scale, not the paper's.",
        "studies.md",
        studies,
    ),
    Claim(
        "Small ViTs train from scratch in minutes",
        "vitlab pretrain tiny-cifar10 --compile True",
        "Test accuracy over three seeds on two cores; `tiny-digits` was chosen with the test split in sight.",
        "training.md#training",
        training,
    ),
    Claim(
        "Pre-trained weights make the difference on few images",
        "vitlab probe CHECKPOINT --dataset shards:data/flowers102 --train-split trainval --kind linear",
        "Flowers-102 by a ViT-S/14 that was fine-tuned for saliency, so these are not DINOv2's own accuracies.",
        "evaluation.md#evaluation-of-a-checkpoint-flowers-102",
        lambda: recorded("evaluation", "Evaluation of a checkpoint: Flowers-102"),
    ),
)


def results_page() -> str:
    """The text of `docs/results.md`: a section for each claim."""
    page = """# Results

What was measured in November 2026: for each claim what it means, the command, a table. Machines, commits, spreads, and
what was not measured: [the records](records/index.md).
"""
    for claim in CLAIMS:
        command = f" `{claim.command}`." if claim.command else ""
        text = f"{claim.meaning}{command} [Record](records/{claim.record})."
        page += f"\n## {claim.heading}\n\n{text}\n\n{format_table(claim.table(), markdown=True)}\n"
    return page


if __name__ == "__main__":
    sys.stdout.write(results_page())
