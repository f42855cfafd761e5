"""The collector's loop: act, cut into sequences, publish shards, take up newer parameters, keep to the ratio."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

import numpy as np

from pipeline.params import ParamsPoller
from pipeline.progress import RunFollower
from pipeline.rollout import Rollout, VectorStep
from pipeline.sequences import SequenceBuilder
from pipeline.shard_writer import ShardWriter
from pipeline.store import LocalStore

WAIT_SECONDS = 0.05
FOLLOW_SECONDS = 0.25  # Reading a record costs 0.1 ms; with narrow bands both jobs wait for each other this often.


@dataclass(frozen=True, kw_only=True)
class RefreshConfig:
    """How often to look for newer parameters.

    Attributes:
        refresh_env_steps: steps per lane between two looks for newer parameters (paper: 400).
        refresh_seconds: look at least this often, for slow environments.
    """

    refresh_env_steps: int = 400
    refresh_seconds: float = 2.0

    def __post_init__(self) -> None:
        if self.refresh_env_steps < 1:
            raise ValueError(f"refresh_env_steps is {self.refresh_env_steps}; allowed: 1 or more")
        if self.refresh_seconds <= 0:
            raise ValueError(f"refresh_seconds is {self.refresh_seconds}; allowed: above 0")


@dataclass
class CollectorCounts:
    """What a collector has done so far. ``finished`` holds (lane, return, length) until a reader takes them."""

    env_steps: int = 0
    episodes: int = 0
    waiting_seconds: float = 0.0
    versions_used: set[int] = field(default_factory=set)
    finished: list[tuple[int, float, int]] = field(default_factory=list)

    def take_finished(self) -> list[tuple[int, float, int]]:
        taken, self.finished = self.finished, []
        return taken


class Collector:
    """One incarnation at work. ``turn`` does one vector step, or waits a moment when it must not run ahead.

    Its lanes may be split into two groups that take turns: while the policy acts for one, the emulator's threads work
    on the other. (Pong, the paper's network, one thread each on two cores: see ``make bench-collect``.)

    Args:
        rollouts: the groups, lanes in order; one, or two to overlap emulator and policy.
        use_params: takes the bytes of new parameters; None keeps to the policy as it is (``--params FILE``).
        follower: says which learner's record tells how far this collector may go.
    """

    def __init__(
        self,
        *,
        store: LocalStore,
        collector: str,
        rollouts: Many[Rollout],
        builder: SequenceBuilder,
        writer: ShardWriter,
        follower: RunFollower,
        use_params: Callable[[bytes], None] | None,
        refresh: RefreshConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._collector = store, collector
        self._rollouts, self._builder, self._writer = rollouts, builder, writer
        self._first_lanes = [sum(rollout.num_lanes for rollout in rollouts[:i]) for i in range(len(rollouts))]
        self._turn = 0
        self._follower, self._use_params, self._refresh, self._clock = follower, use_params, refresh, clock
        self._poller: tuple[str, ParamsPoller] | None = None
        self._calls_since_poll = 0
        self._polled_at = self._followed_at = -np.inf
        num_lanes = sum(rollout.num_lanes for rollout in rollouts)
        self._returns, self._lengths = np.zeros(num_lanes), np.zeros(num_lanes, np.int64)
        self._sequences = 0
        self.counts = CollectorCounts()
        self.waits_for = ""

    def turn(self) -> None:
        """One step in every lane; or, when the learner's record says wait, publish what is complete and pause."""
        self._follow()
        self._poll_params()
        if self.waits_for:
            self._writer.flush()
            started = self._clock()
            time.sleep(WAIT_SECONDS)
            self.counts.waiting_seconds += self._clock() - started
            return
        acting, observing = self._turn, (self._turn + 1) % len(self._rollouts)
        self._rollouts[acting].act()
        if self._rollouts[observing].in_flight:
            self._take_in(observing)
        self._turn = observing
        self._writer.maybe_flush()
        self._calls_since_poll += 1

    def finish(self) -> None:
        """Write the open sequences as cut, with their initial priorities; everything is durable afterwards."""
        for group, rollout in enumerate(self._rollouts):
            if rollout.in_flight:
                self._take_in(group)
            observation, act = rollout.look()
            for sequence in self._builder.cut(observation, act.q_values, self._first_lanes[group]):
                self._writer.add(sequence)
        self._writer.flush()

    def _take_in(self, group: int) -> None:
        step = self._rollouts[group].observe()
        self._count(step, self._first_lanes[group])
        for sequence in self._builder.record(step, self._first_lanes[group]):
            self._writer.add(sequence)
            self._sequences += 1

    def _follow(self) -> None:
        now = self._clock()
        if now - self._followed_at >= FOLLOW_SECONDS:
            self._followed_at = now
            self._follower.poll()
        verdict = self._follower.may_collect(self._sequences, self._collector)
        self.waits_for = "" if verdict.allowed else verdict.reason

    def _poll_params(self) -> None:
        run = self._follower.run
        if run is None or self._use_params is None:
            return
        if self._poller is None or self._poller[0] != run:
            self._poller = run, ParamsPoller(self._store, run)
            self._polled_at = -np.inf
        now = self._clock()
        is_due = self._calls_since_poll >= self._refresh.refresh_env_steps * len(self._rollouts)
        if is_due or now - self._polled_at >= self._refresh.refresh_seconds:
            self._calls_since_poll, self._polled_at = 0, now
            data = self._poller[1].poll()
            if data is not None:
                self._use_params(data)

    def _count(self, step: VectorStep, first_lane: int) -> None:
        lanes = slice(first_lane, first_lane + len(step.reward))
        self.counts.env_steps += int(step.is_transition.sum())
        self.counts.versions_used.add(step.act.version)
        self._returns[lanes] += step.reward
        self._lengths[lanes] += step.is_transition
        for lane in first_lane + np.flatnonzero(step.terminated | step.truncated):
            self.counts.episodes += 1
            self.counts.finished.append((int(lane), float(self._returns[lane]), int(self._lengths[lane])))
            self._returns[lane] = self._lengths[lane] = 0
