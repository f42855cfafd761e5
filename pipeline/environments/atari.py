"""Atari through ale_py's own vector environment: C++ threads, 84x84 grey frames, NEXT_STEP autoreset."""

import ale_py
import gymnasium
import numpy as np
from ale_py.vector_env import AtariVectorEnv

from pipeline.environments.lanes import EnvironmentConfig, EpisodeEnds, LaneStep
from schemas.specs import ArraySpec, EnvSpec

gymnasium.register_envs(ale_py)

# What may be set with --env-arg, with the paper's values (Kapturowski et al. 2019, appendix; 108,000 frames = 30 min).
ARGUMENTS = {
    "img_height": 84,
    "img_width": 84,
    "grayscale": True,
    "maxpool": True,
    "frameskip": 4,
    "full_action_space": False,
    "noop_max": 30,
    "max_num_frames_per_episode": 108_000,
}


def is_atari(env_id: str) -> bool:
    return env_id.startswith("ALE/")


class AtariLanes:
    """N lanes of one Atari game, observation uint8 ``[H, W]`` or ``[H, W, 3]``; see ``Lanes``.

    No reward clipping and no fire reset, ever: both are parts of other protocols. ``threads`` emulator threads give
    the same results whatever their number.

    Raises:
        ValueError: naming an unknown game, argument or value.
    """

    def __init__(self, config: EnvironmentConfig, num_lanes: int, threads: int) -> None:
        unknown = sorted(config.arguments.keys() - ARGUMENTS.keys())
        if unknown:
            raise ValueError(f"env_arg is {unknown[0]!r}; allowed for Atari: {', '.join(ARGUMENTS)}")
        arguments = {**ARGUMENTS, **config.arguments}
        for name, value in arguments.items():
            least = 0 if name == "noop_max" else 1
            if type(value) is not type(ARGUMENTS[name]) or (type(value) is int and value < least):
                raise ValueError(f"env_arg {name} is {value!r}; allowed: {type(ARGUMENTS[name]).__name__}, {least} up")
        registered = gymnasium.spec(config.env_id)
        self._env = AtariVectorEnv(
            registered.kwargs["game"],
            num_envs=num_lanes,
            num_threads=min(threads, num_lanes),
            stack_num=1,
            repeat_action_probability=config.sticky,
            reward_clipping=False,
            use_fire_reset=False,
            **arguments,
        )
        shape = (arguments["img_height"], arguments["img_width"], *(() if arguments["grayscale"] else (3,)))
        self.num_lanes = num_lanes
        self.spec = EnvSpec(
            env_id=config.env_id,
            observation=ArraySpec(shape=shape, dtype="uint8"),
            action_set=tuple(action.name for action in self._env.ale.get_action_set()),
            frame_skip=arguments["frameskip"],
            sticky=config.sticky,
            life_loss=config.life_loss,
            arguments=arguments,
        )
        self.restarts, self.last_failure = 0, ""
        self._ends = EpisodeEnds(num_lanes, self.spec.num_actions)

    def reset(self, seed: int) -> np.ndarray:
        observation, info = self._env.reset(seed=np.arange(seed, seed + self.num_lanes))
        self._ends.start(info["lives"])
        return observation[:, 0]

    def send(self, actions: np.ndarray) -> None:
        self._ends.check(actions)
        self._env.send(actions)

    def recv(self) -> LaneStep:
        observation, reward, terminated, truncated, info = self._env.recv()
        return self._ends.after(observation[:, 0], reward, terminated, truncated, info["lives"])

    def close(self) -> None:
        self._env.close()
