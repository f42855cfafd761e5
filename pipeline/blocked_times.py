"""How long the environment loop is held up by each submission of a sequence."""

import numpy as np

CLAIMED_SECONDS = 120e-6  # The article's 3.4: a submission blocks an actor for at most so long.


class BlockedTimes:
    """Seconds per submission since the last report. One thread."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def add(self, seconds: float, sequences: int) -> None:
        """So many sequences were cut and handed over in this time, which each of them bears its part of."""
        self._seconds += [seconds / sequences] * sequences

    @property
    def seconds(self) -> list[float]:
        """Each of them, oldest first."""
        return list(self._seconds)

    def take(self) -> dict[str, float]:
        """Median, 99th percentile, maximum, and the share within the article's 120 microseconds; empty for nothing."""
        taken, self._seconds = np.array(self._seconds), []
        if not len(taken):
            return {}
        return {
            "blocked_seconds_median": float(np.median(taken)),
            "blocked_seconds_p99": float(np.percentile(taken, 99)),
            "blocked_seconds_max": float(taken.max()),
            "blocked_within_120_us": float((taken <= CLAIMED_SECONDS).mean()),
        }
