"""The collector's run: turn after turn until it is stopped, shown and tracked; then everything is published."""

import contextlib
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from jobs.console import StatusLine, warn
from jobs.health import HealthLog, memory_troubles
from jobs.stopping import StopRequest
from pipeline.collector import Collector
from pipeline.environments import Lanes
from pipeline.spool import Spool
from pipeline.tracking import Tracker
from r2d2.health import MACHINE_TROUBLES, MemoryLimit, SpeedLimit, Trouble, slow_collector
from schemas.terms import DatasetTerms

METRICS_SECONDS = 10.0
RECENT_EPISODES = 100
LEAST_WORKED_SECONDS = 5.0
PUBLISH_SECONDS = 3.0  # At a stop; with the tracker's own time the job is gone within ten seconds.


class Acting(Protocol):
    """What decides the actions: ``ActingPolicy`` or ``StatelessActing``.

    ``version`` is that of the parameters it acts by, -1 without any; ``waits_for`` is empty when it lacks nothing;
    ``metrics`` are its own, since the last report.
    """

    terms: DatasetTerms
    version: int

    @property
    def waits_for(self) -> str: ...

    def metrics(self) -> dict[str, float]: ...


class CollectRun:
    """Everything one collector incarnation consists of, wired. ``run``, then ``close``, in one thread.

    Args:
        link: tells the dataset which tracked run made these sequences; called once, when that is known.
        closing_tags: of the tracked run, at its end.
    """

    def __init__(
        self,
        *,
        collector: Collector,
        spool: Spool,
        policy: Acting,
        groups: list[Lanes],
        tracker: Tracker,
        memory: MemoryLimit,
        speed: SpeedLimit,
        link: Callable[[str], None],
        closing_tags: Callable[[], dict[str, str]],
    ) -> None:
        self._collector, self._spool, self._policy = collector, spool, policy
        self._groups, self._tracker = groups, tracker
        self._link, self._is_linked, self._closing_tags = link, False, closing_tags
        self._recent: list[float] = []
        self._restarts = 0
        self._memory, self._speed, self._health = memory, speed, HealthLog(MACHINE_TROUBLES)
        self._reported_at, self._reported_steps, self._reported_waiting = time.monotonic(), 0, 0.0

    def run(self, stop: StopRequest, status: StatusLine, *, env_steps: int | None, max_minutes: float | None) -> None:
        """Collect until stopped, for ``env_steps`` agent steps over all lanes, or for ``max_minutes``.

        Raises:
            ValueError: a learner published a network that does not fit the dataset.
            EnvironmentFailure: environments keep raising.
        """
        deadline = None if max_minutes is None else time.monotonic() + 60 * max_minutes
        counts = self._collector.counts
        while not stop:
            self._collector.turn()
            self._track_episodes()
            self._show(status)
            if time.monotonic() - self._reported_at >= METRICS_SECONDS:
                self._report()
            if env_steps is not None and counts.env_steps >= env_steps:
                stop.ask(f"{env_steps} env steps")
            if deadline is not None and time.monotonic() >= deadline:
                stop.ask(f"{max_minutes} minutes")

    def close(self, stop: StopRequest, *, failed: bool) -> int:
        """Write the open sequences as cut, publish everything, end the run; returns how many sequences were lost."""
        self._collector.finish()
        lost = self._spool.close(PUBLISH_SECONDS)
        if lost:
            warn(f"{lost} sequences could not be published: {self._spool.store_error or 'the store is too slow'}")
        for lanes in self._groups:
            lanes.close()
        self._track_episodes()
        self._report()
        with contextlib.suppress(OSError):  # The dataset may have gone; its digest is not worth failing for.
            self._tracker.tags(self._closing_tags())
        self._tracker.close(failed=failed or bool(lost), gone_by=stop.gone_by)
        self._link_run()
        return lost

    def summary(self) -> str:
        counts, writer = self._collector.counts, self._spool.writer
        return (
            f"{counts.env_steps} env steps, {counts.episodes} episodes, {writer.sequences} sequences in "
            f"{writer.shards} shards, {writer.bytes_published / 1e6:.1f} MB; "
            f"{len(counts.versions_used - {-1})} parameter versions; MLflow run {self._tracker.run_id()}"
        )

    def _track_episodes(self) -> None:
        counts = self._collector.counts
        for lane, episode_return, length in counts.take_finished():
            self._recent = [*self._recent[1 - RECENT_EPISODES :], episode_return]
            values = {f"collect/episode_return/lane_{lane:02d}": episode_return, "collect/episode_steps": length}
            self._tracker.metrics({**values, "collect/episode_return": episode_return}, counts.env_steps)
        for version, episode_return, length in counts.take_evaluated():
            values = {"eval/episode_return": episode_return, "eval/episode_steps": length}
            self._tracker.metrics({**values, "eval/env_steps": counts.env_steps}, version)

    def _show(self, status: StatusLine) -> None:
        restarts = sum(lanes.restarts for lanes in self._groups)
        if restarts > self._restarts:
            self._restarts = restarts
            last = next(lanes.last_failure for lanes in self._groups if lanes.last_failure)
            warn(f"an environment raised and was made anew, its open episode is cut ({restarts} so far): {last}")
        if status.is_due:
            self.show(status)

    def show(self, status: StatusLine) -> None:
        """The counts as they are now."""
        policy = self._policy
        status.show(
            self._collector.waits_for or policy.waits_for,
            env_steps=self._collector.counts.env_steps,
            steps_per_second=self._rate(),
            episodes=self._collector.counts.episodes,
            mean_return=float(np.mean(self._recent)) if self._recent else None,
            version=policy.version,
            sequences=self._spool.writer.sequences,
            store=self._spool.store_error or None,
        )

    def _report(self) -> None:
        counts, writer, policy = self._collector.counts, self._spool.writer, self._policy
        self._health.tell(self._troubles())
        values = {
            "collect/env_steps": counts.env_steps,
            "collect/frames": counts.env_steps * policy.terms.env.frame_skip,
            "collect/env_steps_per_second": self._rate(),
            "collect/episodes": counts.episodes,
            "collect/sequences": writer.sequences,
            "collect/published_bytes": writer.bytes_published,
            "collect/spooled_bytes": self._spool.bytes,
            "collect/waiting_seconds": counts.waiting_seconds,
            "collect/parameter_version": policy.version,
            "health/environment_restarts": self._restarts,
            **{f"collect/{name}": value for name, value in counts.blocked.take().items()},
            **policy.metrics(),
            **self._health.metrics(),
        }
        self._tracker.metrics(values, counts.env_steps)
        self._link_run()
        self._reported_at, self._reported_steps = time.monotonic(), counts.env_steps
        self._reported_waiting = counts.waiting_seconds

    def _link_run(self) -> None:
        if not self._is_linked and (run_id := self._tracker.run_id()):
            with contextlib.suppress(OSError):  # The dataset is away: the next report tries again.
                self._link(run_id)
                self._is_linked = True

    def _troubles(self) -> list[Trouble]:
        """Of the time since the last report, if enough of it was spent at work to say anything about its speed."""
        counts = self._collector.counts
        worked = time.monotonic() - self._reported_at - (counts.waiting_seconds - self._reported_waiting)
        frames = (counts.env_steps - self._reported_steps) * self._policy.terms.env.frame_skip
        troubles = memory_troubles(self._memory)
        if worked >= LEAST_WORKED_SECONDS:
            troubles += slow_collector(frames / worked, self._speed)
        return troubles

    def _rate(self) -> float:
        seconds = max(time.monotonic() - self._reported_at, 1e-9)
        return (self._collector.counts.env_steps - self._reported_steps) / seconds
