"""What a dataset holds, in about a second however large: from the names of its shards, and a few of their rows."""

from dataclasses import dataclass

from pipeline.dataset import list_collectors, shards_after
from pipeline.scan import digest_of, open_listed
from pipeline.shard_reader import ShardError
from pipeline.store import Store
from schemas.shard import NO_LINEAGE
from schemas.terms import DatasetTerms

MOST_OPENED = 64


@dataclass(kw_only=True)
class Brief:
    """``versions`` and ``lineages`` are those of ``opened_shards`` alone: the first and the last of each collector."""

    digest: str
    collectors: int
    shards: int
    sequences: int
    env_steps: int
    bytes: int
    opened_shards: int
    unreadable_shards: int
    versions: set[int]
    lineages: set[str]


def look_briefly(store: Store, terms: DatasetTerms) -> Brief:
    """Reads no pixels and verifies nothing."""
    collectors = list_collectors(store)
    shards = {name: shards_after(store, name, -1) for name in collectors}
    names = [name for listed in shards.values() for name in listed]
    ends = list(dict.fromkeys(listed[at] for listed in shards.values() for at in (0, -1) if listed))
    step = max(1, -(-len(ends) // MOST_OPENED))
    opened = ends[::step]
    brief = Brief(
        digest=digest_of(names),
        collectors=len(collectors),
        shards=len(names),
        sequences=sum(name.sequences for name in names),
        env_steps=sum(name.env_steps for name in names),
        bytes=sum(store.size_bytes(name.path) for name in names),
        opened_shards=len(opened),
        unreadable_shards=0,
        versions=set(),
        lineages=set(),
    )
    for name in opened:
        try:
            columns = open_listed(store, terms, name).columns
        except ShardError:
            brief.unreadable_shards += 1
            continue
        brief.versions.update(columns["version_first"].tolist(), columns["version_last"].tolist())
        brief.lineages.update(lineage.tobytes().hex() for lineage in columns["lineage"])
    brief.versions.discard(-1)
    brief.lineages.discard(NO_LINEAGE.hex())
    return brief
