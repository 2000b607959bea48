import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
import transformers
from peers import (
    CASES,
    answer,
    check_equal,
    check_prepared,
    faint_images,
    images,
    loaded,
    normalized,
    photographs,
    randomize,
    theirs,
)
from PIL import Image

from vitlab.models import ViTConfig
from vitlab.preprocessing import Preprocessing
from vitlab.weights import load_checkpoint, load_model
from vitlab.weights.huggingface import card_huggingface, read_huggingface

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])


def write_json(path: Path, **changes: Any) -> None:
    """`changes` to the settings in a file."""
    said = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**said, **changes}))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_answers_are_those_of_their_code(tmp_path: Path, case: str) -> None:
    other = theirs(case)
    other.save_pretrained(tmp_path)
    config, _ = read_huggingface(tmp_path)
    assert {name: getattr(config, name) for name in CASES[case][3]} == CASES[case][3]
    model, mean_std = loaded(*read_huggingface(tmp_path)), IMAGENET if case.startswith("d") else HALF
    inputs = images(config.image_size) if isinstance(config, ViTConfig) else faint_images()
    check_equal(model(inputs), answer(other, normalized(inputs, *mean_std)))
    if "body" in case and "bit" not in case:
        tokens = other(normalized(inputs, *mean_std)).last_hidden_state
        check_equal(model.forward_features(inputs), tokens)


@torch.no_grad()
def test_names_of_their_state_dict_are_read_as_well(tmp_path: Path) -> None:
    for case in ("vit", "deit", "dinov2"):
        other, folder = theirs(case), tmp_path / case
        other.save_pretrained(folder)
        _, stored = read_huggingface(folder)
        safetensors.torch.save_file(other.state_dict(), folder / "model.safetensors")
        assert any("q_proj" in name for name in other.state_dict())
        _, by_hand = read_huggingface(folder)
        assert stored.keys() == by_hand.keys()
        assert all(torch.equal(stored[name], by_hand[name]) for name in stored)


def test_precision_is_the_stored_one(tmp_path: Path) -> None:
    theirs("vit").bfloat16().save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in read_huggingface(tmp_path)[1].values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("said", "mean_std"),
    [
        ({"image_mean": [0.1, 0.5, 0.7], "image_std": [0.2, 0.5, 0.4]}, ([0.1, 0.5, 0.7], [0.2, 0.5, 0.4])),
        ({"image_mean": HALF[0], "image_std": HALF[1], "rescale_factor": 0.00392156862745098}, HALF),
        ({"do_normalize": False}, ([0.0] * 3, [1.0] * 3)),
    ],
)
@torch.no_grad()
def test_normalization_is_folded_in(tmp_path: Path, said: dict[str, Any], mean_std: Any) -> None:
    other = theirs("vit")
    other.save_pretrained(tmp_path)
    write_json(tmp_path / "preprocessor_config.json", **said)
    inputs = images()
    check_equal(loaded(*read_huggingface(tmp_path))(inputs), answer(other, normalized(inputs, *mean_std)))


def prepared(folder: Path) -> tuple[Any, int | None]:
    """The image size, and what images are resized to before it is cropped."""
    found = Preprocessing.read(card_huggingface(folder), "")
    return found.image_size, found.resize


@torch.no_grad()
def test_a_resnet_s_size_is_that_of_its_images(tmp_path: Path) -> None:
    theirs("bit").save_pretrained(tmp_path)
    assert read_huggingface(tmp_path)[0].image_size == 224
    said: dict[str, Any] = {"image_mean": HALF[0], "image_std": HALF[1], "size": {"height": 40, "width": 56}}
    said["do_center_crop"] = False
    write_json(tmp_path / "preprocessor_config.json", **said)
    assert read_huggingface(tmp_path)[0].image_size == (40, 56)
    assert prepared(tmp_path) == ((40, 56), None)
    said |= {"size": {"shortest_edge": 72}, "do_center_crop": True, "crop_size": {"height": 64, "width": 64}}
    write_json(tmp_path / "preprocessor_config.json", **said)
    assert read_huggingface(tmp_path)[0].image_size == 64
    assert prepared(tmp_path) == (64, 72)
    write_json(tmp_path / "preprocessor_config.json", image_mean=IMAGENET[0], image_std=IMAGENET[1])
    with pytest.raises(ValueError, match="not into a ResNet"):
        read_huggingface(tmp_path)


def test_weights_in_several_files(tmp_path: Path) -> None:
    other = theirs("vit")
    other.save_pretrained(tmp_path / "one")
    other.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    shards = sorted((tmp_path / "many").glob("*.safetensors"))
    assert len(shards) > 2
    one, many = (read_huggingface(tmp_path / name)[1] for name in ("one", "many"))
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    index = tmp_path / "many" / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": dict.fromkeys(listed, "../one/model.safetensors")}))
    with pytest.raises(ValueError, match="no file of the folder"):
        read_huggingface(tmp_path / "many")
    index.write_text(
        json.dumps({"weight_map": {name: file for name, file in listed.items() if file != shards[0].name}})
    )
    with pytest.raises(ValueError, match="missing"):
        read_huggingface(tmp_path / "many")
    index.write_text(json.dumps({"weight_map": listed}))
    shards[0].unlink()
    with pytest.raises(ValueError, match=shards[0].name):
        read_huggingface(tmp_path / "many")


def test_class_names(tmp_path: Path) -> None:
    other = theirs("vit")
    other.save_pretrained(tmp_path)
    assert card_huggingface(tmp_path) == {}
    names = ["tench", "crane", "cat", "crane", "Grüße", "f", "g"]
    write_json(tmp_path / "config.json", id2label={str(i): names[i] for i in (3, 1, 2, 0, 4, 6, 5)})
    assert card_huggingface(tmp_path) == {"classes": names}
    read_huggingface(tmp_path)


@pytest.mark.parametrize(
    ("case", "file", "changes", "message"),
    [
        ("vit", "config.json", {"model_type": "swin"}, "type 'swin'; supported: vit, deit"),
        ("vit", "config.json", {"hidden_act": "relu"}, "hidden_act='relu'; supported: 'gelu', 'gelu_new'"),
        ("vit", "config.json", {"num_attention_heads": 5}, "heads=5 does not divide"),
        ("vit", "config.json", {"image_size": 32}, r"position_embeddings has shape \(1, 10, 32\) instead of"),
        ("vit", "config.json", {"image_size": "24"}, "image_size"),
        ("vit", "config.json", {"id2label": {"0": "a", "1": "b"}}, "names 2 classes and the head has 7"),
        ("vit", "config.json", {"id2label": {"a": 0}}, "id2label"),
        ("vit", "preprocessor_config.json", {"size": 24}, "lacks image_mean"),
        ("vit", "preprocessor_config.json", {"rescale_factor": 1.0}, "rescale_factor"),
        ("vit", "preprocessor_config.json", {"do_rescale": False}, "rescale_factor"),
        ("vit", "preprocessor_config.json", {"image_mean": [0.5], "image_std": [0.5]}, "three numbers"),
        ("vit body, pooler", "config.json", {"pooler_act": "relu"}, "pooler_act='relu'; supported: 'tanh'"),
        ("dinov2", "config.json", {"use_swiglu_ffn": True}, "use_swiglu_ffn=True"),
        ("dinov2", "config.json", {"image_size": [16, 32]}, "square"),
        ("bit", "config.json", {"global_padding": "SAME"}, "global_padding='SAME'; supported: None"),
        ("bit", "config.json", {"embedding_dynamic_padding": True}, "embedding_dynamic_padding=True"),
        ("bit", "config.json", {"num_groups": 16}, "num_groups=16"),
        ("bit", "config.json", {"output_stride": 4}, "output_stride=4"),
        ("bit", "config.json", {"layer_type": "bottleneck"}, "global_padding=None; supported: 'SAME'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_other_settings_are_refused(
    tmp_path: Path, case: str, file: str, changes: dict[str, Any], message: str
) -> None:
    theirs(case).save_pretrained(tmp_path)
    read_huggingface(tmp_path)
    write_json(tmp_path / file, **changes)
    with pytest.raises(ValueError, match=message):
        read_huggingface(tmp_path)


def test_arrays_that_do_not_fit_are_listed(tmp_path: Path) -> None:
    theirs("vit").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    arrays = safetensors.torch.load_file(weights)
    safetensors.torch.save_file({**arrays, "vit.embeddings.mask_token": torch.zeros(1, 1, 32)}, weights)
    read_huggingface(tmp_path)
    wrong = {name: array for name, array in arrays.items() if not name.endswith("layer.1.output.dense.bias")}
    wrong |= {"vit.pooler.dense.weight": torch.zeros(32, 32), "decoder.0.bias": torch.zeros(3)}
    safetensors.torch.save_file(wrong, weights)
    with pytest.raises(ValueError, match=r"1 missing: encoder.layer.1.output.dense.bias; 2 unknown: .*decoder.0.bias"):
        read_huggingface(tmp_path)
    safetensors.torch.save_file({"vit.embeddings.cls_token": torch.zeros(1, 1, 32)}, weights)
    with pytest.raises(ValueError, match=r"projection\.weight is missing"):
        read_huggingface(tmp_path)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    other = theirs("vit")
    other.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\x08" + b"\0" * 20)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        read_huggingface(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match=r"holds no model\.safetensors\. Get"):
        read_huggingface(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is a pickle, .* never loaded"):
        read_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="no settings by name"):
        read_huggingface(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        card_huggingface(tmp_path)


PROCESSORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # the model's type, their class, and its settings
    "vit": ("vit", "ViTImageProcessor", {}),
    "vit bicubic": ("vit", "ViTImageProcessor", {"size": {"height": 384, "width": 384}, "resample": 3}),
    "vit oblong": ("vit", "ViTImageProcessor", {"size": {"height": 160, "width": 224}}),
    "deit": ("deit", "DeiTImageProcessor", {}),
    "deit large": ("deit", "DeiTImageProcessor", {"size": {"height": 438, "width": 438}, "crop_size": 384}),
    "dinov2": ("dinov2", "BitImageProcessor", {"size": {"shortest_edge": 256}, "crop_size": 224}),
    "bit": ("bit", "BitImageProcessor", {"size": {"shortest_edge": 448}, "crop_size": 448, "resample": 2}),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_images_are_prepared_as_by_their_processor(tmp_path: Path, shared: Path, case: str) -> None:
    kind, name, settings = PROCESSORS[case]
    processor: Any = getattr(transformers, name)(**settings, image_mean=[0.0] * 3, image_std=[1.0] * 3)
    processor.save_pretrained(tmp_path)
    write_json(tmp_path / "config.json", model_type=kind)
    inputs = photographs(shared)
    pillow: Any = getattr(transformers, f"{name}Pil").from_pretrained(tmp_path)
    others = [torch.as_tensor(np.array(pillow(Image.fromarray(each)).pixel_values[0])) for each in inputs]
    check_prepared(card_huggingface(tmp_path), inputs, others)
    # By torchvision their processor differs from itself by Pillow in few values by two gray levels.
    others = [
        processor(torch.from_numpy(each).permute(2, 0, 1), return_tensors="pt").pixel_values[0] for each in inputs
    ]
    check_prepared(card_huggingface(tmp_path), inputs, others, levels=2, off=1e-4)


@pytest.mark.parametrize(
    ("kind", "said", "line"),
    [
        (
            "vit",
            {"feature_extractor_type": "ViTFeatureExtractor", "size": 224},
            "squash to 224x224 (bilinear, antialias)",
        ),
        ("deit", {"size": 256, "crop_size": 224}, "resize 256x256 (bicubic, antialias), center crop 224x224"),
        ("dinov2", {"size": 256}, "resize 256 (bicubic, antialias), center crop 224x224"),
        ("bit", {"crop_size": [160, 224], "size": 240}, "resize 240 (bicubic, antialias), center crop 160x224"),
    ],
)
def test_older_and_shorter_settings(tmp_path: Path, kind: str, said: dict[str, Any], line: str) -> None:
    write_json(tmp_path / "config.json", model_type=kind)
    write_json(tmp_path / "preprocessor_config.json", image_mean=HALF[0], image_std=HALF[1], **said)
    assert Preprocessing.read(card_huggingface(tmp_path), "").describe().startswith(line)


@pytest.mark.parametrize(
    "said",
    [
        {"do_resize": False, "do_center_crop": False},
        {"size": {"shortest_edge": 224}, "do_center_crop": False},
        {"size": {"shortest_edge": 200}, "do_center_crop": True, "crop_size": 224},
        {"size": {"shortest_edge": 224, "longest_edge": 500}},
    ],
)
def test_what_brings_images_to_no_one_size_is_told(
    tmp_path: Path, said: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    write_json(tmp_path / "config.json", model_type="vit")
    write_json(tmp_path / "preprocessor_config.json", image_mean=HALF[0], image_std=HALF[1], **said)
    assert card_huggingface(tmp_path)["preprocessing"]["resize"] is None
    assert "images are squashed to size, because do_resize=" in caplog.text


@pytest.mark.parametrize("said", [{"resample": 9}, {"size": -5}, {"size": 10**9}])
def test_settings_that_are_none_are_refused(tmp_path: Path, said: dict[str, Any]) -> None:
    write_json(tmp_path / "config.json", model_type="vit")
    write_json(tmp_path / "preprocessor_config.json", image_mean=HALF[0], image_std=HALF[1], **said)
    with pytest.raises(ValueError, match=r"resample=9; allowed|image_size is -5|image_size is 1000000000"):
        card_huggingface(tmp_path)


@pytest.mark.parametrize("name", ["Dinov2Model", "Dinov2WithRegistersModel"])
@torch.no_grad()
def test_dinov2_is_evaluated_at_its_own_size(tmp_path: Path, name: str) -> None:
    """At 224 pixels, though its positions are for 518, which they interpolate each in its own way."""
    cls = getattr(transformers, name)
    settings = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 518,
        "patch_size": 14,
    }
    other = randomize(cls(cls.config_class(**settings)))
    other.save_pretrained(tmp_path)
    sizes: dict[str, Any] = {"size": {"shortest_edge": 256}, "crop_size": 224}
    transformers.BitImageProcessor(**sizes, image_mean=IMAGENET[0], image_std=IMAGENET[1]).save_pretrained(tmp_path)
    found = load_checkpoint(tmp_path)
    assert found.model.config.image_size == 224
    assert found.preprocessing.describe().startswith(
        "resize 256 (bicubic, antialias), center crop 224x224, mean (0.485"
    )
    inputs = images(224)
    tokens = other(normalized(inputs, *IMAGENET)).last_hidden_state
    check_equal(found.model.forward_features(inputs), tokens)
    larger = load_checkpoint(tmp_path, image_size=448)
    assert (larger.model.config.image_size, larger.preprocessing.resize) == (448, 512)
    assert load_model(tmp_path).config.image_size == 518
    methods: set[Any] = {"bicubic", "bicubic_antialias", "corners"}
    for method in methods - {found.model.config.position_interpolation}:  # pyright: ignore[reportAttributeAccessIssue]
        wrong = load_checkpoint(tmp_path, interpolation=method)
        with pytest.raises(AssertionError):
            check_equal(wrong.model.forward_features(inputs), tokens, within=0.01)
