"""A bounded number of open shards: the least recently used one makes room."""

import errno
import resource
import threading
from collections import OrderedDict
from pathlib import Path

from pipeline.codec import row_layout
from pipeline.dataset import ShardName
from pipeline.shard_reader import Shard, ShardError, open_shard
from pipeline.store import Store
from schemas.terms import DatasetTerms

DEFAULT_OPEN_SHARDS = 8192  # Half a million sequences in shards of 64; about 3 KB of memory each.
_MAP_COUNT = Path("/proc/sys/vm/max_map_count")
_MAP_COUNT_ELSEWHERE = 65_530  # Linux's default, for systems that do not tell.


class ShardCache:
    """Opens the shards of one dataset and keeps them open. Any number of threads may ask.

    An open shard costs one memory map and no descriptor. A shard that is dropped while a batch still reads from it
    stays mapped until that batch is done.

    Args:
        max_open_shards: how many stay open; None: as many as is sensible here.

    Raises:
        ValueError: ``max_open_shards`` is more than half of the maps that a process may have.
    """

    def __init__(self, store: Store, terms: DatasetTerms, max_open_shards: int | None = None) -> None:
        allowed = _max_map_count() // 2
        if max_open_shards is not None and not 1 <= max_open_shards <= allowed:
            raise ValueError(f"max_open_shards is {max_open_shards}; allowed: 1 to {allowed} ({_limits()})")
        self.max_open_shards = max_open_shards or min(DEFAULT_OPEN_SHARDS, allowed)
        self._store, self._terms, self._layout = store, terms, row_layout(terms)
        self._open: OrderedDict[ShardName, Shard] = OrderedDict()
        self._lock = threading.RLock()  # Opening one shard may evict another one's file.
        store.on_evicted(self._forget)

    def __len__(self) -> int:
        return len(self._open)

    def get(self, name: ShardName) -> Shard:
        """The shard, opened if need be.

        Raises:
            ShardError, FileNotFoundError, PermissionError: this shard cannot be used.
            OSError: no shard can be opened; names the option and the limits when those are the reason.
        """
        with self._lock:
            if (shard := self._open.get(name)) is not None:
                self._open.move_to_end(name)
                self._store.touch(name.path)
                return shard
            shard = self._opened(name)
            self._open[name] = shard
            self._shrink(self.max_open_shards)
            return shard

    def read(self, name: ShardName) -> Shard:
        """Like ``get``, but the shard is not kept."""
        shard = open_shard(self._store.map_path(name.path), name)
        if shard.layout is not self._layout:
            raise ShardError("other terms than the dataset's: " + "; ".join(self._terms.differences(shard.terms)))
        return shard

    def drop(self, name: ShardName) -> None:
        """Close a shard that is not needed any more, so that a deleted file gives its space back."""
        with self._lock:
            self._open.pop(name, None)

    def _forget(self, path: str) -> None:
        """The file is gone: an open map would keep its space."""
        if (name := ShardName.parse(path)) is not None:
            self.drop(name)

    def _opened(self, name: ShardName) -> Shard:
        try:
            return self.read(name)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
        self._shrink(len(self._open) // 2)  # Others in this process use maps and descriptors too.
        try:
            return self.read(name)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
            reason = f"no further shard can be opened: max_open_shards is {self.max_open_shards}, {_limits()}"
            raise OSError(error.errno, reason, name.path) from error

    def _shrink(self, size: int) -> None:
        while len(self._open) > size:
            self._open.popitem(last=False)


def _max_map_count() -> int:
    try:
        return int(_MAP_COUNT.read_text())
    except (OSError, ValueError):
        return _MAP_COUNT_ELSEWHERE


def _limits() -> str:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return f"vm.max_map_count is {_max_map_count()}, the limit of open files {descriptors}"
