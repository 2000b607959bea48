"""Several processes at one job: which one this is, what they tell each other, one model trained by all of them, and
ending all when one fails.

The only file that imports torch.distributed. The processes are started by `torchrun`; each finds its number in the
environment and meets the others through torchrun's key-value store.
"""

import contextlib
import datetime
import functools
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from vitlab.errors import UserError
from vitlab.models.encoder import Block, Branch
from vitlab.models.resnet import Bottleneck
from vitlab.train.compiled import CompileCache, compile_cache, stops_at_once
from vitlab.train.float8 import to_float8
from vitlab.train.precision import Precision

Plain = TypeVar("Plain")
FAILED = "vitlab/failed"  # the key under which a failing process leaves its last words
PATIENCE = 0.02  # seconds of waiting between two looks whether another process has failed
GRACE = 1.0  # seconds for what a process has sent before it failed
FAREWELL = 5.0  # seconds that the first process waits for the others when all ends
LONGEST = datetime.timedelta(days=30)  # of a wait for another that is alive: it may be downloading


class RankError(RuntimeError):
    """Another process of this job has failed, or is gone."""


@dataclass(eq=False)
class World:
    """This process among `world_size`; without a store it is alone."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Number among the processes of this machine."""
    store: Store | None = None
    waiting: dist.ProcessGroup | None = None
    """All processes, where they wait for each other however long it takes; a device's exchange may not take as long."""
    shared: int = 0
    """How often something was shared."""

    def device(self, asked: str) -> str:
        """The device of this process: `auto` and `cuda` stand for one GPU each, in order, where there are GPUs."""
        if self.world_size > 1 and asked in ("auto", "cuda") and torch.cuda.is_available():
            return f"cuda:{self.local_rank}"
        return asked

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the process that writes and speaks for all."""
        return self.rank == 0

    def check_peers(self) -> None:
        """Raises RankError if another process has failed. Waits for nobody."""
        if self.store is None:
            return
        with _the_store_there():
            failed = self.store.get(FAILED).decode() if self.store.check([FAILED]) else None
        if failed is not None:
            raise RankError(f"this process ({self.rank} of {self.world_size}) ends, for another failed: {failed}")

    def check_batch_size(self, batch_size: int) -> None:
        """Raises ValueError for a batch that the processes cannot share equally; asked before anything is written."""
        if batch_size % self.world_size:
            raise UserError(
                f"batch_size={batch_size} is that of all {self.world_size} processes together: give a multiple of "
                f"{self.world_size}, or start another number of processes."
            )

    def broadcast_object(self, make: Callable[[], Plain]) -> Plain:
        """What the first process makes, as plain data, on every process; all wait for all."""
        if self.store is None:
            return make()
        self.shared += 1
        place = f"vitlab/shared/{self.shared}"
        made = json.dumps(make()) if self.is_rank_0 else ""
        with _the_store_there():
            if self.is_rank_0:
                self.store.set(place, made)
            self.all_reduce(0)
            return json.loads(self.store.get(place))

    @contextlib.contextmanager
    def rank_0_first(self) -> Iterator[None]:
        """The others begin what is within when the first has done it: it downloads, and they find what they need."""
        if not self.is_rank_0:
            self.broadcast_object(lambda: None)
        yield
        if self.is_rank_0:
            self.broadcast_object(lambda: None)

    def all_reduce(self, *numbers: int) -> tuple[int, ...]:
        """The sums of the processes' numbers, on every process. The device's queue is not waited for.

        Raises RankError where another process has failed, or died, instead of coming here. So it also stands before
        what could not be left again: the exchanges between devices, and everything that one process never enters.
        """
        if self.store is None:
            return numbers
        sums = torch.tensor(numbers, dtype=torch.int64)
        exchange = dist.all_reduce(sums, group=self.waiting, async_op=True)
        assert exchange is not None
        waited, pause = 0.0, 1e-4
        while not exchange.is_completed():  # also when the connection to one that was killed breaks
            time.sleep(pause)
            waited += pause
            if waited > PATIENCE:
                pause = PATIENCE
                try:
                    self.check_peers()
                except RankError:
                    time.sleep(GRACE)  # it may have failed after this exchange, whose end is on its way here
                    if not exchange.is_completed():
                        raise
        exchange.wait()
        return tuple(sums.tolist())

    def all_reduce_mean(self, tensors: Iterable[Tensor]) -> None:
        """Every tensor, in place, becomes the mean of the processes' own, in one exchange; on their device."""
        if self.store is None:
            return
        tensors = list(tensors)
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        flat /= self.world_size
        for tensor, mean in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(mean.view_as(tensor))

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        """Tells what has happened when an exchange breaks off because another process is gone."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or "gloo" in str(error)):
                raise
            self.check_peers()
            raise RankError(
                f"this process ({self.rank} of {self.world_size}) ends, for another is gone without a word (killed, or "
                f"out of memory?). Start the same command again: it continues from the last checkpoint."
            ) from error

    def all_gather(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The rows of all processes, rank after rank, on every process; counts of rows may differ, and be 0.

        `arrays` have the same number of rows [n, ...]; names, types and further axes are the same everywhere. Raises
        RankError where another process has failed instead of coming here, however long the others wait.
        """
        if self.store is None:
            return dict(arrays)
        self.all_reduce(0)
        counts = self._all_gather(np.array([len(next(iter(arrays.values())))]))
        most = int(counts.max())
        gathered = {}
        for name, array in arrays.items():
            padded = np.zeros((most, *array.shape[1:]), array.dtype)
            padded[: len(array)] = array
            every = self._all_gather(padded)
            gathered[name] = np.concatenate([rows[:count] for rows, (count,) in zip(every, counts, strict=True)])
        return gathered

    def _all_gather(self, array: np.ndarray) -> np.ndarray:
        """Arrays of one shape from all ranks, on a new first axis."""
        own = torch.from_numpy(array)
        every = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(every, own)
        return torch.stack(every).numpy()


@contextlib.contextmanager
def _the_store_there() -> Iterator[None]:
    try:
        yield
    except dist.DistError as error:
        raise RankError(f"the process that keeps the others together is gone ({error}).") from error


def _leave(world: World) -> None:
    """The first process may keep the store: it stays for a moment, until the others have heard why all ends."""
    assert world.store is not None
    left = world.store.add("vitlab/left", 1)
    until = time.monotonic() + FAREWELL
    while world.rank == 0 and left < world.world_size and time.monotonic() < until:
        time.sleep(PATIENCE)
        left = world.store.add("vitlab/left", 0)


SINGLE = World()


def environment() -> World:
    """What torchrun says of this process; nothing is started. Raises ValueError where it says half of it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    if int(os.environ.get("WORLD_SIZE") or 1) == 1:
        return SINGLE
    if missing := [name for name in names if name not in os.environ]:
        raise UserError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} asks for several processes and {', '.join(missing)} is not set: "
            f"start them with `torchrun --nproc-per-node {os.environ['WORLD_SIZE']} -m vitlab ...`, or unset it."
        )
    rank, world_size, local_rank = (int(os.environ[name]) for name in names[:3])
    return World(rank, world_size, local_rank)


@contextlib.contextmanager
def init_distributed() -> Iterator[World]:
    """This process among its fellows, if torchrun started any. What is raised inside ends the others as well."""
    here = environment()
    if here.world_size == 1:
        yield here
        return
    store, *_ = next(rendezvous("env://"))
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backends, store=store, rank=here.rank, world_size=here.world_size)
    here.store = store
    done = False
    try:
        with here._hearing():
            here.waiting = dist.new_group(backend="gloo", timeout=LONGEST)  # pyright: ignore[reportAttributeAccessIssue]
            yield here
            here.all_reduce(0)  # all leave together: the first may keep the store, which the others still read
        done = True
    finally:
        error = sys.exception()
        if not done:
            with contextlib.suppress(dist.DistError):  # the keeper of the store may be gone already
                if not isinstance(error, RankError):
                    store.set(FAILED, str(error) or type(error).__name__)
                _leave(here)
        dist.destroy_process_group()


# -------------------------------------------------------------------------------------------- one model, trained by all


def blocks(model: nn.Module) -> list[nn.Module]:
    """The parts that a model repeats, none within another: encoder blocks (an axial block is two of them), and the
    units of a ResNet or of a hybrid's stem."""
    return [module for module in model.modules() if isinstance(module, (Block, Bottleneck))]


def _compile_blocks(model: nn.Module, device: torch.device, shapes: bool | None) -> None:
    """Compiles each block by itself, all by the same code: what differs between them, the rate of stochastic depth,
    becomes a tensor, for a number would be part of the code, of which only a few versions are kept."""
    for branch in (module for module in model.modules() if isinstance(module, Branch)):
        branch.skip = torch.tensor(branch.skip, dtype=torch.float32, device=device)
    for block in blocks(model):
        block.forward = torch.compile(block.forward, dynamic=shapes)


class Parallel:
    """A model in training as the processes share it; `forward` is what to call in its place.

    By default (DDP) each process holds the whole and gradients are averaged while the backward pass still runs. With
    `fsdp` (FSDP2) each holds a part of every weight, of its gradient and of what the optimizer remembers, and the
    blocks' weights are brought together when they are needed. The changes to a model come in the order that works:
    `float8` products; with `fsdp`, the blocks `compiled`; `recompute` (activations of a block are computed again in the
    backward pass, not kept); sharding or DDP; without `fsdp`, the whole `compiled`. It is compiled for each shape by
    itself unless batches are `uneven`; `graphs` are CUDA's.
    """

    def __init__(
        self, model: nn.Module, world: World, device: torch.device, *, precision: Precision, fsdp: bool = False,
        float8: bool = False, recompute: bool = False, compiled: bool = False, uneven: bool = False,
        graphs: bool = False,
    ) -> None:  # fmt: skip
        self.world = world
        self._graphs = graphs
        self.sharded = fsdp and world.world_size > 1
        self._ddp: DistributedDataParallel | None = None
        self._model = model
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # where NCCL looks for this process's device
        if float8:
            to_float8(model, device)
        shapes = None if uneven else False  # `dynamic`: whether a shape that has changed is left open from then on
        self._compiling: CompileCache | None = None
        """Until the first step is over."""
        if compiled:
            self._compiling = compile_cache(world.broadcast_object(lambda: secrets.token_hex(8)))
        if self.sharded and compiled:
            _compile_blocks(model, device, shapes)
        for block in blocks(model) if recompute else ():
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        self.forward: Callable[..., Any] = model
        if self.sharded:
            self._shard(model, device, precision)
            return
        if world.world_size > 1 and precision != "bfloat16":  # a bfloat16 copy has its gradients averaged in float32
            if graphs:
                raise UserError(
                    f"cuda_graphs: {world.world_size} processes exchange {precision} gradients within the backward "
                    f"pass, which no graph can replay. Give --precision bfloat16, where they are exchanged after it, "
                    f"or leave cuda_graphs out."
                )
            ids = [device.index] if device.type == "cuda" else None
            self._ddp = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
            self.forward = self._ddp
        if compiled:
            self.forward = torch.compile(self.forward, dynamic=shapes, mode="reduce-overhead" if graphs else None)

    def _shard(self, model: nn.Module, device: torch.device, precision: Precision) -> None:
        """FSDP2: each block by itself, then what is left. Gradients are added up in float32."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device.type, (self.world.world_size,))
        policy = MixedPrecisionPolicy()
        if precision != "float32":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in blocks(model):
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    @contextlib.contextmanager
    def exchanging(self, last: bool) -> Iterator[None]:
        """A forward and backward pass; gradients are exchanged in that of a step's last micro-batch only.

        Raises StoppedError at a signal in the first step of a model that is compiled, for which this may take minutes.
        """
        if self._graphs:
            torch.compiler.cudagraph_mark_step_begin()  # what the last pass has left is not needed any more
        if self.sharded:
            self._model.set_requires_gradient_sync(last)  # pyright: ignore[reportCallIssue]  # an FSDPModule's
        with contextlib.ExitStack() as stack:
            if self._compiling is not None:
                stack.enter_context(stops_at_once())
            if self._ddp is not None and not last:
                stack.enter_context(self._ddp.no_sync())
            yield
        if self._compiling is not None and last:
            self.world.all_reduce(0)  # the others compile into the same folder
            self._compiling.publish()
            self._compiling = None

    def average(self, gradients: Iterable[Tensor]) -> None:
        """Averages the gradients of a step over the processes, where the backward pass has not done so."""
        if self._ddp is None and not self.sharded:
            self.world.all_reduce_mean(gradients)


def is_sharded(tensor: Tensor) -> bool:
    """Whether each process has a part of it only."""
    return hasattr(tensor, "device_mesh")


def full_tensor(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, on every process, each of which has to ask; any other tensor is whole already."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def local_shard(tensor: Tensor) -> Tensor:
    """This process's part of a sharded tensor, sharing its memory; any other tensor is its own part."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # pyright: ignore[reportAttributeAccessIssue]


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, which every process has, sharded as another of the same shape is; or as it came."""
    if not is_sharded(like):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(like, DTensor)
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
