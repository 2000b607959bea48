"""A model's name, sizes and cost as every page shows them (Table 1, Sec. 3.1)."""

from vitlab.models import MODELS, ModelConfig, ResNetConfig, ViTConfig

_SIZES = ("width", "depth", "heads", "mlp_dim", "patch_size", "encoder", "stem")
_POOLING = {
    "token": "the class token (Eq. 4)",
    "gap": "the mean over patches (App. D.3)",
    "map": "a learned query's attention over all tokens",
    "token+gap": "class token and mean over patches",
}
_POSITION_AT = {"stem": "", "every": ", of its own in every block", "shared": ", shared by all blocks"}


def name_of(config: ModelConfig) -> str:
    """The paper's name for a model of these sizes, or else its kind and stride."""
    fields = ("body",) if isinstance(config, ResNetConfig) else _SIZES
    for name, known in MODELS.items():
        if all(getattr(config, field) == getattr(known, field, None) for field in fields):
            return name
    if isinstance(config, ResNetConfig):
        return "ResNet"
    kind = "Axial ViT" if config.encoder == "axial" else "Hybrid" if config.stem else "ViT"
    return f"{kind}/{config.stride}"


def numbers_of(config: ModelConfig) -> dict[str, str]:
    """The headline numbers as text."""
    numbers = {
        "Model": name_of(config),
        "Parameters": f"{config.num_parameters:,}",
        "GMACs per image": f"{config.forward_macs / 1e9:.3g}",
        "Pixels, h × w": "{} × {}".format(*config.image_hw),
    }
    if isinstance(config, ViTConfig):
        numbers["Patches, h × w"] = "{} × {}".format(*config.grid)
        numbers["Layers × heads"] = f"{config.depth} × {config.heads}"
    return numbers


def details_of(config: ModelConfig) -> dict[str, str]:
    """Further details as text."""
    classes = f"{config.num_classes:,} classes"
    if isinstance(config, ResNetConfig):
        return {"kind": "ResNet (BiT)", "prediction from": classes if config.num_classes else "none: no head"}
    kind = "hybrid: a Vision Transformer on a ResNet's feature map" if config.stem else "Vision Transformer"
    source = _POOLING[config.pool]
    if config.distilled:
        source = "class token and distillation token, each with a head of its own"
    return {
        "kind": kind + (", axial attention" if config.encoder == "axial" else ""),
        "pixels from patch to patch": str(config.stride),
        "width of a token, of the MLP": f"{config.width}, {config.mlp_dim}",
        "tokens before the patches": str(config.num_prefix_tokens),
        "position embedding": config.position + _POSITION_AT[config.position_at],
        "prediction from": f"{source}; {classes}" if config.num_classes else "none: no head",
    }
