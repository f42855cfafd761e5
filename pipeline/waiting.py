"""What a replay's draws wait for, and for how long."""

from collections.abc import Callable


class Waiting:
    """Of one replay, by its ``clock`` (seconds, monotonic). Not thread-safe.

    Attributes:
        reason: what the last draw, if it was refused, waits for; else empty.
    """

    def __init__(self, reason: str, clock: Callable[[], float]) -> None:
        self.reason, self._clock = reason, clock
        self._since: float | None = None
        self._moved_at = clock()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Time in which draws were refused, the current wait included."""
        return self._seconds + (0.0 if self._since is None else self._clock() - self._since)

    @property
    def still_seconds(self) -> float:
        """Since the last insertion or draw."""
        return self._clock() - self._moved_at

    def note(self, reason: str) -> None:
        """A draw was refused for ``reason``, or with an empty one was not."""
        now = self._clock()
        if self._since is not None:
            self._seconds += now - self._since
        self.reason, self._since = reason, now if reason else None

    def moved(self) -> None:
        """There was an insertion or a draw."""
        self._moved_at = self._clock()

    def restore(self, seconds: float) -> None:
        """Go on from so many seconds."""
        self._seconds = seconds
