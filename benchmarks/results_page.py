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
    "A: AMD EPYC, bfloat16": ("train_cpu", "infer_cpu_packed", "loader", "inference_avx512"),
    "B: Intel Xeon": ("train_cpu_intel", "", "loader_intel", ""),
    "C: AMD EPYC, AVX2 only, float32": ("train_cpu_avx2", "infer_cpu_avx2", "loader_avx2", "inference_avx2"),
    "D: Intel Xeon, AMX": ("train_cpu_amx", "infer_cpu_amx", "loader_amx", ""),
}
"""Processor -> its files of `benchmarks/results`: training, inference beside other libraries, loader, inference beside
runtimes."""
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
        "the same, others with a search": (("cifar10:100", "digits:10"), 1, (600,), 500, "finetune_peers"),
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


def layers() -> list[dict[str, Any]]:
    """Mean test accuracy of the head on the last block, on the chosen one, and on the best by the test images."""
    of = collections.defaultdict[str, list[list[float]]](list)
    for run in runs("layers"):
        tested = {(row["depth"], row["pool"]): row["test"] for row in run["candidates"]}
        chosen = tested[run["chosen"]["depth"], run["chosen"]["pool"]]
        of[run["dataset"]].append([run["candidates"][-1]["test"], chosen, max(tested.values())])
    of = {**of, "mean": [list(column) for name in of.values() for column in name]}
    titles = ("last block, class token", "chosen by leave-one-out loss", "best of twelve on the test images")
    return [
        {"data": name} | dict(zip(titles, map(percent, zip(*rows, strict=True)), strict=True))
        for name, rows in of.items()
    ]


def gpu() -> list[dict[str, str]]:
    train, eager, infer = (read(name) for name in ("gpu", "gpu_eager", "gpu_infer"))
    table = []
    for model in ("ViT-B/16", "ViT-L/16", "ViT-H/14"):
        training, inference = train[f"{model}, train, compiled"], infer[f"{model}, infer"]
        table.append(
            {
                "model": model,
                "training, images/s": f"{training['images_per_s']['vitlab']['median']:,.0f}",
                "MFU": f"{100 * training['mfu']:.0f}%",
                "relative to timm": times(training["ratio"].get("timm")),
                "in eager mode, relative to timm": times(eager[f"{model}, train eager"]["ratio"]["timm"]),
                "inference, images/s": f"{inference['images_per_s']['vitlab']['median']:,.0f}",
                "inference, relative to timm": times(inference["ratio"]["timm"]),
            }
        )
    return table


def times(ratio: dict[str, Any] | None) -> str:
    return "-" if ratio is None else f"{ratio['median']:.2f}"


def cpu() -> list[dict[str, str]]:
    table = []
    for machine, (train, infer, _, runtimes) in MACHINES.items():
        small, large = (result["ratio"] for result in read(train)["results"])
        plain = next(name for name in small if name.startswith("timm") and "fused" not in name)
        runtime = read(runtimes)["results"][0]["ratio"] if runtimes else {}
        openvino = [ratio for name, ratio in runtime.items() if name.startswith("openvino")]
        measured = read(infer) if infer else {}
        rows = measured.get("results") or measured.get("rows", [])  # of peer_speed.py, and of an earlier form of it
        inference = [row["ratio"] for row in rows if row["model"] == "ViT-S/16"]
        table.append(
            {
                "speed relative to": machine,
                "timm, training, small ViT": times(small["timm, fused attention"]),
                "the same, plain attention": times(small[plain]),
                "timm, training, S/16": times(large["timm, fused attention"]),
                "timm, inference, S/16": times(inference[0]["timm"]) if inference else "-",
                "Hugging Face": times(inference[0].get("huggingface")) if inference else "-",
                "OpenVINO": times(min(openvino, key=lambda ratio: ratio["median"], default=None)),
            }
        )
    return table


def loader() -> list[dict[str, str]]:
    table = []
    for title, (size, kind) in LOADERS.items():
        row = {"loader": title}
        for machine, (_, _, name, _) in MACHINES.items():
            ratios = [result["ratio_to_timm"][kind] for result in read(name)["results"] if result["size"] == size]
            row[machine.partition(":")[0]] = times(ratios[0] if ratios else None)
        table.append(row)
    return table


def duplicates() -> list[dict[str, str]]:
    changes = {"JPEG 30": "JPEG quality 30", "half size": "resized to 50 %", "gray": "grey", "flipped": "flipped"}
    changes |= {"cropped by 4%": "cropped by 4 %", "by 8%": "cropped by 8 %"}
    table = []
    for name, result in read("dedup")["planted"].items():
        if name != "environment":
            found = {title: percent([result["by_change"][change]["found"]]) for title, change in changes.items()}
            table.append({"detected, %": name.rpartition("/")[2]} | found)
    return table


def claims() -> list[dict[str, str]]:
    """Every claim of the recorded studies, with the name of its study."""
    return [
        {"study": path.stem, **claim}
        for path in sorted(RECORDED.glob("*.json"))
        for claim in json.loads(path.read_text()).get("claims", ())
    ]


def studies() -> list[dict[str, Any]]:
    count = collections.Counter(claim["verdict"] for claim in claims())
    return [{"verdict": verdict, "claims": count[verdict]} for verdict in VERDICTS]


def contradicted() -> str:
    """The list of the contradicted claims."""
    lines = [
        f"- [{claim['study']}](studies/{claim['study']}/report.md): {claim['claim']} {claim['points']}"
        for claim in claims()
        if claim["verdict"] == "contradicted"
    ]
    return "\n".join(["Contradicted, with the difference in points:", "", *lines])


def budgets() -> list[dict[str, Any]]:
    """Without the busy jobs to which the other work came in the last 30 seconds or never."""
    lines = (ROOT / "benchmarks" / "results" / "budget.jsonl").read_text().splitlines()
    groups: dict[tuple[int, int, str], list[float]] = collections.defaultdict(list)
    cores = 0
    for row in map(json.loads, lines):
        if "environment" in row:
            cores = row["environment"]["cores"]
        elif row["machine"] == "idle" or row["moment"] < row["seconds"] - 30:
            groups[row["budget"], cores, row["machine"]].append(row["seconds"])
    return [
        {
            "budget, s": budget,
            "cores": cores,
            "other work": "a process per core, from a random moment on" if machine == "busy" else "none",
            "jobs": len(seconds),
            "shortest, s": round(min(seconds)),
            "longest, s": round(max(seconds)),
        }
        for (budget, cores, machine), seconds in groups.items()
    ]


def training() -> list[dict[str, str]]:
    rows = recorded("training", "Training")
    return [{name: row[name] for name in ("recipe", "model", "minutes", "mean")} for row in rows if row["minutes"]]


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
    below: Callable[[], str] | None = None
    """Text below the table."""


CLAIMS = (
    Claim(
        "It computes what Google's code, timm and Hugging Face compute",
        "python -m pytest tests/weights tests/train/test_optim.py",
        "Largest error relative to the root mean square (rms) of the outputs, in float32 and mostly with random "
        "weights. All of it is rounding, except torchvision's resizing.",
        "equality.md#equality-with-googles-code",
        equality,
    ),
    Claim(
        "With little data or time, `finetune` is more accurate than other libraries at their defaults",
        "python benchmarks/finetune_peers.py DATA --checkpoints CHECKPOINTS --budget 120 --test-images 500",
        "Mean test accuracy in %, from the same ViT-S/14. The difference shrinks with time and images: in the last row "
        "AutoGluon is on par. In the rows by epochs, AutoGluon and timm have one seed for most sets.",
        "finetuning.md#a-classifier-in-two-minutes",
        peers,
    ),
    Claim(
        "`--budget` keeps its time, also on a busy machine",
        "python benchmarks/budget.py DATA S14",
        "Seconds of the whole process, imports and report included, on four data sets. A job with more test than "
        "training images may end late, because the test is never shortened.",
        "finetuning.md#a-budget-that-holds",
        budgets,
    ),
    Claim(
        "The average of head and fine-tuned model is better than either",
        "python benchmarks/finetune_stages.py DATA --checkpoint S14",
        "Test accuracy in %, three seeds. Fine-tuning helps on photographs and harms on digits; the average is "
        "the best on each, or close to it.",
        "finetuning.md#stages-of-fine-tuning",
        stages,
    ),
    Claim(
        "The block that represents images best is found without training, and without test images",
        "python benchmarks/layers.py DATA S14",
        "Test accuracy in % of the least-squares head on a frozen ViT-S/14 at 112 pixels, three seeds. These weights "
        "were fine-tuned for saliency, which harms their last blocks; another checkpoint may gain less.",
        "finetuning.md#which-block-which-pooling",
        layers,
    ),
    Claim(
        "On an H200 it is as fast as timm, or faster",
        "python benchmarks/gpu.py --no-correct",
        "Training and inference at 224 pixels in bfloat16, compiled except for one column. With larger models the "
        "difference is smaller.",
        "speed.md#training-speed-on-a-gpu",
        gpu,
    ),
    Claim(
        "On a CPU it is as fast as timm, or faster, in training and at inference",
        "python benchmarks/train_cpu.py && python benchmarks/peer_speed.py ViT-S/16",
        "In training most of the difference is the attention kernel: with plain attention, timm is as fast on three of "
        "four [machines](records/index.md#machines). At inference it is packed linear layers, measured on A alone. "
        "OpenVINO is a little faster. On C, Ti/16 was trained, not S/16.",
        "speed.md#training-speed-on-a-cpu",
        cpu,
    ),
    Claim(
        "The loader reads about twice as many images as timm's default",
        "python benchmarks/loader.py shards:data/flowers102",
        "Images/s per core, relative to timm, on four [machines](records/index.md#machines). Plain torchvision is as "
        "fast.",
        "speed.md#loader",
        loader,
    ),
    Claim(
        "A run that was killed ends with the same bytes",
        "",
        "Every file of the killed and resumed runs equals that of an uninterrupted run.",
        "training.md#interrupted-runs",
        interruptions,
    ),
    Claim(
        "Near-duplicates are found after compression, mirroring and small crops",
        "python benchmarks/dedup.py",
        "Share of 400 changed images of each set. 4.3% of CIFAR-10's own test images have near-duplicates in train.",
        "evaluation.md#near-duplicates",
        duplicates,
    ),
    Claim(
        "At small scale, more of the paper's claims hold than fail",
        "vitlab study NAME",
        "Ten studies, of Sec. 3.2, 4.3, 4.4, 4.6 and App. D, of one to four core-hours each, by 95% intervals over "
        "seeds. A verdict is about this scale, not the paper's.",
        "studies.md",
        studies,
        contradicted,
    ),
    Claim(
        "Small models train from scratch in minutes",
        "OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m vitlab pretrain tiny-cifar10 --compile True",
        "Test accuracy over three seeds. A hybrid is a small ResNet and one Transformer block, and was trained by two "
        "processes, one core each. `tiny-digits` ran on one core and was chosen with the test split in view.",
        "training.md#training",
        training,
    ),
    Claim(
        "Pre-trained weights make the difference on few images",
        "vitlab probe S14 --dataset shards:data/flowers102 --train-split trainval --kind linear",
        "Test accuracy on Flowers-102 with a ViT-S/14 that was fine-tuned for saliency, so these are not DINOv2's own "
        "accuracies.",
        "evaluation.md#evaluation-of-a-checkpoint-flowers-102",
        lambda: recorded("evaluation", "Evaluation of a checkpoint: Flowers-102"),
    ),
)


def results_page() -> str:
    """The text of `docs/results.md`: a section for each claim."""
    page = """# Results

Measured in November 2026. Each claim has its meaning, the command and a table. [The records](records/index.md) have the
machines, commits and spreads, how the `S14`, DATA and CHECKPOINTS of the commands are made, and what was not measured.
"""
    for claim in CLAIMS:
        command = f" `{claim.command}`." if claim.command else ""
        text = f"{claim.meaning}{command} [Record](records/{claim.record})."
        page += f"\n## {claim.heading}\n\n{text}\n\n{format_table(claim.table(), markdown=True)}\n"
        page += f"\n{claim.below()}\n" if claim.below else ""
    return page


if __name__ == "__main__":
    sys.stdout.write(results_page())
