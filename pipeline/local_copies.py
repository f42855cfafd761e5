"""Local copies of objects that never change, to be memory-mapped: at most so many bytes, the least recently used go.

    <user's cache>/r2d2/<dataset>/<slot>/<name>      one slot per process, locked while it lives and taken over later

A copy appears whole under its name, so what a killed process left behind is good.
"""

import fcntl
import hashlib
import os
import secrets
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

KEPT = (
    16  # The newest copies stay even beyond the bound: somebody has been given their paths and is about to open them.
)


class LocalCopies:
    """Any number of threads may ask; nothing is created on the disk before the first copy is.

    Args:
        source: where the objects are; copies of different sources lie apart.
        limit_bytes: of all copies of this process.
        root: default: ``r2d2`` in the user's cache folder.

    Attributes:
        listeners: called with the name of each copy that was deleted, without any lock held.
    """

    def __init__(self, source: str, limit_bytes: int, root: Path | None = None) -> None:
        if limit_bytes < 1:
            raise ValueError(f"cache_gb is {limit_bytes / 1e9:g}; allowed: above 0")
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        self._home = (root or cache / "r2d2") / hashlib.sha256(source.encode()).hexdigest()[:16]
        self._limit_bytes = limit_bytes
        self._folder: Path | None = None
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()
        self.listeners: list[Callable[[str], None]] = []

    def get(self, name: str, fetch: Callable[[Path], None]) -> Path:
        """The copy of ``name``; ``fetch`` writes it to the path it is given when there is none."""
        with self._lock:
            path = self._slot() / name
            if name in self._sizes:
                self._sizes.move_to_end(name)
                return path
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{secrets.token_hex(8)}")
        try:
            fetch(temporary)
            size = temporary.stat().st_size
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        with self._lock:
            self._bytes += size - self._sizes.pop(name, 0)  # Two threads may have fetched the same.
            self._sizes[name] = size
            evicted = self._evict()
        self._tell(evicted)
        return path

    def touch(self, name: str) -> None:
        with self._lock:
            if name in self._sizes:
                self._sizes.move_to_end(name)

    def drop(self, name: str) -> None:
        """Delete the copy of ``name``, if there is one."""
        with self._lock:
            size = self._sizes.pop(name, None)
            if size is None:
                return
            self._delete(name, size)
        self._tell([name])

    def _evict(self) -> list[str]:
        gone = []
        while self._bytes > self._limit_bytes and len(self._sizes) > KEPT:
            name, size = self._sizes.popitem(last=False)
            self._delete(name, size)
            gone.append(name)
        return gone

    def _delete(self, name: str, size: int) -> None:
        self._bytes -= size
        (self._slot() / name).unlink(missing_ok=True)

    def _tell(self, names: list[str]) -> None:
        for name in names:
            for listener in self.listeners:
                listener(name)

    def _slot(self) -> Path:
        """This process's folder; what an earlier process left there is taken over, the oldest to go first."""
        if self._folder is not None:
            return self._folder
        number = 0
        while not self._take(self._home / f"{number}.lock"):
            number += 1
        self._folder = self._home / str(number)
        found = [path for path in self._folder.rglob("*") if path.is_file()]
        for path in [path for path in found if path.name.startswith(".")]:
            path.unlink()
        copies = [(path.stat(), path) for path in found if not path.name.startswith(".")]
        for status, path in sorted(copies, key=lambda each: each[0].st_mtime_ns):
            self._sizes[path.relative_to(self._folder).as_posix()] = status.st_size
            self._bytes += status.st_size
        return self._folder

    def _take(self, lock: Path) -> bool:
        """True when the slot was free. The lock lasts as long as this object, at most as long as the process."""
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return False
        weakref.finalize(self, os.close, descriptor)
        return True
