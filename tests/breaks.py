"""Breaks the source on purpose, one place at a time, and reports whether the tests notice (not collected by pytest).

python tests/breaks.py             every break: caught or missed; exit code 1 if one is missed or does not apply
python tests/breaks.py --only 3 7  these alone
python tests/breaks.py --unbroken  the same tests without any break: all of them must pass
python tests/breaks.py --list      the table

Each break is what a slip could be: nothing crashes, something is computed or allowed that should not be. It is made in
a copy of the project, where the tests named with it are run. Where code moves or is rewritten, its row follows: the old
text has to stand in the file exactly once.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
COPIED = ("src", "tests", "docs", "pyproject.toml", "README.md", "Makefile")
SECONDS = 600

TABLE = r"""
models/attention.py: Attention in training divides its logits by Dh instead of by its root.
- MatmulAttention.apply(q * q.shape[-1] ** -0.5, k.contiguous()
+ MatmulAttention.apply(q * q.shape[-1] ** -1, k.contiguous()
pytest models/test_attention.py

models/position.py: Position embeddings are interpolated with borders aligned, where Google's code aligns the corners.
- mode="bilinear", align_corners=True
+ mode="bilinear", align_corners=False
pytest models/test_position.py -k interpolation

models/resnet_config.py: Convolutions of hybrids put the odd row of zeros before the map, and TensorFlow after it.
- return total // 2, total - total // 2
+ return total - total // 2, total // 2
pytest models/test_resnet.py -k tensorflow

models/count.py: The product of attention with the values is missing from the count of operations, and so from MFU.
- encoder = config.depth * (t * dense + 2 * t * t * d)
+ encoder = config.depth * (t * dense + t * t * d)
pytest models/test_count.py -k operations

weights/google_layout.py: Queries and keys of Google's files change places.
- enumerate(("query", "key", "value"))
+ enumerate(("key", "query", "value"))
pytest weights/test_google.py -k googles_code

weights/timm_layout.py: In timm's attention pooling keys and values come before the queries.
- {name.replace(".qkv.", ".q."): 1, name.replace(".qkv.", ".kv."): 2}
+ {name.replace(".qkv.", ".kv."): 2, name.replace(".qkv.", ".q."): 1}
pytest weights/test_timm.py -k outputs

weights/huggingface_layout.py: The two LayerNorms of a block of Hugging Face's change places.
- "norm1": "layernorm_before",
-     "attention.out": "attention.output.dense",
-     "norm2": "layernorm_after",
+ "norm1": "layernorm_after",
+     "attention.out": "attention.output.dense",
+     "norm2": "layernorm_before",
pytest weights/test_huggingface.py -k their_code

weights/adapt.py: The mean of ImageNet is folded into the patch embedding with the wrong sign.
- ((0.5 - center) / scale)
+ ((center - 0.5) / scale)
pytest weights/test_timm.py -k fold

weights/folder.py: Weights are loaded although a byte of them has changed.
- if sha256(weights) != settings["sha256"]:
+ if not settings["sha256"]:
pytest weights/test_folder.py

weights/detect.py: A pickle is known by its name alone.
- return path.name.endswith(PICKLED) or begins or _is_zipped_pickle(path)
+ return path.name.endswith(PICKLED)
pytest weights/test_detect.py -k pickle

data/vtab/tasks.py: The test part of a VTAB task that is cut from train begins with its training images.
- slice(start, start + count)
+ slice(0, start + count)
pytest data/vtab/test_tasks.py

data/remote.py: Remote shards come in the same order in every epoch.
- philox(seed, Stream.REMOTE_ORDER, epoch)
+ philox(seed, Stream.REMOTE_ORDER)
pytest data/test_remote.py -k order

data/downloads.py: A shard is taken although its SHA-256 is not that of the index.
- if (actual := _digest(part, digest)) != digest:
+ if (actual := _digest(part, digest)) and not digest:
pytest data/test_downloads.py

data/dedup.py: Mirrored copies are not among the duplicates.
- np.ascontiguousarray(thumbs[:, :, ::-1])
+ np.ascontiguousarray(thumbs)
pytest data/test_dedup.py

data/imagenet.py: ObjectNet's classes are numbered by the lines of a file, not by ImageNet's order.
- classes_of_name[lines[line].strip()].append(int(number))
+ classes_of_name[lines[line].strip()].append(line)
pytest data/test_imagenet.py -k objectnet

data/imagenet.py: Of ImageNet-ReaL's labels only the first counts as right.
- sets = Labels.of_lists([labels for _, labels in images])
+ sets = Labels.of_lists([labels[:1] for _, labels in images])
pytest data/test_imagenet.py -k real

data/registry.py: A folder without splits is trained on as a whole, test images included.
- return stored.take(np.concatenate([indices[split] for split in part.chosen]))
+ return stored if len(part.chosen) > 1 else stored.take(indices[part.chosen[0]])
pytest data/test_registry.py data/test_folder.py

data/transforms.py: Google's test images are shrunk with antialiasing.
- F.interpolate(planes, full, mode="bilinear", align_corners=False, antialias=False)
+ F.interpolate(planes, full, mode="bilinear", align_corners=False, antialias=True)
pytest data/test_transforms.py

train/optim.py: The warm-up is one step ahead.
- rate *= min(1.0, step / warmup)
+ rate *= min(1.0, (step + 1) / warmup)
pytest train/test_optim.py -k rate

train/optim.py: Class token and position embeddings decay.
- (parameter.ndim >= 2 and name.rpartition(".")[2] == "weight")
+ parameter.ndim >= 2
pytest train/test_optim.py -k kernels

train/step.py: Of several processes the gradient is divided by their number twice.
- scale = count * world.world_size / num_images
+ scale = count / num_images
pytest train/test_parallel.py -k two_processes_equal_one

train/loop.py: A continued run begins again with the first examples.
- first_example=first_step * self.config.batch_size
+ first_example=0
pytest train/test_loop.py -k crash_leaves

train/checkpoint.py: A continued run begins its Polyak average anew.
- for targets, saved in ((masters, sections["weights"]), (average, sections["average"])):
+ for targets, saved in ((masters, sections["weights"]), ({}, {})):
pytest train/test_checkpoint.py -k restored

train/masking.py: Corrupted patches are 90% masked and never replaced, instead of 80% and 10%.
- torch.where(kind < masking.masked, MASK, sources)
+ torch.where(kind < masking.masked + masking.replaced, MASK, sources)
pytest train/test_masking.py -k kinds

train/checkpoint.py: A run continues from a checkpoint of which a byte has changed.
- if sha256(path / TENSORS) != record["sha256"]:
+ if not sha256(path / TENSORS):
pytest train/test_checkpoint.py

train/parallel.py: Of a model sharded by FSDP only the shard of rank 0 is saved.
- return tensor.full_tensor() if is_sharded(tensor) else tensor
+ return tensor.to_local() if is_sharded(tensor) else tensor
pytest train/test_parallel.py -k two_processes_equal_one

recipes/pretrain.py: Table 3's learning rate of ViT-L/16 on JFT is another.
- "ViT-L/16": (14.0, 4e-4),
+ "ViT-L/16": (14.0, 6e-4),
pytest recipes/test_pretrain.py

recipes/rules.py: BiT's rule takes half the steps for exactly 500,000 images.
- 10_000 if examples < 500_000 else 20_000
+ 10_000 if examples <= 500_000 else 20_000
pytest recipes/test_rules.py -k hyperrule

evaluation/accuracy.py: Top-5 accuracy is that of six answers.
- logits.topk(min(5, logits.shape[1]), dim=1)
+ logits.topk(min(6, logits.shape[1]), dim=1)
pytest evaluation/test_accuracy.py -k figures

evaluation/fewshot.py: The constant feature of few-shot regression is 1 in training and 100 in testing.
- np.full(len(x), BIAS)])
+ np.ones(len(x))])
pytest evaluation/test_fewshot.py -k scores

inspection/attention.py: The rollout leaves out the identity of the residual connection.
- rows = (rows + mixed) / 2 if residual else mixed
+ rows = mixed
pytest inspection/test_attention.py -k rollout

inspection/attention.py: Attention distance is in patches, not in pixels.
- dim=1).double() * patch_size
+ dim=1).double()
pytest inspection/test_attention.py -k distance

inspection/page.py: A name with a quotation mark can end an attribute of a report's page and begin another.
- autoescape=True,
+ autoescape=False,
pytest inspection/test_page.py -k escaped

studies/statistics.py: A study claims to show a difference whose interval holds zero.
- return "supported" if self.low > 0 else "contradicted" if self.high < relevant else "inconclusive"
+ return "supported" if self.mean > 0 else "contradicted" if self.high < relevant else "inconclusive"
pytest studies/test_statistics.py -k interval

train/loop.py: The learning rate of a run that its time budget has shortened does not reach the end of its decay.
- lr = learning_rate(config.optim, run.schedule.position(state.step), run.schedule.planned)
+ lr = learning_rate(config.optim, state.step, run.schedule.planned)
pytest train/test_loop.py -k resumed_run_keeps

finetuning/job.py: A resumed job decides anew what its time budget leaves out.
- self.decisions = dict(saved.get("decisions", {}))
+ self.decisions = {}
pytest finetuning/test_job.py -k sweep_is_the_final

cost/plan.py: The hours of a plan are the same however many devices share the work.
- seconds = length["exaflops"] * 1e18 / (flops_per_s * count)
+ seconds = length["exaflops"] * 1e18 / flops_per_s
pytest cost/test_plan.py -k hours

cost/doctor.py: A container without shared memory, in which workers will die, is no problem.
- if shared is not None and shared < 1:
+ if shared is not None and shared < 0:
pytest cost/test_doctor.py -k problem

app/server.py: The web page answers requests from pages of other origins.
- allowed = host in hosts and self.headers.get("Origin") in (None, f"http://{host}")
+ allowed = host in hosts
pytest app/test_server.py -k origins

app/server.py: The web page listens to the whole network.
- HOST = "127.0.0.1"
+ HOST = "0.0.0.0"
pytest app/test_server.py -k loopback

io.py: What a living process is writing is taken for the leftover of a killed one, and removed.
- if new.exists() and not held:
+ if not new.exists() and not held:
pytest test_io.py -k written

cli.py: A run that SIGTERM has stopped and that has been saved exits as one that failed.
-         return error.exit_code
+         return 1
pytest test_cli.py -k exit_codes
"""


class Break(NamedTuple):
    """In `file`, below src/vitlab, `old` becomes `new`; `what` goes wrong then, and `tests` should notice."""

    file: str
    old: str
    new: str
    what: str
    tests: str


def read_table(table: str) -> list["Break"]:
    """The rows of a table: file and sentence, `- ` old text, `+ ` new text, and the arguments of pytest."""
    breaks = []
    for block in table.strip().split("\n\n"):
        first, *lines, last = block.splitlines()
        file, _, what = first.partition(": ")
        old, new = ("\n".join(line[2:] for line in lines if line.startswith(sign)) for sign in ("- ", "+ "))
        breaks.append(Break(file, old, new, what, last.removeprefix("pytest ")))
    return breaks


BREAKS = read_table(TABLE)


def applies(row: Break, root: Path = ROOT) -> bool:
    path = root / "src" / "vitlab" / row.file
    return path.is_file() and path.read_text().count(row.old) == 1


def copy_project(folder: Path) -> Path:
    """A copy of what the tests need; files that stand beside the project stand beside the copy too."""
    copy = folder / "project"
    copy.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, copy / name)
    if (shared := ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(shared)
    return copy


def run_tests(tests: str, copy: Path, wrap: Sequence[str]) -> tuple[int, str]:
    """pytest's exit code, and the first test that failed (or its last line)."""
    words = [f"tests/{word}" if word.endswith(".py") else word for word in tests.split()]
    command = [*wrap, sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *words]
    environment = os.environ | {"PYTHONPATH": str(copy / "src")}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end after {SECONDS} s"
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]]
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return done.returncode, failed[1] if failed else lines[-1]


def attempt(row: Break, copy: Path, broken: bool, wrap: Sequence[str]) -> tuple[bool, str]:
    """Whether all is as it should be, and how it is."""
    if not applies(row):
        return False, "does not apply"
    file = copy / "src" / "vitlab" / row.file
    try:
        if broken:
            file.write_text(file.read_text().replace(row.old, row.new))
        code, output = run_tests(row.tests, copy, wrap)
    finally:
        shutil.copy2(ROOT / "src" / "vitlab" / row.file, file)
    if code not in (0, 1):  # nothing was tested
        return False, f"error: {output}"
    word = ("caught" if code else "MISSED") if broken else ("FAILS" if code else "passes")
    return code == int(broken), f"{word}: {output}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", metavar="N")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--unbroken", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--wrap", default="", help="a command to put before each call of pytest")
    arguments = parser.parse_args()
    rows = [(n, row) for n, row in enumerate(BREAKS, 1) if arguments.only is None or n in arguments.only]
    if arguments.list:
        for n, row in rows:
            print(f"{n:2}  {'' if applies(row) else 'DOES NOT APPLY '}{row.file}: {row.what} [{row.tests}]")
        return
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        copies: Queue[Path] = Queue()
        for job in range(arguments.jobs):
            copies.put(copy_project(Path(folder) / str(job)))

        def work(numbered: tuple[int, Break]) -> bool:
            copy = copies.get()
            try:
                good, output = attempt(numbered[1], copy, not arguments.unbroken, arguments.wrap.split())
            finally:
                copies.put(copy)
            print(f"{numbered[0]:2}  {numbered[1].file}: {output}", flush=True)
            return good

        good = list(pool.map(work, rows))
    print(f"{sum(good)} of {len(good)} as they should be")
    sys.exit(0 if all(good) else 1)


if __name__ == "__main__":
    main()
