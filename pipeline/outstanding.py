"""Batches that were drawn and have not reached their learner yet."""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.decode import RowHolder
from pipeline.limiter import RateLimiter
from pipeline.shard_index import Place


@dataclass(eq=False)
class Drawn:
    """A batch before it is decoded: all that a learner elsewhere needs, its pixels still compressed in their shards.

    ``ids``, ``probabilities``, ``replay_sequences`` are those of ``ReplaySample``; ``rows`` are (shard, row),
    ``places`` the same by name. ``generator_before``: the generator's state before this draw.
    """

    ids: np.ndarray
    probabilities: np.ndarray
    replay_sequences: int
    places: list[Place]
    rows: list[tuple[RowHolder, int]]
    generator_before: Mapping[str, Any]


class Outstanding:
    """They count as samples from their draw on, unless taken back. A state leaves them out. Not thread-safe."""

    def __init__(self, limiter: RateLimiter) -> None:
        self._limiter = limiter
        self._drawn: deque[Drawn] = deque()  # Oldest first.

    @property
    def samples(self) -> int:
        return sum(len(drawn.ids) for drawn in self._drawn)

    @property
    def generator_before(self) -> Mapping[str, Any] | None:
        """The generator's state before the oldest draw; None when there is none."""
        return self._drawn[0].generator_before if self._drawn else None

    def add(self, drawn: Drawn) -> None:
        self._limiter.count_draw(len(drawn.ids))
        self._drawn.append(drawn)

    def consumed(self, drawn: Drawn | None = None) -> None:
        """``drawn``, or else the oldest one, has reached its learner."""
        self._drawn.remove(drawn or self._drawn[0])

    def take_back(self, drawn: Drawn) -> None:
        """No learner will ever see it."""
        self._drawn.remove(drawn)
        self._limiter.take_back_draw(len(drawn.ids))
