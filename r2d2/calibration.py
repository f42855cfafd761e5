"""What a network says about stored steps, to be held against what really followed them."""

import torch
from torch import Tensor

from r2d2.burn_in import burn_in
from r2d2.config import LearnerConfig
from r2d2.losses import td_errors
from r2d2.networks import R2D2Network, State
from r2d2.rescaling import inverse_rescale
from r2d2.targets import double_q_targets
from r2d2.tensors import WindowTensors
from r2d2.training_pass import encode_rows


@torch.no_grad()
def replayed_values(
    online: R2D2Network, target: R2D2Network, window: WindowTensors, start: State, config: LearnerConfig
) -> tuple[Tensor, Tensor]:
    """``Q(s_t, a_t)`` in units of reward and the TD error in h-space, both float32 ``[T, B]``, 0 in invalid rows.

    From ``start``, the state before each sequence's first valid row, through burn-in, as training does it.
    """
    length, steps = window.geometry.burn_in, window.geometry.stored_steps
    both = []
    for network in (online,) if target is online else (online, target):
        features = encode_rows(network, window, 0, steps)
        state = burn_in(network, features[:length], window, start)
        both.append(network.unroll(features[length:], *window.previous(length, steps), state)[0].float())
    rows = window.transitions
    targets = double_q_targets(
        both[0],
        both[-1],
        reward=rows.reward,
        continues=rows.continues,
        end=rows.end,
        n=window.geometry.bootstrap,
        gamma=config.gamma,
        epsilon=config.epsilon,
    )
    q = both[0][: window.geometry.unroll]
    chosen = q.gather(-1, rows.action.unsqueeze(-1)).squeeze(-1)
    value = chosen if config.epsilon is None else inverse_rescale(chosen, config.epsilon)
    return torch.where(rows.mask, value, 0.0), td_errors(q, rows.action, targets, rows.mask)
