import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

from vitlab.models import ResNetBody, ResNetConfig, ViTConfig, build_model
from vitlab.models.vit import ViT
from vitlab.weights.huggingface import card_huggingface, read_huggingface, write_huggingface

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 24,
    "patch_size": 8,
    "num_labels": 7,
}
OLDER = {**SMALL, "intermediate_size": 48}
DINOV2 = {**SMALL, "mlp_ratio": 2}
BIT = {"embedding_size": 32, "hidden_sizes": [128, 256], "depths": [1, 2], "num_labels": 7}
BOTTLENECK = {**BIT, "layer_type": "bottleneck", "global_padding": "same", "embedding_dynamic_padding": True}

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])

# What is saved: class, its settings, its constructor's, and our configuration's telling fields.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", OLDER, {}, {"pool": "token", "layer_norm_eps": 1e-12, "gelu": "erf"}),
    "vit tanh": (
        "ViTForImageClassification",
        {**OLDER, "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-3},
        {},
        {"gelu": "tanh", "layer_norm_eps": 1e-3},
    ),
    "vit oblong": ("ViTForImageClassification", {**OLDER, "image_size": [16, 32]}, {}, {"image_size": (16, 32)}),
    "vit without biases": ("ViTForImageClassification", {**OLDER, "qkv_bias": False}, {}, {}),
    "vit body": ("ViTModel", OLDER, {"add_pooling_layer": False}, {"num_classes": 0, "representation_size": None}),
    "vit body, pooler": ("ViTModel", {**OLDER, "pooler_output_size": 20}, {}, {"representation_size": 20}),
    "deit, teacher": ("DeiTForImageClassificationWithTeacher", OLDER, {}, {"distilled": True, "registers": 0}),
    "deit": ("DeiTForImageClassification", OLDER, {}, {"distilled": False, "registers": 1}),
    "deit body": ("DeiTModel", OLDER, {"add_pooling_layer": False}, {"registers": 1, "num_classes": 0}),
    "deit body, pooler": ("DeiTModel", OLDER, {}, {"registers": 1, "representation_size": 32}),
    "dinov2": ("Dinov2ForImageClassification", DINOV2, {}, {"pool": "token+gap", "layer_scale": 1.0}),
    "dinov2 body": ("Dinov2Model", DINOV2, {}, {"pool": "token", "num_classes": 0, "layer_norm_eps": 1e-6}),
    "dinov2, registers": (
        "Dinov2WithRegistersForImageClassification",
        {**DINOV2, "num_register_tokens": 3},
        {},
        {"registers": 3, "pool": "token+gap"},
    ),
    "dinov2 body, registers": ("Dinov2WithRegistersModel", DINOV2, {}, {"registers": 4, "pool": "token"}),
    "bit": ("BitForImageClassification", BIT, {}, {"num_classes": 7}),
    "bit bottleneck": ("BitForImageClassification", BOTTLENECK, {}, {"num_classes": 7}),
    "bit body": ("BitModel", BIT, {}, {"num_classes": 0}),
}


def randomise(model: nn.Module) -> Any:
    """Every parameter random, so that none can be lost or swapped unseen; convolutions so small that eps counts."""
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=3e-4 if parameter.ndim == 4 and parameter.shape[-1] != 8 else 0.5)
    return model.eval()


def theirs(case: str) -> Any:
    name, settings, options, _ = CASES[case]
    cls = getattr(transformers, name)
    return randomise(cls(cls.config_class(**settings), **options))


def ours(folder: Path) -> Any:
    config, state = read_huggingface(folder)
    model = build_model(config)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.eval()


def images(size: int | tuple[int, int] = 24) -> Tensor:
    height, width = (size, size) if isinstance(size, int) else size
    return torch.rand(3, 3, height, width) * 2 - 1


def faint_images() -> Tensor:
    """Of sides that tell paddings apart, and of values that tell epsilons apart."""
    return images((46, 37)) * 1e-3


def normalised(pictures: Tensor, mean: list[float], std: list[float]) -> Tensor:
    centre, scale = (torch.tensor(each, dtype=torch.float64)[:, None, None] for each in (mean, std))
    return (((pictures.double() + 1) / 2 - centre) / scale).float()


def answer(model: Any, pictures: Tensor) -> Tensor:
    """What their model says in the end: logits, or what stands for the picture."""
    said = model(pictures)
    if "logits" in said:
        return said.logits
    pooled = said.get("pooler_output")
    return said.last_hidden_state[:, 0] if pooled is None else pooled.flatten(1)


def check_equal(mine: Tensor, other: Tensor, within: float = 1e-5) -> None:
    assert mine.shape == other.shape
    error = (mine - other).abs().max() / other.square().mean().sqrt()
    assert error <= within, f"{error:.1e}"


def write_json(path: Path, **changes: Any) -> None:
    """`changes` to the settings in a file."""
    said = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**said, **changes}))


# --------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_answers_are_those_of_their_code(tmp_path: Path, case: str) -> None:
    other = theirs(case)
    other.save_pretrained(tmp_path)
    config, _ = read_huggingface(tmp_path)
    assert {name: getattr(config, name) for name in CASES[case][3]} == CASES[case][3]
    model, mean_std = ours(tmp_path), IMAGENET if case.startswith("d") else HALF
    pictures = images(config.image_size) if isinstance(config, ViTConfig) else faint_images()
    check_equal(model(pictures), answer(other, normalised(pictures, *mean_std)))
    if "body" in case and "bit" not in case:
        tokens = other(normalised(pictures, *mean_std)).last_hidden_state
        check_equal(model.forward_features(pictures), tokens)


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
def test_normalisation_is_folded_in(tmp_path: Path, said: dict[str, Any], mean_std: Any) -> None:
    other = theirs("vit")
    other.save_pretrained(tmp_path)
    write_json(tmp_path / "preprocessor_config.json", **said)
    pictures = images()
    check_equal(ours(tmp_path)(pictures), answer(other, normalised(pictures, *mean_std)))


@torch.no_grad()
def test_a_resnet_s_size_is_that_of_its_pictures(tmp_path: Path) -> None:
    theirs("bit").save_pretrained(tmp_path)
    assert read_huggingface(tmp_path)[0].image_size == 224
    said: dict[str, Any] = {"image_mean": HALF[0], "image_std": HALF[1], "size": {"height": 40, "width": 56}}
    write_json(tmp_path / "preprocessor_config.json", **said)
    assert read_huggingface(tmp_path)[0].image_size == (40, 56)
    assert "eval_resize" not in card_huggingface(tmp_path)
    said |= {"size": {"shortest_edge": 72}, "do_center_crop": True, "crop_size": {"height": 64, "width": 64}}
    write_json(tmp_path / "preprocessor_config.json", **said)
    assert read_huggingface(tmp_path)[0].image_size == 64
    assert card_huggingface(tmp_path) == {"eval_resize": 72}
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


# --------------------------------------------------------------------------------------------------- writing

LOADS = transformers.AutoModelForImageClassification, transformers.AutoModel


def from_pretrained(folder: Path, head: bool) -> Any:
    """Their model; none of its parameters may be missing, left over or of another shape."""
    bare = not head and not any("pooler" in name for name in safetensors.torch.load_file(folder / "model.safetensors"))
    can_pool = json.loads((folder / "config.json").read_text())["model_type"] in ("vit", "deit")
    options: dict[str, Any] = {"add_pooling_layer": False} if bare and can_pool else {}
    model, info = LOADS[0 if head else 1].from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info.values()), info
    return model.eval()


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_what_was_read_is_written_back(tmp_path: Path, case: str) -> None:
    theirs(case).save_pretrained(tmp_path / "theirs")
    model = ours(tmp_path / "theirs")
    write_huggingface(model, tmp_path / "written", {})
    pictures = images(model.config.image_size) if "bit" not in case else faint_images()
    expected = model(pictures)
    check_equal(answer(from_pretrained(tmp_path / "written", "body" not in case), pictures), expected)
    check_equal(ours(tmp_path / "written")(pictures), expected)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "vit"),
        ({"gelu": "erf", "layer_norm_eps": 1e-3, "image_size": (8, 12)}, "vit"),
        ({"position": "2d"}, "vit"),
        ({"position": "none"}, "vit"),
        ({"position": "sincos2d", "position_at": "stem", "class_position": False}, "vit"),
        ({"class_position": False}, "vit"),
        ({"representation_size": 6, "num_classes": 0}, "vit"),
        ({"num_classes": 0}, "vit"),
        ({"distilled": True}, "deit"),
        ({"distilled": True, "class_position": False, "image_size": (8, 12)}, "deit"),
        ({"registers": 1, "position": "2d", "image_size": (8, 12)}, "deit"),
        ({"registers": 1, "representation_size": 6, "num_classes": 0}, "deit"),
        ({"pool": "token+gap", "mlp_dim": 16}, "dinov2"),
        ({"layer_scale": 0.5, "class_position": False, "mlp_dim": 16}, "dinov2"),
        ({"layer_scale": 0.5, "num_classes": 0, "mlp_dim": 16}, "dinov2"),
        ({"registers": 3, "pool": "token+gap", "layer_scale": 0.5, "mlp_dim": 24}, "dinov2_with_registers"),
        ({"registers": 2, "position": "2d", "mlp_dim": 24}, "dinov2_with_registers"),
    ],
)
@torch.no_grad()
def test_their_code_loads_what_we_write(
    tmp_path: Path, tiny: Callable[..., ViT], settings: dict[str, Any], kind: str
) -> None:
    model = tiny(**settings)
    write_huggingface(model, tmp_path, {})
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == kind
    pictures = images(model.config.image_size)
    expected = model(pictures)
    check_equal(answer(from_pretrained(tmp_path, model.config.num_classes > 0), pictures), expected)
    check_equal(ours(tmp_path)(pictures), expected)


@pytest.mark.parametrize(
    "body",
    [
        ResNetBody((1, 2), 32, "v2", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5),
        ResNetBody((1, 2), 32, "v2", weight_eps=1e-5, weight_eps_on="variance", group_norm_eps=1e-5),
        ResNetBody((2, 1), 32, "v1", weight_eps=1e-10, weight_eps_on="variance", group_norm_eps=1e-5),
    ],
)
@pytest.mark.parametrize("num_classes", [0, 7])
@torch.no_grad()
def test_their_code_loads_our_resnets(tmp_path: Path, body: ResNetBody, num_classes: int) -> None:
    model = randomise(build_model(ResNetConfig(image_size=(46, 37), body=body, num_classes=num_classes)))
    write_huggingface(model, tmp_path, {})
    pictures = faint_images()
    check_equal(answer(from_pretrained(tmp_path, num_classes > 0), pictures), model(pictures), within=1e-4)
    assert read_huggingface(tmp_path)[0].image_size == (46, 37)
    check_equal(ours(tmp_path)(pictures), model(pictures), within=1e-4)


def test_their_preparation_of_pictures(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    picture = torch.randint(0, 256, (3, 12, 12), dtype=torch.uint8)
    write_huggingface(tiny(), tmp_path, {})
    prepared = transformers.AutoImageProcessor.from_pretrained(tmp_path)(picture, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(prepared[0], picture / 127.5 - 1, atol=1e-5, rtol=0)
    names = ["tench", "crane", "cat", "crane", "Grüße"]
    write_huggingface(tiny(), tmp_path, {"eval_resize": 14, "classes": names})
    assert card_huggingface(tmp_path) == {"eval_resize": 14, "classes": names}
    assert from_pretrained(tmp_path, head=True).config.id2label == dict(enumerate(names))
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    picture = torch.randint(0, 256, (3, 28, 40), dtype=torch.uint8)
    assert processor(picture, return_tensors="pt")["pixel_values"].shape == (1, 3, 12, 12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pool": "gap"}, "pool='gap'"),
        ({"pool": "map"}, "pool='map'"),
        ({"position": "relative", "position_at": "every"}, "position='relative'"),
        ({"position_at": "every"}, "position_at='every'"),
        ({"encoder": "axial"}, "encoder='axial'"),
        ({"stem": ResNetBody((1,), 32), "patch_size": 1, "image_size": 8}, "stem=ResNetBody"),
        ({"representation_size": 6}, "representation_size=6"),
        ({"representation_size": 6, "registers": 2, "num_classes": 0}, "representation_size=6"),
        ({"distilled": True, "layer_scale": 1.0}, "distilled=True"),
        ({"distilled": True, "num_classes": 0}, "num_classes=0"),
        ({"layer_scale": 1.0}, "mlp_dim=12, which Hugging Face's code cannot compute.*--to vitlab"),
        ({"layer_scale": 1.0, "mlp_dim": 16, "image_size": (8, 12)}, r"image_size=\(8, 12\)"),
    ],
)
def test_what_their_code_would_compute_otherwise_is_refused(
    tmp_path: Path, tiny: Callable[..., ViT], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_huggingface(tiny(**settings), tmp_path / "new", {})
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "weight_eps_on='std'"),
        ({"group_norm_eps": 1e-6}, "group_norm_eps=1e-06"),
        ({"pool_padding": "-inf"}, "pool_padding='-inf'"),
        ({"mixing": "axial"}, "mixing='axial'"),
        ({"weight_eps_on": "variance", "weight_eps": 0.0}, "weight_eps=0.0"),
    ],
)
def test_resnets_of_other_kinds_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    body = ResNetBody(**{"layers": (1,), "width": 64, "version": "v2", "group_norm_eps": 1e-5, **settings})
    with pytest.raises(ValueError, match=message):
        write_huggingface(build_model(ResNetConfig(image_size=16, body=body)), tmp_path, {})


def test_only_a_model_is_replaced(tmp_path: Path, tiny: Callable[..., ViT]) -> None:
    folder = tmp_path / "model"
    write_huggingface(tiny(), folder, {})
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(before) == ["config.json", "model.safetensors", "preprocessor_config.json"]
    with pytest.raises(ValueError, match="names 2 classes and the model has 5 outputs"):
        write_huggingface(tiny(), folder, {"classes": ["a", "b"]})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    write_huggingface(tiny(num_classes=0), folder, {})
    assert (folder / "model.safetensors").read_bytes() != before["model.safetensors"]
    (folder / "README.md").touch()
    with pytest.raises(ValueError, match=r"already holds README\.md"):
        write_huggingface(tiny(), folder, {})
    with pytest.raises(ValueError, match="is a file"):
        write_huggingface(tiny(), folder / "README.md", {})
