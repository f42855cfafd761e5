"""What a dataset's readers and writers ask of its storage, wherever that is."""

from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Protocol

LEFTOVER_SECONDS = 2.0  # A writer creates its temporary file and locks it within this time.


class StoreAway(OSError):
    """The store gave no useful answer, however often it was asked: nothing is known about the object."""


class Store(Protocol):
    """What a dataset's readers and writers ask of its storage. See ``LocalStore`` for what each method promises."""

    uri: str
    name: str
    is_remote: bool

    def prepare(self) -> None: ...

    def put(self, name: str, data) -> None: ...

    def replace(self, name: str, data) -> None: ...

    def create(self, name: str, data) -> bool: ...

    def get(self, name: str) -> bytes: ...

    def identity(self, name: str) -> str | None: ...

    def modified_seconds(self, name: str) -> float | None: ...

    def size_bytes(self, name: str) -> int: ...

    def folders(self, prefix: str = "") -> list[str]: ...

    def files(self, prefix: str = "") -> list[str]: ...

    def delete(self, name: str) -> None: ...

    def map_path(self, name: str) -> Path: ...

    def touch(self, name: str) -> None: ...

    def on_evicted(self, tell: Callable[[str], None]) -> None: ...

    def clean_leftovers(self, older_than_seconds: float = LEFTOVER_SECONDS) -> int: ...


def checked_name(name: str) -> str:
    """``name``. Raises ValueError when it is empty, absolute, or climbs out of the store."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts:
        raise ValueError(f"name is {name!r}; allowed: a relative one inside the store")
    return name
