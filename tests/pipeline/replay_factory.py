"""Ready-made shards to publish one by one, and a replay as slow and obvious as can be to compare with."""

import contextlib
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from pipeline.dataset import ShardName, agree_on_terms, shards_after
from pipeline.holdings import ReplayConfig
from pipeline.limiter import LimiterConfig
from pipeline.priority_table import TINY_PRIORITY
from pipeline.replay import Replay
from pipeline.shard_writer import ShardWriter, WriterConfig
from pipeline.store import LocalStore
from schemas.records import Sequence
from schemas.terms import DatasetTerms
from tests.pipeline.sequence_factory import make_sequences, tiny_terms

TERMS = tiny_terms()
Identity = tuple[str, int]


@dataclass
class Quarry:
    """Shards that wait to be published: by collector in the order of their numbers, and what every sequence holds."""

    store: LocalStore
    shards: dict[str, list[ShardName]] = field(default_factory=dict)
    sequences: dict[Identity, Sequence] = field(default_factory=dict)
    initial: dict[Identity, float] = field(default_factory=dict)
    written_seconds: dict[ShardName, float] = field(default_factory=dict)

    def first_sequence(self, name: ShardName) -> int:
        return sum(each.sequences for each in self.shards[name.collector][: name.number])

    def identities(self, name: ShardName) -> list[Identity]:
        first = self.first_sequence(name)
        return [(name.collector, first + row) for row in range(name.sequences)]

    def publish(self, name: ShardName, store: LocalStore) -> None:
        """The shard appears in ``store`` at once and whole, with its own time of writing."""
        path = store.map_path(name.path)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(self.store.map_path(name.path), path)


@contextlib.contextmanager
def unsynced() -> Iterator[None]:
    """Shards written in here are not synced to disk, which takes most of the time."""
    with patch("os.fsync"):
        yield


@unsynced()
def make_quarry(root: Path, sizes: dict[str, Iterable[int]], terms: DatasetTerms = TERMS, seed: int = 0) -> Quarry:
    """One collector for each item of ``sizes``: how many sequences its shards hold.

    Among the initial priorities are NaN, zero, infinite and negative ones. Times of writing are a minute apart, in an
    order that interleaves the collectors.
    """
    root.mkdir(exist_ok=True)
    quarry, generator = Quarry(LocalStore(root)), np.random.default_rng(seed)
    for index, (collector, shard_sizes) in enumerate(sizes.items()):
        shard_sizes = list(shard_sizes)
        sequences = make_sequences(terms, sum(shard_sizes), collector=collector, seed=seed + index)
        kinds = generator.choice([0, 1, 2, 3, 4], len(sequences), p=[0.8, 0.1, 0.04, 0.03, 0.03])
        values = np.choose(kinds, [generator.uniform(0.1, 3, len(sequences)), np.nan, 0, np.inf, -1]).astype(np.float32)
        remaining = iter(values)
        writer = ShardWriter(
            quarry.store,
            terms,
            collector,
            WriterConfig(flush_sequences=10_000),
            initial_priorities=lambda batch, _, remaining=remaining: np.array(
                [next(remaining) for _ in range(len(batch))]
            ),
        )
        unwritten = iter(sequences)
        for size in shard_sizes:
            for _ in range(size):
                writer.add(next(unwritten))
            writer.flush()
        quarry.shards[collector] = shards_after(quarry.store, collector, -1)
        quarry.sequences |= {(collector, each.sequence): each for each in sequences}
        quarry.initial |= {(collector, i): float(value) for i, value in enumerate(values)}
    names = [name for shards in quarry.shards.values() for name in shards]
    for position, name in enumerate(sorted(names, key=lambda name: (name.number, name.collector))):
        written = 1_700_000_000.0 + 60 * position
        os.utime(quarry.store.map_path(name.path), (written, written))
        quarry.written_seconds[name] = written
    return quarry


def empty_dataset(root: Path, terms: DatasetTerms = TERMS) -> LocalStore:
    root.mkdir(parents=True, exist_ok=True)
    store = LocalStore(root)
    agree_on_terms(store, terms)
    return store


def make_replay(store: LocalStore, **settings: Any) -> Replay:
    """A replay without ratio that draws from the first sequence on; fields of both configurations as keywords."""
    limiter = {"batch_size": 16, "min_sequences": 1, "samples_per_insert": None}
    limiter |= {name: settings.pop(name) for name in (*limiter, "band") if name in settings}
    generator = np.random.default_rng(settings.pop("seed", 0))
    others = {name: settings.pop(name) for name in ("terms", "threads", "clock", "part") if name in settings}
    return Replay(
        store,
        others.pop("terms", TERMS),
        ReplayConfig(**settings),
        LimiterConfig(**limiter),
        generator=generator,
        **others,
    )


@dataclass
class Held:
    identity: Identity
    priority: float


class DictionaryReplay:
    """What ``Replay`` promises, with one dictionary entry for each sequence held."""

    def __init__(self, quarry: Quarry, capacity: int, alpha: float) -> None:
        self.quarry, self.capacity, self.alpha = quarry, capacity, alpha
        self.held: dict[int, Held] = {}
        self.next_id = 0
        self.published: list[ShardName] = []
        self.polled: set[ShardName] = set()
        self.inserted = self.seen = self.stale = self.refused = 0
        self.uncounted: set[ShardName] = set()
        self.saved: dict[Identity, float] = {}

    def maximum(self) -> float:
        return max((each.priority for each in self.held.values()), default=1.0)

    def oldest(self) -> dict[str, int]:
        held = {each.identity for each in self.held.values()}
        numbers: dict[str, int] = {}
        for collector, shards in self.quarry.shards.items():
            for name in shards:
                if held.intersection(self.quarry.identities(name)):
                    numbers.setdefault(collector, name.number)
        for name in self.polled:  # All of its shards have been evicted: the next one counts.
            if name.collector not in {identity[0] for identity in held}:
                numbers[name.collector] = max(numbers.get(name.collector, 0), name.number + 1)
        return numbers

    def poll(self) -> None:
        new = sorted(set(self.published) - self.polled, key=self.quarry.written_seconds.__getitem__)
        self.polled |= set(new)
        self.seen += sum(name.sequences for name in set(new) - self.uncounted)
        room, chosen = self.capacity, []
        for name in reversed(new):
            if room > 0:
                chosen.append(name)
                room -= name.sequences
        for name in reversed(chosen):
            self._admit(name)
        self.saved, self.uncounted = {}, set()

    def _admit(self, name: ShardName) -> None:
        if name not in self.uncounted:
            self.inserted += name.sequences
        # Rows beyond the capacity never arrive, and those without a priority all take the maximum before their shard.
        arriving = self.quarry.identities(name)
        self.next_id += max(0, len(arriving) - self.capacity)
        maximum, entries = self.maximum(), {}
        for identity in arriving[-self.capacity :]:
            initial = self.quarry.initial[identity]
            if 0 <= initial < math.inf:
                initial = max(initial, TINY_PRIORITY)
            else:
                self.refused += name not in self.uncounted and not math.isnan(initial)
                initial = maximum
            entries[self.next_id] = Held(identity, self.saved.get(identity, initial))
            self.next_id += 1
        self.held |= entries
        self.held = {i: each for i, each in self.held.items() if i >= self.next_id - self.capacity}

    def update(self, ids: Iterable[int], priorities: Iterable[float]) -> None:
        for i, priority in zip(ids, priorities, strict=True):
            if not 0 <= priority < math.inf:
                self.refused += 1
            elif i not in self.held:
                self.stale += 1
            else:
                self.held[i].priority = max(priority, TINY_PRIORITY)

    def restart(self) -> None:
        self.saved = {each.identity: each.priority for each in self.held.values()}
        self.uncounted, self.polled, self.held, self.next_id = set(self.polled), set(), {}, 0

    def probability(self, i: int) -> float:
        total = sum(each.priority**self.alpha for each in self.held.values())
        return self.held[i].priority ** self.alpha / total
