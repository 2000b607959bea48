"""Layout tables, one for each format: which array of a file holds which parameter; checks of arrays and settings."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitlab.errors import UserError, first_ten
from vitlab.models import ModelConfig, ResNetBody
from vitlab.models.image_size import ImageSize
from vitlab.models.variant import all_settings
from vitlab.models.vit import Model, ViT, build_model


@dataclass(frozen=True)
class Slot:
    """One array of a file: its shape there, and the parameter that it holds, or the rows of it."""

    shape: tuple[int, ...]
    ours: str
    rows: tuple[int, int | None] = (0, None)

    def select(self, state: Mapping[str, Tensor]) -> Tensor:
        return state[self.ours][slice(*self.rows)]


FREE = {
    *("kind", "image_size", "patch_size", "width", "layers", "depth", "heads", "mlp_dim", "num_classes"),
    *("position_std", "patch_dropout", "dropout", "stochastic_depth", "head_bias", "head_std"),
    *("position_interpolation", "dynamic_image_size"),
}
"""Settings that the shapes of a file's arrays show, or that do not change what a trained model computes at its size."""
Layout = dict[str, Slot]
"""Name in the file -> slot. The slots of one parameter follow each other in the order of its rows."""


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every entry of the state of `config`'s model."""
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in build_model(config).state_dict().items()}


def renamed_layout(config: ModelConfig, rename: Callable[[str], Mapping[str, int]]) -> Layout:
    """The layout of a format that stores our arrays under other names: `rename` maps a name of ours to the names in the
    file -> their shares of the rows, in order."""
    layout = {}
    for ours, (rows, *rest) in parameter_shapes(config).items():
        shares, start = rename(ours), 0
        for name, share in shares.items():
            stop = start + rows * share // sum(shares.values())
            layout[name] = Slot((stop - start, *rest), ours, (start, stop))
            start = stop
    return layout


def read_state(
    layout: Layout, arrays: dict[str, Tensor], convert: Callable[[str, Tensor], Tensor] | None = None
) -> dict[str, Tensor]:
    """The state that `arrays`, which are consumed, hold; `convert` changes an array to our layout."""
    parts: dict[str, list[Tensor]] = {}
    for name, slot in layout.items():
        array = arrays.pop(name)
        parts.setdefault(slot.ours, []).append(convert(name, array) if convert else array)
    return {ours: part[0] if len(part) == 1 else torch.cat(part) for ours, part in parts.items()}


def write_state(layout: Layout, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The arrays of a file that holds `state`, in our layout but of the shapes of the file."""
    return {name: slot.select(state).reshape(slot.shape).clone() for name, slot in layout.items()}


def cpu_state(model: Model) -> dict[str, Tensor]:
    """The state of a model on the CPU, without gradients."""
    return {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}


def position_rows(model: ViT, state: Mapping[str, Tensor]) -> Tensor:
    """What is added to the tokens, [T, D]: position embeddings of any kind. With CLIP's `pre_norm` that includes, for
    patches, the bias of their embedding, because other code of CLIP has none there."""
    config, rows = model.config, model.position.added_rows()
    if rows is None:
        rows = state["embedding.weight"].new_zeros(config.num_tokens, config.width)
    rows = rows.detach().cpu().clone()
    if config.variant.pre_norm:
        rows[config.num_prefix_tokens :] += state["embedding.bias"]
    return rows


# -------------------------------------------------------------------------------------------------------- checks


def check_arrays(what: str, layout: Layout, arrays: Mapping[str, Tensor]) -> None:
    """Raises UserError with every array of a file that is missing, unknown or of another shape."""
    shapes = {name: tuple(array.shape) for name, array in arrays.items()}
    problems = {
        "missing": [name for name in layout if name not in shapes],
        "unknown": [name for name in shapes if name not in layout],
        "of another shape": [
            f"{name} has shape {shapes[name]} instead of {slot.shape}"
            for name, slot in layout.items()
            if shapes.get(name, slot.shape) != slot.shape
        ],
    }
    complaints = [f"{len(names)} {kind}: {first_ten(names)}" for kind, names in problems.items() if names]
    if complaints:
        raise UserError(f"{what}, but the arrays do not fit ({'; '.join(complaints)}).")


def require_shape(where: str, arrays: Mapping[str, Tensor], name: str, ndim: int) -> tuple[int, ...]:
    """The shape of an array that sizes are read from. Raises UserError where it is missing, empty or of other ndim."""
    if name not in arrays or arrays[name].ndim != ndim or not arrays[name].numel():
        problem = f"has shape {tuple(arrays[name].shape)}" if name in arrays else "is missing"
        raise UserError(
            f"{where} does not hold a supported model: {name} {problem}, and an array of {ndim} dimensions is "
            f"required. The file has {first_ten(sorted(arrays)) or 'no arrays'}."
        )
    return tuple(arrays[name].shape)


def as_size(height: int, width: int) -> ImageSize:
    """The inverse of `pair`: one number for a square."""
    return height if height == width else (height, width)


def check_sizes(settings: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """Raises UserError where config.json has other sizes than the arrays, as when some are missing."""
    for name, size in sizes.items():
        if (said := settings.get(name, size)) not in (size, [size, size]):
            raise UserError(f"config.json says {name}={said!r} and the arrays are for {size!r}; get them again.")


def num_rows(arrays: Mapping[str, Tensor], name: str) -> int:
    """Length of the first dimension; 0 where the array is missing."""
    return arrays[name].shape[0] if name in arrays and arrays[name].ndim else 0


def count_units(keys: Collection[tuple[str, str]]) -> tuple[int, ...]:
    """Units of each stage of a ResNet, from the (stage, unit) numbers in names of arrays."""
    stages = [stage for stage, _ in set(keys)]
    return tuple(stages.count(stage) for stage in sorted(set(stages), key=int))


def check_supported(
    library: str,
    config: ModelConfig | ResNetBody,
    supported: Mapping[str, tuple[Any, ...]],
    free: Collection[str] = (),
    prefix: str = "",
) -> None:
    """Raises UserError for the first setting with none of its `supported` values; others must have their default, but
    for those that are `free`."""
    settings, defaults = all_settings(config), all_settings(type(config)())
    free = {*FREE, *free, *supported}
    others = {name: (value,) for name, value in defaults.items() if name not in free}
    for name, values in {**supported, **others}.items():
        if settings[name] not in values:
            raise UserError(
                f"the model has {prefix}{name}={settings[name]!r}, which {library} cannot represent; it has "
                f"{' or '.join(map(repr, values))}. {_way_out(name, config, values) or 'Use'} save_model (`--to "
                f"vitlab`), which keeps every setting."
            )


def _way_out(name: str, config: ModelConfig | ResNetBody, values: Collection[Any]) -> str:
    """The option of `convert` that gives the setting one of the values, where there is one."""
    if name == "representation_size" and None in values:
        return "Give pre_logits='drop' (`--pre-logits drop`), which leaves out that layer and the head on it, or use"
    if name == "pool" and "token" in values and all_settings(config).get("registers") and not config.num_classes:  # pyright: ignore[reportAttributeAccessIssue]
        return "Give pool='token' (`--pool token`) to take its class token, or use"
    return ""
