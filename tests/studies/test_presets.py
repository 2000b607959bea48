"""The small runs that studies share."""

from vitlab.models.config import ViTConfig
from vitlab.studies.presets import changed, comparison, jft, pretraining, resnet, vit


def test_presets() -> None:
    """Sections are changed by dicts; the scales differ by data and batch; a row of Table 3 takes another model."""
    model = resnet(28, (1, 1))
    small, gpu = (pretraining(scale, model, 100) for scale in ("tiny", "gpu"))
    assert (small.data.name, gpu.data.name, small.batch_size, gpu.batch_size) == ("fashion_mnist", "cifar10", 64, 512)
    assert changed(gpu, data={"name": "fashion_mnist", "pad": 2}, batch_size=64) == small
    narrow = comparison("tiny", {"tiny": (vit(28, 7, 48, 3), 100)}, depth=2)
    assert (narrow.model, narrow.steps) == (vit(28, 7, 48, 2), 100)
    wide = jft("ViT-L/32", width=2048, heads=32)
    assert (wide.epochs, wide.optim.lr) == (7.0, 6e-4)
    assert isinstance(wide.model, ViTConfig)
    assert wide.model.representation_size == 2048
