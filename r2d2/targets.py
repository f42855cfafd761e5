"""n-step double-Q targets in h-space (Kapturowski et al. 2019, section 2.3)."""

import torch
from torch import Tensor

from r2d2.rescaling import inverse_rescale, rescale


def double_q_targets(
    online_q: Tensor,
    target_q: Tensor,
    *,
    reward: Tensor,
    continues: Tensor,
    end: Tensor,
    n: int,
    gamma: float,
    epsilon: float | None,
) -> Tensor:
    """The value every trained row is drawn to.

        y_t = h( sum_{k<m} gamma^k r_{t+k} + gamma^m b h^-1( Q_target(s_{t+m}, argmax_a Q_online(s_{t+m}, a)) ) )

    with m = min(n, end - t), the steps left in the episode, and b = 0 when the episode terminated within them.
    Rows count from the first trained one, of which there are T; whatever lies past ``end`` has no effect.

    Args:
        online_q, target_q: ``[T+n, B, A]``, in h-space; any float dtype.
        reward: float32 ``[T+n, B]``, what row t's action brought.
        continues: float32 ``[T+n, B]``, 0 where row t's action ended what may be bootstrapped over, else 1.
        end: int64 ``[B]``, row of the final observation; anything from T+n on when the episode goes on.
        n: bootstrap horizon in steps.
        gamma: discount per step.
        epsilon: of the rescaling; None trains on plain returns.

    Returns:
        float32 ``[T, B]``, without gradient.
    """
    best = online_q.detach().argmax(-1, keepdim=True)
    value = target_q.detach().float().gather(-1, best).squeeze(-1)
    if epsilon is not None:
        value = inverse_rescale(value, epsilon)
    returns = n_step_returns(value, reward=reward, continues=continues, end=end, n=n, gamma=gamma)
    return returns if epsilon is None else rescale(returns, epsilon)


def n_step_returns(value: Tensor, *, reward: Tensor, continues: Tensor, end: Tensor, n: int, gamma: float) -> Tensor:
    """Up to ``n`` discounted rewards, then the ``value`` ``[T+n, B]`` of the row reached; shapes as above."""
    rows = torch.arange(len(value) - n, device=value.device).unsqueeze(1)
    returns = torch.zeros_like(value[: len(rows)])
    weight = torch.ones_like(returns)
    for k in range(n):
        inside = rows + k < end
        returns = returns + torch.where(inside, weight * reward[k : k + len(rows)], 0.0)
        weight = torch.where(inside, weight * gamma * continues[k : k + len(rows)], weight)
    reached = value.gather(0, torch.minimum(rows + n, end).clamp(min=0))
    return returns + torch.where(weight > 0, weight * reached, 0.0)
