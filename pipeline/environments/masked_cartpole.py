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
    """The observation is float32 ``[2]``: cart position (metres) and pole angle (radians)."""

    def __init__(self, **arguments) -> None:
        super().__init__(CartPoleEnv(**arguments))
        whole = self.env.observation_space
        assert isinstance(whole, Box)
        self.observation_space = Box(whole.low[POSITIONS], whole.high[POSITIONS], dtype=np.float32)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return observation[POSITIONS]


gymnasium.register(
    id="MaskedCartPole-v1",
    entry_point="pipeline.environments.masked_cartpole:MaskedCartPole",
    max_episode_steps=500,
)
