"""Deletes a dataset's oldest shards beyond a bound, and never one that some learner still holds."""

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.dataset import ShardName, list_collectors, shards_after
from pipeline.parts import Part
from pipeline.progress import Progress, progress_names
from pipeline.store import Store, StoreAway

ENFORCE_SECONDS = 30.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RetentionConfig:
    """What a dataset may grow to; nothing is ever deleted by default.

    Attributes:
        retain_gb: delete the oldest shards beyond so many gigabytes.
        retain_sequences: delete the oldest shards beyond so many sequences.
    """

    retain_gb: float | None = None
    retain_sequences: int | None = None

    def __post_init__(self) -> None:
        for field in ("retain_gb", "retain_sequences"):
            value = getattr(self, field)
            if value is not None and value <= 0:
                raise ValueError(f"{field} is {value}; allowed: above 0")

    @property
    def deletes(self) -> bool:
        return self.retain_gb is not None or self.retain_sequences is not None


class Retention:
    """Enforces a ``RetentionConfig`` now and then.

    A shard is deleted only when every run that has not closed says in its record that it no longer holds it; a run
    killed and not yet resumed counts as one that still does. Each collector's shards go oldest first, so what remains
    of it is contiguous.
    """

    def __init__(self, store: Store, config: RetentionConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._config, self._clock = store, config, clock
        self._enforced_at = clock()
        self.deleted_shards = 0

    def enforce_if_due(self) -> None:
        if self._config.deletes and self._clock() - self._enforced_at >= ENFORCE_SECONDS:
            self._enforced_at = self._clock()
            with contextlib.suppress(StoreAway):
                self.enforce()

    def enforce(self) -> int:
        """Delete what is too much and held by nobody; returns the number of shards deleted."""
        shards = self._oldest_first()
        free = self._held_by_nobody()
        sequences = sum(name.sequences for name, _, _ in shards)
        size_bytes = sum(size for _, _, size in shards)
        kept_back: set[str] = set()
        deleted = 0
        for name, _, size in shards:
            if not self._is_too_much(sequences, size_bytes):
                break
            if name.collector in kept_back or not free(name):
                kept_back.add(name.collector)
                continue
            self._store.delete(name.path)
            sequences, size_bytes, deleted = sequences - name.sequences, size_bytes - size, deleted + 1
        if deleted:
            _log.info("retention: %d shards deleted", deleted)
        self.deleted_shards += deleted
        return deleted

    def _is_too_much(self, sequences: int, size_bytes: int) -> bool:
        config = self._config
        return (config.retain_sequences is not None and sequences > config.retain_sequences) or (
            config.retain_gb is not None and size_bytes > config.retain_gb * 1e9
        )

    def _oldest_first(self) -> list[tuple[ShardName, float, int]]:
        """Every shard with the time it was written and its bytes; a collector's own in the order of their numbers."""
        found = []
        for collector in list_collectors(self._store):
            written = 0.0
            for name in shards_after(self._store, collector, -1):
                try:
                    size, modified = self._store.size_bytes(name.path), self._store.modified_seconds(name.path)
                except FileNotFoundError:  # Somebody else's retention was faster.
                    continue
                written = max(written, modified or 0.0)  # A clock that jumped back must not change the order.
                found.append((name, written, size))
        return sorted(found, key=lambda each: (each[1], each[0]))

    def _held_by_nobody(self) -> Callable[[ShardName], bool]:
        owners = []
        for run in self._store.folders("runs"):
            for path in progress_names(self._store, run):
                try:
                    record = Progress.from_bytes(self._store.get(path))
                except FileNotFoundError:
                    continue
                except ValueError:  # Nobody knows what this run holds.
                    return lambda name: False
                if not record.closed:
                    owners.append((record, Part.parse(record.part)))

        def is_free(name: ShardName) -> bool:
            # A collector that a record does not name is one that this run has not seen yet.
            speak = [record for record, part in owners if part.owns(name.collector)]
            return all(name.number < record.oldest.get(name.collector, 0) for record in speak)

        return is_free
