"""The value rescaling: right values, and an inverse that is one (case H-a2)."""

import numpy as np
import pytest
import torch

from r2d2.rescaling import inverse_rescale, rescale

EPSILON = 1e-3
SIZES = [0.0, 1e-4, 1e-3, 0.1, 1.0, 100.0, 1e4, 1e6]
VALUES = torch.tensor([sign * size for size in SIZES for sign in (1, -1)])


def test_rescale_has_the_values_of_case_h_a2():
    found = rescale(torch.tensor([0.0, 1.0, 100.0, -100.0, 1e6], dtype=torch.float64), EPSILON)
    wanted = [0.0, 0.415213562, 9.149875621, -9.149875621, 1999.0005]
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-9, atol=1e-9)


def test_round_trip_in_float32_keeps_value_and_sign_h_a2():
    back = inverse_rescale(rescale(VALUES, EPSILON), EPSILON)
    assert back.dtype == torch.float32
    assert (back.sign() == VALUES.sign()).all()
    assert ((back - VALUES).abs() <= 1e-6 + 5e-7 * VALUES.abs()).all()


@pytest.mark.parametrize("function", [rescale, inverse_rescale])
def test_both_directions_are_odd_strictly_increasing_and_exact_at_zero_h_a2(function):
    x = torch.linspace(-50, 50, 1001)
    y = function(x, EPSILON)
    assert torch.equal(function(-x, EPSILON), -y)
    assert (y.diff() > 0).all()
    assert function(torch.zeros(1), EPSILON).item() == 0.0


def test_epsilon_zero_leaves_the_square_root_and_its_square():
    assert rescale(torch.tensor([3.0]), 0.0).item() == pytest.approx(1.0)
    assert inverse_rescale(torch.tensor([1.0]), 0.0).item() == pytest.approx(3.0)
