"""How long a step takes until a learner can draw it: cut, published raw, labelled, seen by the replay."""

import time
from collections import deque
from collections.abc import Callable, Mapping

import numpy as np

REMEMBERED_SHARDS = 10_000


class SampleableLatency:
    """Seconds from a sequence's last step to its being sampleable, as far as the replay's records tell.

    No clock is compared with another: a shard says how long its sequences had waited, the store when it took the raw
    and the labelled one, and the rest is timed here. Records come about once a second: this is an upper bound.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pending: deque[tuple[str, int, float, np.ndarray]] = deque(maxlen=REMEMBERED_SHARDS)
        self._found: list[np.ndarray] = []

    def labelled(self, collector: str, last_sequence: int, ages_seconds: np.ndarray) -> None:
        """A shard has been labelled whose last sequence this is; float64 ``[rows]``: how old its sequences are now."""
        self._pending.append((collector, last_sequence, self._clock(), np.asarray(ages_seconds, np.float64)))

    def seen(self, seen: Mapping[str, int]) -> None:
        """What a replay's record says: how many sequences it knows of each collector."""
        now, waiting = self._clock(), []
        for collector, last_sequence, since, ages in self._pending:
            if seen.get(collector, 0) > last_sequence:
                self._found.append(ages + (now - since))
            else:
                waiting.append((collector, last_sequence, since, ages))
        self._pending = deque(waiting, maxlen=REMEMBERED_SHARDS)

    def take(self) -> dict[str, float]:
        """Of the sequences that became sampleable since the last call: median, 99th percentile, maximum."""
        found, self._found = self._found, []
        if not found:
            return {}
        seconds = np.concatenate(found)
        return {
            "latency_seconds_median": float(np.median(seconds)),
            "latency_seconds_p99": float(np.percentile(seconds, 99)),
            "latency_seconds_max": float(seconds.max()),
        }
