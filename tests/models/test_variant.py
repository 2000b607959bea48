import pytest

from vitlab.models import ModelConfig, Variant, ViTConfig, get_config
from vitlab.models.variant import all_settings, override


def test_settings_are_listed_and_overridden_with_those_of_the_variant(kind: ModelConfig) -> None:
    settings = all_settings(kind)
    assert override(type(kind)(), **settings) == kind
    assert ("registers" in settings) == isinstance(kind, ViTConfig)
    assert Variant(layer_scale=0.1, class_position=False).differences == {"layer_scale": 0.1, "class_position": False}


def test_names_of_models_take_settings_of_the_variant() -> None:
    assert get_config("ViT-S/16", registers=4) == get_config("ViT-S/16", variant=Variant(registers=4))
    both = Variant(registers=4, swiglu=True)
    assert get_config("ViT-S/16", registers=4, variant=Variant(swiglu=True)) == get_config("ViT-S/16", variant=both)
    with pytest.raises(ValueError, match="the nearest: registers"):
        get_config("ViT-S/16", register=4)
    with pytest.raises(ValueError, match="unknown model setting 'registers'"):
        get_config("R50x1", registers=4)
