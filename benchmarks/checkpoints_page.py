"""Writes docs/checkpoints.md: public checkpoints, and which ViTs of timm and Hugging Face compute the same here.

`python benchmarks/checkpoints_page.py > docs/checkpoints.md` takes about 15 minutes on two cores. Each architecture is
built by timm with two blocks and its own width, size and settings; every parameter is drawn at random. The folder that
timm writes for the hub is loaded here, and both compute the outputs of the same images, at the native size and at one
of two more patches a side. Then it is written from here, and timm loads that. The same with Hugging Face's classes, in
the size of their default configuration.
"""

import argparse
import collections
import fnmatch
import gc
import json
import platform
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import transformers
from timm.models import save_for_hf
from torch import Tensor

import vitlab
from vitlab.commands.info import checkpoints
from vitlab.display import format_table
from vitlab.errors import UserError
from vitlab.models import ViTConfig
from vitlab.weights.huggingface import write_huggingface
from vitlab.weights.huggingface_layout import FAMILIES
from vitlab.weights.timm import write_timm

MODULES = ("vision_transformer", "deit", "vision_transformer_hybrid", "eva", "beit", "resnetv2")
EQUAL = 1e-5
"""Largest error of an equal output, relative to the root mean square of timm's outputs."""
ROUNDING = 1e-4
"""The same for BiT's ResNets and stems, which cannot be shortened: rounding grows with their layers."""


HUGGINGFACE: dict[str, dict[str, Any]] = {
    "ViTForImageClassification": {},
    "DeiTForImageClassification": {},
    "DeiTForImageClassificationWithTeacher": {},
    "Dinov2ForImageClassification": {},
    "Dinov2Model": {"use_swiglu_ffn": True},
    "Dinov2WithRegistersForImageClassification": {},
    "DINOv3ViTModel": {"num_register_tokens": 4},
    "DINOv3ViTModel, gated": {"use_gated_mlp": True, "hidden_act": "silu"},
    "CLIPVisionModel": {},
    "CLIPVisionModelWithProjection": {},
    "CLIPModel": {},
    "CLIPForImageClassification": {},
    "SiglipVisionModel": {},
    "SiglipModel": {},
    "SiglipForImageClassification": {},
    "Siglip2VisionModel": {},
    "ViTMAEModel": {"mask_ratio": 0.0},
    "ViTMSNForImageClassification": {},
    "IJepaForImageClassification": {},
    "BitForImageClassification": {"embedding_size": 32, "hidden_sizes": [128, 256], "depths": [1, 2]},
    "BeitForImageClassification": {},
    "Data2VecVisionForImageClassification": {},
    "SwinForImageClassification": {"depths": [1, 1, 1, 1]},
}
"""Class, and settings that differ from its defaults."""
REASONS = {
    "the model has stem=": "hybrids are not written",
    "attn_pool.mlp": "the MLP of its attention pooling has another width than timm's configuration",
    "global_pool is 'map'": "its attention pooling leaves out the register tokens",
}
"""Words of a message -> a short reason in its place."""
WRITERS = {"timm": write_timm, "huggingface": write_huggingface}
HALF = (0.5,) * 3, (0.5,) * 3
"""Mean and std of what is written here."""
ANY_SIZE = ("Dinov2", "DINOv3", "Bit")
"""Beginnings of the classes that take any size by themselves."""


def randomize(model: Any) -> Any:
    """The model in evaluation mode with random parameters, so that none can be lost or swapped unnoticed."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2 or parameter.ndim == 4:
                parameter.copy_(noise * parameter[0].numel() ** -0.5)
            else:
                parameter += 0.3 * noise
    return model.eval()


def create(name: str) -> tuple[Any, dict[str, Any]]:
    """timm's model and the arguments that make it: two blocks, where depth is an argument, and random parameters."""
    args: dict[str, Any] = {"depth": 2}
    if "resnetv2" in name:
        args = {}
    elif "sapiens2" in name:
        args["num_kv_heads"] = [4, 4]  # one entry per block
    return randomize(timm.create_model(name, **args)), args


@torch.no_grad()
def error(ours: Any, theirs: Callable[[Tensor], Tensor], mean: Sequence[float], std: Sequence[float]) -> float:
    """The largest error of the outputs for one image, which `theirs` takes with this mean and deviation."""
    height, width = ours.config.image_hw
    images = torch.rand(1, 3, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1
    expected = theirs(((images + 1) / 2 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None])
    return float((ours(images) - expected).abs().max() / expected.square().mean().sqrt())


def check(name: str, folder: Path) -> dict[str, Any]:
    """The row of an architecture: errors at both sizes, or why it is refused."""
    theirs, args = create(name)
    save_for_hf(theirs, str(folder), model_args=args, safe_serialization=True)
    row: dict[str, Any] = dict.fromkeys(("native", "larger", "written", "refused"), "") | {"architecture": name}
    try:
        ours = vitlab.load_model(folder)
    except UserError as refusal:
        return row | {"refused": _reason(str(refusal), str(folder))}
    if hasattr(theirs, "set_input_size") and isinstance(ours.config, ViTConfig):
        theirs.set_input_size(img_size=ours.config.image_hw)  # without the pixels that no patch takes
    mean, std = (theirs.pretrained_cfg[name] for name in ("mean", "std"))
    row["native"] = error(ours, theirs, mean, std)
    again, row["refused"] = write(ours, folder.parent / "written", "timm")
    if again is not None:
        row["written"] = error(ours, again, HALF[0], HALF[1])
    if isinstance(ours.config, ViTConfig) and hasattr(theirs, "set_input_size"):
        height, width = (side + 2 * ours.config.stride for side in ours.config.image_hw)
        size = height, width
        theirs.set_input_size(img_size=size)
        row["larger"] = error(vitlab.load_model(folder, image_size=size), theirs, mean, std)
    return row


def check_huggingface(name: str, folder: Path) -> dict[str, Any]:
    """The row of a class of Hugging Face's."""
    cls = getattr(transformers, name.partition(",")[0])
    depth = {} if "depths" in HUGGINGFACE[name] else {"num_hidden_layers": 2}
    settings: dict[str, Any] = {**depth, **HUGGINGFACE[name]}
    whole = hasattr(cls.config_class(), "vision_config")
    theirs = randomize(cls(cls.config_class(**{"vision_config": settings} if whole else settings)))
    theirs.save_pretrained(folder)
    row: dict[str, Any] = dict.fromkeys(("native", "larger", "written", "refused"), "") | {"architecture": name}
    try:
        ours = vitlab.load_model(folder)
    except UserError as refusal:
        return row | {"refused": _reason(str(refusal), str(folder))}
    mean, std = FAMILIES[theirs.config.model_type].mean_std
    row["native"] = error(ours, lambda images: outputs(theirs, images), mean, std)
    again, row["refused"] = write(ours, folder.parent / "written", "huggingface")
    if again is not None:
        row["written"] = error(ours, lambda images: outputs(again, images), HALF[0], HALF[1])
    if isinstance(ours.config, ViTConfig):
        larger = vitlab.load_model(folder, image_size=ours.config.image_hw[0] + 2 * ours.config.stride)
        options = {} if name.startswith(ANY_SIZE) else {"interpolate_pos_encoding": True}
        row["larger"] = error(larger, lambda images: outputs(theirs, images, **options), mean, std)
    return row


def outputs(model: Any, images: Tensor, **options: Any) -> Tensor:
    """The output of a model of Hugging Face's: logits, or features of the image."""
    if hasattr(model, "get_image_features"):
        return model.get_image_features(images, **options).pooler_output
    if "MAE" in type(model).__name__:  # which drops no patch, but shuffles them by this noise
        options["noise"] = torch.arange(images[0, 0].numel() / 16**2)[None]
    result = model(images, **options)
    first = next((result[key] for key in ("logits", "image_embeds", "pooler_output") if key in result), None)
    return result.last_hidden_state[:, 0] if first is None else first


def write(model: Any, folder: Path, to: Literal["timm", "huggingface"]) -> tuple[Any, str]:
    """The model as the library loads it from the folder that is written here, or None and why it cannot be written."""
    try:
        WRITERS[to](model, folder, {})
    except UserError as refusal:
        return None, "not written: " + _reason(str(refusal).partition(" Use save_model")[0], str(folder))
    if to == "timm":
        return timm.create_model(f"local-dir:{folder}", pretrained=True).eval(), ""
    cls = getattr(transformers, json.loads((folder / "config.json").read_text())["architectures"][0])
    options = {"add_pooling_layer": False} if cls.__name__ in ("ViTModel", "DeiTModel") else {}  # pooler: not trained
    return cls.from_pretrained(folder, **options).eval(), ""


def _reason(message: str, folder: str) -> str:
    pattern = (
        r"^.*?\): |^.*? looks like |^ holds | Supported are .*|; supported: .*|a Hugging Face model of type '.*?': "
    )
    message = re.sub(pattern, "", message.replace(folder, ""))
    for words, reason in REASONS.items():
        message = reason if words in message else message
    return message[:150].replace("|", "/").replace("\n", " ").strip(" .")


def status(row: dict[str, Any]) -> str:
    """`equal`, `refused` or `DIFFERENT`."""
    if row["native"] == "":
        return "refused"
    bound = ROUNDING if re.search(r"resnetv2|_r\d*_|_r50|_r26|^Bit", row["architecture"]) else EQUAL
    return "equal" if max(float(row[size] or 0) for size in ("native", "larger", "written")) <= bound else "DIFFERENT"


def table(rows: list[dict[str, Any]]) -> str:
    """The rows that load, and below them, folded, those that are refused."""
    refused = [row for row in rows if status(row) == "refused"]
    loaded = [
        {
            "architecture": row["architecture"] + ("" if status(row) == "equal" else ": DIFFERENT"),
            **{size: f"{row[size]:.1e}" if row[size] != "" else "" for size in ("native", "larger", "written")},
            "why not written": row["refused"].removeprefix("not written: "),
        }
        for row in rows
        if status(row) != "refused"
    ]
    reasons = collections.defaultdict[str, list[str]](list)
    for row in refused:
        reasons[row["refused"]].append(row["architecture"])
    lines = "\n".join(f"- {reason[0].upper()}{reason[1:]}: {', '.join(names)}." for reason, names in reasons.items())
    return f"""{format_table(loaded, markdown=True)}

<details markdown="1">
<summary>{len(refused)} are refused, and why</summary>

{lines}

</details>"""


def public() -> str:
    """The checkpoints of `vitlab list checkpoints`."""
    rows = [
        {
            "checkpoint": f"`{row['checkpoint']}`" + (" (default)" if row["default"] else ""),
            "parameters": f"{row['parameters'] / 1e6:.0f}M",
            **{name: row[name] for name in ("image", "pre-training", "license", "good for")},
        }
        for row in checkpoints()
    ]
    return format_table(rows, markdown=True)


def page(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> str:
    """The text of docs/checkpoints.md."""
    counts, classes = collections.Counter(map(status, rows)), collections.Counter(map(status, others))
    written, others_written = (sum(row["written"] != "" for row in part) for part in (rows, others))
    return f"""# Checkpoints

## Which checkpoint to take

`vitlab list checkpoints` prints this table. The names are for the CHECKPOINT argument of the commands. Parameters are
without the head. The default's license, Apache-2.0, permits commercial use of the models trained from it.

{public()}

## How architectures were compared

timm {timm.__version__} has {len(rows)} architectures in the modules {", ".join(MODULES)}. Of these,
{counts["equal"]} compute the same outputs here, {counts["refused"]} are refused, and {counts["DIFFERENT"]} differ.
{written} can also be written from here and loaded by timm. Of the {len(others)} classes of transformers
{transformers.__version__} below, {classes["equal"]} are equal, {classes["refused"]} are refused, and
{classes["DIFFERENT"]} differ; {others_written} can be written.

The numbers are the largest errors, relative to the rms of the outputs, in float32: at the native size, with two more
patches per side, and after writing from here and loading by the other library. Equal means at most {EQUAL:.0e}, or
{ROUNDING:.0e} with a ResNet, whose many layers amplify rounding. The models have two blocks, the width and settings of
the architecture, and random parameters. This page is written by
`python benchmarks/checkpoints_page.py > docs/checkpoints.md` (torch {torch.__version__} on {platform.machine()}).

## timm

{table(rows)}

## Hugging Face

{table(others)}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="pattern of the architectures to check")
    only = parser.parse_args().only
    warnings.filterwarnings("ignore")
    transformers.utils.logging.disable_progress_bar()
    names = sorted({name for module in MODULES for name in timm.list_models(only, module=module)})
    classes = [name for name in HUGGINGFACE if fnmatch.fnmatch(name, only)]
    rows: list[dict[str, Any]] = []
    for number, name in enumerate([*names, *classes], 1):
        with tempfile.TemporaryDirectory() as folder:
            rows.append((check if number <= len(names) else check_huggingface)(name, Path(folder) / "theirs"))
        gc.collect()
        print(f"{number} {name}: {status(rows[-1])} {rows[-1]}", file=sys.stderr, flush=True)
    sys.stdout.write(page(rows[: len(names)], rows[len(names) :]))


if __name__ == "__main__":
    main()
