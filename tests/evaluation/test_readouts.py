"""Which block and which pooling represent images best, by leave-one-out losses."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vitlab.data.registry import load_dataset
from vitlab.errors import UserError
from vitlab.evaluation import readouts
from vitlab.evaluation.features import features
from vitlab.evaluation.linear_head import least_squares_head, leave_one_out
from vitlab.evaluation.options import FeatureOptions
from vitlab.evaluation.readouts import Readout, ReadoutChoice, ReadoutScore, candidates, choose_readout
from vitlab.models import ResNetConfig, ViTConfig
from vitlab.models.variant import Variant
from vitlab.models.vit import ViT, build_model
from vitlab.weights.adapt import adapt

CONFIG = ViTConfig(image_size=8, patch_size=4, width=16, depth=4, heads=2, mlp_dim=32, num_classes=0)
CPU = FeatureOptions(device="cpu", batch_size=64, precision="float32")


@pytest.fixture(scope="module")
def spoiled() -> ViT:
    """Its third and fourth blocks add noise of no use, and hide most of what the second gives."""
    model: Any = build_model(CONFIG, generator=torch.Generator().manual_seed(0)).eval()
    generator = torch.Generator().manual_seed(1)
    for block in model.blocks[2:]:
        nn.init.normal_(block.mlp.fc2.weight, std=3.0, generator=generator)
    return model


@pytest.fixture(scope="module")
def digits() -> Any:
    return load_dataset("digits", "train").take(np.arange(200))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            CONFIG,
            [(d, p) for d in (2, 3, 4) for p in ("token", "gap", "token+gap") if (d, p) != (4, "token")]
            + [(4, "token")],
        ),
        (dataclasses.replace(CONFIG, depth=12, pool="gap"), [(6, "gap"), (8, "gap"), (10, "gap"), (12, "gap")]),
        (dataclasses.replace(CONFIG, depth=1, position_at="every"), [(1, "token+gap"), (1, "token")]),
        (dataclasses.replace(CONFIG, pool="map"), []),
        (dataclasses.replace(CONFIG, representation_size=8), []),
        (dataclasses.replace(CONFIG, pool="gap", variant=Variant(final_norm="mean")), []),
        (ResNetConfig(), []),
    ],
)
def test_candidates(config: Any, expected: list[tuple[int, str]]) -> None:
    assert [(readout.depth, readout.pool) for readout in candidates(config)] == expected


def test_scores_are_those_of_the_head_of_each_cut_model(spoiled: ViT, digits: Any) -> None:
    choice = choose_readout(spoiled, digits, CPU)
    assert choice is not None
    assert choice.images == 200
    assert len(choice.scores) == 9
    for score in choice.scores:
        config, state = adapt(CONFIG, spoiled.state_dict(), depth=score.readout.depth, pool=score.readout.pool)
        assert config == score.readout.config(CONFIG)
        cut = build_model(config).eval()
        cut.load_state_dict(state)
        computed = features(cut, digits, CPU)
        head = least_squares_head(computed.x[None], computed.labels, 10)
        assert score.loss == pytest.approx(head.loss, rel=1e-3)
        assert score.accuracy == pytest.approx(head.accuracy, abs=0.01)
    assert choice.chosen == min(choice.scores, key=lambda score: score.loss).readout
    assert choice.chosen.depth == 2
    assert choice.nested_loss >= min(score.loss for score in choice.scores)
    text = choice.describe()
    assert text.startswith(f"block 2 of 4, {choice.chosen.pool}: accuracy of images left out ")
    assert text.endswith("on 200 images")
    record = choice.to_record()
    assert record["chosen"] == {"depth": 2, "pool": choice.chosen.pool}
    assert len(record["candidates"]) == 9


def test_the_own_representation_stays_where_no_other_is_better() -> None:
    own, other = Readout(12, "token"), Readout(6, "gap")
    choice = ReadoutChoice((ReadoutScore(other, 1.0, 1.0), ReadoutScore(own, 1.0, 1.0)), own, 1.0, 1.0, 3)
    assert choice.describe() == "block 12 of 12, token: no other block or pooling has a lower loss on 3 images"
    assert ReadoutChoice.from_record(choice.to_record()) == choice


def test_the_nested_estimate_leaves_an_image_out_of_the_choice() -> None:
    """By a loop; with groups, all images of a group are left out."""
    rng = np.random.default_rng(0)
    losses, hits = rng.random((5, 30)), rng.random((5, 30)) < 0.5
    for units in (np.arange(30), rng.integers(0, 6, 30)):
        expected = []
        for i in range(30):
            best = losses[:, units != units[i]].sum(axis=1).argmin()
            expected.append((losses[best, i], hits[best, i]))
        assert readouts._nested(losses, hits, units) == pytest.approx(tuple(np.mean(expected, axis=0)))


def test_with_a_given_pool_only_the_block_is_chosen() -> None:
    assert candidates(CONFIG, "gap") == (Readout(2, "gap"), Readout(3, "gap"), Readout(4, "gap"))
    assert candidates(CONFIG, "token")[-1] == Readout(4, "token")


def test_the_last_blocks_together() -> None:
    """By forward hooks: class tokens after the last LayerNorm, and the mean over the patches of the last block."""
    config = dataclasses.replace(CONFIG, depth=6)
    model: Any = build_model(config, generator=torch.Generator().manual_seed(0)).eval()
    joined = [readout for readout in candidates(config, joined=True) if readout.joined > 1]
    assert joined == [Readout(6, pool, 4) for pool in ("token", "gap", "token+gap")]
    assert set(candidates(config, joined=True)) - set(joined) == set(candidates(config))
    assert readouts.last_blocks(config) == joined[0]
    images = load_dataset("digits", "train").take(np.arange(5))
    outputs: list[torch.Tensor] = []
    handles = [block.register_forward_hook(lambda *given: outputs.append(given[2])) for block in model.blocks[2:]]
    features(model, images, CPU)
    for handle in handles:
        handle.remove()
    with torch.inference_mode():
        normed = [model.norm(output) for output in outputs]
    tokens, means = [each[:, 0] for each in normed], [each[:, 1:].mean(dim=1) for each in normed]
    expected = {"token": tokens, "gap": means, "token+gap": [*tokens, means[-1]]}
    computed = readouts.readout_features(model, images, joined, CPU)
    for readout, pooled in zip(joined, expected.values(), strict=True):
        np.testing.assert_allclose(computed[readout].x, torch.cat(pooled, dim=1), atol=1e-5)
    with pytest.raises(UserError, match="last4"):
        readouts.last_blocks(ResNetConfig())


def test_several_labels_and_groups_are_left_out_as_by_the_head() -> None:
    """The mean of the losses is the loss; a whole group is left out."""
    rng = np.random.default_rng(0)
    x, groups = rng.standard_normal((40, 6)).astype(np.float32), np.repeat(np.arange(10), 4)
    labels = rng.random((40, 3)) < 0.4
    for given, left_out in ((labels, None), (labels, groups), (labels.argmax(axis=1), groups)):
        fit = leave_one_out(x, given, 3, left_out)
        head = least_squares_head(x[None], given, 3, left_out)
        assert fit.losses().mean() == pytest.approx(head.loss)
        assert fit.correct().mean() == pytest.approx(head.accuracy)
    with pytest.raises(UserError, match="in one group"):
        leave_one_out(x, labels, 3, np.zeros(40, int))
