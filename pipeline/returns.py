"""The returns of a dataset's episodes as they are published, and how many env steps it has come to."""

import logging
from dataclasses import dataclass, field

import numpy as np

from pipeline.dataset import ShardName, list_collectors, shards_after
from pipeline.scan import open_listed
from pipeline.shard_reader import ShardError
from pipeline.store import Store, StoreAway
from schemas.geometry import LIFE_LOST, TERMINATED, TRUNCATED
from schemas.terms import DatasetTerms

LOW_EPSILON_SHARE = 0.25
_log = logging.getLogger(__name__)


@dataclass
class _Followed:
    """One collector: its last shard looked at, its env steps by then, the last episode counted of each lane."""

    number: int
    env_steps: int = 0
    counted: dict[int, int] = field(default_factory=dict)


class ReturnsFollower:
    """Counts the episodes that end in shards published after it was made; reads three columns of each, no pixels.

    Attributes:
        env_steps: of the whole dataset, from the collectors' own counts: shards deleted since then are in it.
        episodes: counted so far.
    """

    def __init__(self, store: Store, terms: DatasetTerms) -> None:
        self._store, self._terms = store, terms
        self._collectors: dict[str, _Followed] = {}
        self._is_first_look = True
        self._returns: list[tuple[float, float]] = []
        self.episodes = 0

    @property
    def env_steps(self) -> int:
        return sum(followed.env_steps for followed in self._collectors.values())

    def poll(self) -> None:
        """Take in what has been published since the last call."""
        try:
            self._poll()
        except StoreAway:  # What was not seen is found by the next look.
            return

    def _poll(self) -> None:
        for collector in list_collectors(self._store):
            followed = self._collectors.setdefault(collector, _Followed(number=-1))
            names = shards_after(self._store, collector, followed.number)
            for name in names[-1:] if self._is_first_look else names:
                self._read(name, followed)
        self._is_first_look = False

    def take(self) -> dict[str, float]:
        """Means over the episodes since the last ``take``, none without any: of all, and of the least exploring.

        The latter are those whose lanes' epsilon is among the lowest quarter of these episodes'.
        """
        if not self._returns:
            return {}
        returns, epsilons = np.array(self._returns).T
        self._returns = []
        low = epsilons <= np.quantile(epsilons, LOW_EPSILON_SHARE)
        return {"return_mean": float(returns.mean()), "return_low_epsilon_mean": float(returns[low].mean())}

    def _read(self, name: ShardName, followed: _Followed) -> None:
        followed.number = name.number
        try:
            shard = open_listed(self._store, self._terms, name)
        except ShardError as error:
            _log.debug("%s: %s", name.path, error)  # The replay names it.
            return
        columns = shard.columns
        followed.env_steps = max(followed.env_steps, int(columns["env_steps"].max(initial=0)))
        if not self._is_first_look:
            self._count(columns, followed)
        shard.close()

    def _count(self, columns: dict[str, np.ndarray], followed: _Followed) -> None:
        """An end lies in the stored rows of several sequences: each episode counts once."""
        has_ended = np.isin(columns["ends"], (TERMINATED, TRUNCATED, LIFE_LOST)) & np.isfinite(
            columns["episode_return"]
        )
        for row in np.flatnonzero(has_ended):
            lane, episode = int(columns["lane"][row]), int(columns["episode"][row])
            if followed.counted.get(lane, -1) < episode:
                followed.counted[lane] = episode
                self._returns.append((float(columns["episode_return"][row]), float(columns["epsilon"][row])))
                self.episodes += 1
