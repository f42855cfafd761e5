"""Priorities of sequences, the same for the actor that writes one and the learner that has replayed it."""

import numpy as np
import torch
from torch import Tensor

from r2d2.config import LearnerConfig
from r2d2.losses import td_errors
from r2d2.targets import double_q_targets
from r2d2.tensors import transitions
from schemas.geometry import SequenceGeometry
from schemas.records import SequenceBatch


def sequence_priorities(errors: Tensor, mask: Tensor, eta: float) -> Tensor:
    """``eta max|delta| + (1 - eta) mean|delta|`` over the valid rows, in h-space; 0 where no row is valid.

    ``errors`` float32 and ``mask`` bool ``[T, B]``; float32 ``[B]``. A NaN in a valid row makes the priority NaN.

    Source: Kapturowski et al. 2019, section 2.3; eta = 1 is article section 5.4.
    """
    sizes = torch.where(mask, errors.abs(), 0.0)
    mean = sizes.sum(0) / mask.sum(0).clamp(min=1)
    return eta * sizes.amax(0) + (1 - eta) * mean


def initial_priorities(
    batch: SequenceBatch, q_values: np.ndarray, geometry: SequenceGeometry, config: LearnerConfig, life_loss: str
) -> np.ndarray:
    """What an actor's own Q-values say about its new sequences, the online network standing in for the target.

    A sequence's priority does not depend, to the bit, on the others in the batch: the same whatever shard it is in.

    Args:
        batch: sequences stored as ``geometry``; the observations are not looked at.
        q_values: float32 ``[B, S, A]`` as acted on, NaN where no network acted.
        config: ``gamma``, ``eta`` and the rescaling are used.
        life_loss: ``off``, ``roll`` or ``reset``.

    Returns:
        float32 ``[B]``; NaN where a value that a trained row needs is NaN.
    """
    rows = transitions(batch, geometry, geometry, life_loss)
    q = torch.from_numpy(q_values[:, geometry.burn_in :]).transpose(0, 1)
    targets = double_q_targets(
        q,
        q,
        reward=rows.reward,
        continues=rows.continues,
        end=rows.end,
        n=geometry.bootstrap,
        gamma=config.gamma,
        epsilon=config.epsilon,
    )
    errors = td_errors(q[: geometry.unroll], rows.action, targets, rows.mask)
    # Everything so far is done value by value; only a sum rounds by what lies beside it.
    alone = zip(errors.T.contiguous().unbind(), rows.mask.T.contiguous().unbind(), strict=True)
    return torch.cat([sequence_priorities(e[:, None], m[:, None], config.eta) for e, m in alone]).numpy()


def importance_weights(
    probabilities: np.ndarray, replay_sequences: int, beta: float, least: float | None = None
) -> np.ndarray:
    """``(N P)^-beta`` over its maximum in the batch: float64 ``[B]`` in (0, 1], 1 for the least likely draw.

    ``least``: the least probability in the whole batch, where ``probabilities`` are those of a part.

    Source: Schaul et al. 2016, section 3.4.
    """
    weights = (replay_sequences * probabilities) ** -beta
    return weights / (replay_sequences * (probabilities.min() if least is None else least)) ** -beta
