from typing import Any

import pytest

from vitlab.config import DataConfig, FinetuneConfig, OptimConfig, TrainConfig
from vitlab.errors import UserError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optim": OptimConfig(momentum=0.8)}, r"optim\.momentum=0\.8 .*optim\.name"),
        ({"optim": OptimConfig("sgd", beta1=0.8)}, r"optim\.beta1=0\.8 .*optim\.name"),
        ({"optim": OptimConfig(end_lr=1e-5)}, r"end_lr=1e-05 .*optim\.schedule='linear'"),
        ({"optim": OptimConfig(decay_on="kernels")}, r"decay_on='kernels' .*optim\.weight_decay"),
        ({"data": DataConfig(crop="pad", min_area=0.3)}, r"data\.min_area=0\.3 .*data\.crop='pad'"),
        ({"data": DataConfig(pad=2)}, r"data\.pad=2 .*data\.crop='inception'"),
        ({"data": DataConfig(randaugment_magnitude=9)}, r"magnitude=9 .*data\.randaugment_layers"),
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
