"""What a replay holds: which sequences of a dataset, under which ids, with which priorities, and what it had to leave.

Not thread-safe: a replay holds its lock around everything but ``look`` and ``read``, which do the slow part of a poll.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.dataset import TERMS_NAME, ShardName, unknown_files
from pipeline.held_out import held_out_rows
from pipeline.parts import WHOLE, Part
from pipeline.priority_table import REMOVED, SAMPLERS, PriorityTable
from pipeline.shard_cache import ShardCache
from pipeline.shard_index import Arrival, ShardIndex
from pipeline.shard_reader import ShardError
from pipeline.snapshot import SavedPriorities, pack_priorities
from pipeline.store import Store, StoreAway
from schemas.terms import DatasetTerms

UNUSABLE = (ShardError, FileNotFoundError, PermissionError, IsADirectoryError)  # One file's fault, not the machine's.
COUNTERS = ("corrupt_rows", "stale_updates", "refused_priorities")  # Kept over restarts.

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """What a replay holds and how it draws.

    Attributes:
        capacity: sequences held; the oldest make room (paper: 1e5).
        alpha: draws are in proportion to priority^alpha (paper: 0.9, article: 0.5).
        sampler: ``proportional`` or ``uniform``.
        max_open_shards: how many shards stay memory-mapped; None: as many as is sensible on this machine.
        held_out: share of the episodes that are never drawn, to judge by what was learned from the others.
    """

    capacity: int = 100_000
    alpha: float = 0.9
    sampler: str = "proportional"
    max_open_shards: int | None = None
    held_out: float = 0.0

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity is {self.capacity}; allowed: 1 or more")
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha is {self.alpha}; allowed: 0 to 1")
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler is {self.sampler!r}; allowed: {', '.join(SAMPLERS)}")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; allowed: 0 to below 1")


class Holdings:
    """Sequences in the order of their ids, each with a priority. Whatever is left out is named once, by a log warning.

    Attributes:
        index, table, cache: ids and their places; ids and their priorities; open shards.
        is_indexed: the dataset has been gone through once.
        counters: ``COUNTERS``, since the run began.
        bad_shards, missing_sequences: files refused, and sequences of the restored state that have gone from the
            dataset, since this start.
        unknown_files: paths below ``shards/`` that are not named like shards.
    """

    def __init__(self, store: Store, terms: DatasetTerms, config: ReplayConfig, part: Part = WHOLE) -> None:
        self._store, self._held_out = store, config.held_out
        self._kept_apart: dict[ShardName, np.ndarray] = {}
        self.index = ShardIndex(store, config.capacity, part)
        self.table = PriorityTable(config.capacity, config.alpha, config.sampler)
        self.cache = ShardCache(store, terms, config.max_open_shards)
        self.is_indexed = False
        self.counters = dict.fromkeys(COUNTERS, 0)
        self.bad_shards = self.missing_sequences = 0
        self.unknown_files: set[str] = set()
        self._saved: SavedPriorities | None = None

    def is_away(self) -> bool:
        """The dataset cannot be found at all, so a missing file of it says nothing about that file."""
        try:
            return self._store.identity(TERMS_NAME) is None
        except StoreAway:
            return True

    def read(self, name: ShardName) -> Arrival:
        """What a new shard brings. Raises one of ``UNUSABLE`` when it cannot be used, another OSError when none can."""
        shard = self.cache.read(name)
        arrival = self.index.arrival(name, shard)
        if self._held_out:
            self._kept_apart[name] = held_out_rows(name.collector, shard.columns["episode"], self._held_out)
        return arrival

    def admit(self, arrival: Arrival) -> int:
        """Take in a shard's sequences. Returns how many of them the restored state (if any) had not counted yet."""
        name = arrival.name
        ids, evicted = self.index.admit(arrival)
        for shard in evicted:
            self.cache.drop(shard)
        refused = self.table.enter(ids, arrival.initial_priority)
        is_known, held = self.index.is_known(name), self.index.holds(ids)
        self.counters["refused_priorities"] += 0 if is_known else refused
        if self._saved is not None:
            saved = self._saved.take(name.collector, arrival.first_sequence, name.sequences)
            was_saved = held & ~np.isnan(saved)
            self.table.restore(ids[was_saved], saved[was_saved])
        if (kept_apart := self._kept_apart.pop(name, None)) is not None:
            self.table.remove(ids[held & kept_apart])
        if not arrival.intact.all():
            self.remove_corrupt(ids[held & ~arrival.intact])
        return 0 if is_known else name.sequences

    def refuse(self, name: ShardName, error: Exception) -> None:
        """Leave out a new shard for good."""
        self.index.refuse(name)
        self._count_bad_shard(name, error)

    def finish_indexing(self) -> None:
        """The dataset has been gone through: what the restored state knew and nobody found is missing."""
        self.is_indexed = True
        if self._saved is None:
            return
        left, self._saved = self._saved.left(self.index.skips_older), None
        self.missing_sequences = sum(map(len, left.values()))
        if left:
            which = "; ".join(f"{name}, numbers {numbers[0]} to {numbers[-1]}" for name, numbers in left.items())
            _log.warning("%d sequences have gone from the dataset: %s", self.missing_sequences, which)

    def name_unknown_files(self) -> None:
        """Lists the whole dataset: not for every poll."""
        new = set(unknown_files(self._store)) - self.unknown_files
        self.unknown_files |= new
        for path in sorted(new):
            _log.warning("%s is no shard: left alone", path)

    def remove_corrupt(self, ids: np.ndarray) -> None:
        """Never draw these again. Those evicted or removed by now are left out, so that none is counted twice."""
        ids = self._drawable(np.unique(ids[self.index.holds(ids)]))
        self.table.remove(ids)
        self.counters["corrupt_rows"] += len(ids)
        for (name, row), (collector, sequence) in zip(
            self.index.places(ids.tolist()), self.index.identities(ids.tolist()), strict=True
        ):
            _log.warning("sequence %d of %s is corrupt: %s, row %d", sequence, collector, name.path, row)

    def give_up_shard(self, name: ShardName, error: Exception) -> None:
        """A shard that was admitted cannot be read any more: none of its rows is drawn again."""
        ids = self._drawable(self.index.ids_of(name))
        self.table.remove(ids)
        if len(ids):  # Else another thread was faster, or it has been evicted.
            self._count_bad_shard(name, error)

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """Priorities under lasting identities as plain arrays, and JSON-able values; see ``snapshot``."""
        held = np.arange(self.index.oldest_id, self.index.next_id)
        arrays, collectors = pack_priorities(self.index.runs(), self.table.values(held))
        return arrays, {
            "run_collectors": collectors,
            "followed": self.index.state(),
            "counters": dict(self.counters),
        }

    def restore(self, arrays: dict[str, np.ndarray], values: dict[str, Any]) -> None:
        """Before the first ``look``: sequences of the state get their priorities back when they are found."""
        self._saved = SavedPriorities(arrays, values["run_collectors"])
        self.index.restore(values["followed"])
        self.counters.update(values["counters"])

    def metrics(self) -> dict[str, float]:
        """What is held, and what was left out or went wrong."""
        return {
            "size": len(self.index),
            "drawable": self.table.drawable,
            "total_priority": self.table.total,
            "max_priority": self.table.maximum,
            "open_shards": len(self.cache),
            "bad_shards": self.bad_shards,
            "unknown_files": len(self.unknown_files),
            "missing_sequences": self.missing_sequences,
            **self.counters,
        }

    def _drawable(self, ids: np.ndarray) -> np.ndarray:
        return ids[self.table.values(ids) != REMOVED]

    def _count_bad_shard(self, name: ShardName, error: Exception) -> None:
        self.bad_shards += 1
        reason = str(error) if isinstance(error, ShardError) else type(error).__name__
        _log.warning("%s is skipped: %s", name.path, reason)
