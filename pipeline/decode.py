"""Drawn rows to one batch: checksums verified, pixels decoded by a few threads straight into one buffer."""

import threading
from collections.abc import Callable
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Protocol

import numpy as np

from pipeline.codec import EncodedRow, decode_into, row_is_intact, row_layout
from pipeline.collate import unpack_rows
from schemas.records import SequenceBatch
from schemas.terms import DatasetTerms


class RowHolder(Protocol):
    """A shard, or whatever else gives whole rows by number."""

    def row(self, row: int) -> EncodedRow: ...


class BatchDecoder:
    """Decodes batches of rows that were written under ``terms``, one at a time; ``close`` ends its threads.

    Args:
        terms: what the rows were written under.
        threads: how many decode at once, the caller's among them; zstd works without the interpreter's lock, so they
            scale with the cores.
    """

    def __init__(self, terms: DatasetTerms, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}; allowed: 1 or more")
        self._layout, self._threads = row_layout(terms), threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="decode") if threads > 1 else None
        self._records = np.zeros(0, self._layout.dtype)
        self._lock = threading.Lock()

    def __enter__(self) -> "BatchDecoder":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """End the threads. Closing twice is fine."""
        if self._pool is not None:
            self._pool.shutdown()

    def observation_buffer(self, batch_size: int) -> np.ndarray:
        """A new ``[B, K-1+S, *shape]`` array of the kind that ``decode`` fills; touching it once costs its faults."""
        return np.empty((batch_size, *self._layout.frames_shape), self._layout.frames_dtype)

    def decode(
        self, draws: Many[tuple[RowHolder, int]], observation_out: np.ndarray | None = None
    ) -> tuple[SequenceBatch, np.ndarray]:
        """The batch of these (shard, row) pairs and ``ok``, bool ``[B]``.

        A row whose checksum or zstd frame is wrong never raises: it is False in ``ok``, its values are not to be used,
        and the other rows are whole. Everything in the batch is a copy: shards may be closed afterwards.

        Args:
            observation_out: becomes the batch's ``observation`` (pinned memory, say), C-contiguous. Reuse one where
                speed matters: fresh memory costs more in page faults than the decoding itself.

        Raises:
            ValueError: a shard of other terms, or a buffer of another shape or kind.
        """
        return self._decode(lambda index: draws[index][0].row(int(draws[index][1])), len(draws), observation_out)

    def decode_rows(
        self, rows: Many[EncodedRow], observation_out: np.ndarray | None = None
    ) -> tuple[SequenceBatch, np.ndarray]:
        """The same for rows that are at hand as they rest in a shard."""
        return self._decode(rows.__getitem__, len(rows), observation_out)

    def _decode(
        self, row_of: Callable[[int], EncodedRow], batch_size: int, observation_out: np.ndarray | None
    ) -> tuple[SequenceBatch, np.ndarray]:
        observation = self.observation_buffer(batch_size) if observation_out is None else observation_out
        self._refuse_other_buffer(observation, batch_size)
        with self._lock:
            collectors, probes = [b""] * batch_size, [b""] * batch_size
            ok = np.zeros(batch_size, bool)
            remaining = iter(range(batch_size))
            records = self._records_for(batch_size)
            packed, row_bytes = records.view(np.uint8), records.itemsize

            def decode_remaining() -> None:
                # Each thread takes the next row, so a slow one holds up nobody; and it fetches and verifies it itself,
                # which needs the interpreter's lock, while the others are inside zstd, which does not.
                for index in remaining:
                    row = row_of(index)
                    if len(row.fixed) != row_bytes:
                        raise ValueError(f"row holds {len(row.fixed)} fixed bytes; allowed here: {row_bytes}")
                    packed[index * row_bytes : (index + 1) * row_bytes] = memoryview(row.fixed)
                    collectors[index], probes[index] = row.collector, row.probe
                    ok[index] = row_is_intact(row, self._layout) and _decodes(row.frame, observation[index])

            helpers = [self._pool.submit(decode_remaining) for _ in range(self._threads - 1)] if self._pool else []
            try:
                decode_remaining()
            finally:
                wait(helpers)
            for helper in helpers:
                helper.result()
            return unpack_rows(records, collectors, probes, observation, self._layout), ok

    def _records_for(self, batch_size: int) -> np.ndarray:
        """Memory for a batch's fixed columns that is kept: fresh memory would cost its page faults."""
        if len(self._records) != batch_size:
            self._records = np.zeros(batch_size, self._layout.dtype)
        return self._records

    def _refuse_other_buffer(self, buffer: np.ndarray, batch_size: int) -> None:
        shape, dtype = (batch_size, *self._layout.frames_shape), self._layout.frames_dtype
        if buffer.shape != shape or buffer.dtype != dtype or not buffer.flags.c_contiguous:
            raise ValueError(f"observation_out is {buffer.dtype} {list(buffer.shape)}; allowed: {dtype} {list(shape)}")


def _decodes(frame: memoryview | bytes, out: np.ndarray) -> bool:
    try:
        decode_into(frame, out)
    except ValueError:
        return False
    return True
