"""A raw dataset and its labelled twin: the same shards under the same names, with the states of a network in them.

    raw        shards/<collector>/000000/000000007-64-1280.arrow     no states, no network
    labelled   shards/<collector>/000000/000000007-64-1280.arrow     the same, labelled; pixels as they were

So the labelled dataset's own listing says which raw shards have been labelled, and nothing is labelled twice.
"""

import numpy as np
import pyarrow as pa

from pipeline.codec import row_layout
from pipeline.dataset import ShardName, shards_after
from pipeline.decode import BatchDecoder
from pipeline.lane_labels import Core, RawRows, RowLabels
from pipeline.progress import Progress, progress_name
from pipeline.scan import open_listed
from pipeline.shard_reader import Shard, ShardError
from pipeline.shard_writer import encode_shard
from pipeline.store import Store
from schemas.terms import DatasetTerms


def unlabelled_shards(raw: Store, labelled: Store, collector: str, after: int = -1) -> list[ShardName]:
    """Raw shards beyond the last labelled one and beyond the number ``after``, in their order.

    A number that is missing between two is looked for again: a listing may miss what is published while it runs, but
    never twice. Where a learner's retention has deleted all of a collector's labelled shards, its runs' records say how
    many sequences there were.
    """
    done = shards_after(labelled, collector, after)
    last = max([after, *(name.number for name in done)])
    listed = shards_after(raw, collector, last)
    if listed and listed[-1].number - last > len(listed):
        newest = listed[-1].number
        listed = [name for name in shards_after(raw, collector, last) if name.number <= newest]
    if last < 0:
        seen, before = _seen(labelled, collector), np.cumsum([name.sequences for name in listed])
        listed = [name for name, until in zip(listed, before, strict=True) if until > seen]
    return listed


def _seen(labelled: Store, collector: str) -> int:
    """The most sequences of ``collector`` that any run's replay has seen."""
    most = 0
    for run in labelled.folders("runs"):
        try:
            most = max(most, Progress.from_bytes(labelled.get(progress_name(run))).seen.get(collector, 0))
        except (OSError, ValueError):
            continue
    return most


def decode_rows(shard: Shard, decoder: BatchDecoder, rows: list[int] | None = None) -> RawRows:
    """Rows of a shard (default: all), decoded and ready to be labelled."""
    chosen = list(range(shard.num_rows)) if rows is None else rows
    batch, ok = decoder.decode([(shard, row) for row in chosen])
    columns = shard.columns
    place = {name: columns[name][chosen] for name in ("sequence", "episode", "start", "lane")}
    return RawRows(batch=batch, ok=ok, **place)


def encode_labelled(
    shard: Shard, terms: DatasetTerms, labels: list[RowLabels | None], priorities: np.ndarray
) -> pa.Buffer:
    """The labelled twin of ``shard``.

    A row without labels is one that was corrupt: it keeps its place, its pixels are empty, so that every reader finds
    it corrupt, and its number is the one that its neighbours say.

    Args:
        priorities: float32 ``[rows]`` before alpha, NaN = none.
    """
    layout, columns = row_layout(terms), shard.columns
    records = np.zeros(shard.num_rows, layout.dtype)
    for name in set(layout.dtype.names or ()) & columns.keys():
        if not name.startswith(("core_", "unroll_core_")):
            records[name] = columns[name]
    good = [row for row, label in enumerate(labels) if label is not None]
    first_sequence = int(columns["sequence"][good[0]]) - good[0] if good else int(columns["sequence"][0])
    records["sequence"] = first_sequence + np.arange(shard.num_rows)
    records["initial_priority"] = priorities
    frames, probes = [b""] * shard.num_rows, [b""] * shard.num_rows
    for row in good:
        label = labels[row]
        assert label is not None
        frames[row] = bytes(shard.frame(row))
        probes[row] = b"".join(np.ascontiguousarray(part, "<f4").tobytes() for part in label.probe_core)
        for part, core, unroll_core in zip(layout.core_parts, label.core, label.unroll_core, strict=True):
            records[f"core_{part}"][row], records[f"unroll_core_{part}"][row] = core, unroll_core
        records["version_first"][row], records["version_last"][row] = label.version_first, label.version_last
        records["lineage"][row] = np.frombuffer(label.lineage, np.uint8)
    return encode_shard(terms, shard.collector, records, frames, probes)


class LabelledRows:
    """Finds in the labelled dataset where a lane stood; for a labeller that has been started again."""

    def __init__(self, store: Store, terms: DatasetTerms, collector: str, decoder: BatchDecoder) -> None:
        self._store, self._terms, self._collector, self._decoder = store, terms, collector, decoder

    def find(self, lane: int, episode: int, start: int) -> tuple[RawRows, Core, bytes] | None:
        """The lane's newest labelled sequence, with its first state and its lineage, if it is this one."""
        for name in reversed(shards_after(self._store, self._collector, -1)):
            try:
                shard = open_listed(self._store, self._terms, name)
            except ShardError:
                return None
            columns = shard.columns
            of_lane = np.flatnonzero(columns["lane"] == lane)
            if not len(of_lane):
                continue
            row = int(of_lane[-1])
            if (int(columns["episode"][row]), int(columns["start"][row])) != (episode, start):
                return None
            rows = decode_rows(shard, self._decoder, [row])
            if not rows.ok[0]:
                return None
            return rows, tuple(part[0] for part in rows.batch.core), rows.batch.lineage[0].tobytes()
        return None
