"""What the updates since the last report measured, as means."""

import time

from r2d2.learner import LearnerOutput


class MetricsWindow:
    """Means of what the updates since the last report measured."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}
        self._begin()

    def _begin(self) -> None:
        self._since = time.monotonic()
        self._sums: dict[str, tuple[float, int]] = {}
        self._updates = 0
        self._waited = self._busy = 0.0

    def waited(self, seconds: float) -> None:
        self._waited += seconds

    def updated(self, output: LearnerOutput, seconds: float) -> None:
        self._busy += seconds
        self._updates += 1
        self.last = output.metrics
        for name, value in output.metrics.items():
            total, count = self._sums.get(name, (0.0, 0))
            self._sums[name] = total + value, count + 1

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._since

    @property
    def updates_per_second(self) -> float:
        return self._updates / max(self.seconds, 1e-9)

    def take(self) -> dict[str, float]:
        """The report, as ``learn/<name>``; a new window begins."""
        report = {f"learn/{name}": total / count for name, (total, count) in self._sums.items()}
        report["learn/updates_per_second"] = self.updates_per_second
        report["learn/waiting_share"] = self._waited / max(self.seconds, 1e-9)
        if self._updates:
            report["learn/update_seconds"] = self._busy / self._updates
        self._begin()
        return report
