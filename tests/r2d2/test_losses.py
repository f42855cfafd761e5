"""Masked errors, row weights and the sequence loss."""

import numpy as np
import pytest
import torch

from r2d2.losses import row_weights, sequence_losses, td_errors


def errors_of_case_h_a3(padding: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Three valid rows, then five that hold ``padding``."""
    q = torch.tensor([0.5, 1.5, 1.0, *[padding] * 5]).reshape(8, 1, 1)
    mask = (torch.arange(8) < 3).unsqueeze(1)
    return td_errors(q, torch.zeros(8, 1, dtype=torch.int64), torch.zeros(8, 1), mask), mask


@pytest.mark.parametrize("padding", [7.0, 0.0, float("nan"), float("inf")])
def test_padding_is_neither_in_the_loss_nor_in_its_denominator_h_a3(padding):
    errors, mask = errors_of_case_h_a3(padding)
    assert sequence_losses(errors, row_weights(mask, "uniform")).item() == pytest.approx(0.583333, abs=1e-6)


def test_errors_are_of_the_action_taken():
    q = torch.tensor([[[1.0, 10.0, 100.0]], [[2.0, 20.0, 200.0]]])
    errors = td_errors(q, torch.tensor([[2], [0]]), torch.tensor([[1.0], [1.0]]), torch.ones(2, 1, dtype=torch.bool))
    assert errors.squeeze(1).tolist() == [99.0, 1.0]


def test_recent_weighting_rises_from_a_half_to_one_with_mean_one_over_valid_rows():
    mask = torch.tensor([[True, True], [True, True], [True, True], [True, False], [True, False]])
    weights = row_weights(mask, "recent")
    raw = np.array([0.5, 0.625, 0.75, 0.875, 1.0])
    np.testing.assert_allclose(weights[:, 0], raw / raw.mean() / 5, rtol=1e-6)
    np.testing.assert_allclose(weights[:, 1], np.append(raw[:3] / raw[:3].mean() / 3, [0, 0]), rtol=1e-6)


@pytest.mark.parametrize("weighting", ["uniform", "recent"])
def test_a_sequence_without_valid_rows_weighs_nothing(weighting):
    weights = row_weights(torch.zeros(4, 1, dtype=torch.bool), weighting)
    assert weights.tolist() == [[0.0]] * 4


def test_recent_weighting_of_one_row_is_that_row():
    assert row_weights(torch.ones(1, 2, dtype=torch.bool), "recent").tolist() == [[1.0, 1.0]]
