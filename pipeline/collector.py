"""The collector's loop: act, cut into sequences, publish shards, take up newer parameters, keep to the ratio."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pipeline.aside import Aside
from pipeline.blocked_times import BlockedTimes
from pipeline.params import ParamsPoller
from pipeline.progress import RunFollower
from pipeline.rollout import Rollout, VectorStep
from pipeline.sequences import SequenceBuilder
from pipeline.spool import Spool
from pipeline.store import Store

WAIT_SECONDS = 0.05
FOLLOW_SECONDS = 0.25  # Reading a record costs 0.1 ms; with narrow bands both jobs wait for each other this often.
REMOTE_FOLLOW_SECONDS = 1.0  # In an object store every look is three requests.


class Poller(Protocol):
    """Looks for what a run publishes: ``ParamsPoller`` or ``TablePoller``."""

    def poll(self) -> Any:
        """What has been published since the last poll, else None."""
        ...


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
    """What a collector has done so far.

    ``finished`` holds (lane, return, length) of ended episodes until a reader takes them, ``evaluated`` (version at the
    end, return, length) of the evaluation lanes' episodes. ``blocked``: how long the loop copied each
    sequence out and handed it over.
    """

    env_steps: int = 0
    episodes: int = 0
    waiting_seconds: float = 0.0
    versions_used: set[int] = field(default_factory=set)
    finished: list[tuple[int, float, int]] = field(default_factory=list)
    evaluated: list[tuple[int, float, int]] = field(default_factory=list)
    blocked: BlockedTimes = field(default_factory=BlockedTimes)

    def take_finished(self) -> list[tuple[int, float, int]]:
        taken, self.finished = self.finished, []
        return taken

    def take_evaluated(self) -> list[tuple[int, float, int]]:
        taken, self.evaluated = self.evaluated, []
        return taken


class Collector:
    """One incarnation at work. ``turn`` does one vector step, or waits a moment when it must not run ahead.

    Its lanes may be split into two groups that take turns: while the policy acts for one, the emulator's threads work
    on the other. (Pong, the paper's network, one thread each on two cores: see ``make bench-collect``.)

    Args:
        rollouts: the groups, lanes in order; one, or two to overlap emulator and policy.
        spool: takes the sequences.
        use_published: takes what the followed run has published anew; None keeps to the policy as it is.
        poller: looks for it, given the store and the run: ``ParamsPoller`` gives the bytes of new parameters.
        evaluation: lanes that act almost greedily beside the others and write no sequences.
        follower: says which learner's record tells how far this collector may go.
    """

    def __init__(
        self,
        *,
        store: Store,
        collector: str,
        rollouts: Many[Rollout],
        builder: SequenceBuilder,
        spool: Spool,
        follower: RunFollower,
        use_published: Callable[[Any], None] | None,
        poller: Callable[[Store, str], Poller] = ParamsPoller,
        refresh: RefreshConfig,
        evaluation: Rollout | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._collector = store, collector
        self._rollouts, self._builder, self._spool = rollouts, builder, spool
        self._first_lanes = [sum(rollout.num_lanes for rollout in rollouts[:i]) for i in range(len(rollouts))]
        self._turn = 0
        self._evaluation = evaluation
        self._follower, self._refresh, self._clock = follower, refresh, clock
        self._use_published, self._make_poller = use_published, poller
        self._poller: tuple[str, Poller] | None = None
        self._calls_since_poll = 0
        self._polled_at = self._followed_at = -np.inf
        self._following, self._polling = (Aside(in_thread=store.is_remote) for _ in range(2))
        self._follow_seconds = REMOTE_FOLLOW_SECONDS if store.is_remote else FOLLOW_SECONDS
        self._tally = EpisodeTally(sum(rollout.num_lanes for rollout in rollouts))
        self._evaluation_tally = EpisodeTally(evaluation.num_lanes if evaluation else 0)
        self._sequences = 0
        self.counts = CollectorCounts()
        self.waits_for = ""

    def turn(self) -> None:
        """One step in every lane; or, when the learner's record says wait, publish what is complete and pause."""
        self._follow()
        self._poll_published()
        if self.waits_for:
            self._spool.flush()
            started = self._clock()
            time.sleep(WAIT_SECONDS)
            self.counts.waiting_seconds += self._clock() - started
            return
        acting, observing = self._turn, (self._turn + 1) % len(self._rollouts)
        self._rollouts[acting].act()
        if self._rollouts[observing].in_flight:
            self._take_in(observing)
        self._turn = observing
        self._calls_since_poll += 1
        if self._evaluation is not None and self.counts.versions_used - {-1}:
            self._evaluate(self._evaluation.step())

    def finish(self) -> None:
        """Hand the open sequences over as cut, with their initial priorities; the spool's ``close`` publishes them."""
        for group, rollout in enumerate(self._rollouts):
            if rollout.in_flight:
                self._take_in(group)
            observation, act = rollout.look()
            for sequence in self._builder.cut(observation, act.q_values, self._first_lanes[group]):
                self._spool.put(sequence)

    def _take_in(self, group: int) -> None:
        step = self._rollouts[group].observe()
        self._count(step, self._first_lanes[group])
        cutting_before = self._builder.cutting_seconds
        sequences = self._builder.record(step, self._first_lanes[group])
        if sequences:
            started = time.perf_counter()
            for sequence in sequences:
                self._spool.put(sequence)
            handing_over = time.perf_counter() - started
            self.counts.blocked.add(self._builder.cutting_seconds - cutting_before + handing_over, len(sequences))
            self._sequences += len(sequences)

    def _follow(self) -> None:
        now = self._clock()
        if now - self._followed_at >= self._follow_seconds:
            self._followed_at = now
            self._following.run(self._follower.poll)
        self._following.take()
        verdict = self._follower.may_collect(self._sequences, self._collector)
        self.waits_for = self._spool.waits_for or ("" if verdict.allowed else verdict.reason)

    def _poll_published(self) -> None:
        run = self._follower.run
        if run is None or self._use_published is None:
            return
        if self._poller is None or self._poller[0] != run:
            self._poller = run, self._make_poller(self._store, run)
            self._polled_at = -np.inf
        now = self._clock()
        is_due = self._calls_since_poll >= self._refresh.refresh_env_steps * len(self._rollouts)
        if is_due or now - self._polled_at >= self._refresh.refresh_seconds:
            self._calls_since_poll, self._polled_at = 0, now
            self._polling.run(self._poller[1].poll)
        found = self._polling.take()
        if found is not None:
            self._use_published(found)

    def _count(self, step: VectorStep, first_lane: int) -> None:
        self.counts.env_steps += int(step.is_transition.sum())
        self.counts.versions_used.add(step.act.version)
        ended = self._tally.add(step, first_lane)
        self.counts.episodes += len(ended)
        self.counts.finished += ended

    def _evaluate(self, step: VectorStep) -> None:
        ended = self._evaluation_tally.add(step, 0)
        self.counts.evaluated += [(step.act.version, episode_return, length) for _, episode_return, length in ended]


class EpisodeTally:
    """Returns and lengths of the open episodes of N lanes."""

    def __init__(self, num_lanes: int) -> None:
        self._returns, self._lengths = np.zeros(num_lanes), np.zeros(num_lanes, np.int64)

    def add(self, step: VectorStep, first_lane: int) -> list[tuple[int, float, int]]:
        """Count one step of the lanes from ``first_lane`` on; (lane, return, length) of the episodes that it ended."""
        lanes = slice(first_lane, first_lane + len(step.reward))
        self._returns[lanes] += step.reward
        self._lengths[lanes] += step.is_transition
        over = first_lane + np.flatnonzero(step.terminated | step.truncated)
        ended = [(int(lane), float(self._returns[lane]), int(self._lengths[lane])) for lane in over]
        started_anew = first_lane + np.flatnonzero(~step.is_transition)  # After an end, or after a failure.
        for gone in (over, started_anew):
            self._returns[gone] = self._lengths[gone] = 0
        return ended
