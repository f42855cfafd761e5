"""Drawn rows to one batch: checksums verified, pixels decoded by a few threads straight into one buffer."""

from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from pipeline.codec import EncodedRow, decode_into, row_is_intact, row_layout
from pipeline.collate import unpack_rows
from pipeline.shard_reader import Shard
from schemas.records import SequenceBatch
from schemas.terms import DatasetTerms


class BatchDecoder:
    """Decodes batches of rows that were written under ``terms``. One batch at a time; ``close`` ends its threads.

    Args:
        terms: what the rows were written under.
        threads: how many decode at once; zstd works without the interpreter's lock, so they scale with the cores.
    """

    def __init__(self, terms: DatasetTerms, threads: int = 1) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}; allowed: 1 or more")
        self._layout, self._threads = row_layout(terms), threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode") if threads > 1 else None
        self._records = np.zeros(0, self._layout.dtype)

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
        self, draws: Many[tuple[Shard, int]], observation_out: np.ndarray | None = None
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
        return self.decode_rows([shard.row(int(row)) for shard, row in draws], observation_out)

    def decode_rows(
        self, rows: Many[EncodedRow], observation_out: np.ndarray | None = None
    ) -> tuple[SequenceBatch, np.ndarray]:
        """The same for rows that came from elsewhere (a remote replay) as they rest in a shard."""
        observation = self.observation_buffer(len(rows)) if observation_out is None else observation_out
        self._refuse_other_buffer(observation, len(rows))
        records = self._gather(rows)
        ok = np.array([row_is_intact(row, self._layout) for row in rows], bool)
        remaining = iter(range(len(rows)))

        def decode_remaining() -> None:
            for index in remaining:  # Shared by the threads: each takes the next row, so a slow one holds up nobody.
                ok[index] = ok[index] and _decodes(rows[index].frame, observation[index])

        futures = [self._pool.submit(decode_remaining) for _ in range(self._threads)] if self._pool else []
        batch = unpack_rows(records, [row.probe for row in rows], observation, self._layout)
        if self._pool is None:
            decode_remaining()
        for future in futures:
            future.result()
        return batch, ok

    def _gather(self, rows: Many[EncodedRow]) -> np.ndarray:
        """Fixed columns of all rows as records, in memory that is kept: fresh memory would cost its page faults."""
        row_bytes = self._layout.dtype.itemsize
        if len(self._records) != len(rows):
            self._records = np.zeros(len(rows), self._layout.dtype)
        packed = self._records.data.cast("B")
        for index, row in enumerate(rows):
            if len(row.fixed) != row_bytes:
                raise ValueError(f"row holds {len(row.fixed)} fixed bytes; allowed under these terms: {row_bytes}")
            packed[index * row_bytes : (index + 1) * row_bytes] = row.fixed
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
