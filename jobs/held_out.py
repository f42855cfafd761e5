"""How well a learner does on episodes that it never trains on."""

import numpy as np
import torch

from pipeline.decode import BatchDecoder
from pipeline.held_out import HeldOutSequences
from pipeline.monte_carlo import discounted_returns
from pipeline.scan import LeftOut, list_shards
from pipeline.store import Store
from r2d2.calibration import replayed_values
from r2d2.learner import Learner
from schemas.terms import DatasetTerms

BATCH, MOST = 32, 256


class HeldOutCheck:
    """Measures TD errors and calibration on at most ``MOST`` held-out sequences, evenly taken; changes nothing.

    Attributes:
        sequences: what is kept apart, and how much is left.
        every: updates between two measurements.
    """

    def __init__(self, store: Store, terms: DatasetTerms, *, share: float, gamma: float, every: int) -> None:
        self.every = every
        self.sequences = HeldOutSequences(store, terms, share)
        if not self.sequences.rows:
            raise ValueError(f"held_out is {share}; allowed: a share that at least one episode falls into")
        if not self.sequences.drawn_sequences:
            raise ValueError(f"held_out is {share}; allowed: a share that leaves an episode to learn from")
        count = len(self.sequences.rows)
        self._chosen = np.unique(np.linspace(0, count - 1, min(MOST, count)).astype(int)).tolist()
        apart = {(collector, episode) for collector, episode, _ in self.sequences.episodes}
        self._followed = discounted_returns(store, terms, gamma, LeftOut(len(list_shards(store))), of=apart)
        self._decoder = BatchDecoder(terms)

    @torch.no_grad()
    def measure(self, learner: Learner) -> dict[str, float]:
        """``held_out/<name>``: ``td_error_abs_mean`` (h-space); and of steps whose return is known ``q_mean``,
        ``return_mean`` (discounted), ``overestimation`` (mean of Q minus return) and ``calibration_error`` (mean
        distance of the two), in units of reward.
        """  # fmt: skip
        values, errors, returns = [], [], []
        for begin in range(0, len(self._chosen), BATCH):
            some = self._chosen[begin : begin + BATCH]
            batch, ok = self._decoder.decode([self.sequences.rows[index] for index in some])
            window = learner.load(batch)
            usable = torch.from_numpy(learner.usable_states(batch)).to(learner.device)
            start = learner.start_state(window, usable)
            value, error = replayed_values(learner.network, learner.target, window, start, learner.config)
            mask = window.transitions.mask.cpu().numpy()
            for b in np.flatnonzero(ok).tolist():
                rows = np.flatnonzero(mask[:, b])
                collector, episode, first = self.sequences.episodes[some[b]]
                known = self._followed.get((collector, episode))
                values.append(value[rows, b].double().cpu().numpy())
                errors.append(error[rows, b].abs().double().cpu().numpy())
                returns.append(np.full(len(rows), np.nan) if known is None else known[first + rows])
        if not errors:
            return {}
        value, error, followed = (np.concatenate(parts) for parts in (values, errors, returns))
        found = {"held_out/td_error_abs_mean": float(error.mean())}
        known = ~np.isnan(followed)
        if known.any():
            gap = value[known] - followed[known]
            found |= {
                "held_out/q_mean": float(value[known].mean()),
                "held_out/return_mean": float(followed[known].mean()),
                "held_out/overestimation": float(gap.mean()),
                "held_out/calibration_error": float(np.abs(gap).mean()),
            }
        return found

    def close(self) -> None:
        self._decoder.close()
