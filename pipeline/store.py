"""A dataset's storage: whole objects under relative names. On a local disk here, elsewhere in ``object_store``.

The methods are those an object store can offer too: whole objects, listing by prefix, no append, no rename. A name is
relative and "/"-joined. A part of a name that starts with ``_`` or ``.`` is not data and never listed.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.object_store import SCHEMES, ObjectStore
from pipeline.store_protocol import LEFTOVER_SECONDS, Store, StoreAway, checked_name

__all__ = ["DEFAULT_CACHE_BYTES", "LocalStore", "Store", "StoreAway", "open_store"]

DEFAULT_CACHE_BYTES = 20_000_000_000
_TEMPORARY_PREFIX = ".writing-"


class LocalStore:
    """Objects as files below ``root``; any number of processes and threads may use it at once.

    An object appears under its name whole or not at all, whatever kills the writer. The root itself is never created
    on the way of a write: a dataset whose folder was moved away fails with FileNotFoundError until it is back, instead
    of growing a second half in its old place.

    Attributes:
        root: its folder.
        uri, name: that folder as text, and its last part.
        is_remote: no: a call takes less than a millisecond, but for a durable write.
    """

    is_remote = False

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).absolute()
        self.uri, self.name = str(self.root), self.root.name

    def __repr__(self) -> str:
        return f"LocalStore({str(self.root)!r})"

    def prepare(self) -> None:
        """Make the root folder, and those above it."""
        self.root.mkdir(parents=True, exist_ok=True)

    def put(self, name: str, data) -> None:
        """Write ``data`` (anything with the buffer protocol) under ``name``; an older object there is replaced.

        Durable when the call returns: contents, name and new folders are synced. After an OSError (a full disk) the
        name holds what it held before or, if only the last sync failed, all of ``data``: repeating the call is safe.
        """
        self._publish(name, data, os.replace, durable=True)

    def replace(self, name: str, data) -> None:
        """Like ``put``, still atomic for every reader, but not synced: a power cut may bring the older object back."""
        self._publish(name, data, os.replace, durable=False)

    def create(self, name: str, data) -> bool:
        """Write ``data`` unless ``name`` exists; True when this call created it. Durable like ``put``.

        Of several writers at once exactly one gets True, and none sees an incomplete object.
        """

        def link(temporary: Path, final: Path) -> None:
            os.link(temporary, final)  # Unlike rename it refuses an existing name.
            temporary.unlink()

        try:
            self._publish(name, data, link, durable=True)
        except FileExistsError:
            return False
        return True

    def get(self, name: str) -> bytes:
        """The whole object. Raises FileNotFoundError."""
        return self.map_path(name).read_bytes()

    def identity(self, name: str) -> str | None:
        """A text that changes whenever the object is replaced (a poll costs one stat), None while there is none."""
        try:
            status = self.map_path(name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return f"{status.st_ino}-{status.st_mtime_ns}-{status.st_size}"

    def modified_seconds(self, name: str) -> float | None:
        """When the object was written, by the store's own clock; None while there is none. Good for ordering only."""
        try:
            return self.map_path(name).stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            return None

    def size_bytes(self, name: str) -> int:
        """Of the object. Raises FileNotFoundError."""
        return self.map_path(name).stat().st_size

    def folders(self, prefix: str = "") -> list[str]:
        """Names of the folders directly below ``prefix``, sorted; empty when there is no such folder."""
        return sorted(entry.name for entry in self._entries(prefix) if entry.is_dir())

    def files(self, prefix: str = "") -> list[str]:
        """Names of the objects directly below ``prefix``, sorted; empty when there is no such folder."""
        return sorted(entry.name for entry in self._entries(prefix) if not entry.is_dir())

    def delete(self, name: str) -> None:
        """Remove an object if it is there. Not synced: after a power cut it may be back."""
        self.map_path(name).unlink(missing_ok=True)

    def map_path(self, name: str) -> Path:
        """The local file that holds ``name``, for memory-mapping; it need not exist.

        Raises:
            ValueError: ``name`` is empty, absolute, or climbs out of the store.
        """
        return self.root / checked_name(name)

    def touch(self, name: str) -> None:
        """Nothing: there are no copies that could be evicted."""

    def on_evicted(self, tell: Callable[[str], None]) -> None:
        """Nothing: a file stays until it is deleted."""

    def clean_leftovers(self, older_than_seconds: float = LEFTOVER_SECONDS) -> int:
        """Delete temporary files that a killed writer left behind; returns how many.

        A writer at work holds a lock on its file, so its file stays however old it is. The age only covers the moment
        between creating and locking one: a few seconds do.
        """
        newest = time.time() - older_than_seconds
        return sum(
            _delete_abandoned(Path(folder, file), newest)
            for folder, _, files in os.walk(self.root)
            for file in files
            if file.startswith(_TEMPORARY_PREFIX)
        )

    def _entries(self, prefix: str) -> Iterator[os.DirEntry]:
        folder = self.map_path(prefix) if prefix else self.root
        try:
            with os.scandir(folder) as entries:
                yield from (entry for entry in entries if not entry.name.startswith(("_", ".")))
        except (FileNotFoundError, NotADirectoryError):
            return

    def _publish(self, name: str, data, move, *, durable: bool) -> None:
        final = self.map_path(name)
        self._make_folder(final.parent)
        temporary = final.with_name(f"{_TEMPORARY_PREFIX}{secrets.token_hex(8)}")
        try:
            with open(temporary, "xb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(data)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
                move(temporary, final)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        if durable:
            _sync_folder(final.parent)

    def _make_folder(self, folder: Path) -> None:
        """Create ``folder`` below the root, each new name synced into its parent."""
        if folder.is_dir():
            return
        if folder == self.root:
            raise FileNotFoundError(f"{self.root} does not exist: moved away, or never created")
        self._make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def open_store(
    uri: str, *, create: bool = False, cache_bytes: int = DEFAULT_CACHE_BYTES, flag: str = "dataset"
) -> Store:
    """The store behind a path, a ``file://`` URI or that of an object store.

    Args:
        create: make the root folder, and those above it.
        cache_bytes: of an object store's local copies.
        flag: what the errors call it.

    Raises:
        ValueError: another kind of URI, or a file; names ``flag``.
    """
    parts = urlsplit(uri)
    if parts.scheme in SCHEMES and parts.netloc:
        return ObjectStore(uri, cache_bytes=cache_bytes)
    if parts.scheme not in ("", "file") or parts.netloc not in ("", "localhost"):
        raise ValueError(
            f"{flag} is {uri!r}; allowed: a folder of this machine, file:///folder, or "
            "s3://bucket/prefix (gs://, az://)"
        )
    store = LocalStore(Path(parts.path if parts.scheme else uri).expanduser())
    if any(path.is_file() for path in (store.root, *store.root.parents)):
        raise ValueError(f"{flag} is {uri!r}, which is a file or below one; allowed: a folder")
    if create:
        store.prepare()
    return store


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete_abandoned(path: Path, newest: float) -> bool:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_mtime > newest:
                return False
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except OSError:  # Locked by a living writer, renamed meanwhile, or not ours to delete.
        return False
    return True
