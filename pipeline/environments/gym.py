"""Any other gymnasium environment with discrete actions and array observations, as synchronous lanes."""

from collections.abc import Sequence as Many

import gymnasium
import numpy as np
from gymnasium.spaces import Box, Discrete, MultiBinary
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv

from pipeline.environments.lanes import EnvironmentConfig, EpisodeEnds, LaneStep
from pipeline.environments.restarting import EnvironmentFailure, RestartingEnv
from schemas.specs import ArraySpec, EnvSpec


class GymLanes:
    """N lanes over a gymnasium vector environment in NEXT_STEP mode; see ``Lanes``.

    ``restarting`` are its environments where they can be made anew, one per lane.

    Observations keep uint8; bool becomes uint8; every other number becomes float32.

    Raises:
        ValueError: naming what is not supported: another autoreset mode, continuous actions, dict observations,
            life-loss handling of an environment that reports no lives.
    """

    def __init__(
        self,
        env: VectorEnv,
        env_id: str,
        arguments: dict,
        life_loss: str = "off",
        *,
        restarting: Many[RestartingEnv] = (),
        max_failures: int = 1,
    ) -> None:
        mode = env.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            name = mode.name if isinstance(mode, AutoresetMode) else mode
            raise ValueError(f"autoreset_mode of {env_id} is {name}; allowed: NEXT_STEP")
        actions, observations = env.single_action_space, env.single_observation_space
        if not isinstance(actions, Discrete):
            raise ValueError(f"action space of {env_id} is {actions}; allowed: Discrete")
        if not isinstance(observations, Box | MultiBinary):
            raise ValueError(f"observation space of {env_id} is {observations}; allowed: Box (one array)")
        is_bytes = isinstance(observations, MultiBinary) or observations.dtype in (np.uint8, np.bool_)
        self._dtype = np.dtype(np.uint8 if is_bytes else np.float32)
        self._env = env
        self._first_action = int(actions.start)
        self._actions: np.ndarray | None = None
        self.num_lanes = env.num_envs
        self.spec = EnvSpec(
            env_id=env_id,
            observation=ArraySpec(shape=tuple(observations.shape), dtype=self._dtype.name),
            action_set=tuple(str(actions.start + i) for i in range(actions.n)),
            life_loss=life_loss,
            arguments=arguments,
        )
        self.restarts, self.last_failure = 0, ""
        self._restarting, self._max_failures, self._failures_in_a_row = restarting, max_failures, 0
        self._ends = EpisodeEnds(self.num_lanes, self.spec.num_actions)

    def reset(self, seed: int) -> np.ndarray:
        observation, info = self._env.reset(seed=seed)
        lives = info.get("lives")
        if lives is None and self.spec.life_loss != "off":
            raise ValueError(f"life_loss is {self.spec.life_loss!r}; allowed: off, for {self.spec.env_id} has no lives")
        self._ends.start(lives)
        return self._array(observation)

    def send(self, actions: np.ndarray) -> None:
        self._ends.check(actions)
        self._actions = actions + self._first_action

    def recv(self) -> LaneStep:
        observation, reward, terminated, truncated, info = self._env.step(self._actions)
        failed = self._take_failures()
        return self._ends.after(self._array(observation), reward, terminated, truncated, info.get("lives"), failed)

    def close(self) -> None:
        self._env.close()

    def _take_failures(self) -> np.ndarray:
        """Which lanes' environments raised in this step, bool ``[N]``."""
        failed = np.zeros(self.num_lanes, bool)
        for lane, env in enumerate(self._restarting):
            if env.failure:
                failed[lane], self.last_failure, env.failure = True, env.failure, ""
                self.restarts += 1
        self._failures_in_a_row = self._failures_in_a_row + 1 if failed.any() else 0
        if self._failures_in_a_row >= self._max_failures:
            raise EnvironmentFailure(
                f"environments raised in {self._failures_in_a_row} steps in a row: {self.last_failure}"
            )
        return failed

    def _array(self, observation: np.ndarray) -> np.ndarray:
        return np.array(observation, self._dtype)  # A copy: environments may reuse their buffer.


def make_gym_lanes(config: EnvironmentConfig, num_lanes: int) -> GymLanes:
    if config.sticky:
        raise ValueError(f"sticky is {config.sticky}; allowed: 0, for {config.env_id} is no Atari game")

    def make_one() -> gymnasium.Env:
        return gymnasium.make(config.env_id, disable_env_checker=True, **config.arguments)

    restarting = [RestartingEnv(make_one) for _ in range(num_lanes)]
    env = SyncVectorEnv([lambda env=env: env for env in restarting], autoreset_mode=AutoresetMode.NEXT_STEP)
    spec = restarting[0].spec
    arguments = {"max_episode_steps": spec.max_episode_steps, **spec.kwargs} if spec else dict(config.arguments)
    return GymLanes(
        env,
        config.env_id,
        arguments,
        config.life_loss,
        restarting=restarting,
        max_failures=config.max_failures,
    )
