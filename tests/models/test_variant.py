import json

import pytest

from vitlab.models import ModelConfig, Rotary, Variant, ViTConfig, get_config
from vitlab.models.variant import all_settings, override
from vitlab.settings import from_dict


def test_settings_of_an_earlier_version() -> None:
    """Which had those of the variant beside the others."""
    older = {"kind": "vit", "width": 8, "heads": 2, "registers": 4, "swiglu": True, "rotary": {"base": 50.0}}
    config = from_dict(ModelConfig, json.loads(json.dumps(older)))
    assert config == ViTConfig(width=8, heads=2, variant=Variant(registers=4, swiglu=True, rotary=Rotary(50.0)))
    with pytest.raises(ValueError, match="registers is given beside variant"):
        from_dict(ModelConfig, {"registers": 4, "variant": {}})


def test_settings_are_listed_and_overridden_with_those_of_the_variant(kind: ModelConfig) -> None:
    settings = all_settings(kind)
    assert override(type(kind)(), **settings) == kind
    assert ("registers" in settings) == isinstance(kind, ViTConfig)
    assert Variant(layer_scale=0.1, class_position=False).differences == {"layer_scale": 0.1, "class_position": False}


def test_names_of_models_take_settings_of_the_variant() -> None:
    assert get_config("ViT-S/16", registers=4) == get_config("ViT-S/16", variant=Variant(registers=4))
    with pytest.raises(ValueError, match="the nearest: registers"):
        get_config("ViT-S/16", register=4)
    with pytest.raises(ValueError, match="unknown model setting 'registers'"):
        get_config("R50x1", registers=4)
