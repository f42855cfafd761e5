"""The Arrow schema of a shard, version 1. docs/format.md describes every column for readers outside this project."""

import pyarrow as pa

from schemas.terms import SCHEMA_VERSION, DatasetTerms

VERSION_KEY, TERMS_KEY = b"r2d2.schema_version", b"r2d2.terms"
LINEAGE_BYTES = 16
NO_LINEAGE = bytes(LINEAGE_BYTES)
NO_ACTION = -1
PROBE_EVERY = 64  # One sequence in this many also stores the core state before row L+T-1.


def shard_schema(terms: DatasetTerms) -> pa.Schema:
    """Columns in their order, none nullable (a null bitmap would cost the zero-copy read), terms in the metadata."""
    steps, core = terms.geometry.stored_steps, terms.core

    def per_step(kind: pa.DataType) -> pa.DataType:
        return pa.list_(pa.field("item", kind, nullable=False), steps)

    state = pa.list_(pa.field("item", pa.float32(), nullable=False), core.size)
    columns: list[tuple[str, pa.DataType]] = [
        ("collector", pa.string()),
        ("sequence", pa.int64()),
        ("episode", pa.int64()),
        ("start", pa.int32()),
        ("lane", pa.int32()),
        ("first_valid", pa.int32()),
        ("num_steps", pa.int32()),
        ("num_observations", pa.int32()),
        ("ends", pa.int8()),
        ("observation", pa.large_binary()),
        ("action", per_step(pa.int32())),
        ("reward", per_step(pa.float32())),
        ("terminated", per_step(pa.uint8())),
        ("truncated", per_step(pa.uint8())),
        ("life_lost", per_step(pa.uint8())),
        ("greedy", per_step(pa.uint8())),
        ("previous_action", pa.int32()),
        ("previous_reward", pa.float32()),
        *((f"core_{part}", state) for part in core.parts),
        *((f"unroll_core_{part}", state) for part in core.parts),
        ("probe_core", pa.list_(pa.field("item", pa.float32(), nullable=False))),
        ("initial_priority", pa.float32()),
        ("version_first", pa.int64()),
        ("version_last", pa.int64()),
        ("lineage", pa.binary(LINEAGE_BYTES)),
        ("epsilon", pa.float32()),
        ("episode_return", pa.float32()),
        ("env_steps", pa.int64()),
        ("checksum", pa.uint64()),
    ]
    metadata = {VERSION_KEY: str(terms.schema_version).encode(), TERMS_KEY: terms.to_bytes()}
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in columns], metadata=metadata)


def terms_of(schema: pa.Schema) -> DatasetTerms:
    """The terms that a shard was written under.

    Raises:
        ValueError: no shard of ours, a later schema version, or columns that are not those of its terms.
    """
    metadata = schema.metadata or {}
    if VERSION_KEY not in metadata or TERMS_KEY not in metadata:
        raise ValueError("no sequence shard: its metadata names no schema version")
    version = metadata[VERSION_KEY].decode(errors="replace")
    if not version.isdigit() or int(version) > SCHEMA_VERSION:
        raise ValueError(f"schema version is {version}; allowed: at most {SCHEMA_VERSION}, update the project")
    terms = DatasetTerms.from_bytes(metadata[TERMS_KEY])
    if not schema.equals(shard_schema(terms), check_metadata=False):
        raise ValueError("its columns are not those of its schema version")
    return terms
