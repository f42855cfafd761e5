"""A shard's columns as pyarrow maps them, for readers of whole columns: a few times as fast to open as a ``Shard``."""

import pyarrow as pa

from pipeline.dataset import ShardName
from pipeline.scan import open_listed
from pipeline.shard_reader import ShardError
from pipeline.store import Store
from schemas.shard import shard_schema
from schemas.terms import DatasetTerms

WITNESS = "env_steps"  # A narrow column whose place in the file tells whether Arrow had to decompress it.


class ColumnMapper:
    """Maps the shards of one dataset. What looks unusual is opened again as a ``Shard``, which says what is wrong."""

    def __init__(self, store: Store, terms: DatasetTerms) -> None:
        self._store, self._terms, self._schema = store, terms, shard_schema(terms)

    def map(self, name: ShardName) -> pa.RecordBatch:
        """All columns, uncopied; they keep the map alive. No checksum is looked at.

        Raises:
            ShardError: as ``open_listed``.
        """
        try:
            batch, is_usual = self._mapped(name)
        except (pa.ArrowException, OSError, KeyError, IndexError, ValueError) as error:
            open_listed(self._store, self._terms, name)
            raise ShardError(f"torn or foreign: {' '.join(str(error).split())}") from error
        if not is_usual:
            open_listed(self._store, self._terms, name)
        return batch

    def _mapped(self, name: ShardName) -> tuple[pa.RecordBatch, bool]:
        with pa.memory_map(str(self._store.map_path(name.path))) as source:
            whole = source.read_buffer()
        reader = pa.ipc.open_file(whole)
        batch = reader.get_batch(0)
        values = batch.column(WITNESS).buffers()[-1]
        is_inside = 0 <= values.address - whole.address <= whole.size - values.size
        holds = batch.num_rows, batch.column("collector")[0].as_py()
        is_named = reader.num_record_batches == 1 and holds == (name.sequences, name.collector)
        return batch, is_named and is_inside and reader.schema.equals(self._schema, check_metadata=True)
