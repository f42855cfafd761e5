"""A two-storey tree of sums over weights: draws an index in proportion to its weight, at any size, without drift.

    sums     [   s   ][   s   ] ..      each the sum of FAN_OUT leaves
    leaves   [ w w .. ][ w w .. ] ..    leaf i belongs to sum i // FAN_OUT

A draw finds a whole batch at once: in the running sums, then among the leaves of the sums found. Higher storeys would
save additions, which cost next to nothing, and add calls of numpy, which are all that a draw costs.
"""

import math

import numpy as np

FAN_OUT = 64


class SumTree:
    """Non-negative float64 weights of ``capacity`` leaves; knows slots 0 .. capacity-1 and no ids.

    A sum is always taken anew from its leaves, never corrected by a difference: whatever was stored before leaves
    no trace, and the total is the sum of the leaves up to the rounding of one summation. Not thread-safe.

    Raises:
        ValueError: ``capacity`` below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; allowed: 1 or more")
        self.capacity = capacity
        self._sums = np.zeros(-(-capacity // FAN_OUT))
        self._leaves = np.zeros((len(self._sums), FAN_OUT))

    @property
    def total(self) -> float:
        return float(self._sums.sum())

    def get(self, slots: np.ndarray) -> np.ndarray:
        """Weights of ``slots``, float64, a copy."""
        return self._leaves.ravel()[slots]

    def set(self, slots: np.ndarray, weights: np.ndarray) -> None:
        """Store ``weights`` (float64, not negative, their sum finite); of a slot named twice the last weight counts.

        Raises:
            ValueError: a slot outside the tree, or a weight that is NaN, infinite or negative; nothing is stored.
        """
        if not len(slots):
            return
        if slots.min() < 0 or slots.max() >= self.capacity:
            raise ValueError(f"slots reach from {slots.min()} to {slots.max()}; allowed: 0 to {self.capacity - 1}")
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise ValueError("weights hold a NaN, infinite or negative one; allowed: 0 or more, finite")
        self._leaves.ravel()[slots] = weights
        sums = slots // FAN_OUT
        if len(sums) > FAN_OUT:  # Few are summed twice sooner than they are told apart.
            sums = np.unique(sums)
        self._sums[sums] = self._leaves[sums].sum(axis=1)

    def find(self, prefix_sums: np.ndarray) -> np.ndarray:
        """The slot of each prefix sum u: the first whose running sum of weights exceeds u. int64, shape of the input.

        With u uniform in [0, total) a slot comes up in proportion to its weight. A slot of weight 0 never does,
        whatever rounding makes of a u near ``total``.

        Raises:
            ValueError: "nothing to sample", when every weight is 0.
        """
        before = np.zeros(len(self._sums) + 1)
        running = np.cumsum(self._sums, out=before[1:])
        if running[-1] == 0:
            raise ValueError("nothing to sample: every weight is 0")
        inside = np.minimum(prefix_sums, math.nextafter(running[-1], 0))
        sums = np.searchsorted(running, inside, side="right")
        rest = inside - before[sums]
        running = self._leaves[sums].cumsum(axis=1)
        # A sum taken at once rounds otherwise than this running one: keep inside.
        rest = np.minimum(rest, np.nextafter(running[:, -1], 0))
        return sums * FAN_OUT + (running <= rest[:, None]).sum(axis=1)

    def check_valid(self) -> None:
        """Raise AssertionError unless each sum is that of its leaves and nothing lies beyond the capacity."""
        assert not self._leaves.ravel()[self.capacity :].any(), "weight beyond the capacity"
        assert np.array_equal(self._sums, self._leaves.sum(axis=1)), "a sum is not that of its leaves"
