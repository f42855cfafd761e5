"""How far a replayed state has drifted from the one the actor had: the Q-value discrepancy.

    dQ = || q(h_hat_{t+i}) - q(h_{t+i}) ||_2 / | max_{a,j} q(h_hat_{t+j})_a |

h_hat is the state that training arrives at, h the one the actor stored at that very step, both read by the same current
weights. Source: Kapturowski et al. 2019, section 3.
"""

import torch
from torch import Tensor

from r2d2.burn_in import burn_in, choose
from r2d2.networks import R2D2Network, State, zero_state
from r2d2.tensors import WindowTensors
from r2d2.training_pass import encode_rows

STRATEGIES = ("zero", "burn_in", "stored", "both")


def q_discrepancy(replayed_q: Tensor, stored_q: Tensor, largest_q: Tensor) -> Tensor:
    """Discrepancy ``[B]`` of two ``[B, A]`` at one row; ``largest_q`` ``[B]`` is over all trained rows."""
    distance = torch.linalg.vector_norm(replayed_q - stored_q, dim=-1)
    return distance / largest_q.abs().clamp(min=torch.finfo(torch.float32).tiny)


def largest_q(q: Tensor, mask: Tensor) -> Tensor:
    """The maximum over actions and valid rows, ``[B]``, of ``q`` ``[T, B, A]`` and ``mask`` ``[T, B]``."""
    return torch.where(mask, q.amax(-1), -torch.inf).amax(0)


def window_discrepancies(
    network: R2D2Network, window: WindowTensors, replayed_q: Tensor, first_features: Tensor, last_features: Tensor
) -> tuple[Tensor, Tensor]:
    """The dQ at the first trained row ``[B]`` and at the last ``[len(window.probes)]``, without gradient.

    ``replayed_q`` ``[T, B, A]`` is what training computed; the features ``[B, F]`` are those of the first and the last
    trained row. Sequences of a foreign network give numbers without meaning: leaving them out is up to the caller.
    """
    replayed_q = replayed_q.detach().float()
    scale = largest_q(replayed_q, window.transitions.mask)
    first_row = window.geometry.burn_in
    at_first = _q_at(network, first_features, window.previous(first_row, first_row + 1), window.unroll_core)
    first = q_discrepancy(replayed_q[0], at_first, scale)
    some = window.probes
    if not len(some):
        return first, first[:0]
    last_row = first_row + window.geometry.unroll - 1
    action, reward = window.previous(last_row, last_row + 1)
    at_last = _q_at(network, last_features[some], (action[:, some], reward[:, some]), window.probe_core)
    return first, q_discrepancy(replayed_q[-1, some], at_last, scale[some])


def strategy_discrepancies(network: R2D2Network, window: WindowTensors) -> dict[str, tuple[Tensor, Tensor]]:
    """The dQ at the first and the last trained row for each of ``STRATEGIES``, as ``window_discrepancies`` gives them.

    ``zero`` starts the unroll from zeros, ``stored`` from the state stored there, both without burn-in; ``burn_in``
    starts the burn-in from zeros, ``both`` from the state stored before it, where there is one. A sequence that begins
    an episode within its burn-in still begins there, from zeros.
    """
    first, stop = window.geometry.burn_in, window.geometry.burn_in + window.geometry.unroll
    with torch.no_grad():
        features = encode_rows(network, window, 0, stop)
        zeros = zero_state(network.spec.core, features.shape[1], features.device)
        starts = {
            "zero": zeros,
            "burn_in": burn_in(network, features[:first], window, zeros),
            "stored": window.unroll_core,
            "both": burn_in(network, features[:first], window, choose(window.core_known, window.core, zeros)),
        }
        found = {}
        for strategy in STRATEGIES:
            q, _ = network.unroll(features[first:], *window.previous(first, stop), starts[strategy])
            found[strategy] = window_discrepancies(network, window, q, features[first], features[-1])
        return found


@torch.no_grad()
def _q_at(network: R2D2Network, features: Tensor, previous: tuple[Tensor, Tensor], state: State) -> Tensor:
    """Q-values ``[B, A]`` of one row from the ``state`` before it; ``features`` ``[B, F]``, ``previous`` ``[1, B]``."""
    q, _ = network.unroll(features.unsqueeze(0), *previous, state)
    return q[0].float()
