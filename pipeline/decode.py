"""Drawn rows to one batch: checksums verified, pixels decoded by a few threads straight into one buffer."""

from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from pipeline.codec import EncodedRow, decode_into, row_is_intact, row_layout
from pipeline.collate import unpack_rows
from schemas.records import SequenceBatch
from schemas.terms import DatasetTerms


class RowHolder(Protocol):
    """A shard, or whatever else gives whole rows by number."""

    def row(self, row: int) -> EncodedRow: ...


@dataclass(frozen=True, eq=False)
class Gathered:
    """A batch before its pixels are decoded; all of it is copied but the ``frames``, which are views of shards.

    ``columns`` has no observations yet. ``intact``: bool ``[B]``, which rows are what their checksums say.
    """

    columns: SequenceBatch
    frames: list[memoryview | bytes]
    intact: np.ndarray


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
        """The batch of these (shard, row) pairs and ``ok``, bool ``[B]``: ``gather`` and ``decode_pixels`` in one.

        A row whose checksum or zstd frame is wrong never raises: it is False in ``ok``, its values are not to be used,
        and the other rows are whole. Everything in the batch is a copy: shards may be closed afterwards.
        """
        return self.decode_pixels(self.gather(draws), observation_out)

    def decode_rows(
        self, rows: Many[EncodedRow], observation_out: np.ndarray | None = None
    ) -> tuple[SequenceBatch, np.ndarray]:
        """The same for rows that are at hand as they rest in a shard."""
        return self.decode_pixels(self._gather(rows), observation_out)

    def gather(self, draws: Many[tuple[RowHolder, int]]) -> Gathered:
        """Everything but pixels, verified.

        Raises:
            ValueError: a shard of other terms.
        """
        return self._gather([holder.row(row) for holder, row in draws])

    def _gather(self, rows: Many[EncodedRow]) -> Gathered:
        layout = self._layout
        for row in rows:
            if len(row.fixed) != layout.dtype.itemsize:
                allowed = f"allowed under these terms: {layout.dtype.itemsize}"
                raise ValueError(f"row holds {len(row.fixed)} fixed bytes; {allowed}")
        records = np.frombuffer(b"".join([row.fixed for row in rows]), layout.dtype)
        collectors, probes = [row.collector for row in rows], [row.probe for row in rows]
        # Checksums last: they leave the frames in the processor's caches, from where they are decoded next.
        columns = unpack_rows(records, collectors, probes, np.empty(0, layout.frames_dtype), layout)
        intact = np.array([row_is_intact(row, layout) for row in rows], bool)
        return Gathered(columns, [row.frame for row in rows], intact)

    def decode_pixels(
        self, gathered: Gathered, observation_out: np.ndarray | None = None
    ) -> tuple[SequenceBatch, np.ndarray]:
        """The whole batch, and ``ok`` as ``decode`` gives it. Rows that are not intact are not decoded.

        Args:
            observation_out: becomes the batch's ``observation`` (pinned memory, say), C-contiguous. Reuse one where
                speed matters: fresh memory costs more in page faults than the decoding itself.

        Raises:
            ValueError: a buffer of another shape or kind.
        """
        frames, ok = gathered.frames, gathered.intact.copy()
        observation = self.observation_buffer(len(frames)) if observation_out is None else observation_out
        self._refuse_other_buffer(observation, len(frames))
        remaining = iter(np.flatnonzero(ok).tolist())

        def decode_remaining() -> None:
            for index in remaining:  # Shared by the threads: each takes the next row, so a slow one holds up nobody.
                try:
                    decode_into(frames[index], observation[index])
                except ValueError:
                    ok[index] = False

        helpers = [self._pool.submit(decode_remaining) for _ in range(self._threads - 1)] if self._pool else []
        decode_remaining()
        for helper in helpers:
            helper.result()
        return replace(gathered.columns, observation=observation), ok

    def _refuse_other_buffer(self, buffer: np.ndarray, batch_size: int) -> None:
        shape, dtype = (batch_size, *self._layout.frames_shape), self._layout.frames_dtype
        if buffer.shape != shape or buffer.dtype != dtype or not buffer.flags.c_contiguous:
            raise ValueError(f"observation_out is {buffer.dtype} {list(buffer.shape)}; allowed: {dtype} {list(shape)}")
