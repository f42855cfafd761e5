"""Which sequences a dataset offers, in which shard each one lies, and the ids by which a replay knows them.

    ids        oldest_id ............................ next_id      only grow; the newest ``capacity`` are held
    shards     [ first_id, + rows )[ first_id, + rows ) ...        in the order of admission; id - first_id is the row

A sequence costs nothing here, a shard a few hundred bytes: the ids of a shard are contiguous, and so are the sequence
numbers in it, so two numbers per shard say everything.
"""

import heapq
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pipeline.dataset import ShardName, list_collectors, shards_after
from pipeline.parts import WHOLE, Part
from pipeline.shard_reader import Shard, ShardError
from pipeline.store import Store

ACTIVE_POLLS = 100  # A collector that published nothing in this many polls is quiet,
QUIET_PER_POLL = 16  # and of the quiet ones this many are listed in each poll, in turn.


class Arrival(NamedTuple):
    """What a shard brings: its ``[rows]`` initial priorities (float32), and which of them are ``intact`` (bool)."""

    name: ShardName
    first_sequence: int
    initial_priority: np.ndarray
    intact: np.ndarray


class Place(NamedTuple):
    """Where a sequence lies."""

    shard: ShardName
    row: int


@dataclass
class _Collector:
    """What is known of one collector.

    ``last_number``: listing goes on after it; the last shard that was admitted or skipped, so that an unreadable file
    with a large number hides nothing. ``passed`` are the unreadable ones beyond it. ``next_sequence``: the least number
    that the next shard may begin with. ``published`` sequences up to ``last_number``. ``known_number``: the restored
    snapshot knew the shards up to it.
    """

    last_number: int = -1
    next_sequence: int = 0
    published: int = 0
    known_number: int = -1
    skips_older: bool = False
    passed: set[ShardName] = field(default_factory=set)
    quiet_polls: int = 0

    @property
    def seen(self) -> int:
        return self.published + sum(name.sequences for name in self.passed)


class ShardIndex:
    """Follows the shards of a dataset. ``look`` reads the listing, ``admit``, ``skip`` and ``refuse`` only memory.

    Not thread-safe: the caller holds a lock around everything but ``look`` and ``arrival``, and runs those in one
    thread at a time.
    """

    def __init__(self, store: Store, capacity: int, part: Part = WHOLE) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}; allowed: 1 or more")
        self.capacity = capacity
        self.next_id = 0
        self._store, self._part = store, part
        self._shards: list[ShardName] = []
        self._first_ids: list[int] = []
        self._first_sequences: list[int] = []
        self._collectors: dict[str, _Collector] = {}
        self._oldest: dict[str, int] | None = None
        self._quiet_turn = 0

    @property
    def oldest_id(self) -> int:
        return max(0, self.next_id - self.capacity)

    def __len__(self) -> int:
        """Sequences held."""
        return self.next_id - self.oldest_id

    def look(self) -> tuple[list[ShardName], list[ShardName]]:
        """New shards as (skipped, chosen): chosen are the newest that fill the capacity, in the order to admit them.

        Shards of one collector keep the order of their numbers; those of several are merged by the time they were
        written. Only listings are read, and those of quiet collectors not every time.
        """
        new = {name: _Collector() for name in self._listed_collectors() if name not in self._collectors}
        self._collectors = self._collectors | new  # A new object: other threads may be walking through the old one.
        self._oldest = None
        listed = {name: self._new_shards_of(name) for name in self._collectors_to_list()}
        for name, shards in listed.items():
            self._collectors[name].quiet_polls = 0 if shards else self._collectors[name].quiet_polls + 1
        newest_first = heapq.merge(*map(reversed, listed.values()), key=self._written_seconds, reverse=True)
        chosen, room = [], self.capacity
        for shard in newest_first:
            if room <= 0:
                break
            chosen.append(shard)
            room -= shard.sequences
        taken = set(chosen)
        skipped = [shard for shards in listed.values() for shard in shards if shard not in taken]
        return skipped, chosen[::-1]

    def arrival(self, name: ShardName, shard: Shard) -> Arrival:
        """What ``shard`` brings. Two columns are read, and checksums only where its sequence numbers are unexpected.

        Raises:
            ShardError: its sequences were admitted before, or their numbers are no contiguous run.
        """
        collector = self._collectors[name.collector]
        columns = shard.columns
        firsts = columns["sequence"].astype(np.int64) - np.arange(shard.num_rows)
        intact = np.ones(shard.num_rows, bool)
        first = collector.next_sequence
        if (firsts != first).any():
            # Shards were deleted before this one, it is no newcomer, or bits flipped: intact rows tell which.
            intact = shard.checksums_ok(range(shard.num_rows))
            first = int(firsts[intact][0]) if intact.any() else first
            if (firsts[intact] != first).any():
                raise ShardError("its sequence numbers are not contiguous")
            if first < collector.next_sequence:
                raise ShardError(f"repeats sequences of {name.collector}: begins with number {first}")
        return Arrival(name, first, columns["initial_priority"].astype(np.float32), intact)

    def admit(self, arrival: Arrival) -> tuple[np.ndarray, list[ShardName]]:
        """Give the arrival's rows the next ids. Returns these and the shards whose last row was evicted for them."""
        name, rows = arrival.name, arrival.name.sequences
        self._shards.append(name)
        self._first_ids.append(self.next_id)
        self._first_sequences.append(arrival.first_sequence)
        ids = np.arange(self.next_id, self.next_id + rows)
        self.next_id += rows
        collector = self._collectors[name.collector]
        collector.next_sequence = arrival.first_sequence + rows
        if not self.is_known(name):
            # From the sequence numbers, not by adding up: older shards may have been deleted before we came.
            collector.published = collector.next_sequence
        self._pass(collector, name.number)
        return ids, self._evict()

    def skip(self, shards: Iterable[ShardName]) -> None:
        """Leave out older shards for which there is no room."""
        for name in shards:
            collector = self._collectors[name.collector]
            collector.skips_older = True
            if name.number > collector.last_number and name not in collector.passed:
                if not self.is_known(name):
                    collector.published += name.sequences
                self._pass(collector, name.number)

    def refuse(self, name: ShardName) -> None:
        """Never look at this file again."""
        collector = self._collectors[name.collector]
        if name.number > collector.last_number:
            collector.passed.add(name)

    def is_known(self, name: ShardName) -> bool:
        """The restored snapshot knew this shard, whether or not it still held its sequences."""
        return name.number <= self._collectors[name.collector].known_number

    def holds(self, ids: np.ndarray) -> np.ndarray:
        """Which ids are held, bool."""
        return (ids >= self.oldest_id) & (ids < self.next_id)

    def places(self, ids: Iterable[int]) -> list[Place]:
        """Where held ids lie."""
        positions = [(i, bisect_right(self._first_ids, i) - 1) for i in ids]
        return [Place(self._shards[shard], i - self._first_ids[shard]) for i, shard in positions]

    def identities(self, ids: Iterable[int]) -> list[tuple[str, int]]:
        """(collector, sequence number) of held ids, which outlive the ids."""
        positions = [(i, bisect_right(self._first_ids, i) - 1) for i in ids]
        return [
            (self._shards[shard].collector, self._first_sequences[shard] + i - self._first_ids[shard])
            for i, shard in positions
        ]

    def ids_of(self, name: ShardName) -> np.ndarray:
        """Held ids of a shard's rows; empty when it has been evicted."""
        if name not in self._shards:
            return np.arange(0)
        first = self._first_ids[self._shards.index(name)]
        return np.arange(max(first, self.oldest_id), first + name.sequences)

    def runs(self) -> list[tuple[str, int, int]]:
        """Lasting identities of all held ids in their order: (collector, first sequence number, how many)."""
        runs = []
        for name, first_id, sequence in zip(self._shards, self._first_ids, self._first_sequences, strict=True):
            evicted = max(0, self.oldest_id - first_id)
            runs.append((name.collector, sequence + evicted, name.sequences - evicted))
        return runs

    def seen(self) -> dict[str, int]:
        """Sequences that each collector has published so far as we know: evicted, skipped and unreadable ones too."""
        return {name: collector.seen for name, collector in self._collectors.items()}

    def oldest(self) -> dict[str, int]:
        """By collector, the first shard that is still held or to be looked at: nobody here needs one before it."""
        if self._oldest is None:  # Asked for several times a second.
            self._oldest = {name: each.last_number + 1 for name, each in self._collectors.items()}
            self._oldest |= {name.collector: name.number for name in reversed(self._shards)}
        return dict(self._oldest)

    def skips_older(self, collector: str) -> bool:
        """Some shards of ``collector`` were left out for want of room."""
        return collector in self._collectors and self._collectors[collector].skips_older

    def state(self) -> dict[str, Any]:
        """JSON-able: how far each collector had been followed."""
        return {name: [each.last_number, each.published] for name, each in self._collectors.items()}

    def restore(self, state: dict[str, Any]) -> None:
        """Before the first ``look``: remember what a snapshot had seen. Ids and rows come anew from the dataset."""
        for name, (last_number, published) in state.items():
            self._collectors[name] = _Collector(known_number=last_number, published=published)

    def _listed_collectors(self) -> list[str]:
        return [name for name in list_collectors(self._store) if self._part.owns(name)]

    def _collectors_to_list(self) -> list[str]:
        active = [name for name, each in self._collectors.items() if each.quiet_polls < ACTIVE_POLLS]
        quiet = [name for name, each in self._collectors.items() if each.quiet_polls >= ACTIVE_POLLS]
        start = self._quiet_turn % max(1, len(quiet))
        self._quiet_turn = start + QUIET_PER_POLL
        return sorted(active + (quiet[start:] + quiet[:start])[:QUIET_PER_POLL])

    def _new_shards_of(self, name: str) -> list[ShardName]:
        collector = self._collectors[name]
        listed = shards_after(self._store, name, collector.last_number)
        if listed and listed[-1].number - collector.last_number > len(listed):
            # A number is missing. A listing may miss what is published while it runs, but never twice.
            newest = listed[-1].number
            again = shards_after(self._store, name, collector.last_number)
            listed = [shard for shard in again if shard.number <= newest]
        return [shard for shard in listed if shard not in collector.passed]

    def _written_seconds(self, name: ShardName) -> float:
        return self._store.modified_seconds(name.path) or 0.0

    def _pass(self, collector: _Collector, number: int) -> None:
        self._oldest = None
        collector.last_number = max(collector.last_number, number)
        collector.passed = {name for name in collector.passed if name.number > number}

    def _evict(self) -> list[ShardName]:
        gone = bisect_right(self._first_ids, self.oldest_id) - 1
        evicted = self._shards[:gone]
        for table in (self._shards, self._first_ids, self._first_sequences):
            del table[:gone]
        return evicted
