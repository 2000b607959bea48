"""One step of a model in training or inference, ours and the same model's in timm, Hugging Face and OpenVINO.

All compute with the same weights on the same batch in the same dtype; before anything is timed, a peer's answers are
held against ours. Of each peer there are variants (how it computes attention); its best one is what counts.
"""

import importlib
import importlib.util
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.config import OptimConfig, TrainConfig
from vitlab.data.loader import Batch
from vitlab.errors import UserError
from vitlab.models import ModelConfig, ViTConfig, build_model
from vitlab.models.attention import attention_path
from vitlab.models.vit import Model
from vitlab.train.distributed import SINGLE
from vitlab.train.loop import train_step
from vitlab.train.objectives import create_objective
from vitlab.train.precision import Precision, resolve_precision
from vitlab.train.state import create_state
from vitlab.weights import ParityError

Mode = Literal["train", "infer"]
OURS = "vitlab"
PEERS: dict[str, tuple[str, ...]] = {
    "timm": ("timm, fused attention", "timm, attention as products"),
    "huggingface": ("huggingface, fused attention", "huggingface, attention as products"),
    "openvino": ("openvino",),
}
"""Each peer and its variants; the first is its default."""
NEEDS = {"timm": "timm>=1.0.20", "huggingface": "transformers>=5", "openvino": "openvino>=2026.1"}
"""What to install for each."""
MODULES = {"timm": "timm", "huggingface": "transformers", "openvino": "openvino"}
OPTIM = OptimConfig(lr=1e-5, weight_decay=0.05, clip_norm=1.0)
"""The update that all make: torch's fused AdamW, at a rate at which random labels do no harm."""


@dataclass(frozen=True)
class Work:
    """What every contender does alike."""

    config: ModelConfig
    mode: Mode
    batch: int
    dtype: Literal["float32", "bfloat16"]
    compile: bool = False
    device: str = "cpu"


@dataclass(frozen=True)
class Contender:
    """A model ready to run: `step` goes once through the batch; in inference it returns the logits."""

    name: str
    given: str
    """With which settings it runs."""
    step: Callable[[], Tensor | None]


def variants(peer: str, work: Work) -> tuple[str, ...]:
    """The names by which `build` knows a peer's ways to do this work; without attention there is no choice, and
    OpenVINO does not train."""
    if peer == "openvino" and work.mode == "train":
        return ()
    return PEERS[peer] if isinstance(work.config, ViTConfig) else PEERS[peer][:1]


def check_installed(peer: str) -> None:
    """Raises ValueError where the peer's package is not there, saying how to get it."""
    if importlib.util.find_spec(MODULES[peer]) is None:
        raise UserError(f"--against {peer} needs {MODULES[peer]}: pip install '{NEEDS[peer]}'")


def build(name: str, work: Work) -> Contender:
    """The contender of that name, ours or a variant of a peer.

    Raises ValueError for a model that the peer cannot be, ParityError where its answers are not ours.
    """
    device, model = torch.device(work.device), _model(work.config)
    if name == OURS:
        return _ours(work, model, device)
    peer = next(peer for peer, names in PEERS.items() if name in names)
    check_installed(peer)
    images = _images(work.config, 2)
    with torch.inference_mode():
        expected = model(images)
    if peer == "openvino":
        return _openvino(name, work, model, images, expected)
    theirs = {"timm": _timm, "huggingface": _huggingface}[peer](model, name == PEERS[peer][0])
    with torch.inference_mode():
        _check_equal(name, expected, theirs(images), within=1e-3)
    theirs = theirs.to(device)
    told = name.partition(", ")[2] if isinstance(work.config, ViTConfig) else "its only way"
    if work.mode == "infer":
        return Contender(name, f"weights and images in {work.dtype}, {told}", _inference(work, theirs, device))
    cast = "bfloat16 autocast" if work.dtype == "bfloat16" else "float32"
    return Contender(name, f"{cast}, fused AdamW, gradients clipped at 1, {told}", _training(work, theirs, device))


def _model(config: ModelConfig) -> Model:
    """Ours, the same at every call, with a head that tells images apart (a fresh one answers 0)."""
    generator = torch.Generator().manual_seed(0)
    model = build_model(config, generator=generator).eval()
    if model.head is not None:
        nn.init.normal_(model.head.weight, std=0.02, generator=generator)
    return model


def _images(
    config: ModelConfig, count: int, device: torch.device | None = None, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Some, again and again: what a large batch takes is to be taken on the device."""
    few = torch.rand(min(count, 64), 3, *config.image_hw, generator=torch.Generator().manual_seed(1)) * 2 - 1
    return few.to(device, dtype).repeat(-(-count // 64), 1, 1, 1)[:count]


def _check_equal(name: str, ours: Tensor, theirs: Tensor, within: float) -> None:
    error = float((ours - theirs.float()).norm() / ours.norm())
    if not error <= within:
        raise ParityError(f"{name} answers otherwise than vitlab with the same weights, by {error:.1e} of the answers' "
                          f"norm; nothing is timed.")  # fmt: skip


# ------------------------------------------------------------------------------------------------------- ours


def training_precision(dtype: str, device: torch.device) -> Precision:
    """Of our training in this dtype: what `vitlab pretrain` would take here by itself."""
    if dtype == "float32":
        return "float32"
    own = resolve_precision("auto", device)
    return "bfloat16" if own == "float32" else own


def training_batch(work: Work, device: torch.device) -> Batch:
    """Images in float32, random labels."""
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(max(work.config.num_classes, 1), (work.batch,), generator=generator)
    indices = torch.arange(work.batch)
    return Batch(_images(work.config, work.batch, device), labels.to(device), indices.to(device))


def _ours(work: Work, model: Model, device: torch.device) -> Contender:
    path = _path(work, device) if isinstance(work.config, ViTConfig) else "no"
    model = model.to(device)
    if work.mode == "infer":
        said = f"weights and images in {work.dtype}, {path} attention"
        return Contender(OURS, said, _inference(work, model, device))
    precision = training_precision(work.dtype, device)
    run = TrainConfig(
        model=work.config, optim=OPTIM, steps=10**9, batch_size=work.batch, precision=precision, compile=work.compile
    )
    state, objective, batch = (
        create_state(run, model, device, SINGLE),
        create_objective(run),
        training_batch(work, device),
    )
    said = f"the step of vitlab pretrain, precision {precision}, gradients clipped at 1, {path} attention"

    def step() -> None:
        train_step(run, state, objective, batch, OPTIM.lr, work.batch)

    return Contender(OURS, said, step)


def _path(work: Work, device: torch.device) -> str:
    config = work.config
    assert isinstance(config, ViTConfig)
    of_one = config.num_tokens**2 if config.encoder != "axial" else config.num_patches * max(config.grid)
    numbers = work.batch * config.heads * of_one
    return attention_path(device.type, work.mode == "train", getattr(torch, work.dtype), numbers)


# ------------------------------------------------------------------------------------------------------- peers


class _Logits(nn.Module):
    """A Hugging Face model that answers with its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(pixel_values=images).logits


def _timm(model: Model, fused: bool) -> nn.Module:
    timm, settings = importlib.import_module("timm"), importlib.import_module("timm.layers.config")
    from vitlab.weights.timm import write_timm

    with tempfile.TemporaryDirectory() as folder:
        write_timm(model, folder, {})
        settings.set_fused_attn(fused)  # read when a model is built
        try:
            return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        finally:
            settings.set_fused_attn(True)


def _huggingface(model: Model, fused: bool) -> nn.Module:
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    from vitlab.weights.huggingface import write_huggingface

    chosen = {"attn_implementation": "sdpa" if fused else "eager"} if isinstance(model.config, ViTConfig) else {}
    with tempfile.TemporaryDirectory() as folder:
        write_huggingface(model, folder, {})
        made = transformers.AutoModelForImageClassification.from_pretrained(folder, dtype=torch.float32, **chosen)
    return _Logits(made).eval()


def _inference(work: Work, model: nn.Module, device: torch.device) -> Callable[[], Tensor]:
    """One pass over the batch, of ours and of torch's peers alike."""
    dtype = getattr(torch, work.dtype)
    images = _images(work.config, work.batch, device, dtype)
    model = model.to(dtype).eval()
    forward = compiled_for_inference(model, images) if work.compile else model

    def step() -> Tensor:
        with torch.no_grad():
            return forward(images)

    return step


@torch.no_grad()
def compiled_for_inference(model: nn.Module, images: Tensor) -> Callable[[Tensor], Tensor]:
    """torch.compile for batches of this shape; on a CPU with the weights frozen in, in the order its products want."""
    from torch._inductor import config as inductor  # takes seconds

    compiled = torch.compile(model, dynamic=False)
    # Dynamo asks for this setting before the options of a compilation are in force, so it has to be set from outside.
    with inductor.patch(freezing=images.device.type == "cpu"):
        compiled(images)
    return compiled


def _training(work: Work, model: nn.Module, device: torch.device) -> Callable[[], None]:
    """A step as a user of the peer writes it."""
    batch, parameters = training_batch(work, device), list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=OPTIM.lr, weight_decay=OPTIM.weight_decay, fused=True)
    forward = torch.compile(model.train()) if work.compile else model.train()
    largest_norm = OPTIM.clip_norm
    assert largest_norm is not None

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.bfloat16, enabled=work.dtype == "bfloat16"):
            loss = F.cross_entropy(forward(batch.images), batch.labels)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, largest_norm)
        optimizer.step()

    return step


def _openvino(name: str, work: Work, model: Model, example: Tensor, expected: Tensor) -> Contender:
    """Our model, converted; its engine runs it on the CPU with as many threads as torch, one stream."""
    if torch.device(work.device).type != "cpu":
        raise UserError("OpenVINO runs on the CPU alone; leave it out, or give --device cpu.")
    openvino: Any = importlib.import_module("openvino")
    images = _images(work.config, work.batch)
    hints = {"float32": "f32", "bfloat16": "bf16"}
    settings = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
    }
    core = openvino.Core()
    with torch.inference_mode(), warnings.catch_warnings(action="ignore"):  # of tracing, which fixes sizes
        graph = openvino.convert_model(model, example_input=example)

    def prepared(batch: Tensor, dtype: str) -> Callable[[], Tensor]:
        graph.reshape([batch.shape[0], 3, *work.config.image_hw])
        told = settings | {"INFERENCE_PRECISION_HINT": hints[dtype]}
        request = core.compile_model(graph, "CPU", told).create_infer_request()
        shared = openvino.Tensor(batch.numpy(), shared_memory=True)

        def step() -> Tensor:
            request.infer(shared)
            return torch.from_numpy(request.get_output_tensor().data)

        return step

    _check_equal(name, expected, prepared(example, "float32")(), within=1e-3)
    step = prepared(images, work.dtype)
    return Contender(name, f"our model converted, {work.dtype}, hint LATENCY, one stream", step)
