"""What an update reports about itself. A metric without a value in this batch is left out, never NaN."""

import numpy as np
import torch
from torch import Tensor

from r2d2.training_pass import TrainingPass
from schemas.geometry import SequenceGeometry
from schemas.records import SequenceBatch


def value_metrics(trained: TrainingPass, mask: Tensor) -> dict[str, Tensor]:
    """Scalars on the device, over the valid rows, values in h-space.

    ``loss``; ``q_greedy_mean`` and ``q_greedy_max`` of the greedy action's value; ``td_error_abs_mean``;
    ``trained_steps``, the number of those rows.
    """
    steps = mask.sum()
    greedy = trained.q.float().amax(-1)
    return {
        "loss": trained.loss,
        "q_greedy_mean": torch.where(mask, greedy, 0.0).sum() / steps,
        "q_greedy_max": torch.where(mask, greedy, -torch.inf).max(),
        "td_error_abs_mean": trained.errors.abs().sum() / steps,
        "trained_steps": steps,
    }


def origin_metrics(batch: SequenceBatch, lineage: bytes, version: int) -> dict[str, float]:
    """Who acted the batch, seen from the learner's ``lineage`` and ``version``.

    ``foreign_state_share`` of the sequences come from another network (0 to 1); ``parameter_lag_updates`` is the mean
    age of the last parameters that acted the others.
    """
    own = own_lineage(batch, lineage)
    metrics = {"foreign_state_share": float(1 - own.mean())}
    if own.any():
        metrics["parameter_lag_updates"] = float((version - batch.version_last[own]).mean())
    return metrics


def discrepancy_metrics(first: np.ndarray, last: np.ndarray) -> dict[str, float]:
    """Means of the Q-value discrepancies at the first and at the last trained row (see ``diagnostics``)."""
    return {name: float(values.mean()) for name, values in (("dq_first", first), ("dq_last", last)) if len(values)}


def crop_metrics(batch: SequenceBatch, used: SequenceGeometry, stored: SequenceGeometry) -> dict[str, float]:
    """``untrained_step_share`` of the owned steps lies behind a shortened unroll (0 to 1)."""
    if used.unroll == stored.unroll:
        return {}
    owned = stored.owned_steps(batch.first_valid, batch.num_steps, batch.ends)
    return {"untrained_step_share": float((owned - used.unroll).clip(0).sum() / owned.sum())}


def own_lineage(batch: SequenceBatch, lineage: bytes) -> np.ndarray:
    """Which sequences were acted by networks of this lineage: bool ``[B]``."""
    return (batch.lineage == np.frombuffer(lineage, np.uint8)).all(1)
