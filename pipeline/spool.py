"""Publishes a collector's sequences from a thread of its own, and keeps them while the store is slow or away."""

import queue
import threading
from dataclasses import dataclass

from pipeline.frame_buffers import FrameBuffers
from pipeline.shard_writer import ShardWriter
from schemas.records import Sequence

IDLE_SECONDS = 0.1
RETRY_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class SpoolConfig:
    """How much a slow store may cost in memory.

    Attributes:
        spool_mb: megabytes of unpublished sequences at which the environments are paused (ours: 512).
    """

    spool_mb: float = 512.0

    def __post_init__(self) -> None:
        if self.spool_mb <= 0:
            raise ValueError(f"spool_mb is {self.spool_mb}; allowed: above 0")


class Spool:
    """Takes sequences without ever blocking; a thread compresses and publishes them. It drops nothing.

    Args:
        buffers: takes the memory of each sequence's frames back once they are compressed.

    Attributes:
        writer: for its counters; only the thread calls its methods.
    """

    def __init__(self, writer: ShardWriter, config: SpoolConfig, buffers: FrameBuffers | None = None) -> None:
        self.writer, self._buffers = writer, buffers
        self._limit_bytes = int(config.spool_mb * 1e6)
        self._queue: queue.SimpleQueue[Sequence | None] = queue.SimpleQueue()
        # Each is written by one thread alone: a lock would hold up the loop for a turn of the interpreter, 5 ms.
        self._put_bytes = self._taken_bytes = self._pending_bytes = 0
        self._flush, self._closing = threading.Event(), threading.Event()
        self._store_error = ""
        self._bug: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name="publish", daemon=True)
        self._thread.start()

    def put(self, sequence: Sequence) -> None:
        """Hand over one sequence. Raises whatever stopped the thread, if something did."""
        self._raise_bug()
        self._put_bytes += sequence.observation.nbytes
        self._queue.put(sequence)

    def flush(self) -> None:
        """Ask for everything handed over so far to be published now; returns at once."""
        self._flush.set()
        self._queue.put(None)

    @property
    def bytes(self) -> int:
        """Handed over and not durable yet."""
        return self._put_bytes - self._taken_bytes + self._pending_bytes

    @property
    def waits_for(self) -> str:
        """Why the environments must pause, empty while they need not."""
        self._raise_bug()
        if self.bytes < self._limit_bytes:
            return ""
        return f"the store: {self.bytes / 1e6:.0f} MB are spooled ({self._store_error or 'it is slow'})"

    @property
    def store_error(self) -> str:
        """What the store answered last, empty when it took what it was given."""
        return self._store_error

    def close(self, timeout_seconds: float) -> int:
        """Publish everything, for at most so long; returns the number of sequences that are not durable."""
        self._closing.set()
        self.flush()
        self._thread.join(timeout_seconds)
        self._raise_bug()
        return self.writer.pending_sequences + self._queue.qsize()

    def _guarded(self) -> None:
        try:
            self._work()
        except BaseException as error:  # Raised in the collector's thread by its next call.
            self._bug = error

    def _raise_bug(self) -> None:
        if self._bug is not None:
            raise self._bug

    def _work(self) -> None:
        while True:
            self._take_in()
            try:
                if self._flush.is_set():
                    self._flush.clear()
                    self.writer.flush()
                else:
                    self.writer.maybe_flush()
                self._store_error = ""
            except OSError as error:
                self._store_error = " ".join(str(error).split())
                self._flush.set()
                self._closing.wait(RETRY_SECONDS)
            self._pending_bytes = self.writer.pending_bytes
            if self._closing.is_set() and self._queue.empty() and not self.writer.pending_sequences:
                return

    def _take_in(self) -> None:
        """Everything that is queued, or after a while nothing."""
        try:
            sequence = self._queue.get(timeout=IDLE_SECONDS)
            while True:
                if sequence is not None:
                    self.writer.add(sequence)
                    self._taken_bytes += sequence.observation.nbytes
                    if self._buffers is not None:
                        self._buffers.give_back(sequence.observation)
                sequence = self._queue.get_nowait()
        except queue.Empty:
            return
