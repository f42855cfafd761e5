"""Shards read in place: a memory map, views of every fixed column, and rows as they rest. Pixels stay compressed."""

import struct
from collections import Counter
from collections.abc import Iterable
from functools import cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.codec import EncodedRow, RowLayout, row_is_intact, row_layout
from pipeline.dataset import ShardName
from schemas.shard import terms_of
from schemas.terms import DatasetTerms

_NARROW_BYTES = 16
_BEGINNING = b"ARROW1\0\0" + b"\xff" * 4  # Of an Arrow file and its first message. Arrow itself reads from the end.


class ShardError(ValueError):
    """A file that is no readable shard of ours. The text is one line with the reason; the caller knows the name."""


class _Varying(NamedTuple):
    """A column whose values differ in size: value i is ``data[offsets[i] : offsets[i + 1]]``, counted in items."""

    offsets: memoryview
    data: memoryview
    item_bytes: int

    def value(self, row: int) -> memoryview:
        # Wild offsets of a damaged file give a wrong value inside ``data``, which the row's checksum then refuses.
        start, stop = self.offsets[row], self.offsets[row + 1]
        return self.data[start * self.item_bytes : stop * self.item_bytes]


class Shard:
    """One open shard. Everything it gives out is read-only and looks straight into the map; no descriptor stays open.

    The map lives as long as the shard or anything that it gave out. Safe to read from several threads.

    Attributes:
        terms: what the shard was written under.
        layout: of its rows; ``row_layout(terms)``.
        num_rows: sequences in it.
        collector: whose they are.
    """

    def __init__(
        self,
        terms: DatasetTerms,
        layout: RowLayout,
        *,
        num_rows: int,
        data: memoryview,
        fixed_offsets: list[int],
        collectors: _Varying,
        frames: _Varying,
        probes: _Varying,
    ) -> None:
        self.terms, self.layout, self.num_rows = terms, layout, num_rows
        self._data, self._fixed_offsets, self._frames = data, fixed_offsets, frames
        names = [bytes(collectors.value(row)) for row in range(num_rows)]
        # A flipped bit in one row's name costs that row, by its checksum, and not the shard.
        self._collector = Counter(names).most_common(1)[0][0]
        self.collector = self._collector.decode()
        self._other_names = {row: name for row, name in enumerate(names) if name != self._collector}
        self._probes = {row: probe for row in range(num_rows) if len(probe := probes.value(row))}

    @property
    def columns(self) -> dict[str, np.ndarray]:
        """Every column of constant size as a view of the map: ``[rows]``, ``[rows, S]`` or ``[rows, D]``.

        ``lineage`` is uint8 ``[rows, 16]``. Pages are read when touched; nothing is copied. The views are made anew at
        each access (tens of microseconds), for an index that keeps thousands of shards open would feel their size.
        """
        fields = self.layout.dtype.fields or {}
        return {
            name: np.ndarray((self.num_rows, *dtype.shape), dtype.base, buffer=self._data, offset=offset)
            for (name, (dtype, *_)), offset in zip(fields.items(), self._fixed_offsets, strict=True)
        }

    def frame(self, row: int) -> memoryview:
        """The row's pixels, still a zstd frame."""
        return self._frames.value(row)

    def probe(self, row: int) -> np.ndarray:
        """The row's ``probe_core``, float32, parts one after the other; empty when it has none."""
        return np.frombuffer(self._probes.get(row, b""), "<f4")

    def row(self, row: int) -> EncodedRow:
        """The whole row as it rests. Copies the fixed columns (a few KB), not the frame."""
        offsets, frames, _ = self._frames
        return EncodedRow(
            self._other_names.get(row, self._collector),
            b"".join([data[(start := at + row * width) : start + width] for data, at, width in self._pieces]),
            frames[offsets[row] : offsets[row + 1]],
            self._probes.get(row, b""),
        )

    @cached_property
    def _pieces(self) -> list[tuple[memoryview, int, int]]:
        """What a row's fixed bytes are joined from: a buffer, where its row 0 begins, the bytes of a row.

        Joining costs per piece, hardly per byte. So neighbouring narrow columns are laid side by side once, at the
        first row asked for (about 120 bytes a row); wide ones are read where they are.
        """
        pieces = []
        columns = zip(self.columns.values(), self._fixed_offsets, self.layout.widths, strict=True)
        for narrow, group in groupby(columns, key=lambda column: column[-1] <= _NARROW_BYTES):
            if narrow:
                table = np.hstack([view.reshape(self.num_rows, -1).view(np.uint8) for view, _, _ in group])
                pieces.append((table.data.cast("B"), 0, table.shape[1]))
            else:
                pieces += [(self._data, offset, width) for _, offset, width in group]
        return pieces

    def checksums_ok(self, rows: Iterable[int]) -> np.ndarray:
        """Which of ``rows`` are what their checksums say, bool. Reads their frames but does not decode them."""
        return np.array([row_is_intact(self.row(int(row)), self.layout) for row in rows], bool)

    def first_sequence(self) -> int | None:
        """The number of row 0, as the first intact row says: numbers are consecutive. None where none is intact."""
        intact = (row for row in range(self.num_rows) if row_is_intact(self.row(row), self.layout))
        row = next(intact, None)
        return None if row is None else int(self.columns["sequence"][row]) - row

    def close(self) -> None:
        """Let go of the map, which disappears with the last view given out. The shard is not to be used any more."""
        self.__dict__.clear()


def open_shard(path: str | Path, name: ShardName | None = None) -> Shard:
    """Memory-map the file ``path``; with ``name`` also hold it to what its name says.

    Reads the footer, the metadata and the collector's name; neither pixels nor checksums (those are verified when a
    row is decoded). Whatever the file holds, the outcome is a shard or one of these:

    Raises:
        ShardError: empty, torn, foreign, of a later version, compressed by Arrow, with nulls, not what its name says.
        OSError: it could not be opened at all: missing, not permitted, too many open files or maps.
    """
    with pa.memory_map(str(path)) as source:
        whole = source.read_buffer()
    if whole.size == 0:
        raise ShardError("empty file")
    try:
        shard = _parse(whole)
    except ShardError:
        raise
    except Exception as error:  # Any bytes can stand in a file, so any of pyarrow's errors can come of them.
        raise ShardError(f"torn or foreign: {_one_line(error)}") from error
    if name is not None and (shard.num_rows, shard.collector) != (name.sequences, name.collector):
        found = f"{shard.num_rows} sequences of {shard.collector}"
        raise ShardError(f"holds {found}, its name says {name.sequences} of {name.collector}")
    return shard


def _parse(whole: pa.Buffer) -> Shard:
    reader = pa.ipc.open_file(whole)
    if whole.slice(0, len(_BEGINNING)).to_pybytes() != _BEGINNING:
        raise ShardError("torn or foreign: does not begin as an Arrow file does")
    terms, layout = _format_of(reader.schema.serialize().to_pybytes())
    if reader.num_record_batches != 1:
        raise ShardError(f"{reader.num_record_batches} record batches; allowed: 1")
    batch = reader.get_batch(0)
    if batch.num_rows == 0:
        raise ShardError("no rows")
    fixed_offsets, varying = [], {}
    data = memoryview(whole).cast("B")
    for field, column in zip(reader.schema, batch.columns, strict=True):
        *before, values = column.buffers()
        if column.null_count or any(before[:1]):
            raise ShardError(f"column {field.name} has nulls")
        if field.name in layout.dtype.names:
            needed = batch.num_rows * layout.dtype[field.name].itemsize
            fixed_offsets.append(_offset_in(whole, values, needed, field.name))
        else:
            varying[field.name] = _varying_column(whole, data, column, batch.num_rows, field.name)
    return Shard(
        terms,
        layout,
        num_rows=batch.num_rows,
        data=data,
        fixed_offsets=fixed_offsets,
        collectors=varying["collector"],
        frames=varying["observation"],
        probes=varying["probe_core"],
    )


@lru_cache(maxsize=64)
def _format_of(schema_bytes: bytes) -> tuple[DatasetTerms, RowLayout]:
    try:
        terms = terms_of(pa.ipc.read_schema(pa.py_buffer(schema_bytes)))
    except ValueError as error:
        raise ShardError(_one_line(error)) from error
    return terms, row_layout(terms)


def _varying_column(whole: pa.Buffer, data: memoryview, column: pa.Array, num_rows: int, name: str) -> _Varying:
    _, offsets, *_, values = column.buffers()
    kind, code = column.type, "q" if pa.types.is_large_binary(column.type) else "i"
    offset_bytes = (num_rows + 1) * struct.calcsize(code)
    at = _offset_in(whole, offsets, offset_bytes, name)
    size = values.size if values else 0
    start = _offset_in(whole, values, size, name) if size else 0
    return _Varying(
        offsets=data[at : at + offset_bytes].cast(code),
        data=data[start : start + size],
        item_bytes=kind.value_type.byte_width if pa.types.is_list(kind) else 1,
    )


def _offset_in(whole: pa.Buffer, buffer: pa.Buffer | None, needed: int, name: str) -> int:
    """Where ``buffer`` lies in the file: only what Arrow did not have to decompress lies there at all."""
    if buffer is None or buffer.size < needed:
        raise ShardError(f"torn: column {name} is shorter than its rows")
    offset = buffer.address - whole.address
    if not 0 <= offset <= whole.size - needed:
        raise ShardError("uses Arrow buffer compression, which undoes memory-mapping; allowed: uncompressed buffers")
    return offset


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
