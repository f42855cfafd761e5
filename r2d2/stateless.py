"""Acting without a network (article section 3.4): by a table of greedy actions, at random where it has none."""

from collections.abc import Callable

import numpy as np

from schemas.records import ActOutput
from schemas.shard import NO_LINEAGE
from schemas.specs import CoreSpec

LookUp = Callable[[np.ndarray], np.ndarray]


class StatelessPolicy:
    """Epsilon-greedy lanes by a table; without one, or where it does not know a frame, uniformly random.

    What it says is what a policy without a network says: no Q-values, zero states, version -1, no lineage.

    Args:
        core: of the dataset; its states are written as zeros.
        num_actions: of the environment.
        epsilons: float ``[N]``, one per lane.
        generator: of exploration, the only randomness here.

    Attributes:
        lookups, hits: frames looked up in a table so far, and those it knew.
    """

    def __init__(self, core: CoreSpec, num_actions: int, epsilons: np.ndarray, generator: np.random.Generator) -> None:
        self._num_actions, self._ladder = num_actions, np.asarray(epsilons, np.float64)
        self._generator = generator
        self._look_up: LookUp | None = None
        lanes = len(epsilons)
        self._core = tuple(np.zeros((lanes, core.size), np.float32) for _ in core.parts)
        self._q_values = np.full((lanes, num_actions), np.nan, np.float32)
        self.lookups = self.hits = 0

    @property
    def epsilons(self) -> np.ndarray:
        """float64 ``[N]``: each lane's chance of a random action for a known frame, 1 while there is no table."""
        return np.ones_like(self._ladder) if self._look_up is None else self._ladder

    def set_table(self, look_up: LookUp) -> None:
        """Act by this table from the next step on.

        Args:
            look_up: frames ``[N, *shape]`` to actions int64 ``[N]``, negative where a frame is unknown.
        """
        self._look_up = look_up

    def act(
        self, observation: np.ndarray, previous_action: np.ndarray, previous_reward: np.ndarray, first: np.ndarray
    ) -> ActOutput:
        """One vector step of stacks ``[N, K, *shape]``, of which the newest frame alone counts.

        ``greedy`` is the table's own action. Every call takes the same number of random values, whatever is known.
        """
        lanes = len(self._ladder)
        explores = self._generator.random(lanes) < self.epsilons
        action = self._generator.integers(self._num_actions, size=lanes)
        greedy = np.zeros(lanes, bool)
        if self._look_up is not None:
            known = self._look_up(observation[:, -1])
            self.lookups += lanes
            self.hits += int((known >= 0).sum())
            action = np.where(explores | (known < 0), action, known)
            greedy = action == known
        return ActOutput(
            action=action, greedy=greedy, q_values=self._q_values, core=self._core, version=-1, lineage=NO_LINEAGE
        )
