"""The replay: follows a dataset, draws batches of it, keeps their priorities and the ratio of samples to insertions.

shards ─▶ ShardIndex ─ids─▶ PriorityTable ─▶ draw ─▶ ShardCache ─▶ BatchDecoder ─▶ ReplaySample
          RateLimiter ───────────▲   ▲                                                  │
                                     └──────────── (ids, priorities) ◀──────────────────┘
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pipeline.dataset import TERMS_NAME, ShardName, unknown_files
from pipeline.decode import BatchDecoder
from pipeline.limiter import LimiterConfig, RateLimiter
from pipeline.priority_table import REMOVED, SAMPLERS, PriorityTable, UpdateCounts
from pipeline.progress import Progress
from pipeline.shard_cache import ShardCache
from pipeline.shard_index import Place, ShardIndex
from pipeline.shard_reader import Shard, ShardError
from pipeline.snapshot import SavedPriorities, pack_priorities
from pipeline.store import LocalStore
from schemas.records import ReplaySample
from schemas.terms import DatasetTerms

UNKNOWN_FILES_POLLS = 120  # Looking for files that are no shards lists everything, so not in every poll.
COUNTERS = ("corrupt_rows", "stale_updates", "refused_priorities")  # Kept over restarts.
UNUSABLE = (ShardError, FileNotFoundError, PermissionError, IsADirectoryError)  # One file's fault, not the machine's.

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What a replay holds and how it draws.

    Attributes:
        capacity: sequences held; the oldest make room (paper: 1e5).
        alpha: draws are in proportion to priority^alpha (paper: 0.9, article: 0.5); 0 is uniform.
        sampler: ``proportional`` or ``uniform``.
        max_open_shards: how many shards stay memory-mapped; None: as many as is sensible on this machine.
    """

    capacity: int = 100_000
    alpha: float = 0.9
    sampler: str = "proportional"
    max_open_shards: int | None = None

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity is {self.capacity}; allowed: 1 or more")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; allowed: 0 to 1")
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler is {self.sampler!r}; allowed: {', '.join(SAMPLERS)}")


class PollCounts(NamedTuple):
    """What one poll found: shards and sequences admitted, files refused."""

    shards: int
    sequences: int
    bad_shards: int


@dataclass(eq=False)
class Drawn:
    """A batch before it is decoded: all that a remote learner needs, its pixels still compressed in their shards.

    ``ids``, ``probabilities``, ``replay_sequences`` as in ``ReplaySample``; ``rows`` are (shard, row), ``places`` the same
    by name. ``generator_before``: the generator's state as it was before this draw.
    """

    ids: np.ndarray
    probabilities: np.ndarray
    replay_sequences: int
    places: list[Place]
    rows: list[tuple[Shard, int]]
    generator_before: dict[str, Any]


class _DatasetAway(Exception):
    """The whole dataset cannot be found, so a missing shard says nothing about that shard."""


class Replay:
    """One dataset as a replay. Any number of threads may draw, update and ask; polls take turns.

    Shards are immutable and a drawn row keeps its shard mapped, so a batch is whole whatever is admitted, evicted or
    deleted while it is decoded. Files are never moved or changed: what cannot be used is named once (a warning of this
    module's logger), counted, and left alone.

    Args:
        terms: the dataset's; shards of other terms are refused.
        generator: decides all draws; a ``PCG64`` one (``np.random.default_rng(seed)``) for a JSON-able state.
        threads: how many decode a batch.
        clock: seconds, monotonic; for ``waiting_seconds`` only.
    """

    def __init__(
        self,
        store: LocalStore,
        terms: DatasetTerms,
        config: ReplayConfig,
        limiter: LimiterConfig,
        *,
        generator: np.random.Generator,
        threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limiter.refuse_capacity(config.capacity)
        self._store, self._generator, self._clock = store, generator, clock
        self._cache = ShardCache(store, terms, config.max_open_shards)
        self._index = ShardIndex(store, config.capacity)
        self._table = PriorityTable(config.capacity, config.alpha, config.sampler)
        self._limiter = RateLimiter(limiter)
        self._decoder = BatchDecoder(terms, threads)
        self._lock, self._poll_lock, self._decode_lock = threading.RLock(), threading.Lock(), threading.Lock()
        self._outstanding: deque[Drawn] = deque()  # Drawn and not consumed yet, oldest first.
        self._restored: tuple[dict[str, np.ndarray], dict[str, Any]] | None = None
        self._saved: SavedPriorities | None = None
        self._is_indexed = False
        self._polls = 0
        self._unknown_files: set[str] = set()
        self._waits_for = "the dataset to be indexed"
        self._waiting_since: float | None = None
        self._counters = dict.fromkeys(COUNTERS, 0)
        self._waiting_seconds = 0.0
        self._bad_shards = self._missing = 0

    def close(self) -> None:
        """End the decoding threads."""
        self._decoder.close()

    # What there is.

    def poll(self, should_stop: Callable[[], bool] = lambda: False) -> PollCounts:
        """Admit what is new in the dataset. Nothing is drawn before a poll has gone through all of it once.

        ``should_stop`` is asked before each shard; what is left over is found by the next poll.
        """
        with self._poll_lock:
            shards = sequences = 0
            bad_before = self._bad_shards
            skipped, chosen = self._index.look()
            with self._lock:
                self._index.skip(skipped)
            with contextlib.suppress(_DatasetAway):
                for name in chosen:
                    if should_stop():
                        break
                    admitted = self._admit(name)
                    shards, sequences = shards + (admitted > 0), sequences + admitted
                else:
                    self._finish_indexing()
            if self._polls % UNKNOWN_FILES_POLLS == 0:
                self._name_unknown_files()
            self._polls += 1
            return PollCounts(shards, sequences, self._bad_shards - bad_before)

    def _admit(self, name: ShardName) -> int:
        try:
            arrival = self._index.arrival(name, self._cache.read(name))
        except UNUSABLE as error:
            self._raise_if_away(error)
            with self._lock:
                self._index.refuse(name)
                self._count_bad_shard(name, error)
            return 0
        with self._lock:
            ids, evicted = self._index.admit(arrival)
            self._counters["refused_priorities"] += self._table.enter(ids, arrival.initial_priority)
            held = self._index.holds(ids)
            if self._saved is not None:
                saved = self._saved.take(name.collector, arrival.first_sequence, name.sequences)
                was_saved = held & ~np.isnan(saved)
                self._table.restore(ids[was_saved], saved[was_saved])
            self._remove_corrupt(ids[held & ~arrival.intact])
            if not self._is_indexed and not self._index.is_known(name):
                self._limiter.insert_before_start(name.sequences)
            elif self._is_indexed:
                self._limiter.insert(name.sequences)
        for shard in evicted:
            self._cache.drop(shard)
        return name.sequences

    def _finish_indexing(self) -> None:
        if self._is_indexed or self._is_away():
            return
        with self._lock:
            left = self._saved.left(self._index.skips_older) if self._saved is not None else {}
            self._missing = sum(map(len, left.values()))
            self._is_indexed, self._saved, self._restored = True, None, None
        if left:
            which = "; ".join(f"{name} {numbers[0]} .. {numbers[-1]}" for name, numbers in left.items())
            _log.warning("%d sequences of the snapshot have gone from the dataset: %s", self._missing, which)

    def _name_unknown_files(self) -> None:
        new = set(unknown_files(self._store)) - self._unknown_files
        self._unknown_files |= new
        for path in sorted(new):
            _log.warning("%s is no shard: left alone", path)

    def _count_bad_shard(self, name: ShardName, error: Exception) -> None:
        self._bad_shards += 1
        _log.warning("%s is skipped: %s", name.path, _reason(error))

    def _is_away(self) -> bool:
        return self._store.identity(TERMS_NAME) is None

    def _raise_if_away(self, error: Exception) -> None:
        if isinstance(error, FileNotFoundError) and self._is_away():
            raise _DatasetAway from error

    # Draws.

    def sample(
        self, batch_size: int, observation_out: np.ndarray | None = None, *, ahead: bool = False
    ) -> ReplaySample | None:
        """Draw and decode a batch; None when it has to wait (``waits_for`` says for what). Never blocks for long.

        Rows that turn out to be corrupt are replaced by other draws, named, counted and not drawn again.

        Args:
            observation_out: becomes the batch's ``observation``; see ``BatchDecoder.decode``.
            ahead: the batch is not consumed yet: ``state`` leaves it out until ``consumed`` is called.

        Raises:
            ValueError: ``batch_size`` is larger than the limiter was told.
            OSError: shards cannot be opened for want of maps or descriptors.
        """
        drawn = self.draw(batch_size)
        while drawn is not None:
            with self._decode_lock:
                batch, ok = self._decoder.decode(drawn.rows, observation_out)
            if ok.all():
                if not ahead:
                    with self._lock:
                        self._outstanding.remove(drawn)
                return ReplaySample(
                    ids=drawn.ids,
                    probabilities=drawn.probabilities,
                    replay_sequences=drawn.replay_sequences,
                    batch=batch,
                )
            drawn = self.replace(drawn, ok)
        return None

    def draw(self, batch_size: int) -> Drawn | None:
        """Draw without decoding. The batch is outstanding until ``consumed`` is called. Otherwise like ``sample``."""
        with self._lock:
            waits_for = self._refusal(batch_size)
            self._note_wait(waits_for)
            if waits_for:
                return None
            before = dict(self._generator.bit_generator.state)
            ids, probabilities = self._table.draw(batch_size, self._generator)
            drawn = Drawn(ids, probabilities, self._table.drawable, self._index.places(ids.tolist()), [], before)
            self._limiter.count_draw(batch_size)
            self._outstanding.append(drawn)
        return self._open(drawn)

    def replace(self, drawn: Drawn, ok: np.ndarray) -> Drawn | None:
        """``drawn`` with other draws in place of those rows that were found corrupt (``ok`` False, ``[B]``).

        The corrupt ones are named, counted and never drawn again. None when nothing is left to draw.
        """
        with self._lock:
            self._remove_corrupt(drawn.ids[~ok])
        return self._open(drawn) if self._draw_again(drawn, ok) else None

    def consumed(self) -> None:
        """The oldest outstanding batch has reached its learner."""
        with self._lock:
            self._outstanding.popleft()

    def waits_for(self) -> str:
        """What the last refused draw waits for; empty when the last one was served."""
        return self._waits_for

    def _refusal(self, batch_size: int) -> str:
        if not self._is_indexed:
            return "the dataset to be indexed"
        waits_for = self._limiter.waits_for(batch_size)
        if not waits_for and not self._table.drawable:
            return f"sequences: none of the {len(self._index)} that are held can be read"
        return waits_for

    def _note_wait(self, waits_for: str) -> None:
        self._waits_for, now = waits_for, self._clock()
        if self._waiting_since is not None:
            self._waiting_seconds += now - self._waiting_since
        self._waiting_since = now if waits_for else None

    def _open(self, drawn: Drawn) -> Drawn | None:
        """Find the shards of the drawn rows. A shard that is gone or unreadable by now is given up with all its rows."""
        while True:
            shards: dict[ShardName, Shard] = {}
            unusable: dict[ShardName, Exception] = {}
            for name in dict.fromkeys(place.shard for place in drawn.places):
                try:
                    shards[name] = self._cache.get(name)
                except UNUSABLE as error:
                    unusable[name] = error
                except OSError:
                    self._take_back(drawn, "shards that can be opened")
                    raise
            if not unusable:
                drawn.rows = [(shards[place.shard], place.row) for place in drawn.places]
                return drawn
            if self._is_away():
                self._take_back(drawn, "the dataset, which has been moved away")
                return None
            with self._lock:
                for name, error in unusable.items():
                    self._give_up_shard(name, error)
            if not self._draw_again(drawn, np.array([place.shard in shards for place in drawn.places])):
                return None

    def _draw_again(self, drawn: Drawn, ok: np.ndarray) -> bool:
        """Put other draws in place of those that are not ``ok``; False when there is nothing to draw."""
        with self._lock:
            if self._table.drawable:
                where = np.flatnonzero(~ok)
                drawn.ids[where], drawn.probabilities[where] = self._table.draw(len(where), self._generator)
                for position, place in zip(where, self._index.places(drawn.ids[where].tolist()), strict=True):
                    drawn.places[position] = place
                return True
            self._take_back(drawn, self._refusal(len(ok)))
            return False

    def _take_back(self, drawn: Drawn, waits_for: str) -> None:
        with self._lock:
            self._outstanding.remove(drawn)
            self._limiter.take_back_draw(len(drawn.ids))
            self._note_wait(waits_for)

    def _give_up_shard(self, name: ShardName, error: Exception) -> None:
        ids = self._index.ids_of(name)
        ids = ids[self._table.values(ids) != REMOVED]
        if len(ids):  # Else another thread was faster, or it has been evicted.
            self._table.remove(ids)
            self._count_bad_shard(name, error)

    def _remove_corrupt(self, ids: np.ndarray) -> None:
        ids = np.unique(ids[self._index.holds(ids)])
        ids = ids[self._table.values(ids) != REMOVED]
        self._table.remove(ids)
        self._counters["corrupt_rows"] += len(ids)
        for place in self._index.places(ids.tolist()):
            name = place.shard
            _log.warning(
                "sequence %d of %s is corrupt: %s row %d", place.sequence, name.collector, name.path, place.row
            )

    # Priorities and state.

    def update_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> UpdateCounts:
        """Give drawn sequences the learner's priorities (``[B]`` both); those of evicted ones are dropped and counted."""
        ids, priorities = np.asarray(ids, np.int64), np.asarray(priorities, np.float64)
        if ids.shape != priorities.shape or ids.ndim != 1:
            raise ValueError(
                f"ids and priorities are {list(ids.shape)} and {list(priorities.shape)}; allowed: both [B]"
            )
        with self._lock:
            counts = self._table.update(ids, priorities, self._index.holds(ids))
            self._counters["stale_updates"] += counts.stale
            self._counters["refused_priorities"] += counts.refused
        return counts

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Plain arrays and JSON-able values from which a later start goes on, as of the last consumed batch.

        Priorities stand under (collector, sequence number); ids do not outlive this object.
        """
        with self._lock:
            if self._restored is not None:  # Still looking for what these are about: nothing has happened since.
                return self._restored
            held = np.arange(self._index.oldest_id, self._index.next_id)
            arrays, collectors = pack_priorities(self._index.runs(), self._table.values(held))
            unconsumed = sum(len(drawn.ids) for drawn in self._outstanding)
            generator = self._generator.bit_generator.state
            values = {
                "run_collectors": collectors,
                "followed": self._index.state(),
                "limiter": self._limiter.state(unconsumed),
                "generator": self._outstanding[0].generator_before if self._outstanding else generator,
                "counters": dict(self._counters),
                "waiting_seconds": self._waiting_seconds,
            }
            return arrays, values

    def restore(self, arrays: dict[str, np.ndarray], values: dict[str, Any]) -> None:
        """Go on from ``state``; before the first poll, which finds the sequences again and gives them their priorities.

        Sequences that the state does not know enter with their own and earn no samples; those that have gone from the
        dataset are named once and counted.
        """
        assert self._polls == 0, "restore comes before the first poll"
        self._restored = arrays, values
        self._saved = SavedPriorities(arrays, values["run_collectors"])
        self._index.restore(values["followed"])
        self._limiter.restore(values["limiter"])
        self._generator.bit_generator.state = values["generator"]
        self._counters.update(values["counters"])
        self._waiting_seconds = values["waiting_seconds"]

    def progress(self, updates: int) -> Progress:
        """The record for collectors. What they published but the replay could not take is allowed on top."""
        with self._lock:
            seen = self._index.seen()
            sequences_seen = sum(seen.values())
            allowed = self._limiter.sequences_allowed
            return Progress(
                sequences_seen=sequences_seen,
                seen=seen,
                oldest=self._index.oldest(),
                sequences_allowed=None if allowed is None else allowed + sequences_seen - self._limiter.inserted,
                samples=self._limiter.samples,
                updates=updates,
            )

    def metrics(self) -> dict[str, float]:
        """Counters since the run began (``bad_shards``, ``unknown_files`` and ``missing_sequences``: since this start)."""
        with self._lock:
            waiting = 0.0 if self._waiting_since is None else self._clock() - self._waiting_since
            return {
                "sequences": len(self._index),
                "inserted_sequences": self._limiter.inserted,
                "samples": self._limiter.samples,
                "samples_per_insert": self._limiter.samples_per_insert,
                "open_shards": len(self._cache),
                "bad_shards": self._bad_shards,
                "unknown_files": len(self._unknown_files),
                "missing_sequences": self._missing,
                "max_priority": self._table.maximum,
                "waiting_seconds": self._waiting_seconds + waiting,
                **self._counters,
            }


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, ShardError) else type(error).__name__
