"""A model trained by several ranks: the same as by one, sharded or not, and stopped together."""

import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_run import digits, largest_difference, records, run
from stopping import stop_at

from vitlab.config import DataConfig, OptimConfig, TrainConfig
from vitlab.errors import UserError
from vitlab.models import ViTConfig
from vitlab.models.resnet_config import ResNetBody
from vitlab.models.vit import build_model
from vitlab.recipes import tiny
from vitlab.train import checkpoint, loop
from vitlab.train.distributed import SINGLE, RankError, World, init_distributed
from vitlab.train.objectives import create_training_model
from vitlab.train.parallel import Parallel, local_shard, resolve_compile
from vitlab.train.stopping import NonFiniteError, StoppedError

pytestmark = pytest.mark.usefixtures("unchecked")  # each process would compile the checks anew
InRanks = Callable[[int, Callable[[], Any]], list[Any]]

MODEL = ViTConfig(image_size=16, patch_size=4, width=16, depth=2, heads=2, mlp_dim=32, num_classes=10)
CONFIG = TrainConfig(
    model=MODEL,
    data=DataConfig(name="digits", crop="inception", min_area=0.3, flip=False),
    optim=OptimConfig(lr=2e-3, weight_decay=0.05, warmup_steps=3, clip_norm=0.5),
    steps=8,
    batch_size=24,
    microbatch=7,
    average_decay=0.9,
    log_every=1,
    checkpoint_every=4,
    precision="float32",
)


def trained(config: TrainConfig, folder: Path, world: World = SINGLE, evaluate: Any = None) -> dict[str, np.ndarray]:
    return {name: t.numpy() for name, t in run(config, folder, evaluate, world=world).state_dict().items()}


def trained_by(count: int, config: TrainConfig, folder: Path, in_ranks: InRanks, **more: Any) -> list[Any]:
    def job() -> Any:
        with init_distributed() as world:
            return trained(config, folder, world, **more)

    digits()
    return in_ranks(count, job)


@pytest.mark.parametrize("fsdp", [False, True])
def test_two_processes_equal_one(fsdp: bool, tmp_path: Path, in_ranks: InRanks) -> None:
    """The loss to 1e-6 at the same global batch, with micro-batches, clipping, decay and average; each process ends
    with the same weights, and the checkpoint is one that a single process writes."""
    config = dataclasses.replace(CONFIG, fsdp=fsdp)
    one = trained(config, tmp_path / "one")
    first, second = trained_by(2, config, tmp_path / "two", in_ranks)
    for key, bound in (("loss", 2e-6), ("grad_norm", 1e-5), ("accuracy", 1e-7), ("epoch", 0)):
        assert records(tmp_path / "two", key) == pytest.approx(records(tmp_path / "one", key), abs=bound)
    assert largest_difference(first, second) == 0
    # Adam divides by the root of second moments that begin at zero, and blows rounding up
    assert largest_difference(first, one) < 2e-4
    last = f"checkpoints/step-{config.steps:09d}/state.safetensors"
    saved = [load_file(tmp_path / name / last) for name in ("one", "two")]
    assert {name: value.shape for name, value in saved[0].items()} == {n: v.shape for n, v in saved[1].items()}


@pytest.mark.parametrize("fsdp", [False, True])
def test_ranks_begin_with_the_weights_and_the_precision_of_rank_0(
    fsdp: bool, in_ranks: InRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever each of them has drawn and measured. Sharded, each holds half of every weight."""
    config = dataclasses.replace(CONFIG, precision="auto", fsdp=fsdp, steps=1)
    monkeypatch.setattr(
        checkpoint, "resolve_precision", lambda *_: "bfloat16" if os.environ.get("RANK") == "0" else "float32"
    )

    def job() -> tuple[str, int, dict[str, np.ndarray]]:
        with init_distributed() as world:
            model = create_training_model(config.model, None, torch.Generator().manual_seed(world.rank))
            state = checkpoint.create_state(config, model, torch.device("cpu"), world)
            local = sum(local_shard(tensor.detach()).numel() for tensor in model.parameters())
            return state.weights.precision, local, {n: t.detach().numpy() for n, t in state.tensors().items()}

    ranks = in_ranks(2, job)
    expected = create_training_model(config.model, None, torch.Generator().manual_seed(0)).state_dict()
    total = sum(weights.numel() for weights in expected.values())
    assert sum(local for _, local, _ in ranks) == (1 if fsdp else 2) * total
    for precision, local, tensors in ranks:
        assert precision == "bfloat16"
        assert local == pytest.approx(total / 2 if fsdp else total, rel=0.1)
        for name, weights in expected.items():
            np.testing.assert_array_equal(tensors[f"weights/{name}"], weights.numpy())


@pytest.mark.parametrize(("precision", "fsdp"), [("bfloat16", False), ("autocast", True)], ids=["DDP", "FSDP"])
def test_lower_precision_by_two(precision: Any, fsdp: bool, tmp_path: Path, in_ranks: InRanks) -> None:
    """Also with fixed positions, which are no weights, and convolutions in front."""
    model = dataclasses.replace(MODEL, image_size=32, patch_size=1, position="sincos2d", stem=ResNetBody((1,), 32))
    optim = OptimConfig(name="sgd", lr=0.05)
    config = dataclasses.replace(CONFIG, model=model, precision=precision, fsdp=fsdp, steps=2, optim=optim)
    trained(config, tmp_path / "one")
    first, second = trained_by(2, config, tmp_path / "two", in_ranks)
    assert largest_difference(first, second) == 0
    assert records(tmp_path / "two") == pytest.approx(records(tmp_path / "one"), rel=5e-3)


COUNT_GRAPHS = """
import functools, json, torch
from torch._dynamo.utils import counters
from vitlab.config import TrainConfig
from vitlab.models import ViTConfig
from vitlab.models.vit import build_model
from vitlab.train.distributed import init_distributed
from vitlab.train.parallel import Parallel

torch.compile = functools.partial(torch.compile, backend="aot_eager")  # no C++ compiler is needed to count
rows = []
with init_distributed() as world:
    for recompute, rate in ((False, 0.0), (True, 0.1)):
        torch.compiler.reset()
        counters.clear()
        config = ViTConfig(
            image_size=16, patch_size=4, width=16, depth=3, heads=2, mlp_dim=32, num_classes=10, stochastic_depth=rate
        )
        model = build_model(config, generator=torch.Generator().manual_seed(0)).train()
        run = TrainConfig(steps=1, fsdp=True, activation_checkpointing=recompute, compile=True)
        parallel = Parallel(model, world, torch.device("cpu"), run, "float32")
        for last in (False, True):
            with parallel.micro_step(last):
                parallel.forward(torch.zeros(4, 3, 16, 16)).sum().backward()
        rows.append([recompute, rate, counters["stats"]["unique_graphs"], dict(counters["frames"])])
print(json.dumps(rows))
"""


def test_long_runs_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU those of models with convolutions; where torch finds a compiler; a flag decides otherwise."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    vit = dataclasses.replace(CONFIG, model=ViTConfig(), batch_size=1000)
    hybrid = tiny.cifar10()
    monkeypatch.setenv("CXX", sys.executable)
    assert [resolve_compile(vit, gpu, steps) for steps in (100, 1000)] == [False, True]
    assert [resolve_compile(hybrid, cpu, steps) for steps in (1000, hybrid.total_steps(50_000))] == [False, True]
    assert not resolve_compile(vit, cpu, 1000)
    assert resolve_compile(dataclasses.replace(vit, compile=True), cpu, 1)
    assert not resolve_compile(dataclasses.replace(vit, compile=False), gpu, 1000)
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert not resolve_compile(vit, gpu, 1000)


@pytest.mark.slow  # compiles
def test_sharded_blocks_are_compiled(tmp_path: Path) -> None:
    """All by one graph; with stochastic depth by a second, for the first block's rate is 0. In processes that
    check no types, which would break the graphs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2"}
    environment |= {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", COUNT_GRAPHS],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    for process in started:
        out, _ = process.communicate(timeout=500)
        assert json.loads(out) == [
            [recompute, rate, graphs, {"total": graphs, "ok": graphs}]
            for recompute, rate, graphs in ((False, 0.0, 1), (True, 0.1, 2))
        ]


def test_continues_with_another_world_size(tmp_path: Path, in_ranks: InRanks, monkeypatch: Any) -> None:
    """1 process, then 2, then 1: as one alone all the way."""
    config = dataclasses.replace(CONFIG, fsdp=True, microbatch=None, checkpoint_every=100)
    one = trained(config, tmp_path / "one")
    signals = loop.stop_signals
    monkeypatch.setattr(loop, "stop_signals", stop_at(4))
    with pytest.raises(StoppedError, match="step 3/8"):
        trained(config, tmp_path / "three")
    monkeypatch.setattr(loop, "stop_signals", stop_at(3))
    errors = trained_by(2, config, tmp_path / "three", in_ranks)
    assert [type(error) for error in errors] == [StoppedError, StoppedError]
    assert "saved at step 5/8" in str(errors[0])
    monkeypatch.setattr(loop, "stop_signals", signals)
    three = trained(config, tmp_path / "three")
    assert largest_difference(three, one) < 2e-4
    assert records(tmp_path / "three") == pytest.approx(records(tmp_path / "one"), abs=1e-5)


def test_a_signal_to_one_stops_all_at_the_same_step(tmp_path: Path, in_ranks: InRanks, monkeypatch: Any) -> None:
    """And every process waits for the checkpoint: torchrun kills those that are left when one has ended."""
    save, calls = checkpoint.save_checkpoint, itertools.count(1)  # in each process its own

    def slow(*args: Any) -> Path:
        time.sleep(1)
        return save(*args)

    def evaluate(model: torch.nn.Module) -> dict[str, float]:
        if next(calls) == 3 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return {}

    monkeypatch.setattr(checkpoint, "save_checkpoint", slow)
    digits()

    def job() -> str:
        with init_distributed() as world:
            with pytest.raises(StoppedError) as stopped:
                trained(dataclasses.replace(CONFIG, eval_every=1), tmp_path / "run", world, evaluate)
            assert (tmp_path / "run/checkpoints/step-000000003/state.json").exists()
            return str(stopped.value)

    one, two = in_ranks(2, job)
    assert one == two
    assert "at step 3/8" in one


def test_not_finite_in_one_shard(tmp_path: Path, in_ranks: InRanks, monkeypatch: Any) -> None:
    """All stop at the step, and each keeps what it had of the batch."""
    batches = loop.train_batches

    def broken(*args: Any, first_example: int, rank: int, **options: Any) -> Any:
        for step, batch in enumerate(
            batches(*args, first_example=first_example, rank=rank, **options), first_example // CONFIG.batch_size
        ):
            if step == 4 and rank == 1:
                batch.images[0, 0, 0, 0] = torch.nan
            yield batch

    monkeypatch.setattr(loop, "train_batches", broken)
    errors = trained_by(2, CONFIG, tmp_path / "run", in_ranks)
    assert [type(error) for error in errors] == [NonFiniteError, NonFiniteError]
    saved = [load_file(tmp_path / f"run/nonfinite/step-000000005{end}.safetensors") for end in ("", ".rank-1")]
    assert [bool(batch["images"].isfinite().all()) for batch in saved] == [True, False]
    assert len(saved[0]["indices"]) == len(saved[1]["indices"]) == 12
    assert not set(saved[0]["indices"].tolist()) & set(saved[1]["indices"].tolist())


def test_a_folder_that_the_others_do_not_see(tmp_path: Path, in_ranks: InRanks) -> None:
    def job() -> None:
        with init_distributed() as world:
            trained(CONFIG, tmp_path / ("here" if world.is_rank_0 else "elsewhere"), world)

    digits()
    first, second = in_ranks(2, job)
    assert (type(first), type(second)) == (RankError, UserError)
    assert "rank 1 of 2" in str(second)


def test_activation_checkpointing_saves_memory() -> None:
    """That it changes no gradient is tested with the models."""
    saved = []
    for recompute in (False, True):
        model = build_model(dataclasses.replace(MODEL, depth=6))
        config = dataclasses.replace(CONFIG, activation_checkpointing=recompute)
        parallel = Parallel(model, SINGLE, torch.device("cpu"), config, "float32")
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):  # noqa: B023
            parallel.forward(torch.zeros(4, 3, 16, 16))
        saved.append(sum(sizes))
    assert saved[1] < 0.3 * saved[0]
