"""A dataset's sequences as a Ray Dataset, one row each; only the columns asked for are read.

    from pipeline.ray_source import read_sequences
    sequences = read_sequences("data/pong", columns=["collector", "sequence", "reward"])
    sequences.map_batches(lambda batch: {"total": batch["reward"].sum(1)}).to_pandas()

Columns are named as in docs/format.md. ``[rows, S]`` columns arrive as tensors.
"""

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa

from pipeline.codec import RowLayout, row_is_intact, row_layout
from pipeline.dataset import ShardName, read_terms
from pipeline.decode import BatchDecoder
from pipeline.ray_blocks import tensor, to_arrays, to_block
from pipeline.ray_faults import SharedFaults
from pipeline.ray_start import start_ray
from pipeline.scan import LeftOut, list_shards, open_listed
from pipeline.sequence_facts import Faults
from pipeline.shard_columns import ColumnMapper
from pipeline.shard_reader import Shard, ShardError
from pipeline.store import open_store
from schemas.terms import DatasetTerms

if TYPE_CHECKING:
    import ray.data

PIXELS, COLLECTOR, PROBE = "observation", "collector", "probe_core"
BLOCK_BYTES = 32_000_000
# About a second of work: Ray needs a tenth of one between two tasks (make bench-offline: 1 GB reads a quarter slower).
TASK_BYTES = 4_000_000_000
# What a block costs besides its pixels is little beside so many. malloc reuses memory of up to 32 MB; larger pieces
# would cost their page faults each time.
PIXEL_BLOCK_BYTES = 16_000_000
COLLECTOR_BYTES = 20


def read_sequences(
    uri: str,
    columns: Sequence[str] | None = None,
    *,
    decode: bool = True,
    ordered: bool = False,
    max_bad_shards: int = 0,
    faults: SharedFaults | None = None,
) -> "ray.data.Dataset":
    """The sequences of the dataset ``uri``, read and decoded inside Ray's read tasks.

    Shards that cannot be read are named and counted, and fail the job past the limit. Checksums are verified where
    pixels are read; corrupt sequences are then left out, named and counted.

    Args:
        columns: which to read; None: all but the pixels and ``probe_core``.
        decode: ``observation`` as ``[K-1+S, *shape]``; else as zstd frames.
        ordered: rows come by collector and sequence number; costs some parallelism.
        max_bad_shards: how many shards may be unreadable; not looked at when ``faults`` is given.
        faults: takes the names of what was left out.

    Raises:
        ValueError: there is no dataset, or no such column.
    """
    store = open_store(uri)
    terms = read_terms(store)
    if terms is None:
        raise ValueError(f"dataset is {uri!r}; allowed: a folder with a dataset.json")
    chosen = list(columns) if columns is not None else [COLLECTOR, *(row_layout(terms).dtype.names or ())]
    _refuse_unknown(chosen, row_layout(terms))
    plan = ReadPlan(store.uri, terms, chosen, decode)
    if faults is None and max_bad_shards:
        faults = SharedFaults(max_bad_shards)
    # Without a shared count each task by itself fails at its first bad shard: no actor has to be started for that.
    return read_plan(plan, list_shards(store), faults=faults or LeftOut(), ordered=ordered)


class Plan(Protocol):
    """What read tasks do with shards. ``block_bytes``: of the blocks they make, about, but for the last ones."""

    @property
    def block_bytes(self) -> int: ...

    def estimated_bytes(self, shards: Sequence[ShardName]) -> int:
        """Of the blocks that come of these shards."""
        ...

    def work_bytes(self, shards: Sequence[ShardName]) -> int:
        """What is gone through to make them: decides how many tasks there are."""
        ...

    def read(self, names: Sequence[ShardName], faults: Faults) -> Iterator[dict[str, Any]]: ...


def read_plan(plan: Plan, shards: Sequence[ShardName], *, faults: Faults, ordered: bool = False) -> "ray.data.Dataset":
    """Whatever ``plan`` makes of ``shards``, inside Ray's read tasks, each of which has some neighbouring ones."""
    import ray.data

    start_ray()
    cpus = int(ray.cluster_resources().get("CPU", 1))
    rounds = max(2, math.ceil(plan.work_bytes(shards) / TASK_BYTES / cpus))  # Of one task a processor.
    source = _datasource_class()(plan, list(shards), faults)
    dataset = ray.data.read_datasource(source, override_num_blocks=max(1, min(rounds * cpus, len(shards))))
    dataset.context.execution_options.preserve_order = ordered
    # Blocks of at least the target size go on as they are; smaller ones would be copied together first.
    dataset.context.target_max_block_size = plan.block_bytes * 3 // 4
    return dataset


class ReadPlan:
    """What a read task does with a shard, and how much comes of it."""

    def __init__(self, root: str, terms: DatasetTerms, columns: list[str], decode: bool) -> None:
        self.root, self.terms, self.columns, self.decode = root, terms, columns, decode

    def estimated_bytes(self, shards: Sequence[ShardName]) -> int:
        """In memory, of these shards' chosen columns; frames that stay compressed count as their file."""
        layout = row_layout(self.terms)
        dtype, rows = layout.dtype, sum(name.sequences for name in shards)
        per_row = sum(dtype[column].itemsize for column in self.columns if column in (dtype.names or ()))
        per_row += COLLECTOR_BYTES * (COLLECTOR in self.columns)
        if PIXELS in self.columns and self.decode:
            per_row += self.decoded_row_bytes
        total = rows * per_row
        if PIXELS in self.columns and not self.decode:
            store = open_store(self.root)
            fixed = rows * sum(layout.widths)
            total += max(0, sum(store.size_bytes(name.path) for name in shards) - fixed)
        return total

    @property
    def block_bytes(self) -> int:
        return PIXEL_BLOCK_BYTES if PIXELS in self.columns and self.decode else BLOCK_BYTES

    def work_bytes(self, shards: Sequence[ShardName]) -> int:
        return self.estimated_bytes(shards)

    @property
    def decoded_row_bytes(self) -> int:
        layout = row_layout(self.terms)
        return int(np.prod(layout.frames_shape)) * layout.frames_dtype.itemsize

    def read(self, names: Sequence[ShardName], faults: Faults) -> Iterator[dict[str, Any]]:
        """Blocks of columns: several shards each, or several to a shard where pixels would make one too large."""
        if PIXELS in self.columns:
            return self._with_pixels(names, faults)
        return self._without_pixels(names, faults)

    def _without_pixels(self, names: Sequence[ShardName], faults: Faults) -> Iterator[dict[str, Any]]:
        mapper, shard_bytes = ColumnMapper(open_store(self.root), self.terms), self.estimated_bytes(names[:1])
        gathered: list[pa.RecordBatch] = []
        most = max(1, BLOCK_BYTES // max(1, shard_bytes))  # Shards of one dataset are much alike.
        for name in names:
            try:
                gathered.append(mapper.map(name).select(self.columns))
            except ShardError as error:
                faults.shard(name.path, str(error))
                continue
            if len(gathered) == most:
                yield self._columns_of(gathered)
                gathered = []
        if gathered:
            yield self._columns_of(gathered)

    def _columns_of(self, batches: list[pa.RecordBatch]) -> dict[str, Any]:
        """Fixed-size lists as tensors; nothing is copied."""
        table, kinds = pa.Table.from_batches(batches), row_layout(self.terms).dtype
        columns: dict[str, Any] = {}
        for column in self.columns:
            values = table[column]
            if column in (kinds.names or ()) and kinds[column].shape:
                item = pa.from_numpy_dtype(kinds[column].base)
                parts = [tensor(_items(part, item), kinds[column].shape) for part in values.chunks]
                values = pa.chunked_array(parts)
            columns[column] = values
        return columns

    def _with_pixels(self, names: Sequence[ShardName], faults: Faults) -> Iterator[dict[str, Any]]:
        store = open_store(self.root)
        with BatchDecoder(self.terms) as decoder:
            for name in names:
                try:
                    shard = open_listed(store, self.terms, name)
                except ShardError as error:
                    faults.shard(name.path, str(error))
                else:
                    yield from self._decoded(shard, name, decoder, faults)

    def _decoded(
        self, shard: Shard, name: ShardName, decoder: BatchDecoder, faults: Faults
    ) -> Iterator[dict[str, Any]]:
        at_once = max(1, PIXEL_BLOCK_BYTES // self.decoded_row_bytes) if self.decode else shard.num_rows
        views = shard.columns
        for begin in range(0, shard.num_rows, at_once):
            rows = np.arange(begin, min(begin + at_once, shard.num_rows))
            if self.decode:
                batch, ok = decoder.decode([(shard, row) for row in rows.tolist()])
                pixels = batch.observation if ok.all() else batch.observation[ok]
            else:
                ok = np.array([row_is_intact(shard.row(row), shard.layout) for row in rows.tolist()])
                pixels = [bytes(shard.frame(row)) for row in rows[ok].tolist()]
            faults.rows([(name.path, row) for row in rows[~ok].tolist()])
            yield self._block(shard, views, rows[ok], pixels)

    def _block(self, shard: Shard, views: dict[str, np.ndarray], rows: np.ndarray, pixels: Any) -> dict[str, Any]:
        block: dict[str, Any] = {}
        for column in self.columns:
            if column == PIXELS:
                block[column] = pixels
            elif column == COLLECTOR:
                block[column] = [shard.collector] * len(rows)
            elif column == PROBE:
                block[column] = [shard.probe(row).tolist() for row in rows.tolist()]
            else:
                block[column] = views[column][rows]
        return block


def _items(part: pa.Array, item: pa.DataType) -> pa.Array:
    """All values of a fixed-size column; the sixteen bytes of a lineage are such values too."""
    if pa.types.is_fixed_size_binary(part.type):
        return pa.Array.from_buffers(item, len(part) * part.type.byte_width, [None, part.buffers()[1]])
    return part.flatten()


def _refuse_unknown(columns: Sequence[str], layout: RowLayout) -> None:
    known = [COLLECTOR, *(layout.dtype.names or ()), PIXELS, PROBE]
    for column in columns:
        if column not in known:
            raise ValueError(f"columns holds {column!r}; allowed: {', '.join(known)}")


@cache
def _datasource_class():
    """Made when it is first needed, for its base class costs the import of ray."""
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class SequenceDatasource(Datasource):
        """Shards in contiguous groups, one read task each."""

        def __init__(self, plan: Plan, shards: list[ShardName], faults: Faults) -> None:
            super().__init__()
            self._plan, self._shards, self._faults = plan, shards, faults

        def get_name(self) -> str:
            return "Sequences"

        def estimate_inmemory_data_size(self) -> int:
            return self._plan.estimated_bytes(self._shards)

        def get_read_tasks(self, parallelism: int, per_task_row_limit=None, data_context=None) -> list[ReadTask]:
            tasks = []
            for group in np.array_split(np.arange(len(self._shards)), max(1, min(parallelism, len(self._shards)))):
                names = [self._shards[index] for index in group]
                metadata = BlockMetadata(
                    num_rows=sum(name.sequences for name in names),
                    size_bytes=self._plan.estimated_bytes(names),
                    input_files=tuple(name.path for name in names),
                    exec_stats=None,
                )
                read = _read_function(self._plan, names, self._faults)
                tasks.append(ReadTask(read, metadata, per_task_row_limit=per_task_row_limit))
            return tasks

    return SequenceDatasource


def _read_function(plan: Plan, names: list[ShardName], faults: Faults):
    def read():
        for columns in plan.read(names, faults):
            yield to_block(columns)

    return read


def gather_blocks(plan: Plan, shards: Sequence[ShardName], left_out: LeftOut) -> Iterator[dict[str, Any]]:
    """What ``plan`` makes of ``shards``, here, as it comes. In the end ``left_out`` knows what was not readable.

    Raises:
        TooManyFaults: past the limit of ``left_out``.
    """
    if not shards:
        return
    faults = SharedFaults(left_out.max_bad_shards)
    dataset = read_plan(plan, shards, faults=faults)
    try:
        for table in dataset.iter_batches(batch_size=None, batch_format="pyarrow"):
            yield to_arrays(table)
    finally:
        for path, reason in faults.bad_shards.items():  # Past the limit this raises in place of what Ray made of it.
            left_out.shard(path, reason)
        left_out.rows(sorted(faults.corrupt_rows))
