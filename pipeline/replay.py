"""The replay: draws batches of a growing dataset, takes their priorities back, keeps samples to insertions.

    shards ─▶ ShardIndex ─ids─▶ PriorityTable ─▶ draw ─▶ ShardCache ─▶ BatchDecoder ─▶ ReplaySample
              RateLimiter ──────────▲    ▲                                                  │
                                         └──────────── (ids, priorities) ◀──────────────────┘

``draw``, ``replace``, ``update_priorities`` need no decoder, so a service can offer them to learners elsewhere.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pipeline.dataset import ShardName
from pipeline.decode import BatchDecoder
from pipeline.drawing import DecodingReplay
from pipeline.holdings import UNUSABLE, Holdings, ReplayConfig
from pipeline.limiter import LimiterConfig, RateLimiter
from pipeline.outstanding import Drawn, Outstanding
from pipeline.parts import WHOLE, Part
from pipeline.priority_table import UpdateCounts
from pipeline.progress import Progress
from pipeline.shard_reader import Shard
from pipeline.store import Store, StoreAway
from pipeline.waiting import Waiting
from schemas.terms import DatasetTerms

ALONE_SECONDS = 30.0  # Twice what a collector waits before it publishes a shard that is not full.
UNKNOWN_FILES_POLLS = 120  # Looking for files that are no shards lists everything: once in this many polls.

_log = logging.getLogger(__name__)


class PollCounts(NamedTuple):
    """What one poll found: shards and sequences admitted, files refused."""

    shards: int
    sequences: int
    bad_shards: int


class Replay(DecodingReplay[Drawn]):
    """One dataset as a replay. Any number of threads may draw, update and ask; polls take turns.

    Shards are immutable and a drawn row keeps its shard mapped, so a batch is whole whatever is admitted, evicted or
    deleted while it is decoded. Files are never moved or changed: what cannot be used is named once (a warning in the
    log), counted, and left alone.

    Args:
        terms: the dataset's; shards of other terms are refused.
        generator: decides all draws; a ``PCG64`` one (``np.random.default_rng(seed)``) for a JSON-able state.
        threads: how many decode a batch.
        part: of the dataset's collectors that are followed.
        clock: seconds, monotonic; for waits only.
    """

    def __init__(
        self,
        store: Store,
        terms: DatasetTerms,
        config: ReplayConfig,
        limiter: LimiterConfig,
        *,
        generator: np.random.Generator,
        threads: int = 1,
        part: Part = WHOLE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        limiter.refuse_capacity(config.capacity)
        self._held = Holdings(store, terms, config, part)
        self._part = part
        self._limiter = RateLimiter(limiter)
        self._generator = generator
        self._decoder = BatchDecoder(terms, threads)
        self._lock, self._poll_lock = threading.RLock(), threading.Lock()
        self._outstanding = Outstanding(self._limiter)
        self._restored: tuple[dict[str, np.ndarray], dict[str, Any]] | None = None
        self._polls = 0
        self._waiting = Waiting("the dataset to be indexed", clock)

    def close(self) -> None:
        """End the decoding threads."""
        self._decoder.close()

    def poll(self, should_stop: Callable[[], bool] = lambda: False) -> PollCounts:
        """Admit what is new in the dataset. Nothing is drawn before a poll has gone through all of it once.

        ``should_stop`` is asked before each shard; what is left over is found by the next poll.
        """
        held = self._held
        with self._poll_lock:
            shards = sequences = 0
            bad_before = held.bad_shards
            try:
                skipped, chosen = held.index.look()
            except StoreAway:  # It has been said.
                return PollCounts(0, 0, 0)
            with self._lock:
                held.index.skip(skipped)
            for name in chosen:
                if should_stop():
                    break
                try:
                    arrival = held.read(name)
                except (*UNUSABLE, StoreAway) as error:
                    if isinstance(error, StoreAway) or held.is_away():
                        break
                    with self._lock:
                        held.refuse(name, error)
                else:
                    with self._lock:
                        self._count_insertions(held.admit(arrival))
                    shards, sequences = shards + 1, sequences + name.sequences
            else:
                if not held.is_indexed and not held.is_away():
                    with self._lock:
                        held.finish_indexing()
                        self._restored = None
                        self._waiting.note("")
            if self._polls % UNKNOWN_FILES_POLLS == 0:
                with contextlib.suppress(StoreAway):
                    held.name_unknown_files()
            self._polls += 1
            return PollCounts(shards, sequences, held.bad_shards - bad_before)

    def _count_insertions(self, sequences: int) -> None:
        self._waiting.moved()
        if self._held.is_indexed:
            self._limiter.insert(sequences)
        else:
            self._limiter.insert_before_start(sequences)

    def draw(self, batch_size: int) -> Drawn | None:
        """Draw without decoding; the batch is outstanding until ``consumed`` is called. Otherwise like ``sample``."""
        with self._lock:
            waits_for = self._refusal_unless_alone(batch_size)
            self._waiting.note(waits_for)
            if waits_for:
                return None
            before = self._generator.bit_generator.state
            ids, probabilities = self._held.table.draw(batch_size, self._generator)
            places = self._held.index.places(ids.tolist())
            drawn = Drawn(ids, probabilities, self._held.table.drawable, places, [], before)
            self._outstanding.add(drawn)
            self._waiting.moved()
        return self._open(drawn)

    def replace(self, drawn: Drawn, ok: np.ndarray) -> Drawn | None:
        """``drawn`` with other draws in place of those rows that were found corrupt (``ok`` False, ``[B]``).

        The corrupt ones are named, counted and never drawn again. None when nothing is left to draw.
        """
        with self._lock:
            self._held.remove_corrupt(drawn.ids[~ok])
        return self._open(drawn) if self._draw_again(drawn, ok) else None

    def consumed(self, drawn: Drawn | None = None) -> None:
        """``drawn``, or else the oldest outstanding batch, has reached its learner."""
        with self._lock:
            self._outstanding.consumed(drawn)

    def give_back(self, drawn: Drawn) -> None:
        """An outstanding batch that no learner will ever see: its samples are not counted."""
        with self._lock:
            self._outstanding.take_back(drawn)

    def waits_for(self) -> str:
        """What the last draw, if it was refused, waits for; else empty."""
        return self._waiting.reason

    @property
    def drawable(self) -> int:
        """Sequences that can be drawn now."""
        return self._held.table.drawable

    @property
    def total_priority(self) -> float:
        """See ``PriorityTable.total``."""
        with self._lock:
            return self._held.table.total

    def would_wait_for(self, batch_size: int) -> str:
        """What a draw would wait for now; empty when it would not."""
        with self._lock:
            return self._refusal(batch_size)

    def _refusal(self, batch_size: int) -> str:
        if not self._held.is_indexed:
            return "the dataset to be indexed"
        waits_for = self._limiter.waits_for(batch_size)
        if not waits_for and not self._held.table.drawable:
            return f"readable sequences: none of the {len(self._held.index)} held can be read"
        return waits_for

    def _refusal_unless_alone(self, batch_size: int) -> str:
        waits_for = self._refusal(batch_size)
        alone_seconds = self._waiting.still_seconds
        if not waits_for or not self._held.is_indexed or alone_seconds < ALONE_SECONDS:
            return waits_for
        if self._limiter.leave_alone():
            _log.warning("no new sequence for %.0f s: the learner is alone and uses the prefill", alone_seconds)
            return self._refusal(batch_size)
        return f"{waits_for}; none for {alone_seconds:.0f} s: does a collector run?"

    def _open(self, drawn: Drawn) -> Drawn | None:
        """Find the drawn rows' shards. One that is gone or unreadable by now is given up with all its rows."""
        while True:
            shards: dict[ShardName, Shard] = {}
            unusable: dict[ShardName, Exception] = {}
            for name in dict.fromkeys(place.shard for place in drawn.places):
                try:
                    shards[name] = self._held.cache.get(name)
                except (*UNUSABLE, StoreAway) as error:
                    unusable[name] = error
                except OSError:
                    self._take_back(drawn, "shards that can be opened")
                    raise
            if not unusable:
                drawn.rows = [(shards[place.shard], place.row) for place in drawn.places]
                return drawn
            if any(isinstance(error, StoreAway) for error in unusable.values()) or self._held.is_away():
                self._take_back(drawn, "the dataset, which has been moved away or does not answer")
                return None
            with self._lock:
                for name, error in unusable.items():
                    self._held.give_up_shard(name, error)
            if not self._draw_again(drawn, np.array([place.shard in shards for place in drawn.places])):
                return None

    def _draw_again(self, drawn: Drawn, ok: np.ndarray) -> bool:
        """Put other draws in place of those that are not ``ok``; False when there is nothing to draw."""
        with self._lock:
            if not self._held.table.drawable:
                self._take_back(drawn, self._refusal(len(ok)))
                return False
            where = np.flatnonzero(~ok)
            drawn.ids[where], drawn.probabilities[where] = self._held.table.draw(len(where), self._generator)
            for position, place in zip(where, self._held.index.places(drawn.ids[where].tolist()), strict=True):
                drawn.places[position] = place
            return True

    def _take_back(self, drawn: Drawn, waits_for: str) -> None:
        with self._lock:
            self._outstanding.take_back(drawn)
            self._waiting.note(waits_for)

    def update_priorities(self, ids: np.ndarray, priorities: np.ndarray) -> UpdateCounts:
        """Give drawn sequences the learner's priorities (``[B]`` each); those of evicted ones are dropped."""
        ids, priorities = np.asarray(ids, np.int64), np.asarray(priorities, np.float64)
        if ids.shape != priorities.shape or ids.ndim != 1:
            raise ValueError(f"ids are {list(ids.shape)}, priorities {list(priorities.shape)}; allowed: both [B]")
        with self._lock:
            counts = self._held.table.update(ids, priorities, self._held.index.holds(ids))
            self._held.counters["stale_updates"] += counts.stale
            self._held.counters["refused_priorities"] += counts.refused
        return counts

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Plain arrays and JSON-able values from which a later start goes on, as of the last consumed batch.

        Priorities stand under (collector, sequence number); ids do not outlive this object.
        """
        with self._lock:
            if self._restored is not None:  # Not found again yet: nothing has been drawn since.
                return self._restored
            arrays, values = self._held.state()
            return arrays, values | {
                "limiter": self._limiter.state(self._outstanding.samples),
                "generator": self._outstanding.generator_before or self._generator.bit_generator.state,
                "waiting_seconds": self._waiting.seconds,
            }

    def restore(self, arrays: dict[str, np.ndarray], values: dict[str, Any]) -> str:
        """Go on from ``state``; before the first poll, which finds the sequences again. Returns a line for the user.

        Those that the state does not know enter with their own priorities and earn no samples; those that have gone
        from the dataset are named once and counted.
        """
        assert self._polls == 0, "restore comes before the first poll"
        if "limiter" not in values:
            raise ValueError("the checkpoint holds no replay: a service kept it; allowed: with --replay")
        self._restored = arrays, values
        self._held.restore(arrays, values)
        self._limiter.restore(values["limiter"])
        self._generator.bit_generator.state = values["generator"]
        self._waiting.restore(values["waiting_seconds"])
        inserted, samples = self._limiter.inserted, self._limiter.samples
        return f"{len(arrays['priority'])} priorities of {inserted} inserted sequences, {samples} samples"

    def progress(self, updates: int) -> Progress:
        """The record for collectors. What they published but the replay could not take in is allowed on top."""
        with self._lock:
            seen, allowed = self._held.index.seen(), self._limiter.sequences_allowed
            sequences_seen = sum(seen.values())
            return Progress(
                sequences_seen=sequences_seen,
                seen=seen,
                oldest=self._held.index.oldest(),
                sequences_allowed=None if allowed is None else allowed + sequences_seen - self._limiter.inserted,
                samples=self._limiter.samples,
                updates=updates,
                part=str(self._part),
            )

    def metrics(self) -> dict[str, float]:
        """Sequences held (``size``), counters since the run began; of files and missing sequences: since this start."""
        with self._lock:
            return {
                **self._held.metrics(),
                "inserted": self._limiter.inserted,
                "samples": self._limiter.samples,
                "samples_per_insert": self._limiter.samples_per_insert,
                "waiting_seconds": self._waiting.seconds,
            }
