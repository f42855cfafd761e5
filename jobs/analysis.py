"""The facts of a dataset's sequences, read in this process or by Ray Data, and the tables made of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.dataset import ShardName
from pipeline.offline_tables import Facts
from pipeline.scan import LeftOut
from pipeline.sequence_facts import FactsPlan, in_order
from pipeline.store import Store
from schemas.terms import DatasetTerms

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """``facts`` in the order of identity; what could not be read; bytes of the shards that could."""

    facts: Facts
    shard_bytes: int
    bad_shards: dict[str, str] = field(default_factory=dict)
    corrupt_rows: set[tuple[str, int]] = field(default_factory=set)


def gather(
    store: Store,
    terms: DatasetTerms,
    shards: Sequence[ShardName],
    *,
    pixels: bool = True,
    max_bad_shards: int = 0,
    on_ray: bool = False,
    progress: Progress = lambda done, of: None,
) -> Gathered:
    """Read each of these shards of ``store`` once. The facts are the same either way.

    Raises:
        TooManyFaults: more shards than allowed cannot be read.
        ValueError: there is no sequence.
    """
    plan = FactsPlan(store.uri, terms, pixels=pixels)
    total = sum(name.sequences for name in shards)
    left_out = LeftOut(max_bad_shards)
    blocks: list[dict[str, Any]] = []
    done = 0
    if on_ray:
        from pipeline.ray_source import gather_blocks

        source = gather_blocks(plan, shards, left_out)
    else:
        source = plan.read(shards, left_out)
    for block in source:
        blocks.append(block)
        done += len(block["sequence"])
        progress(done, total)
    facts = in_order(blocks)
    if not facts:
        raise ValueError(f"dataset is {store.uri!r}; allowed: one that holds a sequence")
    readable = [name for name in shards if name.path not in left_out.bad_shards]
    return Gathered(
        facts=facts,
        shard_bytes=sum(store.size_bytes(name.path) for name in readable),
        bad_shards=left_out.bad_shards,
        corrupt_rows=left_out.corrupt_rows,
    )


def headline(tables: dict[str, dict[str, np.ndarray]]) -> dict[str, float]:
    """The few numbers to see first."""
    counts = {
        str(name): float(value)
        for table in ("coverage", "storage", "duplicates", "values")
        if table in tables
        for name, value in zip(tables[table]["name"], tables[table]["value"], strict=True)
    }
    known = tables["episodes"]["return"]
    known = known[~np.isnan(known)]
    shown = {"games_ended": float(len(known))}
    if len(known):
        shown |= {
            "return_mean": float(known.mean()),
            "return_min": float(known.min()),
            "return_max": float(known.max()),
        }
    return counts | shown
