from typing import Any

import pytest

from vitlab.config import DataConfig, FinetuneConfig, OptimConfig, TrainConfig
from vitlab.errors import UserError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": OptimConfig(momentum=0.8)}, r"optim\.momentum=0\.8 has no effect with optim\.name='adam'; give opt"),
        ({"optim": OptimConfig("sgd", beta1=0.8)}, r"optim\.beta1=0\.8 has no effect .*or leave optim\.beta1 at 0\.9"),
        ({"optim": OptimConfig(end_lr=1e-5)}, r"end_lr=1e-05 has no effect .*give optim\.schedule='linear' too"),
        ({"optim": OptimConfig(decay_on="kernels")}, r"decay_on='kernels' .*give optim\.weight_decay above 0 too"),
        ({"data": DataConfig(crop="pad", min_area=0.3)}, r"data\.min_area=0\.3 has no effect with data\.crop='pad'"),
        ({"data": DataConfig(pad=2)}, r"data\.pad=2 has no effect with data\.crop='inception'"),
        ({"data": DataConfig(randaugment_magnitude=9)}, r"magnitude=9 .*give data\.randaugment_layers above 0 too"),
    ],
)
@pytest.mark.parametrize("kind", [TrainConfig, FinetuneConfig])
def test_settings_without_effect(kind: type, values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        kind(steps=1, **values)


def test_settings_with_their_switch() -> None:
    data = DataConfig(min_area=0.3, randaugment_layers=2, randaugment_magnitude=9)
    optim = OptimConfig("sgd", momentum=0.8, schedule="linear", end_lr=1e-5, weight_decay=0.1, decay_on="kernels")
    TrainConfig(steps=1, data=data, optim=optim)
