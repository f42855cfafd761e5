"""A recorded dataset without what a network said of it: what collectors without a network write."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from pipeline.codec import row_layout
from pipeline.dataset import agree_on_terms, read_terms, write_provenance
from pipeline.scan import list_shards
from pipeline.shard_reader import open_shard
from pipeline.shard_writer import encode_shard
from pipeline.store import LocalStore
from schemas.specs import CoreSpec


def raw_twin(store: LocalStore, root: Path) -> LocalStore:
    """The same sequences in the same shards, without core, states, priorities, versions and lineage."""
    root.mkdir()
    raw, terms = LocalStore(root), read_terms(store)
    terms = replace(terms, core=CoreSpec(kind="none"))
    agree_on_terms(raw, terms)
    for name in list_shards(store):
        write_provenance(raw, name.collector, {"started_unix_seconds": 1.79e9})
        shard = open_shard(store.map_path(name.path), name)
        records = np.zeros(shard.num_rows, row_layout(terms).dtype)
        for column in records.dtype.names:
            records[column] = shard.columns[column]
        for column in ("version_first", "version_last"):
            records[column] = -1
        records["lineage"], records["initial_priority"] = 0, np.nan
        frames = [bytes(shard.frame(row)) for row in range(shard.num_rows)]
        raw.put(name.path, encode_shard(terms, name.collector, records, frames, [b""] * len(frames)))
    return raw
