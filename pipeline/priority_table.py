"""Live priorities of the sequences in a replay: what may be stored, and how it turns into chances of being drawn."""

from typing import NamedTuple

import numpy as np

from pipeline.samplers import Draw, ProportionalSampler, Sampler, UniformSampler

SAMPLERS: dict[str, type[ProportionalSampler] | type[UniformSampler]] = {
    "proportional": ProportionalSampler,
    "uniform": UniformSampler,
}
TINY_PRIORITY = 1e-8  # Stands for zero and anything below it: every sequence keeps some chance.
LARGEST_PRIORITY = float(np.finfo(np.float32).max)  # Beyond it a float32 is infinite, and sums may overflow.
REMOVED = 0.0


class UpdateCounts(NamedTuple):
    """What became of priorities: each is in exactly one of the counts."""

    applied: int
    stale: int
    refused: int


class PriorityTable:
    """Priorities p of a ring of ids (see ``samplers``), drawn in proportion to p^alpha. Not thread-safe.

    Attributes:
        drawable: ids that can be drawn: held and not removed.
    """

    def __init__(self, capacity: int, alpha: float, sampler: str) -> None:
        self._capacity, self._alpha = capacity, alpha
        self._sampler: Sampler = SAMPLERS[sampler](capacity)
        self._priority = np.full(capacity, REMOVED)
        self.drawable = 0

    @property
    def maximum(self) -> float:
        """The largest priority that is held; 1 when none is (design.md)."""
        return float(self._priority.max()) if self.drawable else 1.0

    @property
    def total(self) -> float:
        """The sum of p^alpha over all that can be drawn; their number when draws are uniform."""
        return self._sampler.total

    def values(self, ids: np.ndarray) -> np.ndarray:
        """Priorities of held ids, float64; ``REMOVED`` for those taken out."""
        return self._priority[ids % self._capacity]

    def enter(self, ids: np.ndarray, initial: np.ndarray) -> int:
        """Give new ids, contiguous and the next ones, their initial priorities; their slots' last owners are gone.

        NaN means none: such an id takes the current maximum. So does one whose priority is none at all (negative,
        infinite); the number of those is returned.
        """
        ids, initial = ids[-self._capacity :], np.asarray(initial, np.float64)[-self._capacity :]
        usable = _is_priority(initial)
        priorities = np.maximum(initial, TINY_PRIORITY)
        if not usable.all():
            priorities[~usable] = self.maximum
        self._store(ids, priorities)
        return int(np.count_nonzero(~usable & ~np.isnan(initial)))

    def restore(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        """Set held ids to what ``values`` once gave."""
        self._store(ids, priorities)

    def update(self, ids: np.ndarray, priorities: np.ndarray, held: np.ndarray) -> UpdateCounts:
        """New ``priorities`` (float ``[B]``) for ``ids`` (int64 ``[B]``); of an id named twice the last one counts.

        NaN, infinite and negative ones are refused. Stale are ids that are not ``held`` (bool ``[B]``) or were removed:
        nothing is ever applied to another sequence that rests in the same slot.
        """
        usable = _is_priority(priorities)
        current = held & (self.values(ids) != REMOVED)
        applied = usable & current
        self._store(ids[applied], np.maximum(priorities[applied], TINY_PRIORITY))
        refused = int(np.count_nonzero(~usable))
        return UpdateCounts(int(np.count_nonzero(applied)), len(ids) - refused - int(applied.sum()), refused)

    def remove(self, ids: np.ndarray) -> None:
        """Never draw these held ids again, whatever updates come."""
        self._store(ids, np.full(len(ids), REMOVED))

    def draw(self, batch_size: int, generator: np.random.Generator) -> Draw:
        """Raises ValueError "nothing to sample" when no id can be drawn."""
        return self._sampler.draw(batch_size, generator)

    def _store(self, ids: np.ndarray, priorities: np.ndarray) -> None:
        slots = ids % self._capacity
        # Only updates name an id twice, and they change nothing here: what they find and leave is drawable.
        self.drawable += int(np.count_nonzero(priorities) - np.count_nonzero(self._priority[slots]))
        self._priority[slots] = priorities
        # 0^0 is 1: a removed id must not come back through alpha 0.
        self._sampler.set(ids, np.where(priorities == REMOVED, 0.0, priorities**self._alpha))


def _is_priority(values: np.ndarray) -> np.ndarray:
    return (values >= 0) & (values <= LARGEST_PRIORITY)
