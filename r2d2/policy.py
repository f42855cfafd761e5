"""The actor's side: numpy in, numpy out, the core state in between."""

import numpy as np
import torch

from r2d2.exploration import epsilon_greedy
from r2d2.networks import R2D2Network, reset_state, state_to_rows, zero_state
from schemas.records import ActOutput
from schemas.shard import NO_LINEAGE
from schemas.specs import CoreSpec


class RecurrentPolicy:
    """Epsilon-greedy lanes that share one network and hold their own core states between calls.

    Until ``set_network`` it acts uniformly at random. One thread may use it at a time.

    Args:
        core: of the states to hold; a network must have the same.
        num_actions: of the environment.
        epsilons: float ``[N]``, one per lane.
        generator: of exploration, the only randomness here.
        device: of the network.
    """

    def __init__(
        self,
        core: CoreSpec,
        num_actions: int,
        epsilons: np.ndarray,
        generator: np.random.Generator,
        device: torch.device | str = "cpu",
    ) -> None:
        self._core, self._num_actions = core, num_actions
        self._lanes, self._ladder, self._generator = len(epsilons), np.asarray(epsilons, np.float64), generator
        self._device = torch.device(device)
        self._network: R2D2Network | None = None
        self._version, self._lineage = -1, NO_LINEAGE
        self._state = zero_state(core, self._lanes, self._device)

    @property
    def epsilons(self) -> np.ndarray:
        """float64 ``[N]``: each lane's chance of a random action, 1 while there is no network."""
        return self._ladder if self._network is not None else np.ones(self._lanes)

    @property
    def version(self) -> int:
        """Of the parameters in use; -1 while there are none."""
        return self._version

    def set_network(self, network: R2D2Network, version: int, lineage: bytes) -> None:
        """Act with ``network`` from the next step on; it is moved to the device and must not be changed by others.

        States are kept between versions of one lineage and zeroed when the lineage changes: they mean something only to
        the network that made them.

        Raises:
            ValueError: a network for other actions or with another core; the old one stays in use.
        """
        if network.spec.num_actions != self._num_actions:
            raise ValueError(f"the network has {network.spec.num_actions} actions, the environment {self._num_actions}")
        if network.spec.core != self._core:
            raise ValueError(f"the network's core is {network.spec.core}; allowed: {self._core}")
        if lineage != self._lineage:
            self._state = zero_state(self._core, self._lanes, self._device)
        self._network = network.to(self._device).eval().requires_grad_(False)
        self._version, self._lineage = version, lineage

    def act(
        self, observation: np.ndarray, previous_action: np.ndarray, previous_reward: np.ndarray, first: np.ndarray
    ) -> ActOutput:
        """One vector step.

        Args:
            observation: ``[N, K, *shape]`` as stored, stacked; a network with fewer frames sees the newest.
            previous_action: int ``[N]``, -1 for none.
            previous_reward: float32 ``[N]``.
            first: bool ``[N]``, the lane begins an episode: its core is zeroed before the observation is consumed.

        The arrays returned are never written to again.
        """
        if self._network is None:
            return self._act_at_random()
        with torch.inference_mode():
            stack = torch.from_numpy(observation[:, -self._network.spec.frame_stack :]).to(self._device)
            action = torch.from_numpy(previous_action).to(self._device)
            reward = torch.from_numpy(previous_reward).to(self._device)
            starts = torch.from_numpy(np.asarray(first, np.bool_)).to(self._device)
            before = reset_state(self._state, starts) if first.any() else self._state
            nobody = torch.zeros_like(starts)
            q, self._state = self._network.step(stack, action, reward, before, nobody)
            q_values = q.float().cpu().numpy()
            core = tuple(part.cpu().numpy() for part in state_to_rows(before))
        action, greedy = epsilon_greedy(q_values, self._ladder, self._generator)
        return ActOutput(
            action=action, greedy=greedy, q_values=q_values, core=core, version=self._version, lineage=self._lineage
        )

    def _act_at_random(self) -> ActOutput:
        return ActOutput(
            action=self._generator.integers(self._num_actions, size=self._lanes),
            greedy=np.zeros(self._lanes, np.bool_),
            q_values=np.full((self._lanes, self._num_actions), np.nan, np.float32),
            core=tuple(np.zeros((self._lanes, self._core.size), np.float32) for _ in self._core.parts),
            version=-1,
            lineage=NO_LINEAGE,
        )
