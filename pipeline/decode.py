"""Drawn rows to one batch: checksums verified, pixels decoded by a few threads straight into one buffer."""

from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from pipeline.codec import EncodedRow, decode_into, row_is_intact, row_layout
from pipeline.collate import unpack_rows
from schemas.records import SequenceBatch
from schemas.terms import DatasetTerms

# The C library hands freed memory back to the system above twice the largest block that was ever freed, up to this
# one. Without it a batch of 64 x 128 frames takes 340 page faults for its fixed columns, 0.5 ms of 12.5 (getrusage).
_KEPT_BYTES = 31 << 20


class RowHolder(Protocol):
    """A shard, or whatever else gives whole rows by number."""

    def row(self, row: int) -> EncodedRow: ...


class BatchDecoder:
    """Decodes batches of rows that were written under ``terms``, for any number of callers; ``close`` ends its threads.

    Args:
        terms: what the rows were written under.
        threads: how many decode at once, the caller's among them; zstd works without the interpreter's lock, so they
            scale with the cores.
    """

    def __init__(self, terms: DatasetTerms, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}; allowed: 1 or more")
        self._layout, self._threads = row_layout(terms), threads
        np.empty(_KEPT_BYTES, np.uint8)  # Freed at once.
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="decode") if threads > 1 else None

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
        """The batch of these (shard, row) pairs and ``ok``, bool ``[B]``: ``gather`` and ``decode_rows`` in one."""
        return self.decode_rows(self.gather(draws), observation_out)

    def gather(self, draws: Many[tuple[RowHolder, int]]) -> list[EncodedRow]:
        """The rows as they rest: copies, but for their frames, which are views of the shards."""
        return [holder.row(row) for holder, row in draws]

    def decode_rows(
        self, rows: Many[EncodedRow], observation_out: np.ndarray | None = None
    ) -> tuple[SequenceBatch, np.ndarray]:
        """The batch of ``rows`` and ``ok``, bool ``[B]``: which are what their checksums say and could be decoded.

        A row whose checksum or zstd frame is wrong never raises: it is False in ``ok``, its values are not to be used,
        and the other rows are whole. Everything in the batch is a copy: shards may be closed afterwards.

        Args:
            observation_out: becomes the batch's ``observation`` (pinned memory, say), C-contiguous. Reuse one where
                speed matters: fresh memory costs more in page faults than the decoding itself.

        Raises:
            ValueError: a row of other terms, or a buffer of another shape or kind.
        """
        observation = self.observation_buffer(len(rows)) if observation_out is None else observation_out
        self._refuse_other(rows, observation)
        decoded, remaining = np.ones(len(rows), bool), iter(range(len(rows)))

        def decode_remaining() -> None:
            for index in remaining:  # Shared by the threads: each takes the next row, so a slow one holds up nobody.
                try:
                    decode_into(rows[index].frame, observation[index])
                except ValueError:
                    decoded[index] = False

        helpers = [self._pool.submit(decode_remaining) for _ in range(self._threads - 1)] if self._pool else []
        # What needs the interpreter's lock comes while the helpers decode already. Checksums are last: they leave the
        # frames in the processor's caches, from where they are decoded next.
        batch = self._unpacked(rows, observation)
        intact = np.array([row_is_intact(row, self._layout) for row in rows], bool)
        decode_remaining()
        for helper in helpers:
            helper.result()
        return batch, intact & decoded

    def _unpacked(self, rows: Many[EncodedRow], observation: np.ndarray) -> SequenceBatch:
        records = np.frombuffer(b"".join([row.fixed for row in rows]), self._layout.dtype)
        collectors, probes = [row.collector for row in rows], [row.probe for row in rows]
        return unpack_rows(records, collectors, probes, observation, self._layout)

    def _refuse_other(self, rows: Many[EncodedRow], buffer: np.ndarray) -> None:
        layout = self._layout
        for row in rows:
            if len(row.fixed) != layout.dtype.itemsize:
                allowed = f"allowed under these terms: {layout.dtype.itemsize}"
                raise ValueError(f"row holds {len(row.fixed)} fixed bytes; {allowed}")
        shape, dtype = (len(rows), *layout.frames_shape), layout.frames_dtype
        if buffer.shape != shape or buffer.dtype != dtype or not buffer.flags.c_contiguous:
            raise ValueError(f"observation_out is {buffer.dtype} {list(buffer.shape)}; allowed: {dtype} {list(shape)}")
