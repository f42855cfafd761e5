"""What is going wrong, told from numbers alone: each trouble in one line with its likely cause (article section 5.5).

A learner's updates are watched over a report's time; ``LearnerWatch.report`` says what it makes of them. Counting and
showing is up to the job.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from r2d2.learner import Learner, LearnerOutput
from r2d2.rescaling import rescale
from schemas.records import ReplaySample
from schemas.shard import NO_LINEAGE

LEARNER_TROUBLES = (
    "not_finite",
    "loss_constant",
    "target_not_copied",
    "priorities_frozen",
    "priorities_equal",
    "one_version",
    "mostly_random",
    "mostly_foreign",
    "q_runs_away",
)
MACHINE_TROUBLES = ("slow_collector", "memory_near_limit")
TELLING_UPDATES = 20  # Fewer of them say nothing about what stays the same.
STALE_UPDATES = 500  # Experience this much older than the learner has stopped following it.


class Trouble(NamedTuple):
    """``name`` is that of its counter ``health/<name>``, ``line`` what a user reads."""

    name: str
    line: str


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """When to complain about memory.

    Attributes:
        most_memory_share: largest share of the machine's or container's memory in use, 0 to 1 (ours: 0.9; 1: off).
    """

    most_memory_share: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.most_memory_share <= 1:
            raise ValueError(f"most_memory_share is {self.most_memory_share}; allowed: above 0, to 1 (off)")


@dataclass(frozen=True, kw_only=True)
class SpeedLimit:
    """When to complain about a collector's speed.

    Attributes:
        least_frames_per_second: emulator frames over all lanes while it is not waiting (article 5.5: 500; 0: off).
    """

    least_frames_per_second: float = 500.0

    def __post_init__(self) -> None:
        if self.least_frames_per_second < 0:
            raise ValueError(f"least_frames_per_second is {self.least_frames_per_second}; allowed: 0 (off) or more")


class Range:
    """Smallest and largest of the finite values seen."""

    def __init__(self) -> None:
        self.least, self.most = math.inf, -math.inf

    def saw(self, values: np.ndarray | float) -> None:
        values = np.asarray(values, np.float64)
        values = values[np.isfinite(values)]
        if values.size:
            self.least, self.most = min(self.least, float(values.min())), max(self.most, float(values.max()))

    @property
    def is_point(self) -> bool:
        """Something was seen, and all of it the same to a millionth."""
        return self.least <= self.most <= self.least + 1e-6 * abs(self.least)


class LearnerWatch:
    """Watches a learner's updates. ``saw`` after each of them, ``report`` now and then; one thread.

    ``saw`` costs some tens of microseconds: a few numpy reductions over a batch's ``[B]`` and ``[B, S]`` columns.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._largest_reward = 1.0
        self._target_seen, self._target_seen_at = self._target_sum(), learner.updates
        self._begin()

    def _begin(self) -> None:
        self._updates = self._skipped = self._applied = self._sequences = self._random = self._foreign = 0
        self._loss, self._priorities, self._versions, self._q = Range(), Range(), Range(), Range()

    def saw(self, sample: ReplaySample, output: LearnerOutput, applied_priorities: int) -> None:
        """Take in one update; ``applied_priorities`` of its priorities reached the replay."""
        batch = sample.batch
        self._updates += 1
        self._skipped += not output.updated
        self._applied += applied_priorities
        self._loss.saw(output.metrics["loss"])
        self._q.saw(output.metrics["q_greedy_max"])
        self._priorities.saw(output.priorities)
        self._largest_reward = max(self._largest_reward, _largest(batch.reward))
        is_random = (batch.lineage == np.frombuffer(NO_LINEAGE, np.uint8)).all(1)
        is_own = (batch.lineage == np.frombuffer(self._learner.lineage, np.uint8)).all(1)
        self._sequences += len(batch)
        self._random += int(is_random.sum())
        self._foreign += int((~is_random & ~is_own).sum())
        self._versions.saw(batch.version_last[is_own])

    def report(self) -> list[Trouble]:
        """What the updates since the last report suffer from."""
        if not self._updates:
            return []
        found = [*self._troubles_of_values(), *self._troubles_of_sameness(), *self._troubles_of_experience()]
        self._begin()
        return found

    def _troubles_of_values(self) -> Iterator[Trouble]:
        config = self._learner.config
        if self._skipped:
            yield Trouble(
                "not_finite",
                f"loss or gradient not finite in {self._skipped} of {self._updates} updates, which were skipped: "
                f"learning_rate {config.learning_rate:g} is too high, or rewards or observations are not finite",
            )
        bound = value_bound(self._largest_reward, config.gamma, config.epsilon)
        if self._q.most > bound:
            yield Trouble(
                "q_runs_away",
                f"Q-values reach {self._q.most:.3g}, beyond {bound:.3g}, the most that rewards up to "
                f"{self._largest_reward:g} can return: learning_rate {config.learning_rate:g} is too high or "
                f"target_copy_updates {config.target_copy_updates} too small",
            )

    def _troubles_of_sameness(self) -> Iterator[Trouble]:
        period, age = self._learner.config.target_copy_updates, self._target_age()
        if age > period:
            yield Trouble(
                "target_not_copied",
                f"target network unchanged for {age} updates, and target_copy_updates is {period}: copies fail, or "
                "the online network itself no longer changes",
            )
        if self._updates < TELLING_UPDATES:
            return
        if self._loss.is_point:
            yield Trouble(
                "loss_constant",
                f"loss has been {self._loss.least:.3g} in all {self._updates} updates: no gradient arrives, or all "
                "sequences are alike (no reward yet?)",
            )
        if self._applied == 0:
            yield Trouble(
                "priorities_frozen",
                f"none of the priorities of {self._updates} updates was taken: their sequences had been evicted "
                "(capacity too small), or they were not finite",
            )
        if self._priorities.is_point:
            yield Trouble(
                "priorities_equal",
                f"all priorities are {self._priorities.least:.3g}, so draws are uniform: the network has one value for "
                "everything, or there is no reward yet",
            )

    def _troubles_of_experience(self) -> Iterator[Trouble]:
        if self._updates < TELLING_UPDATES:
            return
        learner, lag = self._learner, self._learner.version - self._versions.most
        if self._versions.is_point and lag >= STALE_UPDATES:
            yield Trouble(
                "one_version",
                f"all replayed experience is of version {self._versions.least:.0f}, {lag:.0f} updates old: collectors "
                "take up no parameters (fixed by --params, following another run?) or have stopped",
            )
        if self._random > 0.5 * self._sequences and learner.updates >= STALE_UPDATES:
            yield Trouble(
                "mostly_random",
                f"{self._random / self._sequences:.0%} of the replayed sequences were acted at random: collectors "
                "find no parameters of this run (another dataset, --follow another run?)",
            )
        uses_states = learner.config.initial_state != "zero" and not learner.config.trust_stored_state
        if uses_states and self._foreign > 0.5 * self._sequences:
            yield Trouble(
                "mostly_foreign",
                f"{self._foreign / self._sequences:.0%} of the replayed states are another network's and not used: go "
                "on from that network with --init-from, or have relabel.py infer states anew",
            )

    def _target_age(self) -> int:
        """Updates since the target network was last found changed; read off the parameters, not off a counter."""
        now = self._target_sum()
        if now != self._target_seen:
            self._target_seen, self._target_seen_at = now, self._learner.updates
        return self._learner.updates - self._target_seen_at

    def _target_sum(self) -> float:
        return float(self._learner.target.value.weight.double().sum())


def value_bound(largest_reward: float, gamma: float, epsilon: float | None) -> float:
    """The largest value that rewards of this size can sum up to, in h-space (``epsilon`` None: as it is)."""
    if gamma >= 1:
        return math.inf
    bound = torch.tensor(largest_reward / (1 - gamma), dtype=torch.float64)
    return float(bound if epsilon is None else rescale(bound, epsilon))


def never_copied(planned_updates: int | None, done_updates: int, target_copy_updates: int) -> list[Trouble]:
    """Whether a run that ends at ``planned_updates`` in all will not see a single copy into the target network."""
    if planned_updates is None or planned_updates // target_copy_updates > done_updates // target_copy_updates:
        return []
    return [
        Trouble(
            "target_not_copied",
            f"the target network will not be copied once in this run: target_copy_updates is {target_copy_updates}, "
            f"updates are {planned_updates}",
        )
    ]


def slow_collector(frames_per_second: float, limit: SpeedLimit) -> list[Trouble]:
    """``frames_per_second`` while not waiting, emulator frames over all lanes of one collector."""
    if frames_per_second >= limit.least_frames_per_second:
        return []
    return [
        Trouble(
            "slow_collector",
            f"{frames_per_second:.0f} frames/s, below {limit.least_frames_per_second:g}: too few --envs or --threads, "
            "or other work on this machine",
        )
    ]


def memory_near_limit(used_share: float | None, what: str, limit: MemoryLimit) -> list[Trouble]:
    """``used_share`` 0 to 1 of the memory that ``what`` (the machine, the GPU) has; None where nobody knows."""
    if used_share is None or used_share <= limit.most_memory_share:
        return []
    return [
        Trouble(
            "memory_near_limit",
            f"{used_share:.0%} of {what}'s memory is in use: fewer --envs, a smaller --batch-size or --tbptt segments",
        )
    ]


def _largest(rewards: np.ndarray) -> float:
    sizes = np.abs(rewards)
    return float(sizes.max(initial=0.0, where=np.isfinite(sizes)))
