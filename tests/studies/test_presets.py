"""The small runs that studies share."""

from vitlab.config import FinetuneConfig
from vitlab.models.config import ViTConfig
from vitlab.studies.presets import LEARNED, TRANSFER, changed, comparison, finetuning, jft, pretraining, resnet, vit


def test_sections_are_changed_by_dicts() -> None:
    config = pretraining("tiny", vit(28, 7, 48, 3), 100)
    other = changed(config, data={"pad": 3}, model={"depth": 2}, seed=1)
    assert (other.data.pad, other.data.classes, other.model.num_classes, other.seed) == (3, LEARNED, 5, 1)
    assert changed(other, data={"pad": 2}, model={"depth": 3}, seed=0) == config


def test_scales_differ_by_data_and_batch() -> None:
    model = resnet(28, (1, 1))
    tiny, gpu = (pretraining(scale, model, 100) for scale in ("tiny", "gpu"))
    assert (tiny.data.name, gpu.data.name, tiny.batch_size, gpu.batch_size) == ("fashion_mnist", "cifar10", 64, 512)
    assert changed(gpu, data={"name": "fashion_mnist", "pad": 2}, batch_size=64) == tiny
    assert comparison("tiny", model, 100).optim.lr == 2 * comparison("gpu", model, 100).optim.lr


def test_transfer_is_on_the_other_classes() -> None:
    before, after = pretraining("tiny", vit(28, 7, 48, 3), 100), finetuning("tiny", 0.1, 100, 32)
    assert not set(LEARNED) & set(TRANSFER)
    assert isinstance(after, FinetuneConfig)
    assert before.fewshot is not None
    assert before.fewshot.classes == after.data.classes == TRANSFER


def test_a_row_of_table_3_with_another_model() -> None:
    config = jft("ViT-B/16", position="none")
    assert (config.epochs, config.optim.lr) == (7.0, 8e-4)
    assert isinstance(config.model, ViTConfig)
    assert config.model.position == "none"
    wide = jft("ViT-L/32", width=2048, heads=32).model
    assert isinstance(wide, ViTConfig)
    assert wide.representation_size == 2048
