"""Their models at a shrunken size, read and written; transformers itself is the reference."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from peers import (
    CASES,
    RESIZED,
    check_equal,
    create_huggingface,
    faint_images,
    from_pretrained,
    images,
    loaded,
    normalized,
    outputs,
    randomize,
)

from vitlab.models import ModelConfig, ResNetBody, ResNetConfig, Rotary, ViTConfig
from vitlab.models.variant import all_settings, override
from vitlab.models.vit import ViT, build_model
from vitlab.weights import class_probabilities, load_checkpoint, load_model
from vitlab.weights.huggingface import metadata_huggingface, read_huggingface, write_huggingface
from vitlab.weights.huggingface_layout import FAMILIES, HALF, IMAGENET

CARD, IMAGES = "config.json", "preprocessor_config.json"


def write_json(path: Path, **changes: Any) -> None:
    """Changes settings in a file."""
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**settings, **changes}))


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_outputs_are_those_of_their_code(tmp_path: Path, case: str) -> None:
    """Read from their folder, also at another size by their interpolation of positions; and written back to one."""
    other = create_huggingface(case)
    other.save_pretrained(tmp_path / "theirs")
    own = getattr(getattr(other.config, "vision_config", other.config), "image_size", None)
    mean_std = FAMILIES[other.config.model_type].mean_std
    for size in (None, 40) if case in RESIZED else (None,):
        model = load_model(tmp_path / "theirs", image_size=size)
        expected = CASES[case][2] | ({"image_size": size} if size else {})
        assert {name: all_settings(model.config)[name] for name in expected} == expected
        inputs = faint_images() if own is None else images(size or own)
        options = {"interpolate_pos_encoding": True} if size and not case.startswith("dino") else {}
        height, width = inputs.shape[2:] if own is None else model.config.image_hw
        seen = inputs[..., :height, :width]  # patches leave out the last pixels
        check_equal(model(seen), outputs(other, normalized(inputs, *mean_std), **options))
        if case.startswith(("vit body", "deit body", "dinov2 body")):
            check_equal(model.forward_features(seen), other(normalized(inputs, *mean_std)).last_hidden_state)
        if own is None:  # ResNets are not written
            return
        write_huggingface(model, tmp_path / f"ours {size}", {})
        again = from_pretrained(tmp_path / f"ours {size}", model.config.num_classes > 0)
        check_equal(outputs(again, seen), model(seen))
        check_equal(loaded(*read_huggingface(tmp_path / f"ours {size}"))(seen), model(seen))


@pytest.fixture(scope="module")
def vit() -> Any:
    return create_huggingface("vit")


@pytest.mark.parametrize(
    ("settings", "mean_std"),
    [
        ({"image_mean": [0.1, 0.5, 0.7], "image_std": [0.2, 0.5, 0.4]}, ([0.1, 0.5, 0.7], [0.2, 0.5, 0.4])),
        ({"image_mean": HALF[0], "image_std": HALF[1], "rescale_factor": 0.00392156862745098}, HALF),
        ({"do_normalize": False}, ([0.0] * 3, [1.0] * 3)),
    ],
)
@torch.no_grad()
def test_normalization_is_folded_in(tmp_path: Path, vit: Any, settings: dict[str, Any], mean_std: Any) -> None:
    vit.save_pretrained(tmp_path)
    write_json(tmp_path / IMAGES, **settings)
    inputs = images()
    check_equal(loaded(*read_huggingface(tmp_path))(inputs), outputs(vit, normalized(inputs, *mean_std)))


def test_a_resnets_size_is_that_of_its_images(tmp_path: Path) -> None:
    create_huggingface("bit").save_pretrained(tmp_path)
    assert read_huggingface(tmp_path)[0].image_size == 224
    half: dict[str, Any] = {"image_mean": HALF[0], "image_std": HALF[1]}
    crop: dict[str, Any] = {"do_center_crop": True, "crop_size": {"height": 64, "width": 64}}
    for settings, size in (
        ({"size": {"height": 40, "width": 56}, "do_center_crop": False}, (40, 56)),
        ({"size": {"shortest_edge": 72}, **crop}, 64),
    ):
        write_json(tmp_path / IMAGES, **half, **settings)
        assert read_huggingface(tmp_path)[0].image_size == size
    write_json(tmp_path / IMAGES, image_mean=IMAGENET[0], image_std=IMAGENET[1])
    with pytest.raises(ValueError, match="not into a ResNet"):
        read_huggingface(tmp_path)


def test_weights_in_several_files(tmp_path: Path, vit: Any) -> None:
    many = tmp_path / "many"
    vit.save_pretrained(tmp_path / "one")
    vit.save_pretrained(many, max_shard_size="20KB")
    one, several = (read_huggingface(folder)[1] for folder in (tmp_path / "one", many))
    assert one.keys() == several.keys()
    assert all(torch.equal(one[name], several[name]) for name in one)
    index = many / "model.safetensors.index.json"
    listed = json.loads(index.read_text())["weight_map"]
    shards = sorted(set(listed.values()))
    assert len(shards) > 2
    for weight_map, problem in (
        (dict.fromkeys(listed, "../one/model.safetensors"), "not a file of the folder"),
        ({name: file for name, file in listed.items() if file != shards[0]}, "missing"),
        (dict.fromkeys(listed, "absent.safetensors"), "absent.safetensors"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(ValueError, match=problem):
            read_huggingface(many)


def test_class_names_and_several_labels(tmp_path: Path, vit: Any, tiny: Callable[..., ViT]) -> None:
    """Their pipelines take a sigmoid for each of several labels, as we do."""
    vit.save_pretrained(tmp_path / "theirs")
    assert metadata_huggingface(tmp_path / "theirs") == {}
    names = ["tench", "crane", "cat", "crane", "Grüße", "f", "g"]
    write_json(tmp_path / "theirs" / CARD, id2label={str(i): names[i] for i in (3, 1, 2, 0, 4, 6, 5)})
    assert metadata_huggingface(tmp_path / "theirs") == {"classes": names}
    several = {"multi_label": True, "label_thresholds": [0.25, 0.5]}
    write_huggingface(tiny(), tmp_path / "ours", several)
    assert from_pretrained(tmp_path / "ours", True).config.problem_type == "multi_label_classification"
    metadata = metadata_huggingface(tmp_path / "ours")
    assert metadata.items() >= several.items()
    logits = torch.tensor([[0.0, 2.0]])
    torch.testing.assert_close(class_probabilities(logits, metadata), logits.sigmoid())


def test_arrays_that_do_not_fit_are_listed(tmp_path: Path, vit: Any) -> None:
    vit.bfloat16().save_pretrained(tmp_path)
    vit.float()
    weights = tmp_path / "model.safetensors"
    arrays = safetensors.torch.load(weights.read_bytes())
    safetensors.torch.save_file({**arrays, "vit.embeddings.mask_token": torch.zeros(1, 1, 32)}, weights)
    assert {tensor.dtype for tensor in read_huggingface(tmp_path)[1].values()} == {torch.bfloat16}
    del arrays["vit.encoder.layer.1.output.dense.bias"]
    unknown = {"vit.pooler.dense.weight": torch.zeros(32, 32), "decoder.0.bias": torch.zeros(3)}
    for content, problem in (
        (safetensors.torch.save({**arrays, **unknown}), r"1 missing: encoder.layer.1.output.dense.bias; 2 unknown: "),
        (safetensors.torch.save({"vit.embeddings.cls_token": torch.zeros(1, 1, 32)}), r"projection\.weight is missing"),
        (b"\x08" + b"\0" * 20, r"model\.safetensors cannot be read"),
    ):
        weights.write_bytes(content)
        with pytest.raises(ValueError, match=problem):
            read_huggingface(tmp_path)
    weights.unlink()
    with pytest.raises(ValueError, match=r"holds no model\.safetensors"):
        read_huggingface(tmp_path)


@pytest.mark.parametrize("name", ["Dinov2Model", "Dinov2WithRegistersModel"])
@torch.no_grad()
def test_dinov2_is_evaluated_at_its_own_size(tmp_path: Path, name: str) -> None:
    """At 224 pixels, though its positions are for 518; the two kinds interpolate them differently."""
    cls = getattr(transformers, name)
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 518, "patch_size": 14}
    other = randomize(cls(cls.config_class(**sizes)))
    other.save_pretrained(tmp_path)
    settings: dict[str, Any] = {"size": {"shortest_edge": 256}, "crop_size": 224}
    transformers.BitImageProcessor(**settings, image_mean=IMAGENET[0], image_std=IMAGENET[1]).save_pretrained(tmp_path)
    checkpoint, inputs = load_checkpoint(tmp_path), images(224)
    assert (checkpoint.model.config.image_size, load_model(tmp_path).config.image_size) == (224, 518)
    assert checkpoint.preprocessing.resize == 256
    tokens = other(normalized(inputs, *IMAGENET)).last_hidden_state
    check_equal(checkpoint.model.forward_features(inputs), tokens)
    wrong: Any = "bicubic" if "Registers" in name else "bicubic_antialias"
    with pytest.raises(AssertionError):
        check_equal(load_checkpoint(tmp_path, interpolation=wrong).model.forward_features(inputs), tokens, within=0.01)


# --- writing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "vit"),
        ({"position": "2d", "in_chans": 4, "gelu": "quick"}, "vit"),
        ({"position": "none"}, "vit"),
        ({"position": "sincos2d", "class_position": False}, "vit"),
        ({"representation_size": 6, "num_classes": 0}, "vit"),
        ({"distilled": True, "class_position": False, "image_size": (8, 12)}, "deit"),
        ({"registers": 1, "position": "2d", "image_size": (8, 12)}, "deit"),
        ({"registers": 1, "representation_size": 6, "num_classes": 0}, "deit"),
        ({"pool": "token+gap", "mlp_dim": 16}, "dinov2"),
        ({"layer_scale": 0.5, "class_position": False, "mlp_dim": 16}, "dinov2"),
        ({"registers": 3, "pool": "token+gap", "layer_scale": 0.5, "mlp_dim": 24}, "dinov2_with_registers"),
        ({"swiglu": True, "mlp_dim": 24}, "dinov2"),
        ({"pool": "gap", "position": "2d", "image_size": (8, 12)}, "ijepa"),
        ({"pool": "map", "num_classes": 0, "position": "sincos2d"}, "siglip_vision_model"),
        ({"pre_norm": True, "num_classes": 0, "class_position": False}, "clip_vision_model"),
        ({"pre_norm": True, "pool": "gap", "final_norm": "none", "registers": 1, "position": "2d"}, "clip"),
        ({"rotary": Rotary(30.0), "position": "none", "num_classes": 0, "image_size": (8, 12)}, "dinov3_vit"),
        ({"rotary": Rotary(), "position": "none", "num_classes": 0, "swiglu": True, "registers": 2}, "dinov3_vit"),
    ],
)
@torch.no_grad()
def test_their_code_loads_our_vits(
    tmp_path: Path, tiny: Callable[..., ViT], settings: dict[str, Any], kind: str
) -> None:
    model = tiny(**settings)
    write_huggingface(model, tmp_path, {})
    assert json.loads((tmp_path / CARD).read_text())["model_type"] == kind
    inputs = images(model.config.image_size, model.config.in_chans)
    expected = model(inputs)
    check_equal(outputs(from_pretrained(tmp_path, model.config.num_classes > 0), inputs), expected)
    check_equal(loaded(*read_huggingface(tmp_path))(inputs), expected)


def small(**settings: Any) -> Any:
    sizes = {"image_size": 8, "patch_size": 4, "width": 8, "depth": 1, "heads": 2, "mlp_dim": 12}
    return override(ViTConfig(), **{**sizes, **settings})


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (small(pool="gap", registers=1), "registers=1"),
        (small(pool="map"), "num_classes=1000.*has 0"),
        (small(pool="gap", final_norm="mean"), "final_norm='mean'"),
        (small(rotary=Rotary(), num_classes=0), "position='1d'.*has 'none'"),
        (small(rotary=Rotary(50.0, "index"), position="none", num_classes=0), "rotary=.*has Rotary"),
        (small(pre_norm=True, head_bias=-1.0), "only a projection without bias"),
        (small(width=24, mlp_dim=24, swiglu=True), "mlp_dim=24.*has (16|32)"),
        (small(position_at="every"), "position_at='every'"),
        (small(patch_size=1, stem=ResNetBody((1,), 32)), "stem=ResNetBody"),
        (small(representation_size=6), "representation_size=6"),
        (small(distilled=True, layer_scale=1.0), "distilled=True"),
        (small(distilled=True, num_classes=0), "distilled=True"),
        (small(layer_scale=1.0), "mlp_dim=12.*cannot represent.*--to vitlab"),
        (small(mlp_dim=16, image_size=(8, 12), layer_scale=1.0), r"image_size=\(8, 12\)"),
        (ResNetConfig(body=ResNetBody((1,))), "ResNets are not written"),
    ],
)
def test_unsupported_models_are_not_written(tmp_path: Path, config: ModelConfig, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        write_huggingface(build_model(config), tmp_path / "new", {})
    assert not (tmp_path / "new").exists()
