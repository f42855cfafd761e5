"""Acting with a memory of k steps, to see how much of it a trained network uses (Kapturowski et al. 2019, figure 5)."""

import numpy as np
import torch

from r2d2.exploration import epsilon_greedy
from r2d2.networks import R2D2Network, reset_state, zero_state
from schemas.records import ActOutput
from schemas.shard import NO_LINEAGE
from schemas.specs import CoreSpec


class LimitedMemoryPolicy:
    """Epsilon-greedy lanes whose core state is rebuilt at every step from zero and the last k observations.

    k states per lane run side by side, one step apart: each call zeroes the one that is k steps old, lets all consume
    the observation, and acts with the oldest. That costs what unrolling k steps costs, but in one batched call, and
    every observation is encoded once.

        call          0    1    2    3    4    5          k = 3
        state 0       |====acts at 2  |====acts at 5
        state 1            |====acts at 3  |===
        state 2                 |====acts at 4  |=

    k = 1 is a network without memory. An episode's first k steps see all of it, as with unlimited memory.

    Args:
        network: moved to the device; must not be changed by others.
        epsilons: float ``[N]``, one per lane.
        generator: of exploration, the only randomness here.

    Raises:
        ValueError: ``memory_steps`` below 1, or a network without recurrence, which has no memory to limit.
    """

    def __init__(
        self,
        network: R2D2Network,
        memory_steps: int,
        epsilons: np.ndarray,
        generator: np.random.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        if memory_steps < 1:
            raise ValueError(f"memory_steps is {memory_steps}; allowed: 1 or more")
        if network.spec.core.kind == "none":
            raise ValueError(f"memory_steps is {memory_steps}; allowed: only for a network with a recurrent core")
        self.epsilons = np.asarray(epsilons, np.float64)
        self._network = network.to(device).eval().requires_grad_(False)
        self._core: CoreSpec = network.spec.core
        self._steps, self._lanes, self._generator, self._device = memory_steps, len(epsilons), generator, device
        self._state = zero_state(self._core, memory_steps * self._lanes, device)  # Lane-minor: state j of lane i.
        self._turn = 0

    def act(
        self, observation: np.ndarray, previous_action: np.ndarray, previous_reward: np.ndarray, first: np.ndarray
    ) -> ActOutput:
        """One vector step; arguments as of ``RecurrentPolicy.act``. The ``core`` returned is zeros: none is kept."""
        k, lanes = self._steps, self._lanes
        age_out = np.repeat(np.arange(k) == self._turn, lanes)
        starts = torch.from_numpy(age_out | np.tile(np.asarray(first, np.bool_), k)).to(self._device)
        self._turn = (self._turn + 1) % k
        oldest = slice(self._turn * lanes, (self._turn + 1) * lanes)
        with torch.inference_mode():
            stack = torch.from_numpy(observation[:, -self._network.spec.frame_stack :]).to(self._device)
            features = self._network.encode(stack).repeat(k, 1).unsqueeze(0)
            action = torch.from_numpy(np.asarray(previous_action, np.int64)).to(self._device).repeat(k).unsqueeze(0)
            reward = torch.from_numpy(np.asarray(previous_reward, np.float32)).to(self._device).repeat(k).unsqueeze(0)
            hidden, self._state = self._network.recur(features, action, reward, reset_state(self._state, starts))
            q_values = self._network.heads(hidden[0, oldest]).float().cpu().numpy()
        chosen, greedy = epsilon_greedy(q_values, self.epsilons, self._generator)
        nothing = tuple(np.zeros((lanes, self._core.size), np.float32) for _ in self._core.parts)
        return ActOutput(action=chosen, greedy=greedy, q_values=q_values, core=nothing, version=-1, lineage=NO_LINEAGE)
