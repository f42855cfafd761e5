"""One row of numbers per sequence, over the steps it owns: small enough to hold for a whole dataset.

Owned steps tile each episode, so sums over sequences count no overlap twice. A row depends on its sequence alone:
whatever read it, in whatever blocks, the rows sorted by identity are the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash

from pipeline.codec import row_is_intact
from pipeline.dataset import ShardName
from pipeline.decode import BatchDecoder
from pipeline.row_faults import owned_steps
from pipeline.scan import open_listed
from pipeline.shard_reader import Shard, ShardError
from pipeline.store import open_store
from schemas.geometry import CONTINUES
from schemas.terms import DatasetTerms

COPIED = (
    "sequence",
    "episode",
    "start",
    "lane",
    "num_steps",
    "ends",
    "version_first",
    "version_last",
    "epsilon",
    "episode_return",
    "env_steps",
    "initial_priority",
)
BLOCK_BYTES = 8_000_000
ROW_BYTES = 600  # Of one row of facts, about; hashes of pixels apart.
_DECODED_AT_ONCE = 16


class Faults(Protocol):
    """Where what cannot be read is noted: ``LeftOut`` or ``SharedFaults``."""

    def shard(self, path: str, reason: str) -> None: ...

    def rows(self, rows: Iterable[tuple[str, int]]) -> None: ...


class FactsPlan:
    """Reads shards as facts: blocks of columns, arrays ``[rows]`` or ``[rows, A]`` and lists.

    Columns: ``collector``; those of ``COPIED``; ``owned`` steps; ``is_last`` of its episode; ``lineage`` (hexadecimal);
    over owned steps ``reward_sum`` (float64), ``action_counts`` ``[rows, A]``, ``greedy_steps``, and lists
    ``reward_values`` with their ``reward_counts``; ``frame_bytes`` compressed; and, with ``pixels``, the list
    ``frame_hashes`` of every owned observation (xxh3_64).
    """

    def __init__(self, root: str, terms: DatasetTerms, *, pixels: bool = True) -> None:
        self.root, self.terms, self.pixels = root, terms, pixels

    def estimated_bytes(self, shards: Sequence[ShardName]) -> int:
        sequences, steps = sum(name.sequences for name in shards), sum(name.env_steps for name in shards)
        return sequences * (ROW_BYTES + 8 * self.terms.env.num_actions) + 8 * steps * self.pixels

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES

    def work_bytes(self, shards: Sequence[ShardName]) -> int:
        """What a task goes through to make that."""
        per_row = int(np.prod(self.terms.env.observation.shape)) * self.terms.geometry.stored_frames
        return sum(name.sequences for name in shards) * (per_row if self.pixels else ROW_BYTES)

    def read(self, names: Sequence[ShardName], faults: Faults) -> Iterator[dict[str, Any]]:
        """One block for each shard, without its corrupt rows."""
        store = open_store(self.root)
        with BatchDecoder(self.terms) as decoder:
            for name in names:
                try:
                    shard = open_listed(store, self.terms, name)
                except ShardError as error:
                    faults.shard(name.path, str(error))
                    continue
                hashes, intact = self._hashes(shard, decoder)
                faults.rows([(name.path, int(row)) for row in np.flatnonzero(~intact)])
                if intact.any():
                    yield self._facts(shard, np.flatnonzero(intact), hashes)

    def _hashes(self, shard: Shard, decoder: BatchDecoder) -> tuple[list[np.ndarray], np.ndarray]:
        """Per row the hashes of its owned observations, and which rows are intact, bool ``[rows]``."""
        if not self.pixels:
            return [], np.array([row_is_intact(shard.row(row), shard.layout) for row in range(shard.num_rows)])
        geometry = self.terms.geometry
        first, owned = geometry.frame_stack - 1 + geometry.burn_in, owned_steps(self.terms, shard.columns)
        hashes, intact = [], np.zeros(shard.num_rows, bool)
        for begin in range(0, shard.num_rows, _DECODED_AT_ONCE):
            rows = range(begin, min(begin + _DECODED_AT_ONCE, shard.num_rows))
            batch, intact[rows.start : rows.stop] = decoder.decode([(shard, row) for row in rows])
            for row, frames in zip(rows, batch.observation, strict=True):
                own = frames[first : first + owned[row]] if intact[row] else frames[:0]
                hashes.append(np.array([xxhash.xxh3_64_intdigest(frame) for frame in own], np.uint64))
        return hashes, intact

    def _facts(self, shard: Shard, rows: np.ndarray, hashes: list[np.ndarray]) -> dict[str, Any]:
        columns = {name: view[rows] for name, view in shard.columns.items()}
        geometry, owned = self.terms.geometry, owned_steps(self.terms, columns)
        steps = np.arange(geometry.stored_steps) - geometry.burn_in
        own = (steps >= 0) & (steps < owned[:, None])  # [rows, S]
        reaches = columns["first_valid"] + columns["num_steps"] - geometry.burn_in
        rewards = [np.unique(columns["reward"][index, own[index]], return_counts=True) for index in range(len(rows))]
        facts = {
            "collector": [shard.collector] * len(rows),
            **{name: columns[name] for name in COPIED},
            "owned": owned,
            "is_last": (columns["ends"] != CONTINUES) & (reaches <= geometry.unroll),
            "lineage": [lineage.tobytes().hex() for lineage in columns["lineage"]],
            "reward_sum": np.where(own, columns["reward"], 0).sum(1, dtype=np.float64),
            "action_counts": np.stack(
                [(own & (columns["action"] == action)).sum(1) for action in range(self.terms.env.num_actions)], 1
            ),
            "greedy_steps": (own & (columns["greedy"] != 0)).sum(1),
            "reward_values": [values.tolist() for values, _ in rewards],
            "reward_counts": [counts.tolist() for _, counts in rewards],
            "frame_bytes": np.array([len(shard.frame(int(row))) for row in rows], np.int64),
        }
        if self.pixels:
            facts["frame_hashes"] = [hashes[row] for row in rows]
        return facts


def in_order(blocks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """All blocks as one, rows by collector and sequence number: the same whoever read them."""
    blocks = [block for block in blocks if len(block["sequence"])]
    if not blocks:
        return {}
    joined: dict[str, Any] = {}
    for name in blocks[0]:
        parts = [block[name] for block in blocks]
        whole = isinstance(parts[0], np.ndarray)
        joined[name] = np.concatenate(parts) if whole else [value for part in parts for value in part]
    joined["collector"] = np.array(joined["collector"])
    joined["lineage"] = np.array(joined["lineage"])
    order = np.lexsort((joined["sequence"], joined["collector"]))
    return {
        name: values[order] if isinstance(values, np.ndarray) else [values[index] for index in order]
        for name, values in joined.items()
    }
