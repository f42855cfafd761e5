"""A tree of sums over weights: draws an index in proportion to its weight, at any size, without drift.

    level 0 (root)    [ s ]                          each node is the sum of FAN_OUT nodes of the level below;
    level 1           [ s s .. s ]                   a level is one flat array, so node i's children are
    leaves            [ w w .. w ][ w w .. w ] ..    elements i * FAN_OUT .. (i + 1) * FAN_OUT - 1

A draw walks down one level at a time, for a whole batch at once.
"""

import numpy as np

FAN_OUT = 32  # Wide nodes make few levels, and numpy's cost is per call; 16 to 64 differ little.


class SumTree:
    """Non-negative float64 weights of ``capacity`` leaves; knows slots 0 .. capacity-1 and no ids.

    A node is always summed anew from its children, never corrected by a difference: whatever was stored before leaves
    no trace, and the root is the sum of the leaves up to the rounding of one summation. Not thread-safe.

    Raises:
        ValueError: ``capacity`` below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; allowed: 1 or more")
        self.capacity = capacity
        self._levels = [np.zeros(_padded(capacity))]
        while self._levels[0].size > FAN_OUT:
            self._levels.insert(0, np.zeros(_padded(self._levels[0].size // FAN_OUT)))
        self._levels.insert(0, np.zeros(1))

    @property
    def total(self) -> float:
        return float(self._levels[0][0])

    def get(self, slots: np.ndarray) -> np.ndarray:
        """Weights of ``slots``, float64, a copy."""
        return self._levels[-1][slots]

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
        self._levels[-1][slots] = weights
        nodes = slots
        for parents, children in zip(self._levels[-2::-1], self._levels[:0:-1], strict=True):
            nodes = np.unique(nodes // FAN_OUT)
            parents[nodes] = children.reshape(-1, FAN_OUT)[nodes].sum(axis=1)

    def find(self, prefix_sums: np.ndarray) -> np.ndarray:
        """The slot of each prefix sum u: the first whose running sum of weights exceeds u. int64, shape of the input.

        With u uniform in [0, total) a slot comes up in proportion to its weight. A slot of weight 0 never does,
        whatever rounding makes of a u near ``total``.

        Raises:
            ValueError: "nothing to sample", when every weight is 0.
        """
        if self.total == 0:
            raise ValueError("nothing to sample: every weight is 0")
        nodes = np.zeros(len(prefix_sums), np.int64)
        rest = prefix_sums
        for children in self._levels[1:]:
            running = children.reshape(-1, FAN_OUT)[nodes].cumsum(axis=1)
            # A sum taken level by level rounds otherwise than this running one: keep inside the node.
            rest = np.minimum(rest, np.nextafter(running[:, -1], 0))
            child = (running <= rest[:, None]).sum(axis=1)
            before = np.take_along_axis(running, np.maximum(child - 1, 0)[:, None], axis=1)[:, 0]
            rest = rest - np.where(child > 0, before, 0.0)
            nodes = nodes * FAN_OUT + child
        return nodes

    def check_valid(self) -> None:
        """Raise AssertionError unless every node is the sum of its children and nothing lies beyond the capacity."""
        assert not self._levels[-1][self.capacity :].any(), "weight beyond the capacity"
        for parents, children in zip(self._levels, self._levels[1:], strict=False):
            sums = children.reshape(-1, FAN_OUT).sum(axis=1)
            assert np.array_equal(parents[: len(sums)], sums), "a node is not the sum of its children"
            assert not parents[len(sums) :].any(), "weight above no leaf"


def _padded(nodes: int) -> int:
    """``nodes`` rounded up to whole groups of children."""
    return -(-nodes // FAN_OUT) * FAN_OUT
