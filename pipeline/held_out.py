"""Episodes kept apart: never drawn, so that they can judge what was learned from the others."""

import numpy as np
import xxhash

from pipeline.row_faults import owned_steps
from pipeline.scan import LeftOut, list_shards, open_listed
from pipeline.shard_reader import Shard, ShardError
from pipeline.store import Store
from schemas.terms import DatasetTerms


def held_out_rows(collector: str, episode: np.ndarray, share: float) -> np.ndarray:
    """Which rows of a shard belong to episodes kept apart: bool ``[rows]`` from ``episode`` int64 ``[rows]``.

    A hash of the episode's identity decides, so every job that takes the same ``share`` (0 to 1) keeps the same ones
    apart, and a larger share keeps those of a smaller one too.
    """
    numbers, index = np.unique(episode, return_inverse=True)
    chances = [xxhash.xxh3_64_intdigest(f"{collector}/{number}".encode()) / 2**64 for number in numbers.tolist()]
    return np.array([chance < share for chance in chances], bool)[index]


class HeldOutSequences:
    """Where the sequences of the episodes kept apart lie, and how many others there are.

    Attributes:
        rows: (shard, row) of each that is readable, in the order of identity.
        episodes: (collector, episode, start) of each.
        drawn_sequences, drawn_steps: what is left to draw, and the env steps it owns.
    """

    def __init__(self, store: Store, terms: DatasetTerms, share: float) -> None:
        self.rows: list[tuple[Shard, int]] = []
        self.episodes: list[tuple[str, int, int]] = []
        self.drawn_sequences = self.drawn_steps = 0
        names = list_shards(store)
        left_out = LeftOut(len(names))
        for name in names:
            try:
                shard = open_listed(store, terms, name)
            except ShardError as error:
                left_out.shard(name.path, str(error))
                continue
            columns = shard.columns
            apart = held_out_rows(name.collector, columns["episode"], share)
            self.drawn_sequences += int((~apart).sum())
            self.drawn_steps += int(owned_steps(terms, columns)[~apart].sum())
            for row in np.flatnonzero(apart).tolist():
                self.rows.append((shard, row))
                self.episodes.append((name.collector, int(columns["episode"][row]), int(columns["start"][row])))
