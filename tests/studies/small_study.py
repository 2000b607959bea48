"""A study of seconds on the handwritten digits, to be run, killed and compared.

python tests/studies/small_study.py --out DIR [--processes 2]        # run it, or continue it
python tests/studies/small_study.py --out DIR --kills 20 [--seed 0]  # kill it again and again, and compare
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from vitlab.config import DataConfig, FewShotConfig, FinetuneConfig, OptimConfig, TrainConfig
from vitlab.models.config import ViTConfig
from vitlab.studies.spec import Chart, Claim, Scale, Study, StudyRun, changed, difference, percent

RATES = (1e-3, 1e-2)
FILES = ("report.md", "study.json", "figure.png", "figure.svg")
FIRST: dict[str, str | float] = {"what": "digits 0 to 2"}


def variants(scale: Scale, steps: int = 12) -> list[StudyRun]:
    """Two rates with few-shot accuracy while training, and a fine-tuning of the faster one."""
    data = DataConfig(
        name="digits", train_split="trainval", eval_split="test", classes=(0, 1, 2), crop="pad", flip=False
    )
    base = TrainConfig(
        model=ViTConfig(image_size=8, patch_size=4, width=16, depth=1, heads=2, mlp_dim=16, pool="gap", dropout=0.1),
        data=data,
        optim=OptimConfig(clip_norm=1.0),
        fewshot=FewShotConfig(classes=(5, 6, 7), test_split="test", shots=(2,), seeds=1),
        steps=steps,
        batch_size=16,
        log_every=3,
        eval_every=6,
        checkpoint_every=4,
    )
    tuned = FinetuneConfig(
        model=ViTConfig(image_size=16),
        data=changed(data, classes=(5, 6, 7)),
        optim=OptimConfig(name="sgd", lr=0.03),
        steps=steps,
        batch_size=16,
        log_every=3,
        checkpoint_every=4,
    )
    runs = [StudyRun(f"rate-{rate:g}", changed(base, optim={"lr": rate}), FIRST | {"rate": rate}) for rate in RATES]
    labels = {"rate": RATES[1], "what": "digits 5 to 7"}
    return [*runs, StudyRun("tuned", tuned, labels, init_from=f"rate-{RATES[1]:g}")]


SMALL = Study(
    name="small",
    source="nothing",
    question="Does the runner work?",
    variants=variants,
    summary="Digits at 8 pixels.",
    rows=("what", "rate"),
    columns={"rate": "rate", "accuracy": percent("accuracy"), "2-shot": percent("fewshot_2shot", **FIRST)},
    claims=(
        Claim(
            "The larger rate is ahead.",
            "nothing (this is not a study of the paper)",
            difference("accuracy", FIRST | {"rate": RATES[1]}, FIRST | {"rate": RATES[0]}),
        ),
    ),
    charts=(Chart("Accuracy over rate", "accuracy", "accuracy", x="rate", lines="what", log_x=True),),
    seeds=1,
)


def contents(out: Path) -> dict[str, bytes]:
    """The files of a report, and what every run computed."""
    paths = [out / name for name in FILES] + sorted(out.glob("points/*/metrics.jsonl"))
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in paths}


def start(out: Path, processes: int) -> subprocess.Popen[str]:
    """The study in a process that starts workers."""
    command = [sys.executable, __file__, "--out", str(out), "--processes", str(processes)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def holders(out: Path) -> set[int]:
    """Processes that have ever held a run."""
    return {int(text) for path in out.glob("points/.claims/*") if (text := path.read_text())}


def steps_done(out: Path) -> int:
    """Records of all runs."""
    return sum(path.read_bytes().count(b"\n") for path in out.glob("points/*/metrics.jsonl"))


def kill_at(out: Path, processes: int, records: int, moment: float) -> bool:
    """Kills a run of the study `moment` seconds after its runs have this many records; whether it was still alive."""
    run = start(out, processes)
    while run.poll() is None and steps_done(out) < records:
        time.sleep(0.005)
    time.sleep(moment)
    alive = run.poll() is None
    run.send_signal(signal.SIGKILL)
    run.communicate()
    return alive


def have_ended(pids: set[int], seconds: float) -> bool:
    """Whether all these processes end within this time."""
    until = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.kills is None:
        from vitlab.studies.runner import plan, run_study

        run_study(SMALL, plan(SMALL, "small", args.out), processes=args.processes, device="cpu")
        return
    quiet, killed, rng = args.out / "quiet", args.out / "killed", random.Random(args.seed)
    assert start(quiet, args.processes).wait() == 0
    records, kills = steps_done(quiet), 0
    for number in range(args.kills):
        kills += kill_at(killed, args.processes, round(records * number / args.kills), rng.uniform(0, 1.0))
        assert have_ended(holders(killed), 30), "a process outlived the study that started it"
    assert start(killed, args.processes).wait() == 0
    same = contents(quiet) == contents(killed)
    ends = f"{len(contents(quiet))} files {'are the same' if same else 'DIFFER'}"
    sys.stdout.write(f"{kills} kills of {args.kills} met it alive; {ends}\n")
    sys.exit(not same)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
