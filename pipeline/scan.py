"""Going through a whole dataset: its shards in one order, its digest, and what had to be left out."""

import hashlib
import logging
from collections.abc import Iterable

from pipeline.dataset import ShardName, list_collectors, shards_after
from pipeline.shard_reader import Shard, ShardError, open_shard
from pipeline.store import Store
from schemas.terms import DatasetTerms

DIGEST_CHARACTERS = 32  # MLflow takes 36 at most.

_log = logging.getLogger(__name__)


class TooManyFaults(ValueError):
    """More shards could not be read than the job was told to bear."""


class LeftOut:
    """Shards and rows that cannot be used: each is named once in the log, and past ``max_bad_shards`` the job fails.

    Attributes:
        bad_shards: path -> reason.
        corrupt_rows: (path, row) of sequences whose checksum or pixels are wrong.
    """

    def __init__(self, max_bad_shards: int = 0) -> None:
        if max_bad_shards < 0:
            raise ValueError(f"max_bad_shards is {max_bad_shards}; allowed: 0 or more")
        self.max_bad_shards = max_bad_shards
        self.bad_shards: dict[str, str] = {}
        self.corrupt_rows: set[tuple[str, int]] = set()

    def shard(self, path: str, reason: str) -> None:
        """Note a shard. Raises TooManyFaults past the limit."""
        if path in self.bad_shards:
            return
        self.bad_shards[path] = reason
        _log.warning("%s is left out: %s", path, reason)
        if len(self.bad_shards) > self.max_bad_shards:
            raise TooManyFaults(
                f"{len(self.bad_shards)} shards cannot be read, the last is {path}: {reason}; "
                f"allowed: max_bad_shards {self.max_bad_shards}"
            )

    def rows(self, rows: Iterable[tuple[str, int]]) -> None:
        """Note sequences by (path, row). They never fail a job: each costs itself alone."""
        for path, row in rows:
            if (path, row) not in self.corrupt_rows:
                self.corrupt_rows.add((path, row))
                _log.warning("%s row %d is left out: checksum or pixels wrong", path, row)


def list_shards(store: Store, collectors: list[str] | None = None) -> list[ShardName]:
    """Every shard, or those of some collectors: by collector, then by number."""
    names = list_collectors(store) if collectors is None else collectors
    return [shard for name in names for shard in shards_after(store, name, -1)]


def open_listed(store: Store, terms: DatasetTerms, name: ShardName) -> Shard:
    """Open a shard of the dataset whose terms these are.

    Raises:
        ShardError: it cannot be read, is gone, or was written under other terms.
    """
    try:
        shard = open_shard(store.map_path(name.path), name)
    except (FileNotFoundError, PermissionError, IsADirectoryError) as error:
        raise ShardError(type(error).__name__) from error
    if differences := terms.differences(shard.terms):
        raise ShardError(f"other terms than the dataset's: {'; '.join(differences)}")
    return shard


def dataset_digest(store: Store) -> str:
    """``digest_of`` all shards that are there now."""
    return digest_of(list_shards(store))


def digest_of(shards: Iterable[ShardName]) -> str:
    """32 hexadecimal characters that change with the list of shards; shards themselves never change."""
    listing = "\n".join(name.path for name in shards)
    return hashlib.sha256(listing.encode()).hexdigest()[:DIGEST_CHARACTERS]
