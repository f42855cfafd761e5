"""Sequences to immutable shards: compressed as they come, published whole under the flush rule."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.codec import EncodedRow, RowLayout, compress, row_checksum, row_layout
from pipeline.collate import pack_probe, pack_row, unpack_rows
from pipeline.dataset import ShardName
from pipeline.store import Store
from schemas.records import Sequence, SequenceBatch
from schemas.shard import shard_schema
from schemas.terms import DatasetTerms

WAITED_KEY = "r2d2.waited_seconds"
InitialPriorities = Callable[[SequenceBatch, np.ndarray], np.ndarray]


@dataclass(frozen=True, kw_only=True)
class WriterConfig:
    """When a shard is due, and how hard its pixels are compressed (design.md, decisions 1 and 7).

    Attributes:
        first_flush_seconds: how long a sequence waits before the incarnation's first shard.
        flush_sequences: a shard holds at most this many sequences, and is due when it can hold no more.
        flush_seconds: how long a sequence waits for a later shard.
        zstd_level: 3 by default; higher ones cost more time than they save space.
    """

    first_flush_seconds: float = 2.0
    flush_sequences: int = 64
    flush_seconds: float = 15.0
    zstd_level: int = 3

    def __post_init__(self) -> None:
        for field in ("first_flush_seconds", "flush_seconds"):
            if not getattr(self, field) >= 0:
                raise ValueError(f"{field} is {getattr(self, field)}; allowed: 0 or more seconds")
        if self.flush_sequences < 1:
            raise ValueError(f"flush_sequences is {self.flush_sequences}; allowed: 1 or more")
        if not 1 <= self.zstd_level <= 22:
            raise ValueError(f"zstd_level is {self.zstd_level}; allowed: 1 to 22")


class _PendingRow(NamedTuple):
    record: np.ndarray
    frame: bytes
    probe: bytes
    q_values: np.ndarray
    since: float


class ShardWriter:
    """Writes the sequences of one collector incarnation, from one thread.

    ``add`` only compresses; ``maybe_flush`` and ``flush`` do the I/O. When they raise OSError (full disk, folder moved
    away) nothing is lost or written twice: the sequences stay pending and the same shard is tried again by the next
    call. ``pending_bytes`` says what that costs in memory.

    Args:
        initial_priorities: given a batch of B sequences and their ``q_values`` ``[B, S, A]`` float32, their priorities
            before alpha, float32 ``[B]``, NaN = none. The batch's ``observation`` has its shape but is all zeros:
            the pixels are compressed by then.
        notes_waits: each shard also says how long its sequences waited for it (``waited_seconds``).
        clock: seconds, monotonic.

    Attributes:
        shards, sequences, env_steps, bytes_published: published so far; ``env_steps`` are owned steps.
    """

    def __init__(
        self,
        store: Store,
        terms: DatasetTerms,
        collector: str,
        config: WriterConfig,
        *,
        initial_priorities: InitialPriorities,
        notes_waits: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._terms, self._collector, self._config = store, terms, collector, config
        self._initial_priorities, self._notes_waits, self._clock = initial_priorities, notes_waits, clock
        self._layout = row_layout(terms)
        self._pending: list[_PendingRow] = []
        self._unpublished: tuple[ShardName, pa.Buffer] | None = None
        self._next_sequence = 0
        self.shards = self.sequences = self.env_steps = self.bytes_published = 0

    @property
    def pending_sequences(self) -> int:
        """Sequences that have been added and are not durable yet."""
        return self._next_sequence - self.sequences

    @property
    def pending_bytes(self) -> int:
        encoded = self._unpublished[1].size if self._unpublished else 0
        rows = sum(len(row.frame) + row.record.nbytes + row.q_values.nbytes for row in self._pending)
        return encoded + rows

    def add(self, sequence: Sequence) -> None:
        """Take one sequence; its arrays may be reused afterwards. Nothing is written yet.

        Raises:
            ValueError: it is another collector's, not the next in number, or of other shapes than the terms say.
        """
        if sequence.collector != self._collector:
            raise ValueError(f"collector is {sequence.collector!r}; allowed: {self._collector!r}")
        if sequence.sequence != self._next_sequence:
            raise ValueError(f"sequence is {sequence.sequence}; allowed: the next one, {self._next_sequence}")
        frames, layout = sequence.observation, self._layout
        if frames.shape != layout.frames_shape or frames.dtype != layout.frames_dtype:
            allowed = f"{layout.frames_dtype} {list(layout.frames_shape)}"
            raise ValueError(f"observation is {frames.dtype} {list(frames.shape)}; allowed: {allowed}")
        row = _PendingRow(
            record=pack_row(sequence, layout),
            frame=compress(frames, self._config.zstd_level),
            probe=pack_probe(sequence),
            q_values=np.array(sequence.q_values, np.float32),
            since=self._clock(),
        )
        self._pending.append(row)
        self._next_sequence += 1

    def maybe_flush(self) -> int:
        """Publish every shard that is due; returns how many. They are durable (acknowledged) when the call returns."""
        return self._publish_while(self._is_due)

    def flush(self) -> int:
        """Publish everything that is pending; returns the number of shards, durable when the call returns."""
        return self._publish_while(lambda: bool(self._pending))

    def _is_due(self) -> bool:
        if len(self._pending) < self._config.flush_sequences:
            patience = self._config.flush_seconds if self.shards else self._config.first_flush_seconds
            return bool(self._pending) and self._clock() - self._pending[0].since >= patience
        return True

    def _publish_while(self, wanted: Callable[[], bool]) -> int:
        before = self.shards
        while self._unpublished or wanted():
            if self._unpublished is None:
                self._unpublished = self._encode()
            name, data = self._unpublished
            # Named and encoded once: should only the very last sync fail, the next attempt rewrites the same object.
            self._store.put(name.path, data)
            self._unpublished = None
            self.shards += 1
            self.sequences += name.sequences
            self.env_steps += name.env_steps
            self.bytes_published += data.size
        return self.shards - before

    def _encode(self) -> tuple[ShardName, pa.Buffer]:
        rows = self._pending[: self._config.flush_sequences]
        records = np.concatenate([row.record for row in rows])
        records["initial_priority"] = self._priorities(records, rows)
        frames, probes = [row.frame for row in rows], [row.probe for row in rows]
        now, notes = self._clock(), {}
        if self._notes_waits:
            notes = {WAITED_KEY: json.dumps([round(now - row.since, 4) for row in rows])}
        data = encode_shard(self._terms, self._collector, records, frames, probes, notes)
        owned = self._terms.geometry.owned_steps(records["first_valid"], records["num_steps"], records["ends"])
        del self._pending[: len(rows)]
        return ShardName(self._collector, self.shards, len(rows), int(owned.sum())), data

    def _priorities(self, records: np.ndarray, rows: list[_PendingRow]) -> np.ndarray:
        zero = np.zeros((), self._layout.frames_dtype)
        shape = (len(rows), *self._layout.frames_shape)
        stand_in = np.lib.stride_tricks.as_strided(zero, shape, (0,) * len(shape))
        collectors, probes = [self._collector.encode()] * len(rows), [row.probe for row in rows]
        batch = unpack_rows(records, collectors, probes, stand_in, self._layout)
        priorities = np.asarray(self._initial_priorities(batch, np.stack([row.q_values for row in rows])), np.float32)
        if priorities.shape != (len(rows),):
            raise ValueError(f"initial priorities have shape {list(priorities.shape)}; allowed: [{len(rows)}]")
        return priorities


def encode_shard(
    terms: DatasetTerms,
    collector: str,
    records: np.ndarray,
    frames: list[bytes],
    probes: list[bytes],
    notes: dict[str, str] | None = None,
) -> pa.Buffer:
    """A whole shard in memory: one uncompressed record batch in an Arrow IPC file. Fills ``records["checksum"]``.

    Args:
        records: B packed rows of ``row_layout(terms).dtype``.
        frames, probes: what the two columns of varying size hold, one value a row.
        notes: metadata of the record batch, which no reader needs.
    """
    layout = row_layout(terms)
    _fill_checksums(collector, records, frames, probes, layout)
    varying = {
        "collector": [collector] * len(records),
        "observation": frames,
        "probe_core": [np.frombuffer(probe, "<f4") for probe in probes],
    }
    schema = shard_schema(terms)
    columns = [
        pa.array(varying[field.name], field.type)
        if field.name in varying
        else _fixed_column(field.type, np.ascontiguousarray(records[field.name]))
        for field in schema
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema, options=pa.ipc.IpcWriteOptions(compression=None)) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema), custom_metadata=notes or None)
    return sink.getvalue()


def waited_seconds(path: Path) -> np.ndarray | None:
    """How long each sequence of a shard had waited when the shard was made, float64 ``[rows]``; None: it does not say.

    Raises:
        OSError, pyarrow.ArrowInvalid, ValueError: no shard.
    """
    with pa.memory_map(str(path)) as source:
        notes = pa.ipc.open_file(source).get_batch_with_custom_metadata(0).custom_metadata or {}
    return np.array(json.loads(notes[WAITED_KEY.encode()])) if WAITED_KEY.encode() in notes else None


def _fill_checksums(
    collector: str, records: np.ndarray, frames: list[bytes], probes: list[bytes], layout: RowLayout
) -> None:
    identity = collector.encode()
    records["checksum"] = [
        row_checksum(EncodedRow(identity, record.tobytes(), frame, probe), layout)
        for record, frame, probe in zip(records, frames, probes, strict=True)
    ]


def _fixed_column(kind: pa.DataType, values: np.ndarray) -> pa.Array:
    data = pa.py_buffer(values)
    if pa.types.is_fixed_size_list(kind):
        items = pa.Array.from_buffers(kind.value_type, values.size, [None, data])
        return pa.Array.from_buffers(kind, len(values), [None], children=[items])
    return pa.Array.from_buffers(kind, len(values), [None, data])
