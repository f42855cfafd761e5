"""Shards read in place: a memory map, views of every fixed column, and rows as they rest. Pixels stay compressed."""

from collections.abc import Iterable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from pipeline.codec import EncodedRow, RowLayout, row_is_intact, row_layout
from pipeline.dataset import ShardName
from schemas.shard import terms_of
from schemas.terms import DatasetTerms


class ShardError(ValueError):
    """A file that is no readable shard of ours. The text is one line with the reason; the caller knows the name."""


class _Varying(NamedTuple):
    """A column whose values differ in size: ``offsets`` ``[rows + 1]`` into ``data``, counted in items."""

    offsets: np.ndarray
    data: memoryview
    item_bytes: int

    def value(self, row: int) -> memoryview:
        # Wild offsets of a damaged file give a wrong value inside ``data``, which the row's checksum then refuses.
        start, stop = int(self.offsets[row]) * self.item_bytes, int(self.offsets[row + 1]) * self.item_bytes
        return self.data[start:stop]


class Shard:
    """One open shard. Everything it gives out is read-only and looks straight into the map; no descriptor stays open.

    The map lives as long as the shard or anything that it gave out. Safe to read from several threads.

    Attributes:
        terms: what the shard was written under.
        layout: of its rows, ``row_layout(terms)``.
        num_rows: sequences in it.
        collector: whose they are.
    """

    def __init__(
        self,
        terms: DatasetTerms,
        data: memoryview,
        num_rows: int,
        fixed_offsets: list[int],
        varying: dict[str, _Varying],
        collector: str,
    ) -> None:
        self.terms, self.layout, self.num_rows, self.collector = terms, row_layout(terms), num_rows, collector
        self._data, self._fixed_offsets, self._varying = data, fixed_offsets, varying

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        """Every column of constant size as a view of the map: ``[rows]``, ``[rows, S]`` or ``[rows, D]``.

        ``lineage`` is uint8 ``[rows, 16]``. Pages are read when touched; nothing is copied.
        """
        fields = self.layout.dtype.fields or {}
        return {
            name: np.ndarray((self.num_rows, *dtype.shape), dtype.base, buffer=self._data, offset=offset)
            for (name, (dtype, *_)), offset in zip(fields.items(), self._fixed_offsets, strict=True)
        }

    def frame(self, row: int) -> memoryview:
        """The row's pixels, still a zstd frame."""
        return self._varying["observation"].value(row)

    def probe(self, row: int) -> np.ndarray:
        """The row's ``probe_core``, float32, parts one after the other; empty when it has none."""
        return np.frombuffer(self._varying["probe_core"].value(row), "<f4")

    def row(self, row: int) -> EncodedRow:
        """The whole row as it rests. Copies the fixed columns (a few KB), not the frame."""
        data = self._data
        fixed = b"".join(
            [data[at + row * width : at + row * width + width] for at, width in zip(self._fixed_offsets, self._widths)]
        )
        varying = self._varying
        return EncodedRow(
            bytes(varying["collector"].value(row)), fixed, self.frame(row), varying["probe_core"].value(row)
        )

    def checksums_ok(self, rows: Iterable[int]) -> np.ndarray:
        """Which of ``rows`` are what their checksums say, bool. Reads their frames but does not decode them."""
        return np.array([row_is_intact(self.row(int(row)), self.layout) for row in rows], bool)

    def close(self) -> None:
        """Let go of the map; it disappears with the last view that was given out. The shard gives out no more."""
        self.__dict__.pop("columns", None)
        self._data, self._varying = memoryview(b""), {}


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
