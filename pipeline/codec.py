"""One row between memory and disk: its pixels as a zstd frame, its fixed columns side by side, its checksum."""

import threading
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import xxhash
import zstandard

from schemas.shard import shard_schema
from schemas.terms import DatasetTerms

_of_thread = threading.local()  # zstandard objects are not thread-safe: each thread has its own.


class EncodedRow(NamedTuple):
    """One row as it rests: also what travels when a replay is remote, for nobody but the learner decodes.

    ``fixed`` is a ``RowLayout.dtype`` record: every column of constant size in schema order, packed, little-endian.
    """

    collector: bytes
    fixed: memoryview | bytes
    frame: memoryview | bytes
    probe: memoryview | bytes


@dataclass(frozen=True, eq=False)
class RowLayout:
    """Where the fixed columns of a row lie when packed, and what its frame decodes to.

    Attributes:
        dtype: structured, packed, little-endian; one field for each column of constant size, in schema order.
        core_parts: names of the core's parts.
        frames_shape, frames_dtype: of ``observation``, ``[K-1+S, *shape]``.
    """

    dtype: np.dtype
    core_parts: tuple[str, ...]
    frames_shape: tuple[int, ...]
    frames_dtype: np.dtype

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Bytes of each fixed column in one row."""
        return tuple(self.dtype[name].itemsize for name in self.dtype.names or ())

    @cached_property
    def checksum_cuts(self) -> tuple[int, int, int]:
        """Byte offsets in a packed row before which frame, probe and checksum stand in schema order."""
        fields = self.dtype.fields or {}
        return fields["action"][1], fields["initial_priority"][1], fields["checksum"][1]


def row_layout(terms: DatasetTerms) -> RowLayout:
    """The layout of rows under ``terms``; equal terms give the same object, so ``is`` tells whether rows fit."""
    return _layout_of(terms.to_bytes())


@lru_cache(maxsize=64)
def _layout_of(terms_bytes: bytes) -> RowLayout:
    terms = DatasetTerms.from_bytes(terms_bytes)
    observation = terms.env.observation
    return RowLayout(
        dtype=np.dtype([(field.name, *form) for field in shard_schema(terms) if (form := _numpy_form(field.type))]),
        core_parts=terms.core.parts,
        frames_shape=(terms.geometry.stored_frames, *observation.shape),
        frames_dtype=np.dtype(observation.dtype).newbyteorder("<"),
    )


def _numpy_form(kind: pa.DataType) -> tuple[np.dtype, tuple[int, ...]] | None:
    """Little-endian dtype and shape of one value of an Arrow type; None when values differ in size."""
    if pa.types.is_fixed_size_list(kind):
        return np.dtype(kind.value_type.to_pandas_dtype()).newbyteorder("<"), (kind.list_size,)
    if pa.types.is_fixed_size_binary(kind):
        return np.dtype(np.uint8), (kind.byte_width,)
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return np.dtype(kind.to_pandas_dtype()).newbyteorder("<"), ()
    return None


def compress(frames: np.ndarray, level: int) -> bytes:
    """One zstd frame of an array's bytes, its content size in the header."""
    compressors = _of_thread.__dict__.setdefault("compressors", {})
    if level not in compressors:
        compressors[level] = zstandard.ZstdCompressor(level=level, write_content_size=True)
    return compressors[level].compress(np.ascontiguousarray(frames))


def decode_into(frame: memoryview | bytes, out: np.ndarray) -> None:
    """Decompress ``frame`` straight into ``out`` (C-contiguous, any dtype), which it must fill exactly.

    Raises:
        ValueError: corrupt, cut short, too long, or followed by other bytes. ``out`` may be partly overwritten.
    """
    if not hasattr(_of_thread, "decompressor"):
        _of_thread.decompressor = zstandard.ZstdDecompressor()
    try:
        declared = zstandard.frame_content_size(frame)
        if declared != out.nbytes:
            raise ValueError(f"zstd frame holds {declared} bytes; allowed: {out.nbytes}")
        # With the whole frame and the whole target at hand zstd decodes in one pass, without a window of its own.
        reader = _of_thread.decompressor.stream_reader(frame)
        filled = reader.readinto(out)
        surplus = reader.read(1)
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd frame is corrupt: {error}") from error
    if filled != out.nbytes or surplus:
        raise ValueError(f"zstd frame gave {filled + len(surplus)} bytes; allowed: {out.nbytes}")


def row_checksum(row: EncodedRow, layout: RowLayout) -> int:
    """xxh3_64 over the little-endian values of all columns but the checksum, in schema order."""
    before_frame, before_probe, end = layout.checksum_cuts
    fixed = memoryview(row.fixed)
    digest = xxhash.xxh3_64(row.collector)
    digest.update(fixed[:before_frame])
    digest.update(row.frame)
    digest.update(fixed[before_frame:before_probe])
    digest.update(row.probe)
    digest.update(fixed[before_probe:end])
    return digest.intdigest()


def row_is_intact(row: EncodedRow, layout: RowLayout) -> bool:
    """The row's stored checksum is that of its contents."""
    stored = row.fixed[layout.checksum_cuts[-1] :]
    return row_checksum(row, layout) == int.from_bytes(stored, "little")
