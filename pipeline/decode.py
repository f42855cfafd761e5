"""Drawn rows to one batch: checksums verified, pixels decoded by a few threads straight into one buffer."""

import threading
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np

from pipeline.codec import EncodedRow, decode_into, row_is_intact, row_layout
from pipeline.collate import unpack_rows
from schemas.records import SequenceBatch
from schemas.terms import DatasetTerms

FETCHED_AT_ONCE = 16


class RowHolder(Protocol):
    """A shard, or whatever else gives whole rows by number."""

    def row(self, row: int) -> EncodedRow: ...


class _AtHand(NamedTuple):
    rows: Many[EncodedRow]

    def row(self, row: int) -> EncodedRow:
        return self.rows[row]


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
        observation = self.observation_buffer(len(draws)) if observation_out is None else observation_out
        self._refuse_other_buffer(observation, len(draws))
        with self._lock:
            return self._decode(draws, observation)

    def decode_rows(
        self, rows: Many[EncodedRow], observation_out: np.ndarray | None = None
    ) -> tuple[SequenceBatch, np.ndarray]:
        """The same for rows that are at hand as they rest in a shard."""
        at_hand = _AtHand(rows)
        return self.decode([(at_hand, row) for row in range(len(rows))], observation_out)

    def _decode(self, draws: Many[tuple[RowHolder, int]], observation: np.ndarray) -> tuple[SequenceBatch, np.ndarray]:
        layout, records = self._layout, self._records_for(len(draws))
        packed: Any = records.data.cast("B")
        row_bytes = records.itemsize
        rows: list[EncodedRow] = []
        fetched: SimpleQueue[Any] = SimpleQueue()
        ok = np.zeros(len(draws), bool)

        def fetch(draws: Many[tuple[RowHolder, int]]) -> None:
            for holder, number in draws:
                row, index = holder.row(number), len(rows)
                if len(row.fixed) != row_bytes:
                    raise ValueError(f"row holds {len(row.fixed)} fixed bytes; allowed under these terms: {row_bytes}")
                packed[index * row_bytes : (index + 1) * row_bytes] = row.fixed
                rows.append(row)
                if row_is_intact(row, layout):
                    fetched.put(index)

        def decode(index: int) -> None:
            ok[index] = _decodes(rows[index].frame, observation[index])

        def decode_fetched() -> None:
            while (index := fetched.get()) is not None:
                decode(index)

        helpers = [self._pool.submit(decode_fetched) for _ in range(self._threads - 1)] if self._pool else []
        try:
            # Rows are fetched fastest one after the other, while what that takes is in the processor's caches. But it
            # holds the interpreter's lock, which each other thread needs for a moment between two of its rows.
            at_once = FETCHED_AT_ONCE if helpers else max(1, len(draws))
            for start in range(0, len(draws), at_once):
                fetch(draws[start : start + at_once])
                with suppress(Empty):
                    decode(fetched.get_nowait())
            collectors, probes = [row.collector for row in rows], [row.probe for row in rows]
            batch = unpack_rows(records, collectors, probes, observation, layout)
        finally:
            for _ in range(self._threads):
                fetched.put(None)
        decode_fetched()
        for helper in helpers:
            helper.result()
        return batch, ok

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
