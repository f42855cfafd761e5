"""TD errors and the masked loss over a sequence's trained rows."""

import torch
from torch import Tensor


def td_errors(q: Tensor, action: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """``Q(s_t, a_t) - y_t`` where ``mask`` holds, else exactly 0.

    ``q`` ``[T, B, A]``, ``action`` int64, ``targets`` float32 and ``mask`` bool ``[T, B]``; float32 ``[T, B]``.
    Masked by selection: a product would let a NaN in padding through.
    """
    chosen = q.float().gather(-1, action.unsqueeze(-1)).squeeze(-1)
    return torch.where(mask, chosen - targets, 0.0)


def row_weights(mask: Tensor, time_weighting: str) -> Tensor:
    """Each valid row's share of its sequence's loss, float32 ``[T, B]``: columns sum to 1, invalid rows are 0.

    ``recent`` gives row t the weight 0.5 + 0.5 t / (T - 1) (article section 3.3; the formula is ours). Both are
    rescaled over the valid rows, so padding never enters the denominator.
    """
    weights = torch.ones(mask.shape, device=mask.device)
    if time_weighting == "recent" and len(mask) > 1:
        weights = weights * torch.linspace(0.5, 1.0, len(mask), device=mask.device).unsqueeze(1)
    weights = torch.where(mask, weights, 0.0)
    return weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).tiny)


def sequence_losses(errors: Tensor, weights: Tensor) -> Tensor:
    """Weighted mean of ``0.5 delta^2`` over each sequence: float32 ``[B]`` from two ``[T, B]`` (no Huber)."""
    return (weights * 0.5 * errors.square()).sum(0)
