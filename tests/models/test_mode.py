import pytest
from torch import nn

from vitlab.models.mode import evaluation_mode


def test_each_module_gets_its_own_mode_back_after_an_error() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    model[1].eval()
    before = [module.training for module in model.modules()]
    assert before == [True, True, False, False]

    def fails() -> None:
        with evaluation_mode(model):
            assert not any(module.training for module in model.modules())
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert [module.training for module in model.modules()] == before
