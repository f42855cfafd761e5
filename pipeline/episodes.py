"""Whole episodes back out of overlapping sequences: the steps that sequences own tile each episode exactly."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.dataset import ShardName, shards_after
from pipeline.decode import BatchDecoder
from pipeline.row_faults import owned_steps
from pipeline.scan import LeftOut, open_listed
from pipeline.shard_reader import Shard, ShardError
from pipeline.store import Store
from schemas.geometry import CONTINUES, CUT
from schemas.shard import NO_LINEAGE
from schemas.terms import DatasetTerms

STEP_COLUMNS = ("action", "reward", "terminated", "truncated", "life_lost", "greedy")
_DECODED_AT_ONCE = 16
_READ = (
    "episode",
    "start",
    "lane",
    "first_valid",
    "num_steps",
    "ends",
    "version_first",
    "version_last",
    "epsilon",
    "episode_return",
    "env_steps",
)


@dataclass(frozen=True, kw_only=True)
class EpisodeFacts:
    """What is known of an episode without its steps.

    Attributes:
        steps: E.
        ends: how it ended; ``CUT`` also where the rest of it is not in the dataset.
        episode_return: of the whole game, NaN while unknown (cut, a life lost).
        version_first, version_last: the range of parameter versions that acted; -1 is the random policy.
        lineage: 16 bytes of the network that acted throughout, else zeros.
        env_steps: its collector's count of env steps when its first sequence was complete.
    """

    collector: str
    number: int
    lane: int
    steps: int
    ends: int
    episode_return: float
    version_first: int
    version_last: int
    lineage: bytes
    env_steps: int


@dataclass(frozen=True, kw_only=True)
class Episode:
    """An episode of E steps.

    Attributes:
        frames: ``[K-1+E+1, *shape]``: the history before step 0 (zeros but after a lost life), the frame of every step,
            and the final observation.
        action, reward, terminated, truncated, life_lost, greedy: ``[E]``, dtypes as stored.
        epsilon: float32 ``[E]``: of a step, that of the first sequence which reaches so far.
    """

    facts: EpisodeFacts
    frames: np.ndarray
    action: np.ndarray
    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    life_lost: np.ndarray
    greedy: np.ndarray
    epsilon: np.ndarray


class EpisodeReader:
    """Reads collectors episode by episode, each when its last sequence has been found, in the order of those.

    Memory: the pixels of one episode, and references into mapped shards for those that are still open. What was left
    open by a killed collector, or lost its rest to a bad shard, ends ``CUT`` after the last step that is owned, with
    the frame behind it as the final observation. What has lost its beginning is left out and counted: its core states
    could not be inferred.

    Args:
        left_out: takes the bad shards and corrupt rows.
        keep: which episodes to read; the pixels of others are not decoded.

    Attributes:
        episodes, steps: read so far.
        filtered_episodes: refused by ``keep``.
        lost_steps: owned steps that belong to no readable episode.
    """

    def __init__(
        self,
        store: Store,
        terms: DatasetTerms,
        *,
        left_out: LeftOut,
        keep: Callable[[EpisodeFacts], bool] = lambda facts: True,
        threads: int = 1,
    ) -> None:
        self._store, self._terms, self._left_out, self._keep = store, terms, left_out, keep
        self._decoder = BatchDecoder(terms, threads)
        self._buffer = self._decoder.observation_buffer(_DECODED_AT_ONCE)
        self.episodes = self.steps = self.filtered_episodes = self.lost_steps = 0

    def close(self) -> None:
        """End the decoding threads."""
        self._decoder.close()

    def read(self, collector: str, shards: Sequence[ShardName] | None = None) -> Iterator[Episode]:
        """The episodes of one collector, in ``shards`` of it (default: all that are there).

        Raises:
            TooManyFaults: past the limit of bad shards.
        """
        shards = shards_after(self._store, collector, -1) if shards is None else shards
        for rows in self._complete(shards):
            facts = rows.facts(collector)
            if not self._keep(facts):
                self.filtered_episodes += 1
                continue
            episode = self._assemble(rows, facts)
            self.episodes += 1
            self.steps += facts.steps
            yield episode

    def _complete(self, shards: Sequence[ShardName]) -> Iterator["_Rows"]:
        open_episodes: dict[int, _Rows] = {}
        for row in self._rows(shards):
            current = open_episodes.get(row.lane)
            if current is not None and (row.episode != current.episode or row.start != current.next_start):
                del open_episodes[row.lane]
                yield current
                current = None
            if current is None and row.start != 0:
                self.lost_steps += row.owned
                continue
            if current is None:
                current = open_episodes[row.lane] = _Rows(self._terms)
            current.add(row)
            if current.is_over:
                del open_episodes[row.lane]
                yield current
        yield from sorted(open_episodes.values(), key=lambda rows: rows.episode)

    def _rows(self, shards: Sequence[ShardName]) -> Iterator["_Row"]:
        for name in shards:
            try:
                shard = open_listed(self._store, self._terms, name)
            except ShardError as error:
                self._left_out.shard(name.path, str(error))
                continue
            columns = shard.columns
            intact = shard.checksums_ok(range(shard.num_rows))
            owned, lineages = owned_steps(self._terms, columns), columns["lineage"]
            values = {column: columns[column].tolist() for column in _READ}
            for row in range(shard.num_rows):
                if intact[row]:
                    of_row = {column: values[column][row] for column in _READ}
                    yield _Row(shard=shard, row=row, owned=int(owned[row]), lineage=lineages[row].tobytes(), **of_row)
                else:
                    self._left_out.rows([(name.path, row)])

    def _assemble(self, rows: "_Rows", facts: EpisodeFacts) -> Episode:
        geometry, env = self._terms.geometry, self._terms.env
        history, first_row = geometry.frame_stack - 1, geometry.burn_in
        frames = np.zeros((history + facts.steps + 1, *env.observation.shape), env.observation.dtype)
        steps: dict[str, list[np.ndarray]] = {name: [] for name in STEP_COLUMNS}
        at = 0
        for begin in range(0, len(rows.rows), _DECODED_AT_ONCE):
            some = rows.rows[begin : begin + _DECODED_AT_ONCE]
            # The checksums were verified a moment ago: a row that does not decode now was changed under our hands.
            batch, ok = self._decoder.decode([(row.shard, row.row) for row in some], self._buffer[: len(some)])
            if not ok.all():
                raise ValueError(f"a shard of collector {facts.collector} changed while it was read")
            for row, pixels in zip(some, batch.observation, strict=True):
                if at == 0:
                    frames[:history] = pixels[first_row : first_row + history]
                own = slice(history + first_row, history + first_row + row.owned + 1)  # The next step's frame too.
                frames[history + at : history + at + row.owned + 1] = pixels[own]
                at += row.owned
            for name in STEP_COLUMNS:
                stored = getattr(batch, name)
                steps[name] += [stored[i, first_row : first_row + row.owned] for i, row in enumerate(some)]
        return Episode(
            facts=facts,
            frames=frames,
            epsilon=rows.epsilons(),
            **{name: np.concatenate(pieces) for name, pieces in steps.items()},
        )


@dataclass(frozen=True, kw_only=True)
class _Row:
    """Where one sequence lies, and its columns."""

    shard: Shard
    row: int
    owned: int
    episode: int
    start: int
    lane: int
    first_valid: int
    num_steps: int
    ends: int
    version_first: int
    version_last: int
    lineage: bytes
    epsilon: float
    episode_return: float
    env_steps: int


class _Rows:
    """The sequences of one episode from its first on."""

    def __init__(self, terms: DatasetTerms) -> None:
        self._geometry = terms.geometry
        self.rows: list[_Row] = []
        self.steps = 0
        self.is_over = False

    @property
    def episode(self) -> int:
        return self.rows[0].episode

    @property
    def next_start(self) -> int:
        return len(self.rows) * self._geometry.stride

    def add(self, row: _Row) -> None:
        self.rows.append(row)
        self.steps += row.owned
        reaches = row.first_valid + row.num_steps - self._geometry.burn_in
        self.is_over = row.ends != CONTINUES and reaches <= self._geometry.unroll

    def facts(self, collector: str) -> EpisodeFacts:
        first, last = self.rows[0], self.rows[-1]
        lineages = {row.lineage for row in self.rows}
        return EpisodeFacts(
            collector=collector,
            number=first.episode,
            lane=first.lane,
            steps=self.steps,
            ends=last.ends if self.is_over else CUT,
            episode_return=last.episode_return,
            version_first=min(row.version_first for row in self.rows),
            version_last=max(row.version_last for row in self.rows),
            lineage=lineages.pop() if len(lineages) == 1 else NO_LINEAGE,
            env_steps=first.env_steps,
        )

    def epsilons(self) -> np.ndarray:
        """A sequence records its last row's epsilon, so this gives each sequence its own back when cut again."""
        out = np.empty(self.steps, np.float32)
        out[:] = self.rows[-1].epsilon
        for row in reversed(self.rows):
            out[: row.start + self._geometry.unroll + self._geometry.bootstrap] = row.epsilon
        return out
