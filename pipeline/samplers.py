"""Which sequences are drawn next: ids and their probabilities, never data.

Both samplers keep one weight per id of a ring: ids only grow, id i rests in slot i % capacity, and setting an id that
is ``capacity`` or more above another one forgets that other one.
"""

from typing import NamedTuple, Protocol

import numpy as np

from pipeline.sum_tree import SumTree


class Draw(NamedTuple):
    """``ids`` int64 ``[B]``; ``probabilities`` float64 ``[B]``, each the chance of that id in one single draw."""

    ids: np.ndarray
    probabilities: np.ndarray


class Sampler(Protocol):
    """What a replay needs of a sampler. Not thread-safe."""

    @property
    def total(self) -> float:
        """Of all weights, as far as they matter to ``draw``."""
        ...

    def set(self, ids: np.ndarray, weights: np.ndarray) -> None:
        """Give ``ids`` (int64, live or the next ones) their ``weights`` (float64); weight 0 is never drawn."""
        ...

    def draw(self, batch_size: int, generator: np.random.Generator) -> Draw:
        """Draw with replacement. Raises ValueError "nothing to sample" when every weight is 0."""
        ...


class ProportionalSampler:
    """Draws in proportion to the weights, stratified: draw i of B falls into the i-th of B equal parts of their sum.

    Over a batch an id is expected B times its probability, as with independent draws, but with less scatter.
    Source: Schaul et al. 2016, appendix B.2.1.
    """

    def __init__(self, capacity: int) -> None:
        self._ring = _Ring(capacity)
        self._tree = SumTree(capacity)

    @property
    def total(self) -> float:
        return float(self._tree.total)

    def set(self, ids: np.ndarray, weights: np.ndarray) -> None:
        self._tree.set(self._ring.slots(ids), weights)

    def draw(self, batch_size: int, generator: np.random.Generator) -> Draw:
        total = self._tree.total
        strata = (np.arange(batch_size) + generator.random(batch_size)) / batch_size
        slots = self._tree.find(strata * total)
        return Draw(self._ring.ids(slots), self._tree.get(slots) / total)


class UniformSampler:
    """Draws every id of positive weight with the same probability, whatever the weight."""

    def __init__(self, capacity: int) -> None:
        self._ring = _Ring(capacity)
        self._drawable = np.zeros(capacity, bool)
        self._slots: np.ndarray | None = None  # Those that are drawable, found when next needed.

    @property
    def total(self) -> float:
        return float(self._drawable.sum())

    def set(self, ids: np.ndarray, weights: np.ndarray) -> None:
        slots, drawable = self._ring.slots(ids), weights > 0
        if not np.array_equal(self._drawable[slots], drawable):
            self._drawable[slots] = drawable
            self._slots = None

    def draw(self, batch_size: int, generator: np.random.Generator) -> Draw:
        if self._slots is None:
            self._slots = np.flatnonzero(self._drawable)
        if not len(self._slots):
            raise ValueError("nothing to sample: every weight is 0")
        drawn = self._slots[generator.integers(0, len(self._slots), batch_size)]
        return Draw(self._ring.ids(drawn), np.full(batch_size, 1 / len(self._slots)))


class _Ring:
    """Ids to slots and back. The newest id says whose a slot is now, so no table is needed."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._newest = -1

    def slots(self, ids: np.ndarray) -> np.ndarray:
        if len(ids):
            self._newest = max(self._newest, int(ids.max()))
            assert ids.min() > self._newest - self._capacity, "an id that the ring has forgotten"
        return ids % self._capacity

    def ids(self, slots: np.ndarray) -> np.ndarray:
        return self._newest - (self._newest - slots) % self._capacity
