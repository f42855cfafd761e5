"""Records that cross a border: one finished sequence on its way to a shard, a batch of them on its way to a learner.

Letters: B sequences, S stored rows, K frame stack, A actions, D = layers * width of the core.
"""

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Sequence:
    """One sequence as the builder cut it, pixels still raw. Invalid rows are zero.

    ``observation`` is ``[K-1+S, *shape]``; position ``K-1+t`` is row t's own frame and the K-1 before the first valid
    row's hold its history. ``q_values`` ``[S, A]`` float32 are the actor's, NaN where no network acted or no
    observation exists; they serve the initial priority and are not stored. ``probe_core`` has one array per core part,
    or none.
    """

    collector: str
    sequence: int
    episode: int
    start: int
    lane: int
    first_valid: int
    num_steps: int
    num_observations: int
    ends: int
    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    life_lost: np.ndarray
    greedy: np.ndarray
    previous_action: int
    previous_reward: float
    core: tuple[np.ndarray, ...]
    unroll_core: tuple[np.ndarray, ...]
    probe_core: tuple[np.ndarray, ...]
    version_first: int
    version_last: int
    lineage: bytes
    epsilon: float
    episode_return: float
    env_steps: int
    q_values: np.ndarray


@dataclass(frozen=True, kw_only=True)
class SequenceBatch:
    """B sequences, batch-major as they rest on disk, pixels decoded.

    Shapes and dtypes: ``observation`` ``[B, K-1+S, *shape]``; ``action`` int32, ``reward`` float32, ``terminated``,
    ``truncated``, ``life_lost``, ``greedy`` uint8, all ``[B, S]``; ``core`` and ``unroll_core`` one float32 ``[B, D]``
    per core part; ``lineage`` uint8 ``[B, 16]``; ``probes`` int64 ``[P]``, ascending, who carries a probe, and
    ``probe_core`` one float32 ``[P, D]`` per core part, of these alone; ``version_first``, ``version_last``,
    ``sequence`` int64 ``[B]``; the rest int32 or float32 ``[B]``.
    ``collector``: bytes ``[B]``, the ids of the incarnations that acted; empty where nobody said.
    """

    sequence: np.ndarray
    first_valid: np.ndarray
    num_steps: np.ndarray
    num_observations: np.ndarray
    ends: np.ndarray
    observation: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    life_lost: np.ndarray
    greedy: np.ndarray
    previous_action: np.ndarray
    previous_reward: np.ndarray
    core: tuple[np.ndarray, ...]
    unroll_core: tuple[np.ndarray, ...]
    probes: np.ndarray
    probe_core: tuple[np.ndarray, ...]
    version_first: np.ndarray
    version_last: np.ndarray
    lineage: np.ndarray
    epsilon: np.ndarray
    collector: np.ndarray = field(default_factory=lambda: np.zeros(0, "S1"))

    def __len__(self) -> int:
        return len(self.first_valid)

    def identities(self) -> list[tuple[str, int]]:
        """(collector, sequence number) of each: what a sequence is known by for ever."""
        return [(name.decode(), int(number)) for name, number in zip(self.collector, self.sequence, strict=True)]

    def part(self, start: int, stop: int) -> "SequenceBatch":
        """The batch of sequences ``start`` to ``stop - 1`` alone; views, but for the probes."""
        values: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        for name, value in values.items():
            taken = [array[start:stop] for array in (value if isinstance(value, tuple) else (value,))]
            values[name] = tuple(taken) if isinstance(value, tuple) else taken[0]
        here = (self.probes >= start) & (self.probes < stop)
        values["probes"] = self.probes[here] - start
        values["probe_core"] = tuple(array[here] for array in self.probe_core)
        return SequenceBatch(**values)


@dataclass(frozen=True, kw_only=True)
class ReplaySample:
    """A drawn batch: who was drawn, with which probability, and what they hold.

    Attributes:
        ids: int64 ``[B]``, local to one replay, never reused.
        probabilities: float64 ``[B]``, the chance of each under the priorities at the time of the draw.
        replay_sequences: N, how many sequences could have been drawn.
    """

    ids: np.ndarray
    probabilities: np.ndarray
    replay_sequences: int
    batch: SequenceBatch


@dataclass(frozen=True, kw_only=True)
class ActOutput:
    """What a policy says about one vector step of N lanes.

    Attributes:
        action: int64 ``[N]``.
        greedy: bool ``[N]``, the action is the argmax of ``q_values``; False where no network acted.
        q_values: float32 ``[N, A]``, NaN where no network acted.
        core: one float32 ``[N, D]`` per core part: the state *before* this observation was consumed.
        version, lineage: of the parameters that acted; -1 and sixteen zero bytes for the random policy.
    """

    action: np.ndarray
    greedy: np.ndarray
    q_values: np.ndarray
    core: tuple[np.ndarray, ...]
    version: int
    lineage: bytes
