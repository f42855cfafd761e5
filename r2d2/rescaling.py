"""The value rescaling h and its inverse, in forms that do not cancel in float32.

Source: Kapturowski et al. 2019, section 2.3; Pohlen et al. 2018, appendix A.2.
"""

import torch
from torch import Tensor


def rescale(x: Tensor, epsilon: float) -> Tensor:
    """``h(x) = sign(x) (sqrt(|x| + 1) - 1) + epsilon x``, any shape, in the dtype of ``x``.

    The difference of square roots is written as a quotient: exact at 0 and odd by itself.
    """
    return x * (1 / (torch.sqrt(x.abs() + 1) + 1) + epsilon)


def inverse_rescale(y: Tensor, epsilon: float) -> Tensor:
    """The x with ``h(x) = y``, any shape, in the dtype of ``y``; relative error about 3e-7 in float32.

    Solves ``epsilon w^2 + (1 + 2 epsilon) w = |y|`` for ``w = sqrt(|x| + 1) - 1`` by the root form without a
    difference; then ``|x| = w (w + 2)``.
    """
    b = 1 + 2 * epsilon
    w = 2 * y.abs() / (b + torch.sqrt(b * b + 4 * epsilon * y.abs()))
    return torch.sign(y) * w * (w + 2)
