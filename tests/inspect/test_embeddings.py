"""Position similarity and filter components against plain numpy."""

import numpy as np
import pytest
import torch

from vitlab.inspect.embeddings import filter_components, position_similarity


@pytest.mark.parametrize("prefix", [0, 1])
def test_similarity_equals_plain_numpy(prefix: int) -> None:
    table = torch.randn(1, prefix + 6, 10, requires_grad=True)
    found = position_similarity(table, (2, 3), prefix)
    assert found.shape == (2, 3, 2, 3)
    assert not found.requires_grad
    rows = table.detach().numpy()[0, prefix:].astype(float).reshape(2, 3, 10)
    for i, j, row, column in np.ndindex(2, 3, 2, 3):
        one, other = rows[i, j], rows[row, column]
        cosine = one @ other / np.sqrt((one @ one) * (other @ other))
        assert float(found[i, j, row, column]) == pytest.approx(cosine, abs=1e-6)


def test_similarity_is_symmetric_with_ones_on_its_diagonal() -> None:
    flat = position_similarity(torch.randn(1, 17, 8), (4, 4), 1).reshape(16, 16)
    torch.testing.assert_close(flat, flat.T)
    torch.testing.assert_close(flat.diagonal(), torch.ones(16))


def test_similarity_refuses_another_grid() -> None:
    with pytest.raises(ValueError, match="17 rows does not fit 0 prefix tokens and a grid of 4x4"):
        position_similarity(torch.randn(1, 17, 8), (4, 4), 0)


def test_components_are_the_principal_ones() -> None:
    weight = torch.randn(40, 3, 2, 2, requires_grad=True) * torch.linspace(0.2, 2, 12).reshape(3, 2, 2)
    components = filter_components(weight, n=5).numpy()
    assert components.shape == (5, 2, 2, 3)
    filters = weight.detach().numpy().astype(float).transpose(0, 2, 3, 1).reshape(40, 12)
    values, vectors = np.linalg.eigh(np.cov(filters.T))
    for i, component in enumerate(components):
        expected = vectors[:, np.argsort(-values)[i]]
        expected = expected * np.sign(expected[np.abs(expected).argmax()])
        expected = (expected - expected.min()) / (expected.max() - expected.min())
        np.testing.assert_allclose(component.reshape(-1), expected, atol=1e-4)


def test_there_are_no_more_components_than_dimensions() -> None:
    assert filter_components(torch.randn(64, 3, 2, 2)).shape == (12, 2, 2, 3)
    assert filter_components(torch.randn(9, 3, 4, 4)).shape == (8, 4, 4, 3)
    assert filter_components(torch.randn(64, 3, 4, 4)).shape == (28, 4, 4, 3)
    with pytest.raises(ValueError, match="n >= 1"):
        filter_components(torch.randn(64, 3, 4, 4), n=0)
