"""Both forms of a projection give the same numbers."""

from __future__ import annotations

import pytest
import torch

from sagellm.engines.native.matrices import FEWEST_ROWS, MOST_ROWS, Dense


@pytest.mark.parametrize("rows", [0, 1, FEWEST_ROWS - 1, FEWEST_ROWS, 32, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize("with_bias", [False, True])
def test_project_is_a_linear_layer(rows: int, with_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 24), torch.randn(40, 24)
    bias = torch.randn(40) if with_bias else None
    expected = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    torch.testing.assert_close(Dense(weight).multiply(x, bias).double(), expected, atol=1e-5, rtol=1e-5)


def test_a_dense_matrix_is_filled_and_read_by_rows() -> None:
    matrix, values = Dense(torch.zeros(5, 3)), torch.arange(6.0).view(2, 3)
    matrix.store(3, values)
    assert matrix.shape == (5, 3)
    assert matrix.rows(torch.tensor([4, 0, 3])).tolist() == [[3, 4, 5], [0, 0, 0], [0, 1, 2]]
