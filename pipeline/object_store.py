"""A dataset in an object store: S3 and what speaks its protocol, Google Cloud, Azure. The methods are LocalStore's.

Credentials, endpoint and region come from the usual environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY,
AWS_ENDPOINT_URL, AWS_REGION; GOOGLE_...; AZURE_...), an instance's own role included. Tested with S3 alone.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pipeline.local_copies import LocalCopies
from pipeline.store_protocol import LEFTOVER_SECONDS, StoreAway, checked_name

SCHEMES = ("s3", "gs", "az")
RETRY_SECONDS = 10.0  # For one call: refused and reset connections, 5xx and throttling answers, time-outs of reads.
MOST_RETRIES = 20
REQUEST_SECONDS, CONNECT_SECONDS = 30.0, 3.0
SLOW_SECONDS = 3.0
SAY_SECONDS = 5.0
SETTLE_SECONDS = 1.0  # Where creation cannot be made conditional: longer than two racing puts lie apart.
YOUNG_SECONDS = 60.0  # Since its creation by the store's clock, which may differ from ours.

_log = logging.getLogger(__name__)
Answer = TypeVar("Answer")


class ObjectStore:
    """Objects below a bucket's prefix; any number of processes and threads may use it at once.

    An object is one put, so it appears whole or not at all, whatever kills the writer. Every call is tried again for at
    most ``RETRY_SECONDS``; then it raises StoreAway. Slow calls, a store that is away and its return are said.

    Args:
        uri: ``s3://bucket/prefix``, ``gs://...`` or ``az://...``.
        cache_bytes: of local copies kept for memory-mapping.
        cache_root: where they lie; default: below the user's cache folder.

    Attributes:
        uri, name: of the dataset.
        is_remote: a call takes milliseconds to seconds.
    """

    is_remote = True

    def __init__(self, uri: str, *, cache_bytes: int, cache_root: Path | None = None) -> None:
        import obstore
        import obstore.exceptions
        from obstore.store import from_url

        self.uri = uri.rstrip("/")
        self.name = PurePosixPath(self.uri).name
        self._library = obstore
        self._copies = LocalCopies(self.uri, cache_bytes, cache_root)
        seconds = timedelta(seconds=RETRY_SECONDS)
        try:
            self._remote = from_url(
                self.uri,
                # Whoever names an http:// endpoint means it.
                client_options={
                    "allow_http": True,
                    "timeout": timedelta(seconds=REQUEST_SECONDS),
                    "connect_timeout": timedelta(seconds=CONNECT_SECONDS),
                },
                retry_config={
                    "max_retries": MOST_RETRIES,
                    "retry_timeout": seconds,
                    "backoff": {
                        "init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2.0), "base": 2,
                    },
                },
            )  # fmt: skip
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise ValueError(f"dataset is {uri!r}; allowed: {', '.join(f'{s}://bucket/prefix' for s in SCHEMES)} "
                             f"({_one_line(error)})") from error  # fmt: skip
        self._listed: dict[str, dict[str, Any]] = {}
        self._lock = threading.Lock()
        self._lost_at: float | None = None
        self._said_at = -float("inf")

    def __repr__(self) -> str:
        return f"ObjectStore({self.uri!r})"

    def prepare(self) -> None:
        """Nothing to make: a bucket is its owner's affair, folders do not exist."""

    def put(self, name: str, data) -> None:
        """Write ``data`` (anything with the buffer protocol) under ``name``; an older object there is replaced.

        Durable when the call returns. After an OSError the name holds what it held before or, if only the answer was
        lost, all of ``data``: repeating the call is safe.
        """
        self._call(
            f"put {name}", self._library.put, checked_name(name), memoryview(data).cast("B"), use_multipart=False
        )

    def replace(self, name: str, data) -> None:
        """The same as ``put``."""
        self.put(name, data)

    def create(self, name: str, data) -> bool:
        """Write ``data`` unless ``name`` exists; True when this call created it (or another one just like it).

        Of several writers at once one gets True, and what the others find afterwards is final. Where the store cannot
        make a put conditional the object is read back after ``SETTLE_SECONDS``: two writers further apart than this,
        neither seeing the other, stay unnoticed.
        """
        if (about := self._head(name)) is not None:
            if time.time() - about["last_modified"].timestamp() < YOUNG_SECONDS:
                time.sleep(SETTLE_SECONDS)  # Others may be racing for it still.
            return False
        errors, held = self._library.exceptions, bytes(data)

        def put_new() -> bool:
            try:
                self._call(f"create {name}", self._library.put, name, held, mode="create", use_multipart=False)
            except errors.AlreadyExistsError:
                return False
            return True

        try:
            if not put_new():
                return self.get(name) == held  # An answer that was lost makes the retry find its own object.
            if not put_new():
                return True  # The store refuses what exists, so the first one was ours alone.
        except errors.NotSupportedError:
            self.put(name, held)
        time.sleep(SETTLE_SECONDS)
        return self.get(name) == held

    def get(self, name: str) -> bytes:
        """The whole object. Raises FileNotFoundError."""
        return self._call(
            f"get {name}", lambda remote: self._library.get(remote, checked_name(name)).bytes().to_bytes()
        )

    def identity(self, name: str) -> str | None:
        """A text that changes whenever the object is replaced (a poll costs one HEAD), None while there is none."""
        about = self._head(name)
        return about and f"{about['e_tag']}-{about['last_modified'].timestamp()}-{about['size']}"

    def modified_seconds(self, name: str) -> float | None:
        """When the object was written, by the store's own clock; None while there is none. Good for ordering only."""
        about = self._about(name)
        return about and about["last_modified"].timestamp()

    def size_bytes(self, name: str) -> int:
        """Raises FileNotFoundError."""
        if (about := self._about(name)) is None:
            raise FileNotFoundError(f"{self.uri}/{name}")
        return about["size"]

    def folders(self, prefix: str = "") -> list[str]:
        """Names of the folders directly below ``prefix``, sorted; empty when there is no such folder."""
        return _data_names(self._list(prefix)["common_prefixes"])

    def files(self, prefix: str = "") -> list[str]:
        """Names of the objects directly below ``prefix``, sorted; empty when there is no such folder."""
        objects = self._list(prefix)["objects"]
        with self._lock:  # What is listed is not asked for one by one; objects below shards/ never change.
            self._listed |= {each["path"]: each for each in objects if each["path"].startswith("shards/")}
        return _data_names(each["path"] for each in objects)

    def delete(self, name: str) -> None:
        """Remove an object if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._call(f"delete {name}", self._library.delete, checked_name(name))
        with self._lock:
            self._listed.pop(name, None)
        self._copies.drop(name)

    def map_path(self, name: str) -> Path:
        """A local copy of the immutable object ``name``, fetched if need be. Open it at once: it may be evicted later.

        Raises:
            FileNotFoundError: there is no such object.
        """
        return self._copies.get(checked_name(name), lambda path: self._fetch(name, path))

    def touch(self, name: str) -> None:
        """The local copy of ``name`` is in use: others are evicted before it."""
        self._copies.touch(name)

    def on_evicted(self, tell: Callable[[str], None]) -> None:
        """``tell`` is called with the name of each local copy that has been deleted, in whichever thread did it."""
        self._copies.listeners.append(tell)

    def clean_leftovers(self, older_than_seconds: float = LEFTOVER_SECONDS) -> int:
        """There are none: a put that was cut off leaves nothing. Returns 0."""
        return 0

    def _fetch(self, name: str, path: Path) -> None:
        def fetch(remote: Any) -> None:
            answer = self._library.get(remote, name)
            with open(path, "wb") as file:
                written = sum(file.write(chunk) for chunk in answer.stream())
            if written != answer.meta["size"]:
                raise StoreAway(f"{name}: {written} of {answer.meta['size']} bytes came")

        self._call(f"get {name}", fetch)

    def _head(self, name: str) -> Any:
        try:
            return self._call(f"head {name}", self._library.head, checked_name(name))
        except FileNotFoundError:
            return None

    def _about(self, name: str) -> Any:
        return self._listed.get(name) or self._head(name)

    def _list(self, prefix: str) -> Any:
        try:
            return self._call(f"list {prefix}", self._library.list_with_delimiter, prefix or None)
        except FileNotFoundError:
            return {"common_prefixes": [], "objects": []}

    def _call(self, what: str, function: Callable[..., Answer], *arguments: Any, **options: Any) -> Answer:
        errors, started = self._library.exceptions, time.monotonic()
        try:
            answer = function(self._remote, *arguments, **options)
        except (FileNotFoundError, errors.AlreadyExistsError, errors.NotSupportedError):
            self._note_answer(what, started)
            raise
        except (errors.BaseError, StoreAway) as error:
            reason = _one_line(error)
            if "NoSuchBucket" in str(error):
                raise FileNotFoundError(f"{self.uri}: no such bucket") from None
            self._note_loss(f"{what}: {reason}")
            raise StoreAway(f"{self.uri} does not take part: {what}: {reason}") from None
        self._note_answer(what, started)
        return answer

    def _note_loss(self, reason: str) -> None:
        with self._lock:
            now = time.monotonic()
            if self._lost_at is None:
                self._lost_at = now
            if now - self._said_at >= SAY_SECONDS:
                self._said_at = now
                _log.warning("%s is away for %.0f s: %s", self.uri, now - self._lost_at, reason)

    def _note_answer(self, what: str, started: float) -> None:
        now = time.monotonic()
        with self._lock:
            if self._lost_at is not None:
                _log.warning("%s is back", self.uri)
                self._lost_at = None
            elif now - started >= SLOW_SECONDS and now - self._said_at >= SAY_SECONDS:
                self._said_at = now
                _log.warning("%s is slow, or had to be asked again: %s took %.1f s", self.uri, what, now - started)


def _data_names(paths: Any) -> list[str]:
    names = (PurePosixPath(path).name for path in paths)
    return sorted(name for name in names if not name.startswith(("_", ".")))


def _one_line(error: BaseException) -> str:
    text = str(error).partition("\n\nDebug source")[0]
    return " ".join(text.split())[:300] or type(error).__name__
