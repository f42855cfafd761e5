"""A collector's sequences labelled as they arrive: every step runs through the network once, states carried on.

    steps      0 ........ first of sequence k ............ last of k-1 ..... last of k
                          [ sequence k                                      ]
    network                                                [ its piece      ]

A sequence's piece begins with the last observation that the one before it brought. What the network says of it is what
an acting network would have said: the state is carried from piece to piece, over new parameters too, and starts anew
where the lineage changes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from schemas.geometry import CONTINUES, SequenceGeometry
from schemas.records import SequenceBatch
from schemas.shard import NO_LINEAGE, PROBE_EVERY
from schemas.terms import DatasetTerms

Core = tuple[np.ndarray, ...]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """E + 1 consecutive observations of a lane and the E steps between them.

    Attributes:
        frames: ``[K-1+E+1, *shape]``.
        action, reward: ``[E]``.
        core: one float32 ``[D]`` per part, the state before the first; zero at an episode's start.
        previous_action, previous_reward: before the first.
        states_at: ascending observations before which states are wanted, int64.
    """

    frames: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    core: Core
    previous_action: int
    previous_reward: float
    states_at: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PieceLabels:
    """``q_values`` float32 ``[E+1, A]``; ``core`` one float32 ``[E+1, D]`` per part, valid where states were wanted."""

    q_values: np.ndarray
    core: Core


@dataclass(frozen=True, kw_only=True)
class Network:
    """What labels: ``label`` takes pieces of different lanes side by side."""

    label: Callable[[list[Piece]], list[PieceLabels]]
    version: int
    lineage: bytes


@dataclass(frozen=True, kw_only=True)
class RowLabels:
    """What the network says of one sequence, as the columns of the same names store it; ``q_values`` ``[S, A]``."""

    q_values: np.ndarray
    core: Core
    unroll_core: Core
    probe_core: Core
    version_first: int
    version_last: int
    lineage: bytes


@dataclass(frozen=True, kw_only=True)
class RawRows:
    """Decoded sequences of one collector in their order; ``ok`` bool ``[B]`` says which are not corrupt.

    ``episode``, ``start``, ``lane``, ``sequence``: ``[B]``, as stored.
    """

    batch: SequenceBatch
    ok: np.ndarray
    sequence: np.ndarray
    episode: np.ndarray
    start: np.ndarray
    lane: np.ndarray


# The labelled sequence (collector's lane, episode, start) with its stored start state and lineage, if there is one.
FindLabelled = Callable[[int, int, int], "tuple[RawRows, Core, bytes] | None"]


class LaneLabels:
    """The memory of one collector's lanes.

    Args:
        terms: of the labelled sequences; their window is that of the raw ones.
        find: where a lane is not in memory (this is a restart), its last labelled sequence.

    Attributes:
        lost_states: sequences that begin in mid-episode and whose predecessor is gone: their state starts at zero.
    """

    def __init__(self, terms: DatasetTerms, find: FindLabelled = lambda lane, episode, start: None) -> None:
        self._terms, self._geometry, self._find = terms, terms.geometry, find
        self._lanes: dict[int, _Lane] = {}
        self.lost_states = 0

    def label(
        self, rows: RawRows, network: Network, saw: Callable[[np.ndarray, np.ndarray], None] = lambda *_: None
    ) -> list[RowLabels | None]:
        """Label rows, each lane's in their order and the lanes side by side; None for rows that are not ok.

        Args:
            saw: is given the newly seen single frames ``[N, *shape]`` and their greedy actions ``[N]``.
        """
        labels: list[RowLabels | None] = [None] * len(rows.ok)
        for wave in _waves(rows):
            lanes = [self._lane(rows, row, network) for row in wave]
            self._run([(lane, rows, row) for lane, row in zip(lanes, wave, strict=True)], network, saw)
            for lane, row in zip(lanes, wave, strict=True):
                labels[row] = lane.labels(rows, row)
                if _is_over(self._geometry, rows.batch, row):
                    del self._lanes[int(rows.lane[row])]
                else:
                    lane.forget_before(int(rows.start[row]) + self._geometry.stride)
        return labels

    def _lane(self, rows: RawRows, row: int, network: Network) -> "_Lane":
        """The lane of a row, ready for its piece."""
        number, episode, start = int(rows.lane[row]), int(rows.episode[row]), int(rows.start[row])
        lane = self._lanes.get(number)
        if lane is None or (lane.episode, lane.next_start) != (episode, start):
            lane = self._found_again(number, episode, start, network) if start else None
            if lane is None:
                self.lost_states += start > 0
                lane = _Lane(self._terms, episode, _first_step(self._geometry, rows, row))
            self._lanes[number] = lane
        return lane

    def _found_again(self, number: int, episode: int, start: int, network: Network) -> "_Lane | None":
        found = self._find(number, episode, start - self._geometry.stride)
        if found is None or found[2] != network.lineage:
            return None
        rows, core, _ = found
        lane = _Lane(self._terms, episode, _first_step(self._geometry, rows, 0), core, network.lineage)
        self._run([(lane, rows, 0)], network, lambda *_: None)
        return lane

    def _run(self, work: "list[tuple[_Lane, RawRows, int]]", network: Network, saw: Callable) -> None:
        pieces = [lane.piece(rows, row, network.lineage) for lane, rows, row in work]
        history = self._geometry.frame_stack - 1
        for (lane, rows, row), piece, found in zip(work, pieces, network.label(pieces), strict=True):
            lane.take(found, piece, network, int(rows.start[row]))
            saw(piece.frames[history:], found.q_values.argmax(1))


@dataclass
class _Lane:
    """One open episode: Q-values and versions of its observations from ``first`` on, and the states at some of them.

    The last observation's state is always known; it is where the next piece begins.
    """

    terms: DatasetTerms
    episode: int
    first: int
    start_core: Core | None = None
    start_lineage: bytes = NO_LINEAGE
    next_start: int = -1
    q_values: np.ndarray = field(init=False)
    versions: np.ndarray = field(init=False)
    lineages: list[bytes] = field(default_factory=list)
    states: dict[int, Core] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.q_values = np.zeros((0, self.terms.env.num_actions), np.float32)
        self.versions = np.zeros(0, np.int64)

    def piece(self, rows: RawRows, row: int, lineage: bytes) -> Piece:
        """From the last known observation (or the first of all) to the last that the row holds."""
        geometry, batch = self.terms.geometry, rows.batch
        begin = self.first + max(0, len(self.q_values) - 1)
        first_step = _first_step(geometry, rows, row)
        last = first_step + int(batch.num_observations[row]) - 1
        at, row_of_last = (step - (int(rows.start[row]) - geometry.burn_in) for step in (begin, last))
        is_first = begin == first_step
        return Piece(
            frames=batch.observation[row, at : row_of_last + geometry.frame_stack],
            action=batch.action[row, at:row_of_last],
            reward=batch.reward[row, at:row_of_last],
            core=self._core_at(begin, lineage),
            previous_action=int(batch.previous_action[row] if is_first else batch.action[row, at - 1]),
            previous_reward=float(batch.previous_reward[row] if is_first else batch.reward[row, at - 1]),
            states_at=_wanted(geometry, begin, last) - begin,
        )

    def _core_at(self, step: int, lineage: bytes) -> Core:
        known, of = self.states.get(step, self.start_core), self.lineages[-1] if self.lineages else self.start_lineage
        if known is None or of != lineage:
            return tuple(np.zeros(self.terms.core.size, np.float32) for _ in self.terms.core.parts)
        return known

    def take(self, found: PieceLabels, piece: Piece, network: Network, start: int) -> None:
        """Take a piece's labels in; the piece was the sequence's that begins at ``start``."""
        kept = max(0, len(self.q_values) - 1)
        begin, count = self.first + kept, len(found.q_values)
        self.q_values = np.concatenate([self.q_values[:kept], found.q_values])
        self.versions = np.concatenate([self.versions[:kept], np.full(count, network.version)])
        self.lineages = [*self.lineages[:kept], *[network.lineage] * count]
        for at in piece.states_at.tolist():
            self.states[begin + at] = tuple(part[at].copy() for part in found.core)
        self.next_start = start + self.terms.geometry.stride

    def labels(self, rows: RawRows, row: int) -> RowLabels:
        geometry, batch = self.terms.geometry, rows.batch
        first_step, start = _first_step(geometry, rows, row), int(rows.start[row])
        observed = slice(first_step - self.first, first_step - self.first + int(batch.num_observations[row]))
        acted = slice(observed.start, observed.start + int(batch.num_steps[row]))
        q_values = np.full((geometry.stored_steps, self.terms.env.num_actions), np.nan, np.float32)
        first_row = int(batch.first_valid[row])
        q_values[first_row : first_row + int(batch.num_observations[row])] = self.q_values[observed]
        probed = start + geometry.unroll - 1
        has_probe = int(rows.sequence[row]) % PROBE_EVERY == 0 and probed < first_step + int(batch.num_steps[row])
        lineages = set(self.lineages[acted])
        return RowLabels(
            q_values=q_values,
            core=self.states[first_step],
            unroll_core=self.states[start],
            probe_core=self.states[probed] if has_probe else (),
            version_first=int(self.versions[acted].min()),
            version_last=int(self.versions[acted].max()),
            lineage=lineages.pop() if len(lineages) == 1 else NO_LINEAGE,  # A state made by two belongs to none.
        )

    def forget_before(self, start: int) -> None:
        """Keep what the sequence that begins at ``start`` and later ones need."""
        first = max(0, start - self.terms.geometry.burn_in)
        gone = first - self.first
        if gone > 0:
            self.q_values, self.versions = self.q_values[gone:], self.versions[gone:]
            self.lineages, self.first = self.lineages[gone:], first
            self.states = {step: state for step, state in self.states.items() if step >= first}


def _waves(rows: RawRows) -> list[list[int]]:
    """Rows that are ok, no two of one lane in a wave, each lane's in their order."""
    waves: list[list[int]] = []
    passed: dict[int, int] = {}
    for row in np.flatnonzero(rows.ok).tolist():
        wave = passed[rows.lane[row]] = passed.get(rows.lane[row], -1) + 1
        if wave == len(waves):
            waves.append([])
        waves[wave].append(row)
    return waves


def _first_step(geometry: SequenceGeometry, rows: RawRows, row: int) -> int:
    return int(rows.start[row]) - geometry.burn_in + int(rows.batch.first_valid[row])


def _is_over(geometry: SequenceGeometry, batch: SequenceBatch, row: int) -> bool:
    reaches = int(batch.first_valid[row]) + int(batch.num_steps[row]) - geometry.burn_in
    return int(batch.ends[row]) != CONTINUES and reaches <= geometry.unroll


def _wanted(geometry: SequenceGeometry, begin: int, last: int) -> np.ndarray:
    """Observations from ``begin`` to ``last`` before which some sequence stores a state, and both ends."""
    steps = np.arange(begin, last + 1)
    stride: Any = geometry.stride
    starts, firsts, probes = steps % stride, (steps + geometry.burn_in) % stride, (steps + 1) % stride
    is_wanted = (starts == 0) | (firsts == 0) | (probes == 0)
    is_wanted[[0, -1]] = True
    return steps[is_wanted]
