"""CartPole without its velocities: ``pipeline.environments.masked_cartpole:MaskedCartPole-v1``.

One observation shows where cart and pole are, not where they are going, so a policy without memory cannot balance for
long. Everything else is ``CartPole-v1``: two actions, reward 1 a step, truncated after 500 steps.
"""

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleEnv
from gymnasium.spaces import Box

POSITIONS = [0, 2]


class MaskedCartPole(gymnasium.ObservationWrapper):
    """Observes float32 ``[2]``: cart position and pole angle, as shares of where an episode ends (-1 to 1)."""

    def __init__(self, **arguments) -> None:
        game = CartPoleEnv(**arguments)
        super().__init__(game)
        self._limits = np.array([game.x_threshold, game.theta_threshold_radians], np.float32)
        self.observation_space = Box(-2.0, 2.0, (2,), np.float32)  # The last observation lies beyond the limit.

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[POSITIONS] / self._limits


gymnasium.register(
    id="MaskedCartPole-v1",
    entry_point="pipeline.environments.masked_cartpole:MaskedCartPole",
    max_episode_steps=500,
)
