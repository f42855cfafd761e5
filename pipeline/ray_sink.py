"""A Ray Dataset of whole sequences written as a dataset of ours: it appears at once, when all of it is there.

Write tasks may run twice or fail: what they write has names that nobody lists, and only what Ray reports as done gets
its final name.
"""

import secrets
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pipeline.codec import row_layout
from pipeline.dataset import ShardName, agree_on_terms, write_provenance
from pipeline.shard_writer import encode_shard
from pipeline.store import Store, open_store
from schemas.terms import DatasetTerms

if TYPE_CHECKING:
    import ray.data

INCOMING = "_incoming"


def write_sequences(
    dataset: "ray.data.Dataset",
    uri: str,
    terms: DatasetTerms,
    *,
    provenance: dict[str, Any] | None = None,
    sequences_per_shard: int = 64,
) -> None:
    """Write ``dataset``, whose rows have every column of ``terms`` and zstd frames (``decode=False``), into ``uri``.

    Rows keep their identity (collector, sequence number), so each must occur once; what was filtered out is a gap to
    jobs/doctor.py. All shards are durable, and then the dataset exists, when the call returns.

    Raises:
        ValueError: ``uri`` holds something already.
    """
    store = open_store(uri, create=True)
    if store.folders() or store.files():
        raise ValueError(f"out is {uri!r}; allowed: a new or an empty folder")
    dataset.write_datasink(_datasink_class()(store.uri, terms, provenance or {}, sequences_per_shard))


class Piece(NamedTuple):
    """One shard that waits for its final name."""

    collector: str
    first_sequence: int
    rows: int
    env_steps: int
    incoming: str


class PieceWriter:
    """Cuts blocks into runs of consecutive sequences of one collector and stores each as a shard to be."""

    def __init__(self, uri: str, terms: DatasetTerms, prefix: str, sequences_per_shard: int) -> None:
        self._store, self._terms, self._prefix, self._most = open_store(uri), terms, prefix, sequences_per_shard

    def write(self, columns: dict[str, Any]) -> list[Piece]:
        """Durable when the call returns."""
        collectors, numbers = np.asarray(columns["collector"], object), np.asarray(columns["sequence"], np.int64)
        order = np.lexsort((numbers, collectors.astype(str)))
        pieces, begin = [], 0
        for at in range(1, len(order) + 1):
            if at < len(order):
                last, this = order[at - 1], order[at]
                goes_on = collectors[this] == collectors[last] and numbers[this] == numbers[last] + 1
                if goes_on and at - begin < self._most:
                    continue
            pieces.append(self._put(columns, order[begin:at]))
            begin = at
        return pieces

    def _put(self, columns: dict[str, Any], rows: np.ndarray) -> Piece:
        layout = row_layout(self._terms)
        records = np.zeros(len(rows), layout.dtype)
        for column in layout.dtype.names or ():
            records[column] = np.asarray(columns[column])[rows]
        frames = [columns["observation"][row] for row in rows.tolist()]
        probes = [np.asarray(columns["probe_core"][row], "<f4").tobytes() for row in rows.tolist()]
        collector = str(columns["collector"][int(rows[0])])
        name = f"{INCOMING}/{self._prefix}-{secrets.token_hex(8)}.arrow"
        self._store.put(name, encode_shard(self._terms, collector, records, frames, probes))
        owned = self._terms.geometry.owned_steps(records["first_valid"], records["num_steps"], records["ends"])
        return Piece(collector, int(records["sequence"][0]), len(rows), int(owned.sum()), name)


def publish(store: Store, terms: DatasetTerms, pieces: Iterable[Piece], provenance: dict[str, Any]) -> None:
    """Give pieces their final names, in the order of their sequences; the terms, and with them the dataset, come last.

    Raises:
        ValueError: a sequence occurs twice; nothing is published.
    """
    ordered = sorted(pieces)
    for before, after in pairwise(ordered):
        if before.collector == after.collector and before.first_sequence + before.rows > after.first_sequence:
            raise ValueError(f"sequence {after.first_sequence} of {after.collector} occurs twice; allowed: once")
    numbers: dict[str, int] = {}
    for piece in ordered:
        if piece.collector not in numbers:
            write_provenance(store, piece.collector, provenance)
        number = numbers[piece.collector] = numbers.get(piece.collector, -1) + 1
        store.put(ShardName(piece.collector, number, piece.rows, piece.env_steps).path, store.get(piece.incoming))
    agree_on_terms(store, terms)


@cache
def _datasink_class():
    """Made when it is first needed, for its base class costs the import of ray."""
    from ray.data import Datasink

    class SequenceDatasink(Datasink):
        """``write`` in tasks, ``on_write_complete`` once in the process that asked for it."""

        def __init__(self, uri: str, terms: DatasetTerms, provenance: dict[str, Any], per_shard: int) -> None:
            self._uri, self._terms, self._provenance, self._per_shard = uri, terms, provenance, per_shard
            self._prefix = secrets.token_hex(4)

        def get_name(self) -> str:
            return "Sequences"

        def write(self, blocks: Iterable[Any], ctx: Any) -> list[Piece]:
            from pipeline.ray_blocks import to_arrays

            writer = PieceWriter(self._uri, self._terms, self._prefix, self._per_shard)
            return [piece for block in blocks for piece in writer.write(to_arrays(block))]

        def on_write_complete(self, write_result: Any) -> None:
            pieces = [piece for pieces in write_result.write_returns for piece in pieces]
            try:
                publish(open_store(self._uri), self._terms, pieces, self._provenance)
            finally:
                self._clean()

        def on_write_failed(self, error: Exception) -> None:
            self._clean()

        def _clean(self) -> None:
            store = open_store(self._uri)
            for name in store.files(INCOMING):
                if name.startswith(self._prefix):
                    store.delete(f"{INCOMING}/{name}")

    return SequenceDatasink
