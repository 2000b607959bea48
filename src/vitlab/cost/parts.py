"""Where the time of our training step goes: torch's profile, its operations gathered by a table of names."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch.profiler import ProfilerActivity, profile

PARTS: dict[str, tuple[str, ...]] = {
    "matrix products": (
        "mm", "addmm", "_addmm_activation", "mkldnn_convolution", "cudnn_convolution", "convolution_backward",
    ),
    "attention": (
        "bmm", "baddbmm", "_softmax", "_softmax_backward_data",
        "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_backward",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward",
        "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_cudnn_attention_backward",
        "_flash_attention_forward", "_flash_attention_backward",
        "_efficient_attention_forward", "_efficient_attention_backward",
    ),
    "norms": (
        "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
        "var_mean", "rsqrt",
    ),
    "activation functions": ("gelu", "gelu_backward", "relu", "threshold_backward", "tanh", "tanh_backward"),
    "loss": (
        "_log_softmax", "_log_softmax_backward_data", "nll_loss_forward", "nll_loss_backward", "argmax", "eq",
        "binary_cross_entropy_with_logits",
    ),
    "optimizer": (
        "_fused_adamw_", "_fused_adam_", "_fused_sgd_", "_foreach_norm", "linalg_vector_norm", "_foreach_mul_",
        "_foreach_lerp_",
    ),
    "casts and copies": ("copy_", "_foreach_copy_", "_to_copy", "clone", "cat", "contiguous", "reshape"),
}  # fmt: skip
"""Operations of aten by what they are for. In these models a batch of products (bmm) is attention's."""
REST = "the rest"


def part_of(operation: str) -> str:
    """The part that an operation of the profile belongs to, `aten::addmm` to the matrix products."""
    name = operation.removeprefix("aten::")
    return next((part for part, names in PARTS.items() if name in names), REST)


def shares(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Of (operation, its own time) the share of each part; they sum to 1."""
    sums = dict.fromkeys([*PARTS, REST], 0.0)
    for operation, time in times:
        sums[part_of(operation)] += time
    total = sum(sums.values())
    assert total > 0, "a profile without any time"
    return {part: time / total for part, time in sums.items()}


def profile_step(step: Callable[[], object], device: torch.device, steps: int = 3) -> dict[str, float]:
    """Shares of the parts of a training step, over some of them after one that does not count.

    On a CPU the time that operations take themselves; on a GPU that of the kernels which they start.
    """
    on_gpu = device.type == "cuda"
    step()
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as seen:
        for _ in range(steps):
            step()
        if on_gpu:
            torch.cuda.synchronize(device)
    own = [event for event in seen.key_averages() if event.device_type.name == "CPU"]
    return shares((event.key, event.self_device_time_total if on_gpu else event.self_cpu_time_total) for event in own)


def as_text(parts: Mapping[str, float]) -> str:
    """Largest first, in percent."""
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {share:.0%}" for name, share in ordered if share >= 0.005)
