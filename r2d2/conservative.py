"""The conservative term for learning from fixed data: values of actions that nobody took are held down."""

import torch
from torch import Tensor


def conservative_losses(q: Tensor, action: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of ``log sum_a exp Q(s, a) - Q(s, a_t)`` over each sequence: float32 ``[B]``.

    Plain Q-learning on fixed data overestimates actions whose outcome it never sees. This is the regulariser of
    CQL(H) for discrete actions: 0 or more, and least where the action taken has all the value. In h-space, like ``q``.

    Args:
        q: ``[T, B, A]``.
        action: int64 ``[T, B]``, the actions taken.
        weights: float32 ``[T, B]``, each row's share of its sequence's loss; 0 where a row is not valid.

    Source: Kumar et al. 2020, equation 4.
    """
    q = q.float()
    taken = q.gather(-1, action.unsqueeze(-1)).squeeze(-1)
    gap = torch.logsumexp(q, -1) - taken
    return torch.where(weights > 0, weights * gap, 0.0).sum(0)
