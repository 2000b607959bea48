"""How their folders prepare images; their processors are the reference."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from peers import check_equal, check_prepared, from_pretrained, outputs, photographs
from PIL import Image

from vitlab.models.vit import ViT
from vitlab.preprocessing import Preprocessing
from vitlab.weights.huggingface import metadata_huggingface, read_huggingface, write_huggingface

PROCESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # model_type, their class, and its settings
    "vit": ("vit", "ViTImageProcessor", {}),
    "vit oblong": ("vit", "ViTImageProcessor", {"size": {"height": 160, "width": 224}}),
    "deit": ("deit", "DeiTImageProcessor", {}),
    "deit large": ("deit", "DeiTImageProcessor", {"size": {"height": 438, "width": 438}, "crop_size": 384}),
    "dinov2": ("dinov2", "BitImageProcessor", {"size": {"shortest_edge": 256}, "crop_size": 224}),
    "bit": ("bit", "BitImageProcessor", {"size": {"shortest_edge": 448}, "crop_size": 448, "resample": 2}),
    "clip": ("clip", "CLIPImageProcessor", {}),
    "siglip": ("siglip", "SiglipImageProcessor", {}),
}


def write(folder: Path, kind: str, settings: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps({**half, **settings}))


@pytest.mark.parametrize("case", PROCESSORS)
def test_images_are_prepared_as_by_their_processor(tmp_path: Path, shared: Path, case: str) -> None:
    kind, name, settings = PROCESSORS[case]
    write(tmp_path, kind, {})
    processor: Any = getattr(transformers, name)(**settings)
    processor.save_pretrained(tmp_path)
    inputs = photographs(shared)[::2]
    pillow: Any = getattr(transformers, f"{name}Pil").from_pretrained(tmp_path)
    expected = [torch.as_tensor(np.array(pillow(Image.fromarray(image)).pixel_values[0])) for image in inputs]
    check_prepared(metadata_huggingface(tmp_path), inputs, expected)
    # Their processor by torchvision differs from that by Pillow in few values by two gray levels.
    tensors = [torch.from_numpy(image).permute(2, 0, 1) for image in inputs]
    expected = [processor(tensor, return_tensors="pt").pixel_values[0] for tensor in tensors]
    check_prepared(metadata_huggingface(tmp_path), inputs, expected, levels=2, off=1e-4)


def test_a_whole_processor_of_transformers_5(tmp_path: Path) -> None:
    """Its image processor is below `image_processor`, and counts before a preprocessor_config.json."""
    write(tmp_path, "clip", {"size": 8, "crop_size": 8})
    whole = tmp_path / "processor_config.json"
    settings: Any = {"size": {"shortest_edge": 250}, "crop_size": 200, "image_mean": [0.1] * 3, "image_std": [0.3] * 3}
    vocabulary = {name: i for i, name in enumerate(("<|startoftext|>", "<|endoftext|>", "a</w>"))}
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=[])
    transformers.CLIPProcessor(transformers.CLIPImageProcessor(**settings), tokenizer).save_pretrained(tmp_path)
    assert whole.exists()
    prepared = Preprocessing.read(metadata_huggingface(tmp_path), "")
    assert (prepared.image_size, prepared.resize, prepared.mean) == (200, 250, (0.1,) * 3)
    for text, problem in ((json.dumps({"image_processor": [1]}), r"image_processor is \[1\]"), ("{", "not valid JSON")):
        whole.write_text(text)
        with pytest.raises(ValueError, match=rf"processor_config\.json.*{problem}"):
            metadata_huggingface(tmp_path)
    whole.write_text(json.dumps({"processor_class": "CLIPProcessor"}))  # of transformers 4, beside the other
    assert metadata_huggingface(tmp_path)["preprocessing"]["image_size"] == 8


@pytest.mark.parametrize(
    ("kind", "settings", "line"),
    [
        ("vit", {"feature_extractor_type": "ViTFeatureExtractor", "size": 224}, "squash to 224x224 (bilinear, antia"),
        ("deit", {"size": 256, "crop_size": 224}, "resize 256x256 (bicubic, antialias), center crop 224x224"),
        ("dinov2", {"size": 256}, "resize 256 (bicubic, antialias), center crop 224x224"),
        ("bit", {"crop_size": [160, 224], "size": 240}, "resize 240 (bicubic, antialias), center crop 160x224"),
        ("vit", {"size": {"shortest_edge": 224}, "do_center_crop": False}, "squash"),  # these have no one size
        ("vit", {"do_resize": False, "do_center_crop": False}, "squash"),
        ("vit", {"size": {"shortest_edge": 224, "longest_edge": 500}}, "squash"),
        ("vit", {"resample": 9}, None),
        ("vit", {"size": 10**9}, None),
    ],
)
def test_other_settings(
    tmp_path: Path, kind: str, settings: dict[str, Any], line: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Older and shorter ones, some without one size, which is said, and invalid ones."""
    write(tmp_path, kind, settings)
    if line is None:
        with pytest.raises(ValueError, match=r"resample is 9|size is 1000000000"):
            metadata_huggingface(tmp_path)
        return
    assert Preprocessing.read(metadata_huggingface(tmp_path), "").describe().startswith(line)
    assert (line == "squash") == ("squashed" in caplog.text)


def test_their_processor_prepares_images_for_our_model(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    names = ["tench", "crane", "cat", "crane", "Grüße"]
    write_huggingface(tiny(), tmp_path, {"preprocessing": Preprocessing.google(12, 14).to_metadata(), "classes": names})
    card = metadata_huggingface(tmp_path)
    assert card["classes"] == names
    assert Preprocessing.read(card, "").describe().startswith("resize 14 (bilinear, antialias), center crop 12x12")
    assert from_pretrained(tmp_path, head=True).config.id2label == dict(enumerate(names))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    image = torch.randint(0, 256, (3, 28, 40), dtype=torch.uint8)
    assert processor(image, return_tensors="pt")["pixel_values"].shape == (1, 3, 12, 12)
    with pytest.raises(ValueError, match="2 names"):
        write_huggingface(tiny(), tmp_path, {"classes": ["a", "b"]})
    write_huggingface(tiny(), tmp_path, {})
    image = torch.randint(0, 256, (3, 12, 12), dtype=torch.uint8)
    prepared = transformers.AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(prepared[0], image / 127.5 - 1, atol=1e-5, rtol=0)


@pytest.mark.parametrize("resize", [None, 20])
@torch.no_grad()
def test_pixels_that_no_patch_covers_are_written(tmp_path: Path, tiny: Callable[..., ViT], resize: int | None) -> None:
    model = tiny()
    prepared = Preprocessing(12, resize, crop_size=15, crop_offset="floor", mean=(0.5,) * 3, std=(0.5,) * 3)
    write_huggingface(model, tmp_path, {"preprocessing": prepared.to_metadata()})
    assert Preprocessing.read(metadata_huggingface(tmp_path), "") == prepared
    assert read_huggingface(tmp_path)[0].image_size == 12
    image = torch.randint(0, 256, (3, 28, 40), dtype=torch.uint8)
    pixels = transformers.AutoImageProcessor.from_pretrained(tmp_path)(image, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 15, 15)
    check_equal(model(pixels[..., :12, :12]), outputs(from_pretrained(tmp_path, head=True), pixels))
