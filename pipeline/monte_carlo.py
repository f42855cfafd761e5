"""What really followed each step: discounted returns of whole stored episodes."""

from collections.abc import Collection, Sequence

import numpy as np

from pipeline.dataset import ShardName
from pipeline.row_faults import owned_steps
from pipeline.scan import LeftOut, list_shards, open_listed
from pipeline.shard_reader import ShardError
from pipeline.store import Store
from schemas.geometry import CONTINUES, LIFE_LOST, TERMINATED
from schemas.terms import DatasetTerms

EpisodeKey = tuple[str, int]


def discounted_returns(
    store: Store,
    terms: DatasetTerms,
    gamma: float,
    left_out: LeftOut,
    *,
    of: Collection[EpisodeKey] | None = None,
    shards: Sequence[ShardName] | None = None,
) -> dict[EpisodeKey, np.ndarray]:
    """Per (collector, episode) the return from each step on, float64 ``[E]``, of episodes that are known to their end.

    Only those that terminated: what follows a truncation or a cut is unknown. Where a lost life zeroes the discount, as
    in the learner's targets, nothing that comes after it counts. A corrupt row is a missing part. Reads and verifies
    the rows of the episodes ``of`` in ``shards`` (default: all) and holds 9 bytes a step.
    """
    rewards: dict[EpisodeKey, list[np.ndarray]] = {}
    lost: dict[EpisodeKey, list[np.ndarray]] = {}
    known: dict[EpisodeKey, int] = {}
    for name in list_shards(store) if shards is None else shards:
        try:
            shard = open_listed(store, terms, name)
        except ShardError as error:
            left_out.shard(name.path, str(error))
            continue
        columns, first = shard.columns, terms.geometry.burn_in
        owned = owned_steps(terms, columns).tolist()
        reaches = columns["first_valid"] + columns["num_steps"] - first
        is_last = ((columns["ends"] != CONTINUES) & (reaches <= terms.geometry.unroll)).tolist()
        episodes, ends = columns["episode"].tolist(), columns["ends"].tolist()
        for row, start in enumerate(columns["start"].tolist()):
            key = name.collector, episodes[row]
            if of is not None and key not in of:
                continue
            if not shard.checksums_ok([row])[0]:
                left_out.rows([(name.path, row)])
                continue
            parts = rewards.setdefault(key, [])
            if start != len(parts) * terms.geometry.stride:
                known[key] = -1  # A part is missing.
            own = slice(first, first + owned[row])
            parts.append(columns["reward"][row, own].astype(np.float64))
            lost.setdefault(key, []).append((columns["life_lost"][row, own] != 0) & (terms.env.life_loss == "roll"))
            if is_last[row] and ends[row] in (TERMINATED, LIFE_LOST):
                known.setdefault(key, 1)
    return {
        key: returns(np.concatenate(rewards[key]), gamma * ~np.concatenate(lost[key]))
        for key, is_known in known.items()
        if is_known > 0
    }


def returns(reward: np.ndarray, discount: np.ndarray) -> np.ndarray:
    """``G_t = r_t + discount_t G_{t+1}`` of one episode, float64 ``[E]``."""
    out, following = np.empty(len(reward), np.float64), 0.0
    for t in range(len(reward) - 1, -1, -1):
        following = out[t] = reward[t] + discount[t] * following
    return out
